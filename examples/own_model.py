"""Your own model and data: a small network that learns which of three noisy sine waves it sees.

python examples/own_model.py
"""

import math

import torch
from torch import nn

import fedbcgd


def make_clients(count: int, size: int, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each client has waves of its own loudness: real federations are uneven."""
    time = torch.linspace(0, 2 * math.pi, 64)
    clients = []
    for _ in range(count):
        y = torch.randint(3, (size,), generator=generator)
        loudness = 0.5 + torch.rand(1, generator=generator)
        phase = 2 * math.pi * torch.rand(size, 1, generator=generator)
        x = loudness * torch.sin((y[:, None] + 1) * time + phase) + 1.5 * torch.randn(size, 64, generator=generator)
        clients.append((x, y))
    return clients


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = make_clients(50, 40, generator)
    test = make_clients(1, 1000, generator)[0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3))

    print("upload budget 5 d for each")
    for name in ("fedavg", "fedbcgd"):
        result = fedbcgd.simulate(
            model,
            clients,
            algorithm=name,
            test=test,
            budget=5,
            cohort=10,
            lr=0.1,
            local_epochs=2,
            batch_size=10,
            workers=0,
        )
        final = result.final
        print(f"{name}: accuracy {final['test_accuracy']:.3f} after {result.rounds} rounds, {final['upload_d']:.1f} d")


if __name__ == "__main__":
    main()
