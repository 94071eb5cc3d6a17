"""What the figure of an item shows."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedbcgd.display import plots
from fedbcgd.display.styles import ALGORITHM_STYLES, _shaded
from fedbcgd.paper.figures import _lengths_differ, _limit_axis, contender_styles, draw
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


def test_what_spends_alike_is_drawn_once_with_one_legend(tmp_path):
    """Contenders whose rounds cost the same look the same on every axis: there is one, with both metrics side by side."""
    where = replace(panel("a", "b"), drawn=("train_loss",))
    draw([result(where, a=[outcome(0.1, 0.2)], b=[outcome(0.3, 0.4)])], tmp_path, "A figure")
    texts = words(tmp_path)
    assert (texts.count("upload (in d)"), texts.count("rounds"), texts.count("gradient evaluations")) == (2, 0, 0)
    assert (texts.count("A"), texts.count("B")) == (1, 1)


def test_short_runs_beside_long_ones_are_not_squeezed():
    for longest, differ in ((9.0, False), (40.0, True)):
        axes = Figure().subplots()
        axes.plot([1, 2, 10.0], [0, 0, 0])
        axes.plot([1, 2, longest], [0, 0, 0])
        axes.axhline(0.5)
        assert _lengths_differ(axes) is differ


def test_a_smoothed_line_by_hand():
    """Means of three, and at the ends of one."""
    assert plots.smoothed(np.array([[0.0, 3.0, 0.0, 6.0]]), 3).tolist() == [[0.0, 1.0, 3.0, 6.0]]


def test_the_axis_of_a_loss_fits_what_comes_after_its_start():
    axes = Figure().subplots()
    axes.plot(range(10), [100.0, 50, 1, 1.1, 1, 1.2, 1, 1, 1, 2.0], label="a")
    _limit_axis(axes)
    low, high = axes.get_ylim()
    assert 0.9 <= low < 1
    assert 2 < high < 3


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
    styles = contender_styles(contenders)
    assert styles[key] == ALGORITHM_STYLES[algorithm]
    assert len({(look.dash, look.marker) for look in styles.values()}) == len(contenders)
    others = [c for c in contenders if c.algorithm["name"] == algorithm and c.key != key]
    if item != "figure7":  # where all lines are one algorithm, colours tell them apart
        shades = [_shaded(ALGORITHM_STYLES[algorithm], turn).colour for turn in range(1, len(others) + 1)]
        assert [styles[c.key].colour for c in others] == shades


def test_figure_7_has_the_train_loss():
    assert {p.drawn for scale in ("paper", "cpu", "smoke") for p in ITEMS["figure7"].panels[scale]} == {("train_loss",)}
