"""The paper's own numbers, put through the judge: where they do not bear out a sentence, the page says so."""

import math

import pytest

from fedbcgd.paper.claims import judge
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import FAILS, HOLDS, UNTESTABLE
from tests.paper.invented import outcome


def as_printed(panel, printed):
    """Two runs with the printed mean and deviation, looked at each d, that meet the target where the paper says."""
    ends = [(printed.mean + sign * printed.deviation / math.sqrt(2)) / 100 for sign in (-1, 1)]
    rows = []
    if printed.floats is not None and math.isfinite(printed.floats):
        rows = [(printed.floats - 1, 0.0), (printed.floats, panel.target / 100)]
    out = {}
    for seed, end in enumerate(ends, 1):
        run = outcome(*(value for _, value in rows), end)
        for row, (upload, _) in zip(run.rows, rows, strict=False):
            row["upload_d"] = upload
        run.rows[-1] |= {"upload_d": 3000.0, "round": 1000}
        out[seed] = run
    return out


def statuses(item):
    results = {
        panel.key: PanelResult(panel, {key: as_printed(panel, p) for key, p in panel.printed.items()})
        for panel in item.panels["paper"]
    }
    return {claim.key: judge(item, claim, results, "paper") for claim in item.claims}


# What the printed numbers do not bear out, and the numbers by which the page says so.
CONTRADICTED = {
    "table2-plus-end": "63.6 against 61.1",
    "table3-sooner": "278d, 292d",
    "table3-better": "87.4 ± 0.5, 87.5 ± 0.9",
    "table3-plus-sooner": "207d, 117d",
    "table3-central": "88.6 against 87.8",
    "table3-plus-central": "90.1 ± 0.1, 90.3 ± 0.5",
    "table3-plus-others-better": "82.8 ± 0.7, 83.5 ± 0.3",
    "table4-plus": "59.9 ± 0.4, 59.5 ± 0.3",
    "table4-fedbcgd+-better": "80.2 ± 1.3, 79.1 ± 0.8",
    "table5-plus-others-better": "90.4 ± 0.1, 90.6 ± 0.3",
}


@pytest.mark.parametrize("name", ["table2", "table3", "table4", "table5", "table6"])
def test_the_page_says_where_the_paper_contradicts_itself(name):
    item = ITEMS[name]
    found = {key for key, verdict in statuses(item).items() if verdict.status == FAILS}
    assert found == {key for key in CONTRADICTED if key.startswith(name)}
    for key in found:
        assert CONTRADICTED[key] in " ".join(item.notes)


def test_the_printed_factors_are_reached_by_the_printed_numbers():
    found = statuses(ITEMS["table2"]) | statuses(ITEMS["table5"])
    assert {found[key].status for key in ("table2-7.3", "table2-1.8", "table5-3", "table5-11.5")} == {HOLDS}


def test_how_sharp_minima_are_is_never_said_to_be_measured():
    verdict = statuses(ITEMS["table2"])["table2-minima"]
    assert (verdict.status, verdict.evidence) == (UNTESTABLE, "How sharp a minimum is, is not measured.")
