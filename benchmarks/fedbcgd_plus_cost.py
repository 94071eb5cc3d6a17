"""What FedBCGD+ costs a client beside FedBCGD: LeNet-5, 500 images, batch 50, one epoch and five, one thread."""

import statistics

import torch
from interleave import interleaved, ratios
from local_steps import one_client
from rich.console import Console


def measure(console: Console, repeats: int = 5) -> list[dict]:
    console.print(f"FedBCGD+ beside FedBCGD, {repeats} turns", highlight=False)
    torch.set_num_threads(1)
    rows = []
    for epochs in (1, 5):
        ways = {name: one_client(name, 500, batch_size=50, local_epochs=epochs) for name in ("fedbcgd", "fedbcgd+")}
        seconds = interleaved(ways, repeats)
        speed = ratios(seconds, "fedbcgd")
        for name, times in seconds.items():
            rows.append(
                {
                    "way": f"{name}, E = {epochs}",
                    "s a client": statistics.median(times),
                    "times the cost": 1 / speed[name],
                }
            )
    return rows
