"""The messages between server and clients. A payload is bytes by channel and slice; no message depends on an algorithm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BUFFERS = "buffers"  # the channel of BatchNorm statistics and the like: sent uncompressed; the server takes their mean

Allocator = Callable[[int], Tensor]  # returns memory for this many bytes of an upload, as a uint8 tensor


@dataclass(frozen=True)
class Task:
    """A request to a client: train in `round`, and upload `block` and the shared block."""

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
    payload: Mapping[str, Sequence[Tensor]]
    examples: int  # n_i
    steps: int  # T
    gradient_evaluations: int  # minibatches
    train_loss: float | None  # mean over the minibatches, before each step; None: the client's training does not say
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the client's own training, where it has some

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

    round: int
    accepted: int
    refused: Sequence[str]
    lost: Sequence[str]
    train_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # means over the clients, weighted by their examples
