"""What crosses a Flower network: one flat array of bytes per vector, or per channel and slice, and a few plain values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedbcgd.algorithm import Algorithm, make_algorithm
from fedbcgd.flat import Layout
from fedbcgd.messages import Broadcast, Task, Upload

BROADCAST, TASK, UPLOAD, TOLD = "broadcast", "task", "upload", "told"  # records by name
HELLO = "query.fedbcgd"  # the message type by which a client says who it is
X = "x"


@dataclass(frozen=True)
class Order:
    """All that a client must know to serve a task, beside the vectors."""

    task: Task
    epoch: int
    accepted: int  # the round of this client's last accepted upload in this epoch; −1: none
    run: str  # which federation: state of another one is not meant
    seed: int
    layout: str  # the digest of the server's
    channels_last: bool
    algorithm: Algorithm

    def record(self) -> ConfigRecord:
        t = self.task
        return ConfigRecord(
            {
                "round": t.round, "client": t.client, "block": t.block, "epoch": self.epoch, "accepted": self.accepted,
                "run": self.run, "seed": self.seed, "layout": self.layout, "channels_last": self.channels_last,
                "algorithm": json.dumps(self.algorithm.options()),
            }
        )  # fmt: skip

    @classmethod
    def read(cls, content: RecordDict) -> "Order":
        r: Any = content[TASK]
        return cls(
            Task(r["round"], r["client"], r["block"]),
            r["epoch"],
            r["accepted"],
            r["run"],
            r["seed"],
            r["layout"],
            r["channels_last"],
            make_algorithm(**json.loads(r["algorithm"])),
        )


def array(t: Tensor) -> Array:
    data = t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return Array(dtype="uint8", shape=(len(data),), stype="fedbcgd", data=data)


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
    told: dict[str, Any] = {
        "round": upload.round, "client": upload.client, "block": upload.block, "examples": upload.examples,
        "steps": upload.steps, "evaluations": upload.gradient_evaluations, "loss": float(upload.train_loss),
    }  # fmt: skip
    return RecordDict({UPLOAD: ArrayRecord(arrays), TOLD: ConfigRecord(told)})


def read_upload(content: RecordDict) -> Upload:
    """Whatever a client sent, as an upload for the server to check; ValueError where it is none at all."""
    try:
        told: Any = content[TOLD]
        arrays: Any = content[UPLOAD]
        payload: dict[str, dict[int, Tensor]] = {}
        for name, a in arrays.items():
            channel, _, k = name.rpartition(".")
            payload.setdefault(channel, {})[int(k)] = tensor(a)
        return Upload(
            int(told["round"]),
            int(told["client"]),
            int(told["block"]),
            {channel: [parts[k] for k in sorted(parts)] for channel, parts in payload.items()},
            int(told["examples"]),
            int(told["steps"]),
            int(told["evaluations"]),
            float(told["loss"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"it is no upload: {type(error).__name__}: {error}") from None


def failure(text: str, state_lost: bool = False) -> RecordDict:
    return RecordDict({TOLD: ConfigRecord({"failed": text[:2000] or "unknown", "state_lost": state_lost})})


def counted(message: Message) -> int:
    """The bytes of a message's content, by Flower's own count."""
    return sum(record.count_bytes() for record in message.content.values())


def told(content: RecordDict) -> Mapping[str, Any]:
    found = content.get(TOLD)
    return found if isinstance(found, ConfigRecord) else {}
