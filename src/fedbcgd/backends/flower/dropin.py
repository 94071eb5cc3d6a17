"""An existing Flower app as a client: its own training function, behind the same codec, state and checks as ours.

The function gets an ordinary message, with the whole model and the settings, and replies with the whole model it trained.
Only the change of the assigned block and of the shared block is uploaded.
"""

import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedbcgd.backends.flower import plain, wire
from fedbcgd.backends.flower.client import answer, partition_id
from fedbcgd.backends.flower.memory import InContext, InFolder
from fedbcgd.backends.flower.plain import Form
from fedbcgd.backends.flower.privacy import refuse_mods
from fedbcgd.backends.flower.wire import Order
from fedbcgd.core.algorithm import RESIDUAL, Algorithm
from fedbcgd.core.corrections import needs
from fedbcgd.core.encoding import encode
from fedbcgd.core.generators import generators_restored, seed_generators
from fedbcgd.core.messages import Broadcast, StateUpdate, Upload
from fedbcgd.core.own_training import options_of_own_steps, training_seed
from fedbcgd.core.reading import APP, LONGEST_NAME, MOST_TRAIN_METRICS
from fedbcgd.core.vector import Layout
from fedbcgd.core.work import Progress
from fedbcgd.errors import UserError

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

TrainFunction = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, TrainFunction], Message]

LOSS_NAMES = ("train_loss", "train-loss", "loss")  # under which apps report the loss of their training


def train(
    app: ClientApp,
    *,
    mods: Sequence[Mod] = (),
    index: Callable[[Context], int] | None = None,
    folder: str | Path | None = None,
) -> Callable[[TrainFunction], TrainFunction]:
    """Register a training function as `@app.train()` does; of the model that it returns, only a block is uploaded.

    The function gets a `Message` with the whole model (`arrays`) and the settings (`config`), and replies with the model
    and its metrics, as it does with Flower's FedAvg. The server needs `fedbcgd.flower.strategy`. What else the app
    registers, such as `@app.evaluate()`, stays as it is.

    Example:
        >>> app = ClientApp()
        >>> @fedbcgd.flower.train(app)
        ... def train(msg, context): ...

    Args:
        app: the app to register the function with.
        mods: Flower mods around the function; they see its ordinary arrays. Mods of the app itself see what is sent.
        index: who this client is, 0 to M − 1; default: `partition-id` of the node's configuration.
        folder: where residuals (top-k) are kept on disk, so that a restarted SuperNode has them; default: in memory.

    Returns:
        A decorator that registers the function and returns it unchanged.

    Raises:
        UserError: a mod cannot do its work with partial uploads.
    """
    refuse_mods(getattr(app, "_mods", ()), sees_whole_models=False)
    refuse_mods(mods, sees_whole_models=True)
    site = _Site(index or partition_id, folder)

    def register(function: TrainFunction) -> TrainFunction:
        trainer = _MessageApp(_with_mods(function, mods))

        @app.train()
        def serve(message: Message, context: Context) -> Message:
            return Message(answer(lambda m, c: site.train(m, c, trainer), message, context), reply_to=message)

        @app.query(wire.HELLO_ACTION)
        def hello(message: Message, context: Context) -> Message:
            return Message(answer(site.hello, message, context), reply_to=message)

        return function

    return register


def wrap(
    app: ClientApp, *, index: Callable[[Context], int] | None = None, folder: str | Path | None = None
) -> ClientApp:
    """Return an app with `client_fn` (a `NumPyClient`) in which only a block of the model is uploaded.

    Example:
        >>> app = fedbcgd.flower.wrap(ClientApp(client_fn=client_fn))

    Args:
        app: the app. Its mods see the ordinary arrays.
        index: see `train`.
        folder: see `train`.

    Raises:
        UserError: the app has no `client_fn`, or a mod that cannot do its work with partial uploads.
    """
    if getattr(app, "_call", None) is None:
        raise UserError("wrap: expected an app with client_fn; for @app.train() say @fedbcgd.flower.train(app) instead")
    refuse_mods(getattr(app, "_mods", ()), sees_whole_models=True)
    outer, site, inner = ClientApp(), _Site(index or partition_id, folder), _NumPyApp(app)

    @outer.train()
    def serve(message: Message, context: Context) -> Message:
        return Message(answer(lambda m, c: site.train(m, c, inner), message, context), reply_to=message)

    @outer.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return inner.evaluate(message, context)

    @outer.query(wire.HELLO_ACTION)
    def hello(message: Message, context: Context) -> Message:
        return Message(answer(site.hello, message, context), reply_to=message)

    return outer


def unfit_reason(algorithm: Algorithm) -> str:
    """Return why an app's own training cannot serve this algorithm; empty if it can."""
    if needs(algorithm.local) != "free":
        return (
            f"{algorithm.name} corrects every gradient on the client, and the app's own training does not let it. Take an "
            "algorithm that needs only the trained model (fedavg, fedavgm, fedadam, fedyogi, fedpaq, topk, fedbcgd, "
            "qsgd+fedbcgd), or fedbcgd.flower.client_app(…, train=…), whose function steps with config.optimizer"
        )
    for option, advice in options_of_own_steps(algorithm):
        return f"{option}: expected none where clients train in an app of their own: {advice}"
    return ""


def _with_mods(function: TrainFunction, mods: Sequence[Mod]) -> TrainFunction:
    """Put mods around a function, the first one outermost."""
    for mod in reversed(mods):
        function = _with_mod(function, mod)
    return function


def _with_mod(function: TrainFunction, mod: Mod) -> TrainFunction:
    return lambda message, context: mod(message, context, function)


@dataclass(frozen=True)
class _Trained:
    """What an app's training gave."""

    state: Mapping[str, Tensor]
    examples: int | None  # None: it does not say
    metrics: Mapping[str, Any]


class _MessageApp:
    """An app of Flower's Message API."""

    def __init__(self, function: TrainFunction):
        self._function = function

    def train(self, message: Message, context: Context, form: Form) -> _Trained:
        reply = self._function(message, context)
        if not isinstance(reply, Message):
            raise UserError(f"the training function: expected a Message as its result, got {type(reply).__name__}")
        if reply.has_error():
            raise UserError(f"the training function replied with an error: {reply.error.reason}")
        arrays, measured = reply.content.array_records, reply.content.metric_records
        if len(arrays) != 1 or len(measured) > 1:
            raise UserError(
                "the training function: expected one ArrayRecord and one MetricRecord in its reply, got "
                f"{len(arrays)} and {len(measured)}"
            )
        metrics: dict[str, Any] = dict(next(iter(measured.values()), {}))
        examples = plain.whole(metrics.pop(form.weighted_by, None))
        return _Trained(next(iter(arrays.values())).to_torch_state_dict(), examples, metrics)


class _NumPyApp:
    """An app with `client_fn`, in the messages that Flower has for it."""

    def __init__(self, app: ClientApp):
        self._app = app

    def train(self, message: Message, context: Context, form: Form) -> _Trained:
        arrays, config = _of(message.content, form)
        reply = self._call("fit", arrays, config, message, context)
        given: Any = reply["fitres.parameters"]
        values = [np.load(io.BytesIO(a.data), allow_pickle=False) for a in given.values()]
        if len(values) != len(arrays):
            raise UserError(f"fit: expected {len(arrays)} arrays, as many as it was given, got {len(values)}")
        state = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in zip(arrays, values, strict=True)}
        count: Any = reply["fitres.num_examples"]
        return _Trained(state, count["num_examples"], reply["fitres.metrics"])

    def evaluate(self, message: Message, context: Context) -> Message:
        form = Form.read(message.content)
        reply: Any = self._call("evaluate", *_of(message.content, form), message, context)
        metrics = _numbers(reply["evaluateres.metrics"], MOST_TRAIN_METRICS)
        metrics |= {"loss": reply["evaluateres.loss"]["loss"]}
        metrics |= {form.weighted_by: reply["evaluateres.num_examples"]["num_examples"]}
        return Message(RecordDict({wire.METRICS: MetricRecord(metrics)}), reply_to=message)

    def _call(
        self, what: str, arrays: ArrayRecord, config: ConfigRecord, message: Message, context: Context
    ) -> RecordDict:
        tensors: dict[str, Array] = {str(k): a for k, a in enumerate(arrays.values())}
        records = {f"{what}ins.parameters": ArrayRecord(tensors), f"{what}ins.config": config}
        message.content = RecordDict(records)  # type: ignore[arg-type]
        reply = self._app(message, context)
        if reply.has_error():
            raise UserError(f"{what} failed: {reply.error.reason}")
        status: Any = reply.content[f"{what}res.status"]
        if status["code"] != 0:
            raise UserError(f"{what} failed: {status['message']}")
        return reply.content


def _of(content: RecordDict, form: Form) -> tuple[ArrayRecord, ConfigRecord]:
    return content[form.arrays], content[form.config]  # type: ignore[return-value]


class _Site:
    """A client of the federation that trains by an app of its own."""

    def __init__(self, index: Callable[[Context], int], folder: str | Path | None):
        self._index = index
        self._folder = None if folder is None else Path(folder)

    def hello(self, message: Message, context: Context) -> RecordDict:
        of = int(context.node_config.get("num-partitions", 0))
        told: dict[str, Any] = {"client": self._index(context), "of": of, "trains": APP, **wire.versions()}
        return RecordDict({wire.TOLD: ConfigRecord(told)})

    def train(self, message: Message, context: Context, app: _MessageApp | _NumPyApp) -> RecordDict:
        order, form = Order.read(message.content), Form.read(message.content)
        task, algorithm = order.task, order.algorithm
        if why := unfit_reason(algorithm):
            raise UserError(why)
        layout = plain.read_layout(message.content, order.layout)
        arrays, config = _of(message.content, form)
        x = _vector(layout, arrays.to_torch_state_dict(), "the message")
        keeper = InContext(context.state, layout.dtype) if self._folder is None else InFolder(self._folder, task.client)
        memory = keeper.load() if algorithm.state_names else None
        if memory is not None and not memory.settle(order, layout.dim, layout.dtype):
            memory.begin_anew(order)  # a lost residual makes nothing inconsistent: go on from zero
        # The function sees what Flower's own strategies would send.
        message.content = RecordDict({form.arrays: arrays, form.config: config})
        with generators_restored():
            seed_generators(training_seed(order.seed, task), None)
            trained = app.train(message, context, form)
        y = _vector(layout, trained.state, "the reply of the training function")
        if trained.examples is None and algorithm.weighting == "examples":
            raise UserError(
                f"the training function: expected {form.weighted_by!r} among its metrics, by which clients are weighted"
            )
        mine = {RESIDUAL: torch.zeros(layout.dim, dtype=layout.dtype)} if algorithm.codec.residual else {}
        mine |= memory.vectors if memory is not None else {}
        rate, dim = algorithm.local.rate(task.round), layout.dim
        work = Progress(x[:dim], y[:dim], {}, mine, layout.slices(task.block), rate, torch.zeros(()))
        work.steps = 1  # how many there were is not known here
        broadcast, new_memory = Broadcast(task.round, order.epoch, x, {}), partial(torch.empty, dtype=torch.uint8)
        payload, values = encode(
            algorithm, layout, order.seed, work, broadcast, task, y[layout.buffer_slice], new_memory
        )
        metrics = _numbers(trained.metrics, MOST_TRAIN_METRICS)
        loss = next((float(metrics[name]) for name in LOSS_NAMES if name in metrics), None)
        if memory is not None:
            memory.wait_for(task.round, StateUpdate(task.client, order.epoch, values))
            keeper.save(memory)
        examples = 1 if trained.examples is None else trained.examples
        upload = Upload(
            task.round, task.client, task.block, payload, examples, work.steps, work.evaluations, loss, metrics
        )
        return wire.reply(upload)


def _vector(layout: Layout, state: Mapping[str, Tensor], where: str) -> Tensor:
    """Lay a model out as the server does; what is not finite is for the server to refuse."""
    out = torch.empty(layout.size, dtype=layout.dtype)
    for e in (*layout.parameters, *layout.buffers):
        if e.name not in state:
            raise UserError(f"{where} lacks {e.name!r}, which the server's model has")
        if tuple(state[e.name].shape) != e.shape:
            raise UserError(
                f"{where}: expected shape {e.shape} of {e.name!r}, as the server's model has, got "
                f"{tuple(state[e.name].shape)}"
            )
        e.view(out).copy_(state[e.name])
    return out


def _numbers(metrics: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the metrics that are finite numbers; say in the log which ones are left out."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if number and 1 <= len(name) <= LONGEST_NAME and name.isprintable() and len(found) < most:
            found[name] = value
        else:
            log.warning("metric %r is not sent: expected a finite number, of at most %d metrics", name, most)
    return found
