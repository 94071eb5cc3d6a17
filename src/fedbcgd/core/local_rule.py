"""What a local rule is: hyper-parameters, the way it trains, and what it tells the server."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbcgd.core.parts import Part
from fedbcgd.core.work import Progress, Work

Channels = dict[str, Tensor]


class LocalRule(Part):
    # For each name in `controls` the server keeps a vector that is the mean of one that every client keeps. The change
    # of control `c` is channel `dc`. `broadcasts` says which of them clients need to see.
    controls: ClassVar[tuple[str, ...]] = ()
    broadcasts: ClassVar[tuple[str, ...]] = ()

    lr: float = Field(0.1, gt=0, description="η: local learning rate in round 0")
    lr_decay: float = Field(0.998, gt=0, le=1, description="η is multiplied by this every round")
    weight_decay: float = Field(1e-3, ge=0, description="part of every client's objective, so of every gradient")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a minibatch gradient; none by default")
    batch_size: int = Field(50, ge=1, description="B")
    local_epochs: int = Field(5, ge=1, description="E: passes over a client's data in a round")
    local_steps: int | None = Field(None, ge=1, description="T: steps in a round; replaces the epochs when given")

    @property
    def channels(self) -> tuple[str, ...]:
        """What is sent, beside the buffers."""
        return ("dx",)

    def rate(self, round: int) -> float:
        return self.lr * self.lr_decay**round

    def steps(self, examples: int) -> int:
        """T = E·ceil(n/B), unless given."""
        return self.local_steps or self.local_epochs * -(-examples // self.batch_size)

    @property
    def unbatchable_reason(self) -> str:
        """Why clients that take this rule cannot be computed together; empty if they can."""
        return ""

    def evaluations(self, examples: int, nbytes: int) -> int:
        """Gradients of minibatches that a round takes a client with so many examples, of a model of so many bytes."""
        return self.steps(examples)

    def refuses(self, model: nn.Module) -> str:
        """Why this rule cannot train this model; empty if it can."""
        return ""

    # -- on a client

    def train(self, work: Work) -> None:
        """Move work.y by T steps."""
        raise NotImplementedError

    def changes(self, work: Progress, s: slice) -> Channels:
        """The channels to send, on one slice. Fresh tensors: a codec may reuse their memory."""
        return {"dx": torch.sub(work.y[s], work.x[s], out=work.room(s.stop - s.start))}

    def keep(self, work: Progress, parts: Sequence[tuple[slice, Channels]]) -> dict[str, list[tuple[slice, Tensor]]]:
        """The client's new controls on what it uploaded: it adds just what the server will add."""
        return {name: [(s, work.mine[name][s] + sent[f"d{name}"]) for s, sent in parts] for name in self.controls}

    # -- on both ends, from the decoded values, so that they agree to the bit

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        """All channels of a slice, from those that were sent."""
        return sent

    # -- on the server

    def server_change(self, delta: Tensor, controls: Mapping[str, Tensor]) -> Tensor:
        """What the server rule gets for a slice: the mean change, unless the rule adds to it."""
        return delta
