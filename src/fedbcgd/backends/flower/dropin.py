"""An existing Flower app as a client: it trains by its own function, and its upload goes through our codec and checks.

The function gets an ordinary message, with the whole model and the settings, and replies with the whole model it trained.
Only the change of the assigned block and of the shared block is uploaded.
"""

import io
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
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.node import Node, serving
from fedbcgd.backends.flower.plain import RecordNames
from fedbcgd.backends.flower.privacy import refuse_mods
from fedbcgd.backends.flower.wire import TaskRequest
from fedbcgd.core.algorithm import RESIDUAL, Algorithm
from fedbcgd.core.corrections import needs
from fedbcgd.core.encoding import encode
from fedbcgd.core.generators import generators_restored, seed_generators
from fedbcgd.core.messages import Broadcast, StateUpdate, Upload
from fedbcgd.core.own_training import options_of_own_steps, training_seed
from fedbcgd.core.reading import APP, LONGEST_NAME, MOST_TRAIN_METRICS
from fedbcgd.core.vector import Layout
from fedbcgd.core.work import Progress
from fedbcgd.errors import UserError, call_users

TrainFunction = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, TrainFunction], Message]

LOSS_NAMES = ("train_loss", "train-loss", "loss")  # metrics that may be an app's training loss; the first one counts


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
        index: a function of Flower's context that returns this client's index, 0 to M − 1; default: `partition-id` of the
            node's configuration.
        folder: where residuals (top-k) are kept on disk, so that a restarted SuperNode has them; default: in memory.

    Returns:
        A decorator that registers the function and returns it unchanged.

    Raises:
        UserError: a mod cannot work with partial uploads.
    """
    refuse_mods(getattr(app, "_mods", ()), sees_whole_models=False)
    refuse_mods(mods, sees_whole_models=True)
    node = _AppNode(index, folder, APP)

    def register(function: TrainFunction) -> TrainFunction:
        trainer = _MessageApp(_with_mods(function, mods))

        app.train()(serving(partial(node.train, app=trainer)))
        app.query(wire.HELLO_ACTION)(serving(node.hello))
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

    Returns:
        A new app, which calls the given one to train.

    Raises:
        UserError: the app has no `client_fn`, or has a mod that cannot work with partial uploads.
    """
    if getattr(app, "_call", None) is None:
        raise UserError(
            "wrap: expected a ClientApp with client_fn, got one without; for @app.train() say @fedbcgd.flower.train(app) "
            "instead"
        )
    refuse_mods(getattr(app, "_mods", ()), sees_whole_models=True)
    outer, node, inner = ClientApp(), _AppNode(index, folder, APP), _NumPyApp(app)

    outer.train()(serving(partial(node.train, app=inner)))
    outer.evaluate()(inner.evaluate)
    outer.query(wire.HELLO_ACTION)(serving(node.hello))
    return outer


def unfit_reason(algorithm: Algorithm) -> str:
    """Return why clients that train in an app of their own cannot run this algorithm; empty if they can."""
    if needs(algorithm.local) != "free":
        return (
            "algorithm: expected one that needs only the trained model (fedavg, fedavgm, fedadam, fedyogi, fedpaq, topk, "
            f"fedbcgd, qsgd+fedbcgd), since clients train in an app of their own, got {algorithm.name!r}, which corrects "
            "every gradient; take one of these, or fedbcgd.flower.client_app(…, train=…), whose function steps with "
            "config.optimizer"
        )
    for option, advice in options_of_own_steps(algorithm):
        value = getattr(algorithm.local, option)
        return f"{option}: expected none where clients train in an app of their own, got {value}: {advice}"
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
    """What an app's training returned."""

    state: Mapping[str, Tensor]
    examples: int | None  # None: it did not report how many
    metrics: Mapping[str, Any]


class _MessageApp:
    """Runs an app of Flower's Message API."""

    def __init__(self, function: TrainFunction):
        self._function = function

    def train(self, message: Message, context: Context, names: RecordNames) -> _Trained:
        reply = call_users(self._function, message, context)
        if not isinstance(reply, Message):
            raise UserError(
                f"training function: expected it to return a Message, got {type(reply).__name__}; return "
                "Message(content=content, reply_to=msg)"
            )
        if reply.has_error():
            raise UserError(f"training function: expected a reply with the model, got an error: {reply.error.reason}")
        arrays, measured = reply.content.array_records, reply.content.metric_records
        if len(arrays) != 1 or len(measured) > 1:
            raise UserError(
                "training function: expected one ArrayRecord, the model, and one MetricRecord in its reply, got "
                f"{len(arrays)} and {len(measured)}"
            )
        metrics: dict[str, Any] = dict(next(iter(measured.values()), {}))
        examples = plain.whole(metrics.pop(names.weighted_by, None))
        return _Trained(next(iter(arrays.values())).to_torch_state_dict(), examples, metrics)


class _NumPyApp:
    """Runs an app with `client_fn`, with the messages that Flower itself would send to it."""

    def __init__(self, app: ClientApp):
        self._app = app

    def train(self, message: Message, context: Context, names: RecordNames) -> _Trained:
        arrays, config = _model_and_settings(message.content, names)
        reply = self._call("fit", arrays, config, message, context)
        returned: Any = reply["fitres.parameters"]
        values = [np.load(io.BytesIO(a.data), allow_pickle=False) for a in returned.values()]
        if len(values) != len(arrays):
            raise UserError(
                f"fit: expected it to return {len(arrays)} arrays, as many as it was given, got {len(values)}; return all "
                "weights of the model"
            )
        state = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in zip(arrays, values, strict=True)}
        count: Any = reply["fitres.num_examples"]
        return _Trained(state, count["num_examples"], reply["fitres.metrics"])

    def evaluate(self, message: Message, context: Context) -> Message:
        names = RecordNames.read(message.content)
        reply: Any = self._call("evaluate", *_model_and_settings(message.content, names), message, context)
        metrics = _numbers(reply["evaluateres.metrics"], MOST_TRAIN_METRICS)
        metrics |= {"loss": reply["evaluateres.loss"]["loss"]}
        metrics |= {names.weighted_by: reply["evaluateres.num_examples"]["num_examples"]}
        return Message(RecordDict({wire.METRICS: MetricRecord(metrics)}), reply_to=message)

    def _call(
        self, what: str, arrays: ArrayRecord, config: ConfigRecord, message: Message, context: Context
    ) -> RecordDict:
        tensors: dict[str, Array] = {str(k): a for k, a in enumerate(arrays.values())}
        records = {f"{what}ins.parameters": ArrayRecord(tensors), f"{what}ins.config": config}
        message.content = RecordDict(records)  # type: ignore[arg-type]
        reply = self._app(message, context)
        if reply.has_error():
            raise UserError(f"{what}: expected a result, got an error: {reply.error.reason}")
        status: Any = reply.content[f"{what}res.status"]
        if status["code"] != 0:
            raise UserError(f"{what}: expected a result, got an error: {status['message']}")
        return reply.content


def _model_and_settings(content: RecordDict, names: RecordNames) -> tuple[ArrayRecord, ConfigRecord]:
    return content[names.arrays], content[names.config]  # type: ignore[return-value]


class _AppNode(Node):
    """Has an app train, and uploads the task's block of what came out."""

    def train(self, message: Message, context: Context, app: _MessageApp | _NumPyApp) -> RecordDict:
        """Have the app train, and return the upload of the task's block."""
        request, names = TaskRequest.read(message.content), RecordNames.read(message.content)
        if why := unfit_reason(request.algorithm):
            raise UserError(why)
        layout = plain.read_layout(message.content, request.layout)
        arrays, config = _model_and_settings(message.content, names)
        x = _vector(layout, arrays.to_torch_state_dict(), "message")
        # The function sees what Flower's own strategies would send.
        message.content = RecordDict({names.arrays: arrays, names.config: config})
        with self.memory(request, context, layout) as memory:
            with generators_restored():
                seed_generators(training_seed(request.seed, request.task), None)
                trained = app.train(message, context, names)
            y = _vector(layout, trained.state, "training function")
            if trained.examples is None and request.algorithm.weighting == "examples":
                raise UserError(
                    f"training function: expected {names.weighted_by!r} among its metrics, by which clients are weighted, "
                    f"got {', '.join(trained.metrics) or 'none'}"
                )
            upload, update = _upload(request, layout, x, y, trained, memory.vectors)
            memory.keep_pending(request.task.round, update)
        return wire.reply(upload)


def _upload(
    request: TaskRequest, layout: Layout, x: Tensor, y: Tensor, trained: _Trained, state: Mapping[str, Tensor]
) -> tuple[Upload, StateUpdate]:
    """Encode the task's block of what the training changed; return the upload and the state update."""
    task, algorithm, dim = request.task, request.algorithm, layout.dim
    own = {RESIDUAL: torch.zeros(dim, dtype=layout.dtype)} if algorithm.codec.residual else {}
    rate = algorithm.local.rate(task.round)
    work = Progress(x[:dim], y[:dim], {}, own | dict(state), layout.slices(task.block), rate, torch.zeros(()))
    work.steps = 1  # the number of steps is not known here
    broadcast, new_memory = Broadcast(task.round, request.epoch, x, {}), partial(torch.empty, dtype=torch.uint8)
    payload, values = encode(algorithm, layout, request.seed, work, broadcast, task, y[layout.buffer_slice], new_memory)
    metrics = _numbers(trained.metrics, MOST_TRAIN_METRICS)
    loss = next((float(metrics[name]) for name in LOSS_NAMES if name in metrics), None)
    examples = 1 if trained.examples is None else trained.examples
    upload = Upload(task.round, task.client, task.block, payload, examples, work.steps, work.evaluations, loss, metrics)
    return upload, StateUpdate(task.client, request.epoch, values)


def _vector(layout: Layout, state: Mapping[str, Tensor], where: str) -> Tensor:
    """Return a model in the server's layout. Values may be NaN or infinite; the server refuses these."""
    out = torch.empty(layout.size, dtype=layout.dtype)
    for e in (*layout.parameters, *layout.buffers):
        if e.name not in state:
            raise UserError(
                f"{where}: expected a model with {e.name!r}, as the server's has, got one without; reply with the whole "
                "state_dict"
            )
        if tuple(state[e.name].shape) != e.shape:
            raise UserError(
                f"{where}: expected {e.name!r} of shape {e.shape}, as in the server's model, got "
                f"{tuple(state[e.name].shape)}"
            )
        e.view(out).copy_(state[e.name])
    return out


def _numbers(metrics: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the metrics that can be sent: finite numbers with printable names, and not too many. Log the others."""
    sent: dict[str, Any] = {}
    for name, value in metrics.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number:
            log.warning("metric %r is not sent: expected a finite number, got %r", name, value)
        elif not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            log.warning("metric %r is not sent: expected a name of 1 to %d printable characters", name, LONGEST_NAME)
        elif len(sent) >= most:
            log.warning("metric %r is not sent: expected at most %d metrics, got %d", name, most, len(metrics))
        else:
            sent[name] = value
    return sent
