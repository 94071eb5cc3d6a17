"""The messages between driver and actors. Vectors are sent as arrays of bytes, which Ray stores and maps without a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedbcgd.backends.workers.protocol import EvaluateReply
from fedbcgd.core.messages import StateUpdate, Task, Upload

ZERO, BEFORE, AFTER, SENT = "zero", "before", "after", "sent"  # where an actor finds the state that a task begins with


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Return a vector of any type as bytes, which Ray puts into its store, and takes from it, without a copy."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


class _WritableArray:
    """A read-only array that claims to be writable: torch has no read-only tensors and would warn. Do not write to it."""

    def __init__(self, array: np.ndarray):
        self.array = array  # keeps the memory as long as a tensor uses it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def as_tensor(array: np.ndarray, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a vector over the memory of an array of bytes."""
    return torch.from_numpy(np.asarray(_WritableArray(array))).view(dtype)


@dataclass(frozen=True)
class InitialState:
    """The state that a client's task begins with.

    Attributes:
        source: ZERO; BEFORE or AFTER, the state before or after the client's last task at this actor; or SENT, which means
            `vectors`.
        vectors: the state, if `source` is SENT.
        forget: clients whose state the actor need not cache any more.
    """

    source: str
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    forget: Sequence[int] = ()


@dataclass(frozen=True)
class FitRequest:
    """Train a client on the model of a publication."""

    publication: int
    epoch: int
    task: Task
    state: InitialState


@dataclass(frozen=True)
class FitReply:
    """An upload and the client's new state, both as bytes."""

    upload: Upload  # with an empty payload
    payload: Mapping[str, Sequence[np.ndarray]]
    state: Mapping[str, Sequence[tuple[slice, np.ndarray]]]
    epoch: int
    seconds: dict[str, float]  # by part of the work: "local", "codec"

    @classmethod
    def of(cls, upload: Upload, update: StateUpdate, seconds: dict[str, float]) -> "FitReply":
        """Make the reply from the results of a client."""
        payload = {channel: [as_bytes(piece) for piece in pieces] for channel, pieces in upload.payload.items()}
        state = {name: [(s, as_bytes(values)) for s, values in pieces] for name, pieces in update.values.items()}
        return cls(replace(upload, payload={}), payload, state, update.epoch, seconds)

    def as_upload(self) -> Upload:
        """Return the upload, with its payload."""
        payload = {channel: [as_tensor(piece) for piece in pieces] for channel, pieces in self.payload.items()}
        return replace(self.upload, payload=payload)

    def as_update(self, dtype: torch.dtype) -> StateUpdate:
        """Return the new state, with vectors of this type."""
        values = {name: [(s, as_tensor(v, dtype)) for s, v in pieces] for name, pieces in self.state.items()}
        return StateUpdate(self.upload.client, self.epoch, values)


@dataclass(frozen=True)
class EvaluateRequest:
    """Evaluate the model of a publication on test examples from `start` to `stop`."""

    publication: int
    start: int
    stop: int


@dataclass(frozen=True)
class Ready:
    """An actor's first message: where it is."""

    pid: int
    host: str


@dataclass(frozen=True)
class NotPublished:
    """The reply to a request whose publication (the vectors of a round) did not reach the actor."""


Request = FitRequest | EvaluateRequest
Reply = FitReply | EvaluateReply
