"""Run folders damaged at random: the page is written, `hours` has an answer or a reason, a comparison its tables."""

import random
import shutil

import pytest
from rich.console import Console

from fedbcgd import UserError
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.files import as_csv
from fedbcgd.report import page, reach
from fedbcgd.report.collect import Collector
from fedbcgd.report.network import bias_table, hours_table, measure_hours, select_networks
from fedbcgd.runs import compare
from fedbcgd.runs.folder import finished, read_configuration
from fedbcgd.runs.retiming import bias
from tests.report.odd import SECRET, copy, damage
from tests.report.runfolders import embedded

LONG = pytest.param(range(100, 10_100), marks=pytest.mark.slow)


@pytest.fixture
def damaged(real_run, tmp_path):
    """A function from a seed to a folder with a whole run and one that was damaged by the draws of this seed."""
    copy(real_run, tmp_path / "runs" / "whole")

    def make(seed):
        folder = tmp_path / "runs" / "odd"
        shutil.rmtree(folder, ignore_errors=True)
        damage(copy(real_run, folder), random.Random(seed))
        return folder

    return make


@pytest.mark.parametrize("seeds", [range(100), LONG])
def test_the_page_is_written_whatever_a_folder_holds(damaged, tmp_path, seeds):
    for seed in seeds:
        damaged(seed)
        runs, problems = Collector([tmp_path / "runs"]).collect()
        html = page.document(page.content(runs, problems)).encode().decode()
        data = embedded(html)
        assert data["runs"][-1]["folder"].endswith("whole"), seed
        assert len(data["runs"]) == 2 or any("odd" in p["where"] for p in data["problems"]), seed
        assert SECRET not in html, seed
        assert not set(html) & set("\x1b\u202e"), seed
        assert len(html) < 1_000_000, seed


@pytest.mark.parametrize("seeds", [range(100), LONG])
def test_hours_are_told_or_why_there_are_none(damaged, seeds):
    answered = 0
    for seed in seeds:
        folder = damaged(seed)
        try:
            chosen = select_networks(folder, None, None)
            found = measure_hours(folder, chosen, None)
            name, network = next(iter(chosen.items()))
            leans = bias(folder, network)
            with Console(quiet=True) as console:
                console.print(hours_table(found), bias_table(leans, name))
            answered += 1
        except UserError as why:
            assert SECRET not in str(why), seed
    assert 0 < answered < len(seeds)


@pytest.mark.parametrize("seeds", [range(100), LONG])
def test_a_comparison_takes_a_run_as_finished_only_if_it_can_be_shown(damaged, real_run, tmp_path, seeds):
    settings = read_configuration(RunFolder(real_run))
    count = 0
    for seed in seeds:
        outcome = finished(RunFolder(damaged(seed)), settings)
        if outcome is not None:
            count += 1
            outcomes = {"fedbcgd": {0: outcome}}
            as_csv(compare.rows(outcomes)).encode()
            with Console(quiet=True) as console:
                console.print(compare.table(outcomes))
                if reached := reach.rows(outcomes, tmp_path, say=lambda why: None):
                    console.print(reach.table(reached))
    assert 0 < count < len(seeds)
