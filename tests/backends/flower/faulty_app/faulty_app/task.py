"""Model and data; what goes wrong on a node is said by its environment variable FAULT."""

import os
import time

import torch
from flwr.app import Context
from torch import nn

FAULT = os.environ.get("FAULT", "")


def make_model(context: Context) -> nn.Module:
    hidden = int(context.run_config["hidden"])
    torch.manual_seed(1 if FAULT == "body" else 0)
    body = nn.Linear(4, 20).requires_grad_(False)
    torch.manual_seed(0)
    return nn.Sequential(
        body, nn.ReLU(), nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 20), nn.ReLU(), nn.Linear(20, 10)
    )


def load_data(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    if FAULT == "loader":
        raise OSError("the disk of this node is gone")
    if FAULT == "slow":
        time.sleep(3600)
    g = torch.Generator().manual_seed(client)
    return torch.randn(20, 4, generator=g), torch.randint(10, (20,), generator=g)
