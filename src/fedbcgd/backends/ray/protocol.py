"""What driver and actors send to each other. Vectors travel as arrays of bytes, which Ray stores and maps without a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import StateUpdate, Task, Upload
from fedbcgd.engine.evaluation import Batch

ZERO, BEFORE, AFTER, SENT = "zero", "before", "after", "sent"  # which state a client's task begins with


def as_bytes(tensor: Tensor) -> np.ndarray:
    """A vector of any type as bytes, which Ray puts into its store, and takes from it, without a copy."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


class _Lent:
    """An array of Ray's store, which is read-only. torch has no such tensors and would warn; nothing here writes to it."""

    def __init__(self, array: np.ndarray):
        self.array = array  # keeps the memory, for as long as a tensor uses it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def as_tensor(array: np.ndarray, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The vector again, over the same memory."""
    return torch.from_numpy(np.asarray(_Lent(array))).view(dtype)


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state that a client's task begins with: zero, what its last task at this actor began with or made, or `vectors`.

    `forget` names clients whose state the actor need not keep any longer.
    """

    source: str
    vectors: dict[str, np.ndarray] = field(default_factory=dict)  # with SENT only
    forget: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class FitRequest:
    """Train a client on the model of a publication."""

    publication: int
    epoch: int
    task: Task
    state: InitialState


@dataclass(frozen=True, slots=True)
class FitReply:
    """An upload and the client's new state, both as bytes."""

    upload: Upload  # with an empty payload
    payload: Mapping[str, Sequence[np.ndarray]]
    state: Mapping[str, Sequence[tuple[slice, np.ndarray]]]
    epoch: int
    seconds: dict[str, float]  # by part of the work

    @classmethod
    def of(cls, upload: Upload, update: StateUpdate, seconds: dict[str, float]) -> "FitReply":
        payload = {channel: [as_bytes(piece) for piece in pieces] for channel, pieces in upload.payload.items()}
        state = {name: [(s, as_bytes(values)) for s, values in pieces] for name, pieces in update.values.items()}
        return cls(replace(upload, payload={}), payload, state, update.epoch, seconds)

    def as_upload(self) -> Upload:
        payload = {channel: [as_tensor(piece) for piece in pieces] for channel, pieces in self.payload.items()}
        return replace(self.upload, payload=payload)

    def as_update(self, dtype: torch.dtype) -> StateUpdate:
        """The new state; dtype: of its vectors."""
        values = {name: [(s, as_tensor(v, dtype)) for s, v in pieces] for name, pieces in self.state.items()}
        return StateUpdate(self.upload.client, self.epoch, values)


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Evaluate the model of a publication on test examples from `start` to `stop`."""

    publication: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    batch: Batch


@dataclass(frozen=True, slots=True)
class Ready:
    """An actor's first message: where it is."""

    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class NotPublished:
    """The publication that a request names did not reach the actor."""


Request = FitRequest | EvaluateRequest
Reply = FitReply | EvaluateReply
