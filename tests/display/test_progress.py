"""The bars of several runs on a terminal."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedbcgd.core.ledger import Ledger
from fedbcgd.display.progress import progress_display


@pytest.mark.parametrize("columns", [80, 110])
def test_nothing_is_cut_off_from_the_bars_of_a_sweep(columns):
    """A label that does not fit is wrapped; upload in MB and the word validation are left out on a narrow terminal."""
    console = Console(width=columns, force_terminal=True, color_system=None, file=io.StringIO())
    ledger = Ledger(dim=10, itemsize=4, blocks=1)
    ledger.upload_bytes = 123_400_000
    server = SimpleNamespace(round=1234)
    row = {"round": 1234, "validation_accuracy": 0.5678}
    with progress_display(["lr 0.01, momentum 0.5", "lr 0.02, momentum 0.5"], console) as shown:
        shown.begin(0)
        shown(SimpleNamespace(server=server, row=row, metric=None, ledger=ledger, progress=0.5, reason=""))
        bars = shown._progress.make_tasks_table(shown._progress.tasks)
    paper = Console(width=columns, color_system=None, file=io.StringIO())
    paper.print(bars)
    text = paper.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    for word in ("lr 0.01,", "0.5", "━━━━━", "round 1234", "accuracy 0.5678", f"{ledger.upload_d:.2f} d", "1 of 2"):
        assert word in text
    assert [line.rstrip().endswith("left -:--:--") for line in lines[:2]] == [True, True]
    assert ("validation accuracy" in text, "123.4 MB" in text) == (columns == 110, columns == 110)
