"""Pretrained weights from a hub, which is a small server on loopback here."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.vits import body, check_refused, classical, same, small


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check_refused("owner/model", r"pip install 'fedbcgd\[hf\]'")


CHILD = """
import sys, time
import torch
from safetensors.torch import save_file
from fedbcgd import UserError
from fedbcgd.models.pretrained import load_pretrained
from fedbcgd.models.vit import ViT

time.sleep = lambda seconds: None  # the hub's client asks a silent server again and again, half a minute in all
for k, name in enumerate(sys.argv[1:]):
    model = ViT(5, (3, 32, 32), patch=8, dim=12, depth=2, heads=3)
    try:
        print(load_pretrained(model, name).lines()[0])
        save_file(model.state_dict(), f"{k}.safetensors")
    except UserError as error:
        print(error)
"""


def child(tmp_path, port, *names):
    """Load models in a process with its own cache and a hub at `port`; return a line for each, and standard error."""
    pytest.importorskip("huggingface_hub", reason="the hub's client comes with the extra hf")
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *names]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that its client needs to download one file."""

    files: dict[str, bytes] = {}

    def do_HEAD(self):
        owner, model, *rest = self.path.strip("/").split("/")
        content = self.files.get(f"{owner}/{model}/{rest[-1]}") if rest else None
        if content is not None:
            self.send_response(200)
            self.send_header("ETag", f'"{abs(hash(content)):x}"')
        else:
            known = any(name.startswith(f"{owner}/{model}/") for name in self.files)
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    a, b = small(), small(seed=1)
    save_file(a.state_dict(), tmp_path / "a.safetensors")
    torch.save(classical(b), tmp_path / "b.bin")
    Hub.files = {
        "owner/new/model.safetensors": (tmp_path / "a.safetensors").read_bytes(),
        "owner/old/pytorch_model.bin": (tmp_path / "b.bin").read_bytes(),
        "owner/text/README.md": b"hello",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, a, b
    server.shutdown()
    server.server_close()


def test_models_on_the_hub(tmp_path, hub):
    """From the hub; and once it is gone, from the client's cache, which has only the second file of the second model."""
    server, a, b = hub
    names = ["owner/new", "owner/old", "owner/text", "owner/none", "owner/no--name"]
    (new, old, text, none, bad), _ = child(tmp_path, server.server_port, *names)
    assert new.startswith("pretrained weights from owner/new (")
    assert old.endswith("pytorch_model.bin)")
    assert (
        "owner/text: expected model.safetensors or pytorch_model.bin in the model on the Hugging Face hub, got neither"
        in text
    )
    assert "owner/none: no such file or folder here, and no such model on the Hugging Face hub" in none
    assert "owner/no--name: no such file or folder here, and no such model" in bad
    assert same(body(a), {name: p for name, p in load_file(tmp_path / "0.safetensors").items() if "head" not in name})
    loaded = load_file(tmp_path / "1.safetensors")
    assert all(torch.equal(loaded[name], p) for name, p in body(b).items())
    server.shutdown()
    server.server_close()
    assert child(tmp_path, server.server_port, "owner/new", "owner/old")[0] == [new, old]


def test_hub_out_of_reach(tmp_path):
    with socket.socket() as bound:  # but not listening: connections to its port are refused
        bound.bind(("127.0.0.1", 0))
        (line,), log = child(tmp_path, bound.getsockname()[1], "owner/model")
    assert "owner/model: no such file or folder here, the Hugging Face hub could not be reached" in line
    assert line.endswith("a path to a downloaded file or folder works too")
    assert "pytorch_model.bin" not in log  # no second attempt
