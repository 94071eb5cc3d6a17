"""What passes between server and clients. A payload is bytes by channel and slice; no message knows an algorithm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUFFERS = "buffers"  # the channel of BatchNorm statistics and the like: sent plain, averaged plainly

Allocator = Callable[[int], Tensor]  # memory for so many bytes of an upload, which is written there once and for all


@dataclass(frozen=True)
class Task:
    """Client `client` is asked to train in `round` and to upload `block` (and the shared block)."""

    round: int
    client: int
    block: int


@dataclass(frozen=True)
class Broadcast:
    """The model, and the server's control vectors where the local rule needs them. Read-only to clients."""

    round: int
    epoch: int  # control epoch: client state of an older epoch counts as zero
    x: Tensor
    controls: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.x, *self.controls.values()))


@dataclass(frozen=True)
class Plan:
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
    train_loss: float  # mean over the minibatches, before each step

    @property
    def nbytes(self) -> int:
        """Bytes of the payload; what is no array counts nothing."""
        if not isinstance(self.payload, Mapping):
            return 0
        pieces = [piece for part in self.payload.values() if isinstance(part, (list, tuple)) for piece in part]
        dense = [
            p for p in pieces if isinstance(p, np.ndarray) or (isinstance(p, Tensor) and p.layout == torch.strided)
        ]
        return sum(piece.nbytes for piece in dense)


@dataclass(frozen=True)
class StateUpdate:
    """New values of a client's state on the coordinates it uploaded. It holds only once the upload was accepted."""

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
    """What became of a round."""

    round: int
    accepted: int
    refused: Sequence[str]
    lost: Sequence[str]
    idle_blocks: Sequence[int]  # blocks for which nothing arrived: they kept their value and momentum
    train_loss: float
