"""What a notebook shows of runs."""

import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from torch import nn

from fedbcgd import UserError, simulate
from fedbcgd.display import notebook
from fedbcgd.display.notebook import NotebookDisplay
from fedbcgd.display.progress import in_notebook, progress_display, single_run_display
from fedbcgd.display.styles import ALGORITHM_STYLES

CLIENTS = [(torch.randn(6, 2), torch.tensor([0, 1] * 3)) for _ in range(3)]


@pytest.fixture(scope="module")
def result():
    return simulate(nn.Linear(2, 2), CLIENTS, "fedavg", rounds=3, test=CLIENTS[0], workers=0, local_steps=1)


@pytest.fixture
def kernel(monkeypatch):
    """A fake kernel, and what it was asked to display."""
    shown = []

    class Handle:
        def __init__(self, data):
            self.updates = [data]
            shown.append(self.updates)

        def update(self, data, raw):
            self.updates.append(data)

    def display(data, raw, display_id):
        return Handle(data)

    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.setattr(NotebookDisplay, "plain_every", 0.0)
    return shown


def test_progress_is_drawn_in_its_place(kernel):
    assert in_notebook()
    simulate(nn.Linear(2, 2), CLIENTS, "fedavg", rounds=4, workers=0, local_steps=1, test=CLIENTS[0])
    assert len(kernel) == 1
    values = [float(re.search(r'value="([\d.]+)"', data["text/html"])[1]) for data in kernel[0]]
    assert values == [0, 0.25, 0.5, 0.75, 1]
    assert "fedavg: round 4  accuracy" in kernel[0][-1]["text/plain"]


def test_several_runs_have_a_line_each_and_notes_stay(kernel, capsys):
    with progress_display(["fedavg", "<b>"]) as shown:
        shown.begin(0)
        shown.start(None)
        shown.say("a note")
        shown.skip(0, "finished already")
        shown.begin(1)
        shown.start(None)
    assert [len(updates) for updates in kernel] == [1, 1]
    assert "&lt;b&gt;: started (2 of 2)" in kernel[1][0]["text/html"]
    assert capsys.readouterr().out == "a note\nfedavg: finished already (1 of 2)\n"


def test_no_progress_if_it_is_not_wanted(kernel):
    with single_run_display("fedavg", False) as shown:
        assert shown is None
    assert kernel == []


def test_this_process_is_no_notebook():
    assert not in_notebook()
    with single_run_display("fedavg", None) as shown:
        assert shown is None or not isinstance(shown, NotebookDisplay)


def test_a_result_in_a_line(result):
    accuracy = result.final["test_accuracy"]
    assert repr(result) == (
        f"<Result of fedavg: 3 rounds, stopped by rounds, test_accuracy {accuracy:.4f}, 3.00 d uploaded>"
    )


def test_a_result_as_html(result):
    html = result._repr_html_()
    tree = ElementTree.fromstring(re.sub(r"xmlns(:\w+)?=\"[^\"]*\"|xlink:", "", html))
    cells = {row.find("th").text: row.find("td").text for row in tree.iter("tr")}
    assert cells["algorithm"] == "fedavg"
    assert cells["rounds"] == "3"
    assert cells["test accuracy"] == f"{result.final['test_accuracy']:.4g}"
    assert [svg.get("aria-label") for svg in tree.iter("svg")] == ["test accuracy of fedavg", "test loss of fedavg"]
    assert "currentColor" in html
    assert "<script" not in html


def test_a_name_is_no_markup(result):
    class Named(type(result)):
        pass

    odd = Named(**vars(result) | {"algorithm": "<img src=x>"})
    assert "<img" not in odd._repr_html_()


def test_lines_are_seen_on_light_and_dark_pages(result):
    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for name, style in ALGORITHM_STYLES.items():
        if style.colour != notebook._BLACK:
            colour = notebook._for_any_page(style).colour
            assert min(contrast(colour, page) for page in ("#ffffff", "#111111")) >= 2.9, name
    html = result._repr_html_()
    colours = set(re.findall(r"(?:fill|stroke): (#\w{6})", html))
    assert colours <= {
        "#ffffff",
        "#b0b0b0",
    }  # the invisible background, and the grid; the rest is the page's own colour


def test_without_any_metric(result):
    bare = type(result)(**vars(result) | {"rows": []})
    assert "<table" in bare._repr_html_()
    assert "<svg" not in bare._repr_html_()
    assert "stopped by rounds, 3.00 d" in repr(bare)


def test_any_metric_is_plotted_against_any_column(result):
    figure = result.plot("train_loss", against="round")
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3]
    assert list(line.get_ydata()) == [row["train_loss"] for row in result.rows]
    assert result.plot().axes[0].get_ylabel() == "test accuracy"
    assert result.plot(axes=figure.axes[0]) is figure
    assert len(figure.axes[0].lines) == 2


def test_a_metric_that_is_not_there_is_named(result):
    with pytest.raises(UserError, match=r"column: expected one of .* got 'test_acuracy'.*Did you mean 'test_accuracy'"):
        result.plot("test_acuracy")
    with pytest.raises(UserError, match=r"column: expected one of .*, got 'hours'"):
        result.plot(against="hours")
