"""Metrics of a model on a data set: means over its examples."""

import numpy as np
import torch
from torch import nn

from fedbcgd.data.sources import Source, batch_length, to_device
from fedbcgd.objective import Objective
from fedbcgd.threads import one_thread

BATCH = 500


def evaluate(module: nn.Module, objective: Objective, data: Source, batch_size: int = BATCH) -> dict[str, float]:
    device = next(module.parameters()).device
    rng = np.random.default_rng(0)  # no source augments what it evaluates on; the protocol wants a generator
    totals: dict[str, float] = {}
    module.eval()
    with torch.inference_mode(), one_thread():
        for rows in torch.arange(len(data)).split(batch_size):
            batch = to_device(data.gather(rows, rng), device)
            n = batch_length(batch, len(rows))
            for name, value in objective.metrics(module, batch).items():
                totals[name] = totals.get(name, 0.0) + float(value) * n
    return {name: total / len(data) for name, total in totals.items()}
