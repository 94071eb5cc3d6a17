"""Logistic regression with its optimum: a second convex problem, with data of users' form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.models.problems import Pair, Problem


def logistic(clients: Sequence[Pair], classes: int, l2: float = 1e-3) -> Problem:
    """Make multinomial logistic regression with the regulariser l2/2·‖w‖².

    Args:
        clients: the data (x, y) of each.
        classes: how many.
        l2: of the regulariser.

    Returns:
        The problem, with its optimum computed in float64.
    """
    data = [(x.double().flatten(1), y.long()) for x, y in clients]
    model = nn.Linear(data[0][0].shape[1], classes).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    criterion = nn.functional.cross_entropy

    def value(m: nn.Module) -> Tensor:
        """Compute the federated objective: the mean over clients, of equal weight whatever their sizes."""
        fit = torch.stack([criterion(m(x), y) for x, y in data]).mean()
        return fit + 0.5 * l2 * sum(p.square().sum() for p in m.parameters())

    best = nn.Linear(model.in_features, classes).double()
    best.load_state_dict(model.state_dict())

    def closure() -> Tensor:
        best.zero_grad()
        f = value(best)
        f.backward()
        return f

    # Near the optimum f no longer changes in float64 but its gradient does: end without a line search, which uses f.
    for search in ("strong_wolfe", None):
        solver = torch.optim.LBFGS(
            best.parameters(),
            max_iter=5000,
            tolerance_grad=1e-12,
            tolerance_change=0,
            history_size=50,
            line_search_fn=search,
        )
        solver.step(closure)
    with torch.no_grad():
        lowest = value(best)
    optimum = torch.cat([p.detach().flatten() for p in best.parameters()])

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return criterion(m(batch[0]), batch[1])

    def metrics(m: nn.Module, batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            f = value(m)
        return {"gap": f - lowest, "loss": f}

    return Problem(model, data, loss, metrics, (torch.zeros(1, 1), torch.zeros(1)), optimum)
