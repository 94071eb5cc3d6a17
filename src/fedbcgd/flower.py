"""FedBCGD and every other algorithm on Flower. In an existing app two lines change:

strategy = fedbcgd.flower.strategy("fedbcgd", model, blocks=5, momentum=0.8)      # in the ServerApp
@fedbcgd.flower.train(app)                                                         # instead of @app.train()

`client_app(make_model, load_data)` is a whole ClientApp that trains by the algorithm's own rule.
"""

from typing import TYPE_CHECKING, Any

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from fedbcgd.backends.flower.client import client_app
    from fedbcgd.backends.flower.dropin import train, wrap
    from fedbcgd.backends.flower.federation import Federation, strategy

_MODULES = {
    "client_app": "client",
    "train": "dropin",
    "wrap": "dropin",
    "strategy": "federation",
    "Federation": "federation",
}

__all__ = ["Federation", "client_app", "strategy", "train", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbcgd.flower' has no attribute {name!r}")
    from importlib import import_module

    try:
        import flwr.serverapp  # noqa: F401
    except ImportError as error:
        raise UserError(f"fedbcgd.flower needs the extra `flower`: pip install 'fedbcgd[flower]' ({error})") from None
    return getattr(import_module(f"fedbcgd.backends.flower.{_MODULES[name]}"), name)
