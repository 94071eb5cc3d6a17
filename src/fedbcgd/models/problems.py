"""Convex problems whose optimum is known: model, data and optimum.

Example:

problem = quadratics(clients=40, beta=10, mu=1, sigma=1, G=5)
simulate(problem.model, problem.clients, "fedbcgd+", loss=problem.loss, metrics=problem.metrics, test=problem.test, …)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.core.objective import Loss, Metrics
from fedbcgd.rng import stream

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model, the clients' data and the optimum.

    Attributes:
        model: the model at its initial point.
        clients: the data of each client.
        loss: the loss of a batch.
        metrics: `gap`, which is f(x) − f(x*) exactly, and `loss`, which is f(x).
        test: a placeholder, since the metrics need no data.
        optimum: x*, flat.
    """

    model: nn.Module
    clients: list[Pair]
    loss: Loss
    metrics: Metrics
    test: Pair
    optimum: Tensor

    def gap(self, model: nn.Module) -> float:
        """Compute f(x) − f(x*)."""
        return float(self.metrics(model, None)["gap"])


class Point(nn.Module):
    """A model with one parameter, a vector of float64, initially zero."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.w = nn.Parameter(torch.zeros(dim, dtype=torch.float64))


def quadratics(
    clients: int = 40,
    dim: int = 20,
    beta: float = 10.0,
    mu: float = 1.0,
    sigma: float = 1.0,
    G: float = 5.0,
    examples: int = 10,
    seed: int = 0,
    conditioned: bool = False,
) -> Problem:
    """Make heterogeneous quadratics f_i(w) = mean over ν of ½·Σ_k a_ik·(w_k − t_iνk)².

    Args:
        clients: how many clients.
        dim: length of w.
        beta: upper bound of all curvatures a_ik.
        mu: lower bound of all curvatures.
        sigma: σ, where σ² is the variance of a single example's gradient around its client's gradient.
        G: such that G² is the mean of ‖∇f_i(x*)‖² over the clients.
        examples: how many examples each client has.
        seed: fixes the draws.
        conditioned: if False, the curvatures of each client are drawn independently, so that the mean f of all clients is
            much better conditioned than β/μ. If True, a coordinate is about equally steep for all clients, so that f
            is about as badly conditioned as each of them.

    Returns:
        The problem.
    """
    rng = stream(seed, "quadratics")
    spread = torch.from_numpy(rng.random((clients, dim)))
    if conditioned:
        spread = (torch.linspace(0, 1, dim, dtype=torch.float64) + 0.2 * (spread - 0.5)).clamp(0, 1)
    a = mu * (beta / mu) ** spread  # log-uniform
    a[0, 0], a[-1, -1] = mu, beta  # both bounds are attained
    b = torch.from_numpy(rng.normal(size=(clients, dim)))
    optimum = (a * b).sum(0) / a.sum(0)
    b = optimum + (b - optimum) * G / (a * (optimum - b)).square().sum(1).mean().sqrt()
    noise = torch.from_numpy(rng.normal(size=(clients, examples, dim)))
    noise -= noise.mean(1, keepdim=True)
    if examples > 1:
        noise *= sigma / (a[:, None] * noise).square().sum(2).mean().sqrt()
    data = [(a[i].expand(examples, dim).clone(), b[i] + noise[i]) for i in range(clients)]
    mean = a.mean(0)
    lowest = torch.stack([(x * (optimum - t).square()).sum(1).mean() / 2 for x, t in data]).mean()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        curvature, target = batch
        return 0.5 * (curvature * (model.w - target).square()).sum(1).mean()

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        gap = 0.5 * (mean * (model.w.detach() - optimum).square()).sum()  # type: ignore[operator]
        return {"gap": gap, "loss": lowest + gap}

    return Problem(Point(dim), data, loss, metrics, (torch.zeros(1, 1), torch.zeros(1)), optimum)
