"""Speed of codecs, compared with a plain copy of the same bytes, in one thread."""

import statistics

import torch
from interleave import interleaved, ratios
from machinery import Vector
from rich.console import Console

from fedbcgd import Server, make_algorithm
from fedbcgd.algorithms.codecs import QSGD, Half, Plain, TopK
from fedbcgd.core.messages import Upload
from fedbcgd.rng import stream

N = 11_173_962  # ResNet-18


def measure(console: Console, repeats: int = 9) -> list[dict]:
    console.print(f"codecs on {N:,} floats, {repeats} turns", highlight=False)
    torch.set_num_threads(1)
    v, target = torch.randn(N), torch.empty(N)
    codecs = {"plain": Plain(), "qsgd 8 bits": QSGD(), "qsgd 4 bits": QSGD(levels=7), "qsgd 3 bits": QSGD(levels=3)}
    codecs |= {"float16": Half(), "top 1 %": TopK(fraction=0.01), "top 10 %": TopK(fraction=0.1)}
    ways = {"copy": lambda: target.copy_(v)}
    for name, codec in codecs.items():
        rng = stream(0, "bench")
        data = codec.encode(v.clone(), rng)
        ways[f"{name}, encode"] = lambda c=codec, r=rng: c.encode(v, r)
        # Plain decodes without a copy, so the server's sum is included.
        ways[f"{name}, decode and add"] = lambda c=codec, d=data: target.add_(c.decode(d, N, torch.float32))
    seconds = interleaved(ways, repeats)
    share = ratios(seconds, "copy")
    return [
        {"way": name, "MB a second": 4 * N / 1e6 / statistics.median(seconds[name]), "of a copy": share[name]}
        for name in ways
    ]


def measure_sums(console: Console, repeats: int = 9) -> list[dict]:
    """Time ten uploads of ResNet-18's size through Server.receive, checks included, and copies of as many bytes."""
    console.print(f"sums of ten uploads of {N:,} floats, {repeats} turns", highlight=False)
    torch.set_num_threads(1)
    rows = []
    for name in ("fedavg", "fedbcgd"):
        algorithm = make_algorithm(
            name, **({"blocks": 5, "divider": "even", "shared": "none"} if name == "fedbcgd" else {})
        )
        layout = algorithm.uplink.layout(Vector(N))
        server = Server(algorithm, layout, torch.zeros(N), 10, 10, 0)
        sent = [
            torch.randn(max(layout.block(j).stop - layout.block(j).start for j in range(layout.blocks)))
            for _ in range(10)
        ]
        uploaded = sum(s.stop - s.start for task in server.plan().tasks for s in layout.slices(task.block))
        target = torch.empty(N)

        def take(server=server, sent=sent, layout=layout) -> None:
            for v, task in zip(sent, server.plan().tasks, strict=True):
                block = layout.block(task.block)
                piece = v[: block.stop - block.start].view(torch.uint8)
                assert server.receive(
                    Upload(server.round, task.client, task.block, {"dx": [piece]}, 1, 1, 1, 0.0)
                ).accepted

        def copy(sent=sent, count=uploaded // 10, target=target) -> None:
            for v in sent:
                target[: min(count, len(v))].copy_(v[:count])

        seconds = interleaved({"copy": copy, "sum": take}, repeats)
        rows.append(
            {
                "way": f"{name}: {uploaded / N:.3g} d in ten uploads",
                "copy, GB/s": 4e-9 * uploaded / statistics.median(seconds["copy"]),
                "sum, GB/s": 4e-9 * uploaded / statistics.median(seconds["sum"]),
                "of a copy": ratios(seconds, "copy")["sum"],
            }
        )
    return rows
