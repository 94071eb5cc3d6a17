"""Speed of the loader, compared with a plain slice of the same bytes, in one thread.

Random images of CIFAR's size. `slice` is a copy of `images[at : at + B]`; `index` is `images[rows]`, the least that a loader
of shuffled batches must do; `naive` is a loop over images, as in a DataLoader.
"""

import statistics

import numpy as np
import torch
from interleave import interleaved, ratios
from rich.console import Console

from fedbcgd.data import Images
from fedbcgd.rng import stream

N, BATCHES = 50_000, 200


def measure(console: Console, repeats: int = 9) -> list[dict]:
    console.print(f"{BATCHES} batches of 3×32×32 images, {repeats} turns", highlight=False)
    torch.set_num_threads(1)
    pixels = torch.randint(0, 256, (N, 32, 32, 3), dtype=torch.uint8)
    mean, std = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])
    plain = Images(pixels.permute(0, 3, 1, 2), torch.zeros(N, dtype=torch.int64), mean, std)
    augmented = plain.shown_as(augment=True)
    rows = []
    for size in (50, 10):
        rng = stream(0, "bench")
        orders = [torch.from_numpy(rng.permutation(N)[:size]) for _ in range(BATCHES)]
        starts = [int(s) for s in rng.integers(0, N - size, BATCHES)]
        ways = {
            "slice": lambda n=size, s=starts: [pixels[at : at + n].clone() for at in s],
            "index": lambda o=orders: [pixels[at] for at in o],
            "scaled": lambda o=orders, r=rng: [plain.gather(at, r) for at in o],
            "scaled and augmented": lambda o=orders, r=rng: [augmented.gather(at, r) for at in o],
            "naive, augmented": lambda o=orders, r=rng: [_naive(pixels, at, mean, std, r) for at in o[:20]],
        }
        seconds = interleaved(ways, repeats)
        counts = {name: 20 if name.startswith("naive") else BATCHES for name in ways}
        share = ratios({name: [s / counts[name] for s in seconds[name]] for name in ways}, "slice")
        for name in ways:
            each = statistics.median(seconds[name]) / counts[name]
            rows.append({"batch": str(size), "way": name, "batches a second": 1 / each, "of a slice": share[name]})
    return rows


def _naive(
    pixels: torch.Tensor, at: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, rng: np.random.Generator
) -> torch.Tensor:
    """Convert, pad, crop, mirror and scale one image after the other, and stack them."""
    out = []
    for k in at.tolist():
        image = torch.nn.functional.pad(pixels[k].permute(2, 0, 1).float() / 255, (4, 4, 4, 4))
        top, left = rng.integers(0, 9, 2)
        image = image[:, top : top + 32, left : left + 32]
        image = image.flip(2) if rng.random() < 0.5 else image
        out.append((image - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    return torch.stack(out)
