"""The cost of checksums in a checkpoint and in loading a data set: python benchmarks/checkpoints.py

With and without checksums in turn; the state of two clients changes between two checkpoints.
"""

import os
import statistics
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from interleave import interleaved, ratios
from torch import nn

from fedbcgd import make_algorithm
from fedbcgd.core.messages import StateUpdate
from fedbcgd.core.server import Server
from fedbcgd.data import store
from fedbcgd.data.raw import Raw, Split
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.client_state import SlotFile, StateStore

WITHOUT = (
    patch("fedbcgd.files.tensors_checksum", lambda *_: "00000000"),
    patch.object(SlotFile, "checksum", lambda *_: 0),
)


def checkpoints(dim: int, folder: Path) -> tuple[float, float]:
    """Return the median seconds with checksums, and their ratio to those without."""
    algorithm = make_algorithm("scaffold")
    layout = algorithm.uplink.layout(nn.Linear(dim, 1, bias=False))
    server = Server(algorithm, layout, torch.randn(layout.size), 2, 2, 0)
    points = Checkpoints(folder, 1)
    clients = StateStore(("c",), layout.dim, layout.dtype, points.clients)
    everything = [(slice(0, layout.dim), torch.randn(layout.dim))]

    def save() -> None:
        for client in range(2):
            slot = clients.reserve()
            assert clients.file is not None
            assert slot is not None
            clients.file.write(slot, None, StateUpdate(client, 0, {"c": everything}))
            clients.accept(client, slot, 0)
        clients.commit()
        points.save(server, clients, {})

    def bare() -> None:
        with WITHOUT[0], WITHOUT[1]:
            save()

    seconds = interleaved({"bare": bare, "checked": save}, 15)
    return statistics.median(seconds["checked"]), 1 / ratios(seconds, "bare")["checked"]


def data_set() -> tuple[float, float]:
    """Return the median seconds to load a data set of CIFAR-10's size, with and without checksums."""
    pixels, labels = torch.randint(256, (60_000, 32, 32, 3), dtype=torch.uint8), torch.arange(60_000) % 10
    split = [Split(pixels[k].numpy(), labels[k].numpy()) for k in (slice(0, 50_000), slice(50_000, 60_000))]
    store.save("noise", Raw(split[0], split[1], tuple("0123456789")), "noise")

    def bare() -> None:
        with patch("fedbcgd.files.tensors_checksum", lambda tensors, _: checksum):
            store.load("noise")

    from safetensors import safe_open

    with safe_open(store.path_of("noise"), "pt") as file:
        checksum = file.metadata()["checksum"]
    seconds = interleaved({"bare": bare, "checked": lambda: store.load("noise") and None}, 10)
    return statistics.median(seconds["checked"]), statistics.median(seconds["bare"])


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as place:
        os.environ["FEDBCGD_DATA"] = place
        for dim in (44_000, 1_000_000, 10_000_000):
            folder = Path(place) / str(dim)
            folder.mkdir()
            seconds, times = checkpoints(dim, folder)
            print(
                f"checkpoint, d = {dim:>10,}: {seconds * 1e3:6.1f} ms, {times:.2f} times as long as without checksums"
            )
        checked, bare = data_set()
        print(
            f"data set of {60_000 * 3072 / 1e6:.0f} MB: loaded in {checked * 1e3:.0f} ms, unchecked {bare * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
