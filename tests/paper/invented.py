"""Invented panels and outcomes for tests."""

from dataclasses import replace

from fedbcgd.core.ledger import Ledger
from fedbcgd.engine.loop import Outcome
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import Contender, Effort, Panel

EFFORT = Effort({"lr": (0.1, 0.3)}, seeds=2, share=0.5)


def panel(*keys, budget=20.0, metric="accuracy", target=None, key="p"):
    contenders = tuple(Contender(k, k.upper(), {"name": "fedavg"}) for k in keys)
    return Panel(key, f"panel {key}", {}, {}, {}, {"cohort": 10}, budget, contenders, EFFORT, metric, target)


def outcome(*values, cost=1.0, stopped="budget", metric="test_accuracy"):
    """A run evaluated every round, with these values and this upload a round."""
    rows = [
        {"round": k + 1, metric: v, "train_loss": v, "upload_d": cost * (k + 1), "gradient_evaluations": 10 * (k + 1)}
        for k, v in enumerate(values)
    ]
    return Outcome("fedavg", rows, Ledger(1, 4, 1), len(rows), 1.0, stopped)


def result(where=None, **runs):
    """`result(a=[outcome, …])`: the outcomes of each contender, from seed 1 on."""
    where = where or panel(*runs)
    where = (
        where if {c.key for c in where.contenders} >= set(runs) else replace(where, contenders=panel(*runs).contenders)
    )
    return PanelResult(where, {key: dict(enumerate(each, 1)) for key, each in runs.items()})
