"""Federated learning over slow uplinks: FedBCGD, FedBCGD+ and their baselines under one upload ledger.

import fedbcgd
result = fedbcgd.simulate(model, clients, algorithm="fedbcgd", blocks=5, test=test, rounds=100)
result.module, result.rows
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbcgd.version import __version__

if TYPE_CHECKING:
    from fedbcgd.algorithms.registry import algorithm_names, make_algorithm
    from fedbcgd.comparison import Runs, compare, sweep
    from fedbcgd.core.algorithm import Algorithm
    from fedbcgd.core.blocks import divide
    from fedbcgd.core.client import Client
    from fedbcgd.core.objective import supervised
    from fedbcgd.core.own_training import TrainConfig
    from fedbcgd.core.server import Server
    from fedbcgd.core.vector import FlatModel, Layout
    from fedbcgd.display.callbacks import ClientCsv, EarlyStopping, KeepBest, MLflow, WandB
    from fedbcgd.errors import Diverged, UserError
    from fedbcgd.models.stored import ModelInfo, load_model, model_info
    from fedbcgd.simulation import Interrupted, Result, simulate

# Public names are imported on first use, so that `fedbcgd --help` does not wait for torch.
_MODULES = {
    "Algorithm": "core.algorithm",
    "algorithm_names": "algorithms.registry",
    "make_algorithm": "algorithms.registry",
    "divide": "core.blocks",
    "Client": "core.client",
    "Diverged": "errors",
    "UserError": "errors",
    "FlatModel": "core.vector",
    "Layout": "core.vector",
    "supervised": "core.objective",
    "TrainConfig": "core.own_training",
    "Server": "core.server",
    "ModelInfo": "models.stored",
    "load_model": "models.stored",
    "model_info": "models.stored",
    "ClientCsv": "display.callbacks",
    "EarlyStopping": "display.callbacks",
    "KeepBest": "display.callbacks",
    "MLflow": "display.callbacks",
    "WandB": "display.callbacks",
    "Runs": "comparison",
    "compare": "comparison",
    "sweep": "comparison",
    "Interrupted": "simulation",
    "Result": "simulation",
    "simulate": "simulation",
}

__all__ = [
    "Algorithm",
    "Client",
    "ClientCsv",
    "Diverged",
    "EarlyStopping",
    "FlatModel",
    "Interrupted",
    "KeepBest",
    "Layout",
    "MLflow",
    "ModelInfo",
    "Result",
    "Runs",
    "Server",
    "TrainConfig",
    "UserError",
    "WandB",
    "__version__",
    "algorithm_names",
    "compare",
    "divide",
    "load_model",
    "make_algorithm",
    "model_info",
    "simulate",
    "supervised",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "flower":  # needs the extra `flower`
        return import_module("fedbcgd.flower")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbcgd' has no attribute {name!r}")
    return getattr(import_module(f"fedbcgd.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
