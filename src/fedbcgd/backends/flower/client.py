"""The ClientApp: a user's model and data behind the same `Client` that every backend runs."""

import inspect
import logging
import traceback
from collections.abc import Callable, Sequence
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
from fedbcgd.errors import UserError

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
    """A Flower ClientApp that serves any algorithm the server names.

    make_model: gives the model; its weights are replaced by the server's. load_data: gives this client's training data, a
        pair (x, y) of tensors, a dictionary of tensors, or a map-style data set; it is called with the client's index.
        load_test: the same for evaluation on the client. Each may also take `context`, Flower's.
    train: a training function of your own, train(model, data, config), in the place of the algorithm's local steps; `data`
        is what `load_data` gave, such as a DataLoader, and `config["name"]` reads Flower's `train_config`. See
        docs/own-training.md.
    loss, metrics: as in `fedbcgd.simulate`.
    index: who this client is, 0 to M − 1; default `partition-id` of the node's configuration, as Flower's simulation sets
        it and `flower-supernode --node-config "partition-id=3"` does.
    folder: where the client's state (control variates, residuals) is kept on disk, so that a restarted SuperNode has it;
        without one Flower keeps it in memory.
    threads: of the computation; 1 gives the same bits as a simulation.
    mods: Flower's mods, around every message. A mod that reads or changes arrays meets the form of wire.py: flat arrays of
        bytes, encoded by the algorithm's codec.
    """
    site = _Site(make_model, load_data, load_test, loss, metrics, index or partition_id, folder, threads, device, train)
    refuse_mods(mods, sees_whole_models=False)
    app = ClientApp(mods=list(mods))

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        return Message(answer(site.train, message, context), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(answer(site.evaluate, message, context), reply_to=message)

    @app.query(wire.HELLO_ACTION)
    def hello(message: Message, context: Context) -> Message:
        return Message(answer(site.hello, message, context), reply_to=message)

    return app


def partition_id(context: Context) -> int:
    try:
        return int(context.node_config["partition-id"])
    except (KeyError, ValueError, TypeError):
        raise UserError(
            'this client does not know its index: start the SuperNode with --node-config "partition-id=0" (each with a '
            "number of its own), or give client_app(index=…)"
        ) from None


def answer(work: Callable[[Message, Context], RecordDict], message: Message, context: Context) -> RecordDict:
    """Do the work, and return the question's token. A failure is told in words; Flower would only say that there was one."""
    task: Any = message.content[wire.TASK]
    token = task[wire.TOKEN]
    try:
        wire.check_server(message.content)
        content = work(message, context)
    except UserError as error:
        log.error("%s", error)
        content = wire.failure(str(error))
    except Exception as error:
        log.error("%s", "".join(traceback.format_exception(error)))
        content = wire.failure(with_line(error))
    content[wire.TOLD] = ConfigRecord({**content.get(wire.TOLD, {}), wire.TOKEN: token})  # type: ignore[dict-item]
    return content


class _Site:
    def __init__(
        self,
        make_model: Callable[..., nn.Module],
        load_data: Callable[..., Any],
        load_test: Callable[..., Any] | None,
        loss: Any,
        metrics: Any,
        index: Callable[[Context], int],
        folder: str | Path | None,
        threads: int,
        device: str,
        train: Train | None,
    ):
        if train is not None and not callable(train):
            raise UserError(f"train: expected a function of (model, data, config), got {train!r}")
        self._make_model, self._load_data, self._load_test = make_model, load_data, load_test
        self._loss, self._metrics = loss, metrics
        self._index = index
        self._folder = None if folder is None else Path(folder)
        self._threads = threads
        self._device = torch.device(device)
        self._train = train
        # A process that serves several messages makes model and data once.
        self._made: tuple[Any, Client] | None = None
        self._data: dict[str, tuple[int, Any]] = {}

    def hello(self, message: Message, context: Context) -> RecordDict:
        task: Any = message.content[wire.TASK]
        told: dict[str, Any] = {"client": self._index(context), **wire.versions()}
        told["of"] = int(context.node_config.get("num-partitions", 0))
        told["trains"] = RULE if self._train is None else FUNCTION
        if "examples" in task["ask"]:
            told["examples"] = self._examples(context)
        if "test_examples" in task["ask"] and self._load_test is not None:
            told["test_examples"] = len(self._loaded("test", self._load_test, context))
        return RecordDict({wire.TOLD: ConfigRecord(told)})

    def train(self, message: Message, context: Context) -> RecordDict:
        order = Order.read(message.content)
        client = self._client(order, context)
        data = self._loaded("train", self._load_data, context)
        config = message.content.get(wire.CONFIG)
        values = dict(config) if isinstance(config, ConfigRecord) else {}
        broadcast = wire.read_broadcast(message.content, order, client.layout)
        names = order.algorithm.state_names
        keeper = self._keeper(order, context, client)
        memory = keeper.load() if names else None
        if memory is not None and not memory.settle(order, client.layout.dim, client.layout.dtype):
            if order.algorithm.local.controls:  # c is no longer the mean of the c_i: only the server can mend that
                keeper.save(memory)
                return wire.failure("this client's state is lost, or newer than the server", state_lost=True)
            memory.begin_anew(order)
        with threads_used(self._threads):
            state = memory.vectors if memory is not None else {}
            upload, update = client.fit(broadcast, order.task, data, state, values=values)
        if memory is not None:
            memory.wait_for(order.task.round, update)
            keeper.save(memory)
        return wire.reply(upload)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        order = Order.read(message.content)
        if self._load_test is None:
            raise UserError("evaluation on clients needs client_app(load_test=…)")
        client = self._client(order, context)
        data: Source = self._loaded("test", self._load_test, context)
        client.model.load(wire.read_broadcast(message.content, order, client.layout).x)
        with threads_used(self._threads):
            batches = [evaluate_span(client.model.module, client.objective, data, *span) for span in spans(len(data))]
        return wire.evaluation(len(data), combine(batches))

    def _client(self, order: Order, context: Context) -> Client:
        key = (
            *(order.layout, order.model, order.channels_last, order.precision, order.seed),
            repr(order.algorithm),
        )
        if self._made is None or self._made[0] != key:
            module = _call(self._make_model, context).to(self._device)
            if not isinstance(module, nn.Module):
                raise UserError(f"make_model: expected it to return an nn.Module, got {type(module).__name__}")
            if found := Definition.of(module).differences(Definition.unpacked(order.model)):
                raise UserError(f"the client's model differs from the server's: {found}; both must make the same one")
            if order.channels_last:
                module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            layout = order.algorithm.uplink.layout(module)
            if layout.digest != order.layout:
                raise UserError(
                    f"the client's model ({type(module).__name__}, d = {layout.dim:,}) is laid out differently from the "
                    "server's: both must make the same one"
                )
            if self._train is not None and order.precision != "fp32":
                raise UserError("precision: expected 'fp32' with train: use torch.autocast in the function instead")
            goal = objective(self._loss, self._metrics, order.precision)
            self._made = key, Client(order.algorithm, layout, module, goal, order.seed, self._train)
        return self._made[1]

    def _loaded(self, what: str, load: Callable[..., Any], context: Context) -> Any:
        """Return the client's data: a Source, or as the user gave it where the user's own function trains on it."""
        client = self._index(context)
        if what not in self._data or self._data[what][0] != client:
            data = _call(load, context, client)
            own = what == "train" and self._train is not None
            self._data[what] = client, data if own else as_source(data, f"client {client}")
        return self._data[what][1]

    def _examples(self, context: Context) -> int:
        examples = examples_in(self._loaded("train", self._load_data, context))
        if not examples:
            raise UserError(
                "load_data: expected data whose examples can be counted, since the server asks how many it has"
            )
        return examples

    def _keeper(self, order: Order, context: Context, client: Client) -> InContext | InFolder:
        if self._folder is None:
            return InContext(context.state, client.layout.dtype)
        return InFolder(self._folder, order.task.client)


def _call(function: Callable[..., Any], context: Context, *arguments: Any) -> Any:
    """Call a user's function, with Flower's context if it takes that."""
    takes = "context" in inspect.signature(function).parameters
    return function(*arguments, context=context) if takes else function(*arguments)
