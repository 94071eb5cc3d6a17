"""Federated learning over slow uplinks: FedBCGD, FedBCGD+ and their baselines under one upload ledger.

import fedbcgd
result = fedbcgd.simulate(model, clients, algorithm="fedbcgd", blocks=5, test=test, rounds=100)
result.module, result.rows
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbcgd.version import __version__

if TYPE_CHECKING:
    from fedbcgd.algorithm import Algorithm, algorithm_names, make_algorithm
    from fedbcgd.blocks import divide
    from fedbcgd.client import Client
    from fedbcgd.errors import Diverged, UserError
    from fedbcgd.flat import FlatModel, Layout
    from fedbcgd.objective import supervised
    from fedbcgd.server import Server
    from fedbcgd.simulation import Interrupted, Result, simulate

# Public names are imported on first use, so that `fedbcgd --help` does not wait for torch.
_HOME = {
    "Algorithm": "algorithm",
    "algorithm_names": "algorithm",
    "make_algorithm": "algorithm",
    "divide": "blocks",
    "Client": "client",
    "Diverged": "errors",
    "UserError": "errors",
    "FlatModel": "flat",
    "Layout": "flat",
    "supervised": "objective",
    "Server": "server",
    "Interrupted": "simulation",
    "Result": "simulation",
    "simulate": "simulation",
}

__all__ = [
    "Algorithm",
    "Client",
    "Diverged",
    "FlatModel",
    "Interrupted",
    "Layout",
    "Result",
    "Server",
    "UserError",
    "__version__",
    "algorithm_names",
    "divide",
    "make_algorithm",
    "simulate",
    "supervised",
]


def __getattr__(name: str) -> Any:
    if name == "flower":  # a package of its own, for those who have Flower
        return import_module("fedbcgd.flower")
    if name not in _HOME:
        raise AttributeError(f"module 'fedbcgd' has no attribute {name!r}")
    return getattr(import_module(f"fedbcgd.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
