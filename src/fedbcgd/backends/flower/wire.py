"""The messages between server and clients: vectors as flat arrays of bytes, and a few plain values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Broadcast, Task, Upload
from fedbcgd.core.objective import Precision
from fedbcgd.core.reading import (
    MOST_METRICS,
    MOST_TRAIN_METRICS,
    Evaluation,
    Failure,
    Hello,
    Malformed,
    UploadValues,
    read,
    shorten,
)
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError
from fedbcgd.version import __version__

FORMAT = 2  # of all messages; server and clients must have the same. Versions that did not send it had format 1
# Names of the records of a message; that of VALUES holds the plain values of a client's reply.
BROADCAST, TASK, UPLOAD, VALUES, METRICS = "broadcast", "task", "upload", "told", "metrics"
CONFIG = "config"  # the record of `train_config`, for clients that train by a function of their own
HELLO_ACTION = "fedbcgd"
HELLO = f"query.{HELLO_ACTION}"  # the message type by which a client says who it is
MODEL = "fedbcgd-model"  # the record with the definition of the server's model
X = "x"
STYPE = "fedbcgd"  # Flower's serialisation type (`stype`) of our arrays
# Each message has a random token that its reply must return. Only the node that was asked knows it, while any node can
# name any sender in the metadata of its reply.
TOKEN = "token"
TRAIN_LOSS = "train_loss"  # left out by clients whose training loss is unknown
_UPLOAD_VALUES = set(UploadValues.model_fields) - {TRAIN_LOSS, METRICS}
MOST_RECORDS, MOST_VALUES = 3, 16  # records in a client's message, and plain values in a record


@dataclass(frozen=True)
class TaskRequest:
    """All that a client must know to do a task, beside the vectors.

    Attributes:
        task: the task.
        epoch: the control epoch of the server.
        accepted: the round of this client's last accepted upload in this epoch; −1: none.
        run: the id of the federation's run; a client drops state that it kept from another run.
        seed: the seed of the run.
        layout: the digest of the server's layout.
        channels_last: whether to compute in that memory format.
        algorithm: the four choices.
        precision: "fp32" or "bf16", for the forward and backward passes.
        model: the packed definition of the server's model. It is sent in a record of its own, which Flower stores once.
    """

    task: Task
    epoch: int
    accepted: int
    run: str
    seed: int
    layout: str
    channels_last: bool
    algorithm: Algorithm
    precision: Precision = "fp32"
    model: bytes = b""

    def record(self) -> ConfigRecord:
        """Return the request, without the model's definition, as a record of a message."""
        values = {name: getattr(self, name) for name in _PLAIN}
        return ConfigRecord({**vars(self.task), **values, "algorithm": json.dumps(self.algorithm.options())})

    @classmethod
    def read(cls, content: RecordDict) -> "TaskRequest":
        """Read the request in a message of the server."""
        values: Any = content[TASK]
        model: Any = content.get(MODEL, {"definition": b""})  # clients' own apps get the whole model instead
        return cls(
            Task(values["round"], values["client"], values["block"]),
            algorithm=make_algorithm(**json.loads(values["algorithm"])),
            model=model["definition"],
            **{name: values[name] for name in _PLAIN if name in values},
        )


# Fields of a TaskRequest that are plain values; earlier versions did not send the precision.
_PLAIN = ("epoch", "accepted", "run", "seed", "layout", "channels_last", "precision")


def versions() -> dict[str, int | str]:
    """Return the values with which server and client tell each other their wire format and version of fedbcgd."""
    return {"wire_format": FORMAT, "version": __version__}


def format_problem(theirs: int, version: str, whose: str) -> str:
    """Return why this side and the other cannot work together; empty if they can.

    Args:
        theirs: the wire format of the other side.
        version: its version of fedbcgd; empty if it did not send it.
        whose: what to call the other side: "the server", or "client 3".
    """
    if theirs == FORMAT:
        return ""
    release = f" (fedbcgd {shorten(version, 60)})" if version else " (an earlier fedbcgd)"
    return (
        f"{whose} speaks wire format {theirs}{release}, this one {FORMAT} (fedbcgd {__version__}): install the same "
        "version on both"
    )


def check_server(content: RecordDict) -> None:
    """Check that the server has the wire format of this client.

    Raises:
        UserError: it has another one; the message names both versions.
    """
    task: Any = content[TASK]
    if problem := format_problem(task.get("wire_format", 1), task.get("version", ""), "the server"):
        raise UserError(problem)


def array(t: Tensor) -> Array:
    """Return the bytes of a tensor as Flower's array."""
    data = t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def tensor(a: Array, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the bytes of a Flower array as a tensor of this type: a copy, since the array is read-only."""
    return torch.frombuffer(bytearray(a.data), dtype=dtype) if a.data else torch.empty(0, dtype=dtype)


def vectors(broadcast: Broadcast) -> ArrayRecord:
    """Return x and the controls as one record, which all messages of a round share and Flower stores once."""
    return ArrayRecord({X: array(broadcast.x), **{name: array(t) for name, t in broadcast.controls.items()}})


def read_broadcast(content: RecordDict, request: TaskRequest, layout: Layout) -> Broadcast:
    """Read the vectors in a message of the server.

    Args:
        content: the content of the message.
        request: the request in the same message.
        layout: the layout of the client's model.

    Raises:
        ValueError: the vectors do not have the length of the layout.
    """
    arrays: Any = content[BROADCAST]
    controls = {name: tensor(a, layout.dtype) for name, a in arrays.items()}
    x = controls.pop(X)
    if x.numel() != layout.size or any(c.numel() != layout.dim for c in controls.values()):
        raise ValueError(f"broadcast: expected a model of {layout.size:,} values, got {x.numel():,}")
    return Broadcast(request.task.round, request.epoch, x, controls)


def reply(upload: Upload) -> RecordDict:
    """Return the content of a reply with an upload."""
    arrays = {f"{channel}.{k}": array(t) for channel, parts in upload.payload.items() for k, t in enumerate(parts)}
    values = {name: getattr(upload, name) for name in _UPLOAD_VALUES}
    if upload.train_loss is not None:
        values[TRAIN_LOSS] = float(upload.train_loss)
    content = RecordDict({UPLOAD: ArrayRecord(arrays), VALUES: ConfigRecord(values)})
    if upload.metrics:
        content[METRICS] = MetricRecord(dict(upload.metrics))
    return content


def failure(text: str, state_lost: bool = False) -> RecordDict:
    """Return the content of a reply that says why the task could not be done.

    Args:
        text: the reason.
        state_lost: whether the client's control variates are lost, so that those of all clients must be reset.
    """
    return RecordDict({VALUES: ConfigRecord({"failed": shorten(text) or "unknown", "state_lost": state_lost})})


def evaluation(examples: int, metrics: Mapping[str, float]) -> RecordDict:
    """Return the content of a reply with an evaluation."""
    return RecordDict({METRICS: MetricRecord({**metrics, "examples": examples})})


# -- strict readers of clients' messages: they raise `Malformed` for whatever does not fit, and nothing else ----------


def token(message: Message) -> str | None:
    """Return the token in a reply; None if there is none."""
    content = message.content if message.has_content() else None
    values = content.get(VALUES) if isinstance(content, RecordDict) else None
    found = values.get(TOKEN) if isinstance(values, ConfigRecord) else None
    return found if isinstance(found, str) else None


def read_failure(content: RecordDict) -> Failure | None:
    """Read why a client could not do its task, cut to a bounded length; None if the reply is no failure."""
    if set(record_names(content)) != {VALUES}:
        return None
    failure = read(Failure, _values(content))
    return failure.model_copy(update={"failed": shorten(failure.failed)})


def read_hello(content: RecordDict) -> Hello:
    """Read which client a node says it is."""
    _expect(content, {VALUES: ConfigRecord})
    return read(Hello, _values(content))


def read_evaluation(content: RecordDict) -> Evaluation:
    """Read the metrics of a client's evaluation."""
    _expect(content, {VALUES: ConfigRecord, METRICS: MetricRecord})
    if extra := set(_values(content)):
        raise Malformed(f"{VALUES}: expected no fields but the token, got {shorten(min(extra), 60)!r}")
    metrics: dict[str, Any] = _bounded(content[METRICS], MOST_METRICS + 1)
    values = {"examples": metrics.pop("examples")} if "examples" in metrics else {}
    return read(Evaluation, {**values, "metrics": metrics})


def read_upload(content: RecordDict, lengths: Mapping[str, Sequence[int]]) -> Upload:
    """Read an upload. Its plain values are not checked here: the server checks them.

    Args:
        content: the content of the client's message.
        lengths: the most bytes that each slice of each channel may have; all are checked before any array is copied.

    Raises:
        Malformed: the content is no upload of these lengths.
    """
    measured = {METRICS: MetricRecord} if METRICS in record_names(content) else {}
    _expect(content, {VALUES: ConfigRecord, UPLOAD: ArrayRecord, **measured})
    metrics = _bounded(content[METRICS], MOST_TRAIN_METRICS) if measured else {}
    values = _values(content)
    if wrong := (set(values) - {TRAIN_LOSS}) ^ _UPLOAD_VALUES:
        raise Malformed(f"{VALUES}: unexpected or missing field {shorten(min(wrong), 60)!r}")
    arrays: Any = content[UPLOAD]
    wanted = {f"{channel}.{k}": most for channel, parts in lengths.items() for k, most in enumerate(parts)}
    if len(arrays) != len(wanted) or set(arrays) != set(wanted):
        some = ", ".join(shorten(name, 60) for name in islice(arrays, len(wanted)))
        raise Malformed(f"{UPLOAD}: expected the arrays {', '.join(wanted)}, got {len(arrays):,} ({some})")
    for name, most in wanted.items():
        a = arrays[name]
        if not isinstance(a, Array) or not isinstance(a.data, bytes):
            raise Malformed(f"array {name}: expected an array, got {type(a).__name__}")
        if a.dtype != "uint8" or a.stype != STYPE or tuple(a.shape) != (len(a.data),):
            raise Malformed(f"array {name}: expected a flat array of bytes, got one of another shape or type")
        if len(a.data) > most:
            raise Malformed(f"array {name}: expected at most {most:,} bytes, got {len(a.data):,}")
    payload = {
        channel: [tensor(arrays[f"{channel}.{k}"]) for k in range(len(parts))] for channel, parts in lengths.items()
    }
    return Upload(payload=payload, **({TRAIN_LOSS: None} | values), metrics=metrics)


def record_names(content: Any, most: int = MOST_RECORDS) -> list[str]:
    """Return the names of the records; raise Malformed if there are too many."""
    if not isinstance(content, RecordDict):
        raise Malformed(f"expected records, got {type(content).__name__}")
    if len(content) > most:
        raise Malformed(f"expected at most {most} records, got {len(content):,}")
    return list(content)


def _expect(content: Any, kinds: Mapping[str, type]) -> None:
    """Raise Malformed unless the content has exactly these records."""
    names = record_names(content)
    if set(names) != set(kinds):
        given = ", ".join(shorten(name, 60) for name in names) or "none"
        raise Malformed(f"expected the records {', '.join(kinds)}, got {given}")
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            raise Malformed(f"record {name}: expected {kind.__name__}, got {type(content[name]).__name__}")


def _values(content: RecordDict) -> dict[str, Any]:
    """Return the plain values, without the token."""
    values = _bounded(content.get(VALUES), MOST_VALUES)
    values.pop(TOKEN, None)
    return values


def _bounded(record: Any, most: int) -> dict[str, Any]:
    """Return the values of a record; raise Malformed if there are too many."""
    if not isinstance(record, (ConfigRecord, MetricRecord)):
        raise Malformed(f"expected plain values, got {type(record).__name__}")
    if len(record) > most:
        raise Malformed(f"expected at most {most} values, got {len(record):,}")
    return dict(record)


def counted(message: Message) -> int:
    """Return the size of a message's content in bytes as Flower counts it; 0 if it cannot."""
    try:
        return sum(record.count_bytes() for record in message.content.values())
    except (ValueError, TypeError, LookupError, AttributeError):  # an empty list or text among the values
        return 0
