"""Packed runs: `reproduce` goes on from them, the same runs give the same bytes, and nothing else is unpacked."""

import io
import lzma
import os
import runpy
import tarfile
from pathlib import Path

import pytest

from fedbcgd.errors import UserError
from fedbcgd.files import Damaged
from fedbcgd.paper import engine, origin, packs, pages
from fedbcgd.paper.request import Request, panels_for
from fedbcgd.paper.spec import Contender
from tests.paper.small import item, run, small

KEEP = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "keep_reproduced.py"))["keep"]
FILES = {name: f"{name} of a run".encode() for name in packs.RUN_FILES}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    out = tmp_path_factory.mktemp("source")
    run(item(small()), out)
    return out


def packed(source, out):
    KEEP(source, out, "smoke", {"item": item(small())})
    return out / "item" / packs.NAME


def test_finished_runs_are_taken_from_the_pack_and_not_computed_again(source, tmp_path):
    packed(source, tmp_path)
    assert not (tmp_path / "runs").exists()
    (result,), shown = run(item(small()), tmp_path)
    assert shown.begun == []
    assert result.commits == {origin.current_commit()}
    (original,), _ = run(item(small()), source)
    assert (pages.scores([result]), pages.curves([result])) == (pages.scores([original]), pages.curves([original]))
    assert not list(tmp_path.glob("runs/*/*.safetensors"))
    _, shown = run(item(small()), tmp_path, seeds=2)
    assert len(shown.begun) == 1  # the second seed alone


def test_looking_at_what_is_finished_takes_it_from_the_pack(source, tmp_path):
    packed(source, tmp_path)
    request = Request("smoke", tmp_path)
    (result,) = engine.gather(panels_for(item(small()), request), request)
    assert len(result.folders) == 3
    assert len(pages.curves([result])) == len(result.outcomes["fedavg"][1].rows)


def test_the_same_runs_give_the_same_bytes(source, tmp_path):
    first = packed(source, tmp_path / "one").read_bytes()
    for path in source.glob("runs/*/*"):
        os.utime(path, (1, 1))
    second = packed(source, tmp_path / "two")
    assert second.read_bytes() == first
    packs.write(second, dict(reversed(packs.read(second).items())))
    assert second.read_bytes() == first


def test_a_run_that_two_items_share_is_packed_once_and_more_runs_are_added(source, tmp_path):
    path = packed(source, tmp_path)
    more = small(*small().contenders, Contender("again", "Again", {"name": "fedbcgd", "blocks": 5, "lr": 0.01}))
    run(item(more, "two"), source)
    KEEP(source, tmp_path, "smoke", {"item": item(small()), "two": item(more, "two")})
    assert len(packs.read(path)) == 3
    assert [name.split("-")[3] for name in packs.read(tmp_path / "two" / packs.NAME)] == ["fedbcgd"]
    KEEP(tmp_path / "nothing", tmp_path, "smoke", {"item": item(small())})
    assert len(packs.read(path)) == 3  # what was packed stays


def test_a_run_that_is_there_is_left_as_it_is(tmp_path):
    packs.write(folder(tmp_path / "item") / packs.NAME, {"a": FILES, "b": FILES})
    mine = folder(tmp_path / "runs" / "a") / "config.toml"
    mine.write_text("mine")
    packs.restore(tmp_path, ["a", "b"])
    assert [p.name for p in (tmp_path / "runs" / "a").iterdir()] == ["config.toml"]
    assert mine.read_text() == "mine"
    assert {p.name: p.read_bytes() for p in (tmp_path / "runs" / "b").iterdir()} == FILES


def test_only_what_is_wanted_is_unpacked(tmp_path):
    packs.write(folder(tmp_path / "item") / packs.NAME, {"a": FILES, "b": FILES})
    packs.restore(tmp_path, ["b"])
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["b"]


def test_nothing_but_the_files_of_runs_leaves_a_pack(tmp_path):
    """No links, no devices, no other names, no way out of the folder."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, kind in (
            ("../summary.json", tarfile.REGTYPE),
            ("/summary.json", tarfile.REGTYPE),
            ("a/../../summary.json", tarfile.REGTYPE),
            ("a/other.txt", tarfile.REGTYPE),
            ("a/config.toml", tarfile.SYMTYPE),
            ("a/metrics.jsonl", tarfile.LNKTYPE),
            ("a/commit.txt", tarfile.FIFOTYPE),
            ("a/summary.json", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    out = folder(tmp_path / "out" / "item").parent
    (out / "item" / packs.NAME).write_bytes(lzma.compress(raw.getvalue()))
    packs.restore(out, ["a", "..", "", "."])
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()) == [
        "out/item/runs.tar.xz",
        "out/runs/a/summary.json",
    ]


def test_a_pack_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "MAX_BYTES", 1 << 20)
    path = tmp_path / packs.NAME
    path.write_bytes(lzma.compress(bytes(1 << 22), preset=0))
    with pytest.raises(Damaged, match="damaged file"):
        packs.read(path)
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(UserError, match="got a larger one"):
        packs.read(path)


def test_a_damaged_pack_is_named(source, tmp_path):
    path = packed(source, tmp_path)
    whole = path.read_bytes()
    request = Request("smoke", tmp_path)
    for bad in (b"", b"no archive", whole[:-100], whole[:100] + bytes(100) + whole[200:], lzma.compress(b"no tar")):
        path.write_bytes(bad)
        with pytest.raises(Damaged, match=r"runs\.tar\.xz: expected packed runs, got a damaged file"):
            engine.gather(panels_for(item(small()), request), request)
    assert not (tmp_path / "runs").exists()


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
