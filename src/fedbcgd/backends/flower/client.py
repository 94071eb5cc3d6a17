"""The ClientApp: a user's model and data behind the same `Client` that every backend runs."""

import inspect
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.definition import Definition
from fedbcgd.backends.flower.memory import InContext, InFolder
from fedbcgd.backends.flower.privacy import refuse_mods
from fedbcgd.backends.flower.wire import Order
from fedbcgd.core.client import Client
from fedbcgd.core.objective import Loss, Metrics, objective
from fedbcgd.core.own_training import Train
from fedbcgd.core.reading import FUNCTION, RULE
from fedbcgd.data.sources import Source, as_source, examples_in
from fedbcgd.engine.evaluation import combine, evaluate_span, spans
from fedbcgd.engine.probe import with_line
from fedbcgd.engine.threads import threads as threads_used
from fedbcgd.errors import UserError, users_frames

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


def client_app(
    make_model: Callable[..., nn.Module],
    load_data: Callable[..., Any],
    *,
    load_test: Callable[..., Any] | None = None,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    index: Callable[[Context], int] | None = None,
    folder: str | Path | None = None,
    threads: int = 1,
    device: str = "cpu",
    train: Train | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return a Flower ClientApp that runs whatever algorithm the server names.

    Example:
        >>> app = fedbcgd.flower.client_app(Net, lambda client: load(f"part-{client}.npz"))

    What is trained:
        make_model: returns the model; its weights are replaced by the server's. It may take an argument `context`, which
            is Flower's context.
        load_data: returns this client's training data, given its index: a pair (x, y) of tensors, a dictionary of tensors,
            or a map-style data set; with `train`, whatever that function takes. It may also take `context`.
        load_test: the same for evaluation on the client; None: this client does not evaluate.
        loss, metrics: as in `fedbcgd.simulate`.

    How:
        train: a training function of your own, train(model, data, config), which replaces the algorithm's local steps;
            `config["name"]` reads Flower's `train_config`. See docs/own-training.md.
        threads: how many threads compute; 1, the default, gives the same bits as a simulation.
        device: "cpu", "cuda", …

    Which client it is, and what it keeps:
        index: a function of Flower's context that returns this client's index, 0 to M − 1; default: `partition-id` of the
            node's configuration, as Flower's simulation sets it and `flower-supernode --node-config "partition-id=3"` does.
        folder: where the client's state (control variates, residuals) is kept on disk, so that a restarted SuperNode has
            it; default: in Flower's memory.

    What processes its messages:
        mods: Flower mods that every message passes through. They see what crosses the network: flat arrays of bytes,
            encoded by the algorithm's codec.

    Returns:
        The app.

    Raises:
        UserError: `train` is not a function, or a mod cannot work with partial uploads.
    """
    site = _Site(
        make_model=make_model,
        load_data=load_data,
        load_test=load_test,
        loss=loss,
        metrics=metrics,
        index=index or partition_id,
        folder=None if folder is None else Path(folder),
        threads=threads,
        device=device,
        train=train,
    )
    refuse_mods(mods, sees_whole_models=False)
    app = ClientApp(mods=list(mods))

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        return Message(answer(site.answer_task, message, context), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(answer(site.answer_evaluation, message, context), reply_to=message)

    @app.query(wire.HELLO_ACTION)
    def hello(message: Message, context: Context) -> Message:
        return Message(answer(site.answer_hello, message, context), reply_to=message)

    return app


def partition_id(context: Context) -> int:
    """Return the client's index from the node's configuration.

    Raises:
        UserError: the configuration has none.
    """
    given = context.node_config.get("partition-id")
    try:
        return int(given)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UserError(
            f"partition-id: expected this client's index in the node's configuration, got {given!r}; start the SuperNode "
            'with --node-config "partition-id=0" (each with a number of its own), or pass index=…'
        ) from None


def answer(work: Callable[[Message, Context], RecordDict], message: Message, context: Context) -> RecordDict:
    """Return the content of a reply: the result of the work or why it failed, and the token of the message.

    If an app raises an error, Flower tells the server that it failed, but not why.

    Args:
        work: makes the content of the reply.
        message: the server's message.
        context: Flower's context.
    """
    task: Any = message.content[wire.TASK]
    token = task[wire.TOKEN]
    try:
        wire.check_server(message.content)
        content = work(message, context)
    except UserError as error:
        log.error("%s", error)
        content = wire.failure(str(error))
    except Exception as error:
        log.error("%s", "".join(traceback.format_exception(error.with_traceback(users_frames(error.__traceback__)))))
        content = wire.failure(with_line(error))
    content[wire.VALUES] = ConfigRecord({**content.get(wire.VALUES, {}), wire.TOKEN: token})  # type: ignore[dict-item]
    return content


@dataclass(frozen=True)
class _Made:
    """A client that was made, and the settings it was made for."""

    key: Any
    client: Client


@dataclass(frozen=True)
class _Loaded:
    """Data that was loaded, and for which client."""

    client: int
    data: Any


@dataclass
class _Site:
    """What a node does with the messages of the server; the fields are the arguments of `client_app`."""

    make_model: Callable[..., nn.Module]
    load_data: Callable[..., Any]
    load_test: Callable[..., Any] | None
    loss: Any
    metrics: Any
    index: Callable[[Context], int]
    folder: Path | None
    threads: int
    device: str
    train: Train | None

    def __post_init__(self) -> None:
        if self.train is not None and not callable(self.train):
            raise UserError(f"train: expected a function of (model, data, config), got {self.train!r}")
        # A process that serves several messages makes model and data once.
        self._made: _Made | None = None
        self._loaded: dict[str, _Loaded] = {}

    def answer_hello(self, message: Message, context: Context) -> RecordDict:
        """Say which client this is, and how it trains."""
        task: Any = message.content[wire.TASK]
        values: dict[str, Any] = {"client": self.index(context), **wire.versions()}
        values["of"] = int(context.node_config.get("num-partitions", 0))
        values["trains"] = RULE if self.train is None else FUNCTION
        if "examples" in task["ask"]:
            values["examples"] = self._examples(context)
        if "test_examples" in task["ask"] and self.load_test is not None:
            values["test_examples"] = len(self._load("test", self.load_test, context))
        return RecordDict({wire.VALUES: ConfigRecord(values)})

    def answer_task(self, message: Message, context: Context) -> RecordDict:
        """Train, and return the upload. New state is kept until the next task says whether it counts."""
        order = Order.read(message.content)
        client = self._client(order, context)
        data = self._load("train", self.load_data, context)
        config = message.content.get(wire.CONFIG)
        values = dict(config) if isinstance(config, ConfigRecord) else {}
        broadcast = wire.read_broadcast(message.content, order, client.layout)
        names = order.algorithm.state_names
        keeper = self._keeper(order, context, client)
        memory = keeper.load() if names else None
        if memory is not None and not memory.settle(order, client.layout.dim, client.layout.dtype):
            if order.algorithm.local.controls:  # c is no longer the mean of the c_i, so the server must reset it
                keeper.save(memory)
                return wire.failure(
                    f"state: expected the client's state of {_version(order.accepted)}, got that of "
                    f"{_version(memory.version)}; client_app(folder=…) keeps it over restarts",
                    state_lost=True,
                )
            memory.begin_anew(order)
        with threads_used(self.threads):
            state = memory.vectors if memory is not None else {}
            upload, update = client.fit(broadcast, order.task, data, state, values=values)
        if memory is not None:
            memory.wait_for(order.task.round, update)
            keeper.save(memory)
        return wire.reply(upload)

    def answer_evaluation(self, message: Message, context: Context) -> RecordDict:
        """Return the model's metrics on this client's test data."""
        order = Order.read(message.content)
        if self.load_test is None:
            raise UserError(
                "load_test: expected a function that returns this client's test data, got none, while the server asks for "
                "an evaluation; pass client_app(load_test=…)"
            )
        client = self._client(order, context)
        data: Source = self._load("test", self.load_test, context)
        client.model.load(wire.read_broadcast(message.content, order, client.layout).x)
        with threads_used(self.threads):
            batches = [evaluate_span(client.model.module, client.objective, data, *span) for span in spans(len(data))]
        return wire.evaluation(len(data), combine(batches))

    def _client(self, order: Order, context: Context) -> Client:
        """Return the client for this task; make a new one if model, algorithm or seed have changed since the last task."""
        key = (order.layout, order.model, order.channels_last, order.precision, order.seed, repr(order.algorithm))
        if self._made is None or self._made.key != key:
            module = _call(self.make_model, context).to(torch.device(self.device))
            if not isinstance(module, nn.Module):
                raise UserError(f"make_model: expected it to return an nn.Module, got {type(module).__name__}")
            if differences := Definition.of(module).differences(Definition.unpacked(order.model)):
                raise UserError(
                    f"make_model: expected the server's model, got another one: {differences}; install the same app on both"
                )
            if order.channels_last:
                module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            layout = order.algorithm.uplink.layout(module)
            if layout.digest != order.layout:
                raise UserError(
                    f"make_model: expected a model whose blocks lie where the server's do, got {type(module).__name__} with "
                    f"d = {layout.dim:,}; install the same app on both"
                )
            if self.train is not None and order.precision != "fp32":
                raise UserError(
                    f"precision: expected 'fp32' with train, got {order.precision!r}; use torch.autocast in the function "
                    "instead"
                )
            goal = objective(self.loss, self.metrics, order.precision)
            self._made = _Made(key, Client(order.algorithm, layout, module, goal, order.seed, self.train))
        return self._made.client

    def _load(self, what: str, load: Callable[..., Any], context: Context) -> Any:
        """Return the client's data as a Source; data for a user's own training function as the user gave it."""
        client = self.index(context)
        if what not in self._loaded or self._loaded[what].client != client:
            data = _call(load, context, client)
            own = what == "train" and self.train is not None
            self._loaded[what] = _Loaded(client, data if own else as_source(data, f"client {client}"))
        return self._loaded[what].data

    def _examples(self, context: Context) -> int:
        data = self._load("train", self.load_data, context)
        if not (examples := examples_in(data)):
            raise UserError(
                "load_data: expected data whose examples can be counted, since the server asks how many there are, got "
                f"{type(data).__name__}; return data that has a length"
            )
        return examples

    def _keeper(self, order: Order, context: Context, client: Client) -> InContext | InFolder:
        """Return where the client's state is kept."""
        if self.folder is None:
            return InContext(context.state, client.layout.dtype)
        return InFolder(self.folder, order.task.client)


def _version(round: int) -> str:
    return "no round" if round < 0 else f"round {round + 1}"


def _call(function: Callable[..., Any], context: Context, *arguments: Any) -> Any:
    """Call a user's function, with Flower's context if it has a parameter of that name."""
    takes = "context" in inspect.signature(function).parameters
    return function(*arguments, context=context) if takes else function(*arguments)
