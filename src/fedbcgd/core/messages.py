"""The messages between server and clients. A payload is bytes by channel and slice; no message depends on an algorithm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BUFFERS = "buffers"  # the channel of BatchNorm statistics and the like: sent uncompressed; the server takes their mean

Payload = Mapping[str, Sequence[Tensor]]  # by channel, then by slice: encoded bytes
Allocator = Callable[[int], Tensor]  # returns memory for this many bytes of an upload, as a uint8 tensor


@dataclass(frozen=True)
class Task:
    """A request to a client: train in `round`, and upload `block` and the shared block. All three are counted from 0."""

    round: int
    client: int
    block: int


@dataclass(frozen=True)
class Broadcast:
    """The model, and the server's control vectors if the local rule needs them. Clients only read it."""

    round: int
    epoch: int  # of the controls: client state of an older epoch counts as zero
    x: Tensor
    controls: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return sum(t.numel() * t.element_size() for t in (self.x, *self.controls.values()))


@dataclass(frozen=True)
class Plan:
    """A round: what goes to every client, and a task for each of the cohort."""

    broadcast: Broadcast
    tasks: Sequence[Task]


@dataclass(frozen=True)
class Upload:
    """What one client sends back. `payload[channel][k]` is slice k of that channel, encoded as bytes."""

    round: int
    client: int
    block: int
    payload: Payload
    examples: int  # n_i
    steps: int  # T
    gradient_evaluations: int  # minibatches
    # The mean loss of all minibatches whose gradient was computed, those at the anchor included; None: unknown.
    train_loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)  # that a user's training function returned

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, which may come from a hostile client: what is not an array counts as 0."""
        if not isinstance(self.payload, Mapping):
            return 0
        pieces = [piece for part in self.payload.values() if isinstance(part, (list, tuple)) for piece in part]
        dense = [
            p for p in pieces if isinstance(p, np.ndarray) or (isinstance(p, Tensor) and p.layout == torch.strided)
        ]
        return sum(piece.nbytes for piece in dense)


@dataclass(frozen=True)
class StateUpdate:
    """New values of a client's state on the coordinates it uploaded, valid once the server has accepted the upload."""

    client: int
    epoch: int
    values: Mapping[str, Sequence[tuple[slice, Tensor]]]


@dataclass(frozen=True)
class Receipt:
    """The server's answer to one upload."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True)
class RoundReport:
    """The result of a round."""

    round: int  # counted from 0
    accepted: int  # uploads that were added
    refused: Sequence[str]  # a reason for each refused upload
    lost: Sequence[str]  # a reason for each client that did not answer
    train_loss: float  # mean over the accepted uploads; NaN if none has one
    metrics: Mapping[str, float] = field(default_factory=dict)  # means over the clients, weighted by their examples
