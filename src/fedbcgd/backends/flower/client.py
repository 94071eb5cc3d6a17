"""The ClientApp: a user's model and data behind the same `Client` that every backend runs."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.definition import as_on_server
from fedbcgd.backends.flower.node import Node, serving
from fedbcgd.backends.flower.privacy import refuse_mods
from fedbcgd.backends.flower.wire import TaskRequest
from fedbcgd.core.client import Client
from fedbcgd.core.objective import Loss, Metrics, objective
from fedbcgd.core.own_training import Train
from fedbcgd.core.reading import FUNCTION, RULE
from fedbcgd.data.sources import Source, as_source, examples_in
from fedbcgd.engine.evaluation import combine, evaluate_span, spans
from fedbcgd.engine.threads import threads as threads_used
from fedbcgd.errors import UserError


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
    if train is not None and not callable(train):
        raise UserError(f"train: expected a function of (model, data, config), got {train!r}")
    refuse_mods(mods, sees_whole_models=False)
    how = RULE if train is None else FUNCTION
    node = _ModelNode(index, folder, how, make_model, load_data, load_test, loss, metrics, threads, device, train)
    app = ClientApp(mods=list(mods))
    app.train()(serving(node.train))
    app.evaluate()(serving(node.evaluate))
    app.query(wire.HELLO_ACTION)(serving(node.hello))
    return app


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
class _ModelNode(Node):
    """Trains and evaluates the user's model; the fields are the arguments of `client_app`."""

    make_model: Callable[..., nn.Module]
    load_data: Callable[..., Any]
    load_test: Callable[..., Any] | None
    loss: Loss | nn.Module | None
    metrics: Metrics | None
    threads: int
    device: str
    own_train: Train | None

    def __post_init__(self) -> None:
        # A process that serves several messages makes model and data once.
        self._made: _Made | None = None
        self._loaded: dict[str, _Loaded] = {}

    def hello(self, message: Message, context: Context) -> RecordDict:
        """Say also how many examples there are, if the server asks."""
        content = super().hello(message, context)
        task: Any = message.content[wire.TASK]
        values: Any = content[wire.VALUES]
        if "examples" in task["ask"]:
            values["examples"] = self._examples(context)
        if "test_examples" in task["ask"] and self.load_test is not None:
            values["test_examples"] = len(self._load("test", self.load_test, context))
        return content

    def train(self, message: Message, context: Context) -> RecordDict:
        """Train, and return the upload. New state is kept until the next task says whether it counts."""
        request = TaskRequest.read(message.content)
        client = self._client(request, context)
        data = self._load("train", self.load_data, context)
        config = message.content.get(wire.CONFIG)
        values = dict(config) if isinstance(config, ConfigRecord) else {}
        broadcast = wire.read_broadcast(message.content, request, client.layout)
        with self.memory(request, context, client.layout) as memory, threads_used(self.threads):
            upload, update = client.fit(broadcast, request.task, data, memory.vectors, values=values)
            memory.keep_pending(request.task.round, update)
        return wire.reply(upload)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Return the model's metrics on this client's test data."""
        request = TaskRequest.read(message.content)
        if self.load_test is None:
            raise UserError(
                "load_test: expected a function that returns this client's test data, got none, while the server asks for "
                "an evaluation; pass client_app(load_test=…)"
            )
        client = self._client(request, context)
        data: Source = self._load("test", self.load_test, context)
        client.model.load(wire.read_broadcast(message.content, request, client.layout).x)
        with threads_used(self.threads):
            batches = [evaluate_span(client.model.module, client.objective, data, *span) for span in spans(len(data))]
        return wire.evaluation(len(data), combine(batches))

    def _client(self, request: TaskRequest, context: Context) -> Client:
        """Return the client for this task; make a new one if model, algorithm, seed or node have changed."""
        node = context.node_id if _takes_context(self.make_model) else 0  # one process may serve several nodes
        key = (
            node,
            request.layout,
            request.model,
            request.channels_last,
            request.precision,
            request.seed,
            repr(request.algorithm),
        )
        if self._made is None or self._made.key != key:
            if self.own_train is not None and request.precision != "fp32":
                raise UserError(
                    f"precision: expected 'fp32' with train, got {request.precision!r}; use torch.autocast in the function "
                    "instead"
                )
            module = _call(self.make_model, context)
            if not isinstance(module, nn.Module):
                raise UserError(f"make_model: expected it to return an nn.Module, got {type(module).__name__}")
            module, layout = as_on_server(module.to(torch.device(self.device)), request)
            goal = objective(self.loss, self.metrics, request.precision)
            self._made = _Made(key, Client(request.algorithm, layout, module, goal, request.seed, self.own_train))
        return self._made.client

    def _load(self, what: str, load: Callable[..., Any], context: Context) -> Any:
        """Return the client's data as a Source; data for a user's own training function as the user gave it."""
        client = self.client_index(context)
        if what not in self._loaded or self._loaded[what].client != client:
            data = _call(load, context, client)
            own = what == "train" and self.own_train is not None
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


def _call(function: Callable[..., Any], context: Context, *arguments: Any) -> Any:
    """Call a user's function, with Flower's context if it has a parameter of that name."""
    return function(*arguments, context=context) if _takes_context(function) else function(*arguments)


def _takes_context(function: Callable[..., Any]) -> bool:
    return "context" in inspect.signature(function).parameters
