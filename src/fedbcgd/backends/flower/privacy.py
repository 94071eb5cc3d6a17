"""Flower's differential privacy and secure aggregation need whole models: with uploads of blocks they are refused."""

from collections.abc import Iterable
from types import FrameType
from typing import Any

from flwr.app import ArrayRecord

from fedbcgd.errors import UserError

# By name: Flower has each of them twice, for the Message API and for client_fn.
_LOCAL = "LocalDpMod"
_CENTRAL = "central differential privacy, got {}, which clips for a strategy that adds noise, while fedbcgd's adds none"
_SECURE = "secure aggregation, got {}, which masks whole models, while clients upload encoded blocks"
_UNFIT = {name: _CENTRAL.format(name) for name in ("fixedclipping_mod", "adaptiveclipping_mod")}
_UNFIT |= {name: _SECURE.format(name) for name in ("secagg_mod", "secaggplus_mod")}


def refuse_wrapper(strategy: Any, caller: FrameType | None) -> None:
    """Refuse to be called by one of Flower's strategies for differential privacy.

    They wrap a strategy, and clip and add noise to whole models on their way between clients and strategy. Ours keeps its
    model in its own server and reads uploads of blocks, so the noise would have no effect, and nobody would notice. The
    wrapped strategy recognises its wrapper only by the frame that calls it.

    Args:
        strategy: the strategy that is called.
        caller: the frame that calls it.

    Raises:
        UserError: the caller is a method of such a wrapper.
    """
    wrapper = caller.f_locals.get("self") if caller is not None else None
    names = [kind.__name__ for kind in type(wrapper).__mro__ if kind.__module__.startswith("flwr.")]
    if wrapper is not strategy and any(name.startswith("DifferentialPrivacy") for name in names):
        raise UserError(
            f"strategy: expected nothing around fedbcgd's strategy, got {type(wrapper).__name__}: it changes whole models "
            "between the clients and the strategy, while clients upload encoded blocks and the server keeps the model, so "
            "it would have no effect; start the strategy itself (docs/flower.md says what privacy means with blocks)"
        )


def refuse_changed(returned: ArrayRecord | None, arrays: ArrayRecord | None) -> None:
    """Refuse a model that was changed between two rounds: the strategy continues with its own model.

    Args:
        returned: the model that the strategy returned after the last round; None: there was no round yet.
        arrays: the model that it is given for the next round; None: it is given none.

    Raises:
        UserError: they differ.
    """
    if returned is None or arrays is None or arrays is returned:
        return
    if {name: a.data for name, a in arrays.items()} != {name: a.data for name, a in returned.items()}:
        raise UserError(
            "arrays: expected the model that aggregate_train returned, got another one; take out what changes it between "
            "the rounds, such as a strategy around this one, since the server goes on from its own model"
        )


def refuse_workflow(caller: FrameType | None) -> None:
    """Refuse Flower's workflows, of which secure aggregation is one.

    Raises:
        UserError: the caller is a workflow.
    """
    if caller is not None and str(caller.f_globals.get("__name__", "")).startswith("flwr.server.workflow"):
        raise UserError(
            "strategy: expected to be started by itself, got a workflow of Flower's (secure aggregation, DefaultWorkflow), "
            "which can neither mask nor sum encoded blocks; call strategy.start(grid=grid, …) in @app.main()"
        )


def refuse_mods(mods: Iterable[Any], *, sees_whole_models: bool) -> None:
    """Refuse mods of Flower that cannot work with uploads of blocks.

    Args:
        mods: mods of an app or of its training function.
        sees_whole_models: whether they process messages between our code and the training function, which hold whole
            models.

    Raises:
        UserError: one of them is for secure aggregation or for central differential privacy, or adds noise to
            messages that hold encoded blocks.
    """
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name in _UNFIT:
            raise UserError(f"mods: expected none for {_UNFIT[name]}; leave it out")
        if name == _LOCAL and not sees_whole_models:
            raise UserError(
                "mods: expected none here that changes whole models, got LocalDpMod, while these messages hold encoded "
                "blocks; put it around the training function, @fedbcgd.flower.train(app, mods=[…])"
            )
