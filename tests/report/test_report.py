"""Tables, plots and files that a person gets."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedbcgd import UserError, simulate
from fedbcgd.display import plots
from fedbcgd.display import tables as runs
from fedbcgd.files import as_csv, make_folder, write_text, write_whole
from fedbcgd.runs.retiming import to_reach


@pytest.fixture
def results(net, toys):
    test = toys((30,))[0]
    return {
        name: simulate(net(), toys(), name, rounds=3, test=test, batch_size=3, workers=0)
        for name in ("fedavg", "fedbcgd")
    }


def test_table(results):
    out = Console(file=io.StringIO(), width=140)
    out.print(runs.table(results, "title"))
    text = out.file.getvalue()
    for word in ("fedavg", "fedbcgd", "accuracy", "rounds", "upload, d", "largest upload", "gradient", "seconds"):
        assert word in text
    assert "3.00" in text  # FedAvg: 1 d a round


def test_csv_of_rows_whose_keys_differ():
    assert as_csv([{"run": "a", "x": 1}, {"run": 'b"', "y": 0.5}]) == 'run,x,y\na,1,\n"b""",,0.5\n'


def test_the_upload_at_which_a_run_reached_a_target(results):
    rows = results["fedavg"].rows
    uploads = [row["upload_d"] for row in rows]
    assert to_reach(rows, uploads, "test_accuracy", 0) == uploads[0]
    assert to_reach(rows, uploads, "test_accuracy", 1.1) is None


def test_plots_are_pictures(results, tmp_path):
    plots.curves({n: r.rows for n, r in results.items()}, tmp_path / "curves.png", title="t")
    plots.label_counts(np.arange(20).reshape(5, 4), tmp_path / "label_counts.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert path.stat().st_size > 5000
    # no temporary file is left
    assert {p.name for p in tmp_path.iterdir()} == {"curves.png", "curves.svg", "label_counts.png", "label_counts.svg"}


def test_a_legend_of_many_names_stays_on_the_page(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    row = {"round": 1, "test_accuracy": 0.5, "upload_d": 1.0, "gradient_evaluations": 10}
    names = [f"an-algorithm-{k:02}" for k in range(15)]
    plots.bands({name: [[row, row | {"round": 2}]] for name in names}, tmp_path / "c.png")
    (figure,) = drawn
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "first")

    def fail(temporary: Path) -> None:
        temporary.write_text("half of the sec")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"a\.txt could not be written: No space left"):
        write_whole(path, fail)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.txt"]
    write_text(path, "second")
    assert path.read_text() == "second"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be created"):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(UserError, match="could not be written"):
        write_text(tmp_path / "absent" / "a.txt", "")
