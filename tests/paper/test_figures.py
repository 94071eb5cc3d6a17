"""What the figure of an item shows."""

import re
from dataclasses import replace

import pytest

from fedbcgd.display.looks import LOOKS, _shaded
from fedbcgd.paper.figures import contender_looks, draw
from fedbcgd.paper.items import ITEMS
from tests.paper.invented import outcome, panel, result


def words(folder):
    return re.findall(r"<text [^>]*>([^<]*)</text>", (folder / "figure.svg").read_text())


def test_accuracy_is_drawn_against_upload_rounds_and_gradients(tmp_path):
    where = replace(panel("a"), drawn=("train_loss",))
    draw([result(where, a=[outcome(0.1, 0.2)])], tmp_path, "A figure")
    texts = words(tmp_path)
    for label in ("upload (in d)", "rounds", "gradient evaluations"):
        assert texts.count(label) == 2  # a row for the accuracy, one for the train loss
    assert {"test accuracy", "train loss"} <= set(texts)


def test_what_diverged_is_in_the_legend(tmp_path):
    lost = outcome(0.1, 0.2, stopped="diverged")
    draw([result(a=[outcome(0.1, 0.2)], b=[lost], c=[lost, outcome(0.1, 0.2)])], tmp_path, "A figure")
    assert {"A", "B (diverged)", "C (1 of 2 diverged)"} <= set(words(tmp_path))


@pytest.mark.parametrize(
    ("item", "key", "algorithm"),
    [
        ("table3", "fedbcgd", "fedbcgd"),
        ("table3", "scaffold", "scaffold"),
        ("table6", "qsgd+fedbcgd", "qsgd+fedbcgd"),
        ("figure4", "N=5", "fedbcgd"),
        ("figure4", "N=1", "fedavgm"),
        ("figure5", "share-momentum", "fedbcgd"),
        ("figure7", "λ=0.8", "fedbcgd"),
    ],
)
def test_an_algorithm_has_its_look_in_every_figure(item, key, algorithm):
    contenders = ITEMS[item].panels["paper"][0].contenders
    styles = contender_looks(contenders)
    assert styles[key] == LOOKS[algorithm]
    assert len({(look.dash, look.marker) for look in styles.values()}) == len(contenders)
    others = [c for c in contenders if c.algorithm["name"] == algorithm and c.key != key]
    if item != "figure7":  # where all lines are one algorithm, colours tell them apart
        shades = [_shaded(LOOKS[algorithm], turn).colour for turn in range(1, len(others) + 1)]
        assert [styles[c.key].colour for c in others] == shades


def test_figure_7_has_the_train_loss():
    assert {p.drawn for scale in ("paper", "cpu", "smoke") for p in ITEMS["figure7"].panels[scale]} == {("train_loss",)}
