"""What crosses a Flower network: one flat array of bytes per vector, or per channel and slice, and a few plain values."""

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

FORMAT = 2  # of all messages; server and clients must have the same. 1: versions that did not say it
# Names of the records of a message. TOLD holds the plain values of a client's reply.
BROADCAST, TASK, UPLOAD, TOLD, METRICS = "broadcast", "task", "upload", "told", "metrics"
CONFIG = "config"  # the record of `train_config`, for clients that train by a function of their own
HELLO_ACTION = "fedbcgd"
HELLO = f"query.{HELLO_ACTION}"  # the message type by which a client says who it is
MODEL = "fedbcgd-model"  # the record with the definition of the server's model
X = "x"
STYPE = "fedbcgd"  # how the bytes of our arrays came about, in Flower's terms
# Each question has a random token that its reply returns: the sender that a reply names in Flower's metadata is the
# client's own word, while nobody but the node that was asked knows the token.
TOKEN = "token"
TRAIN_LOSS = "train_loss"  # left out by clients that do not know it
_UPLOAD_VALUES = set(UploadValues.model_fields) - {TRAIN_LOSS, METRICS}
MOST_RECORDS, MOST_VALUES = 3, 16  # of a client's message, and of a record's plain values


@dataclass(frozen=True)
class Order:
    """All that a client must know to serve a task, beside the vectors."""

    task: Task
    epoch: int
    accepted: int  # the round of this client's last accepted upload in this epoch; −1: none
    run: str  # id of the federation's run; a client drops state that it kept from another run
    seed: int
    layout: str  # the digest of the server's
    channels_last: bool
    algorithm: Algorithm
    precision: Precision = "fp32"
    model: bytes = b""  # the definition of the server's, packed; in a record of its own, which Flower stores once

    def record(self) -> ConfigRecord:
        t = self.task
        return ConfigRecord(
            {
                "round": t.round, "client": t.client, "block": t.block, "epoch": self.epoch, "accepted": self.accepted,
                "run": self.run, "seed": self.seed, "layout": self.layout, "channels_last": self.channels_last,
                "precision": self.precision,
                "algorithm": json.dumps(self.algorithm.options()),
            }
        )  # fmt: skip

    @classmethod
    def read(cls, content: RecordDict) -> "Order":
        r: Any = content[TASK]
        model: Any = content.get(MODEL, {"definition": b""})  # apps of their own get the whole model instead
        return cls(
            Task(r["round"], r["client"], r["block"]),
            r["epoch"],
            r["accepted"],
            r["run"],
            r["seed"],
            r["layout"],
            r["channels_last"],
            make_algorithm(**json.loads(r["algorithm"])),
            r.get("precision", "fp32"),
            model["definition"],
        )


def versions() -> dict[str, int | str]:
    """Return the values by which server and client tell each other what they speak."""
    return {"wire_format": FORMAT, "version": __version__}


def format_problem(theirs: int, version: str, whose: str) -> str:
    """Say why two that speak these formats do not understand each other; empty if they do."""
    if theirs == FORMAT:
        return ""
    release = f" (fedbcgd {shorten(version, 60)})" if version else " (an earlier fedbcgd)"
    return (
        f"{whose} speaks wire format {theirs}{release}, this one {FORMAT} (fedbcgd {__version__}): install the same "
        "version on both"
    )


def check_server(content: RecordDict) -> None:
    """Refuse a server that speaks another format.

    Raises:
        UserError: it does; the message names both versions.
    """
    task: Any = content[TASK]
    if problem := format_problem(task.get("wire_format", 1), task.get("version", ""), "the server"):
        raise UserError(problem)


def array(t: Tensor) -> Array:
    data = t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def tensor(a: Array, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A copy: what came over the network is read-only."""
    return torch.frombuffer(bytearray(a.data), dtype=dtype) if a.data else torch.empty(0, dtype=dtype)


def vectors(broadcast: Broadcast) -> ArrayRecord:
    """x and the controls; one record for all messages of a round, which Flower then stores once."""
    return ArrayRecord({X: array(broadcast.x), **{name: array(t) for name, t in broadcast.controls.items()}})


def read_broadcast(content: RecordDict, order: Order, layout: Layout) -> Broadcast:
    arrays: Any = content[BROADCAST]
    found = {name: tensor(a, layout.dtype) for name, a in arrays.items()}
    x = found.pop(X)
    if x.numel() != layout.size or any(c.numel() != layout.dim for c in found.values()):
        raise ValueError("the broadcast does not fit the model's layout")
    return Broadcast(order.task.round, order.epoch, x, found)


def reply(upload: Upload) -> RecordDict:
    arrays = {f"{channel}.{k}": array(t) for channel, parts in upload.payload.items() for k, t in enumerate(parts)}
    told = {name: getattr(upload, name) for name in _UPLOAD_VALUES}
    if upload.train_loss is not None:
        told[TRAIN_LOSS] = float(upload.train_loss)
    content = RecordDict({UPLOAD: ArrayRecord(arrays), TOLD: ConfigRecord(told)})
    if upload.metrics:
        content[METRICS] = MetricRecord(dict(upload.metrics))
    return content


def failure(text: str, state_lost: bool = False) -> RecordDict:
    return RecordDict({TOLD: ConfigRecord({"failed": shorten(text) or "unknown", "state_lost": state_lost})})


def evaluation(examples: int, metrics: Mapping[str, float]) -> RecordDict:
    return RecordDict({METRICS: MetricRecord({**metrics, "examples": examples})})


# -- what a client sent, read strictly: whatever does not fit is `Malformed`, and nothing else is raised --------------


def token(message: Message) -> str | None:
    """The token that a reply returns; None where it has none."""
    content = message.content if message.has_content() else None
    told = content.get(TOLD) if isinstance(content, RecordDict) else None
    found = told.get(TOKEN) if isinstance(told, ConfigRecord) else None
    return found if isinstance(found, str) else None


def read_failure(content: RecordDict) -> Failure | None:
    """The client's own words if it could not do its task, cut to a bounded length; None if the reply is no failure."""
    if set(_heads(content)) != {TOLD}:
        return None
    failure = read(Failure, _told(content))
    return failure.model_copy(update={"failed": shorten(failure.failed)})


def read_hello(content: RecordDict) -> Hello:
    _expect(content, {TOLD: ConfigRecord})
    return read(Hello, _told(content))


def read_evaluation(content: RecordDict) -> Evaluation:
    _expect(content, {TOLD: ConfigRecord, METRICS: MetricRecord})
    if extra := set(_told(content)):
        raise Malformed(f"{TOLD}: unexpected field {shorten(min(extra), 60)!r}")
    metrics: dict[str, Any] = _bounded(content[METRICS], MOST_METRICS + 1)
    values = {"examples": metrics.pop("examples")} if "examples" in metrics else {}
    return read(Evaluation, {**values, "metrics": metrics})


def read_upload(content: RecordDict, lengths: Mapping[str, Sequence[int]]) -> Upload:
    """Read an upload; its plain values are as they came, for the server to check.

    Args:
        content: what the client sent.
        lengths: the most bytes that each slice of each channel may have. No array is copied before all fit.
    """
    measured = {METRICS: MetricRecord} if METRICS in _heads(content) else {}
    _expect(content, {TOLD: ConfigRecord, UPLOAD: ArrayRecord, **measured})
    metrics = _bounded(content[METRICS], MOST_TRAIN_METRICS) if measured else {}
    values = _told(content)
    if wrong := (set(values) - {TRAIN_LOSS}) ^ _UPLOAD_VALUES:
        raise Malformed(f"{TOLD}: unexpected or missing field {shorten(min(wrong), 60)!r}")
    arrays: Any = content[UPLOAD]
    wanted = {f"{channel}.{k}": most for channel, parts in lengths.items() for k, most in enumerate(parts)}
    if len(arrays) != len(wanted) or set(arrays) != set(wanted):
        some = ", ".join(shorten(name, 60) for name in islice(arrays, len(wanted)))
        raise Malformed(f"it has {len(arrays):,} arrays ({some}), expected were {', '.join(wanted)}")
    for name, most in wanted.items():
        a = arrays[name]
        if not isinstance(a, Array) or not isinstance(a.data, bytes):
            raise Malformed(f"array {name} is no array")
        if a.dtype != "uint8" or a.stype != STYPE or tuple(a.shape) != (len(a.data),):
            raise Malformed(f"array {name} is not a flat array of bytes")
        if len(a.data) > most:
            raise Malformed(f"array {name} has {len(a.data):,} bytes, at most {most:,} were expected")
    payload = {
        channel: [tensor(arrays[f"{channel}.{k}"]) for k in range(len(parts))] for channel, parts in lengths.items()
    }
    return Upload(payload=payload, **({TRAIN_LOSS: None} | values), metrics=metrics)


def _heads(content: Any) -> list[str]:
    """The names of the records, if they are few."""
    if not isinstance(content, RecordDict):
        raise Malformed(f"expected records, got {type(content).__name__}")
    if len(content) > MOST_RECORDS:
        raise Malformed(f"it has {len(content):,} records, at most {MOST_RECORDS} are expected")
    return list(content)


def _expect(content: Any, kinds: Mapping[str, type]) -> None:
    names = _heads(content)
    if set(names) != set(kinds):
        given = ", ".join(shorten(name, 60) for name in names) or "none"
        raise Malformed(f"it has the records {given}; expected were {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            raise Malformed(f"record {name}: expected {kind.__name__}, got {type(content[name]).__name__}")


def _told(content: RecordDict) -> dict[str, Any]:
    """The plain values, without the token."""
    values = _bounded(content.get(TOLD), MOST_VALUES)
    values.pop(TOKEN, None)
    return values


def _bounded(record: Any, most: int) -> dict[str, Any]:
    if not isinstance(record, (ConfigRecord, MetricRecord)):
        raise Malformed(f"expected plain values, got {type(record).__name__}")
    if len(record) > most:
        raise Malformed(f"it has {len(record):,} values, at most {most} are expected")
    return dict(record)


def counted(message: Message) -> int:
    """The bytes of a message's content by Flower's own count; 0 where it cannot count them."""
    try:
        return sum(record.count_bytes() for record in message.content.values())
    except (ValueError, TypeError, LookupError, AttributeError):  # an empty list or text among the values
        return 0
