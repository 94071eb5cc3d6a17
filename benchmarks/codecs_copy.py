"""Codecs: megabytes of floats a second beside a plain copy of the same bytes, in one thread."""

import statistics

import torch
from interleave import interleaved, ratios
from rich.console import Console

from fedbcgd.codecs import QSGD, Half, Plain, TopK
from fedbcgd.streams import stream

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
        # plain decodes without a copy; the sum that follows on the server is part of it
        ways[f"{name}, decode and add"] = lambda c=codec, d=data: target.add_(c.decode(d, N, torch.float32))
    seconds = interleaved(ways, repeats)
    share = ratios(seconds, "copy")
    return [
        {"way": name, "MB a second": 4 * N / 1e6 / statistics.median(seconds[name]), "of a copy": share[name]}
        for name in ways
    ]
