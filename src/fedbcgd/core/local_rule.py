"""What a local rule does: it trains on a client's data, and computes what the client sends to the server."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbcgd.core.parts import Part
from fedbcgd.core.work import Progress, Work

Channels = dict[str, Tensor]
TrainingNeeds = Literal["refused", "free", "corrected", "anchored"]


class LocalRule(Part):
    """Base of local rules. The fields are the options that all of them have; a subclass adds its own."""

    # For each name in `controls` every client keeps a vector, and the server keeps their mean. The change of control `c` is
    # sent in channel `dc`. The server's vectors that are named in `broadcasts` are sent to the clients.
    controls: ClassVar[tuple[str, ...]] = ()
    broadcasts: ClassVar[tuple[str, ...]] = ()

    # What the rule needs where a user's function trains in the place of `train`: "free", nothing; "corrected", that its
    # gradients are corrected (`corrector`, `project`); "anchored", each minibatch's gradient at x as well. It is not
    # inherited: a subclass that steps in another way must say what it needs.
    own_training: ClassVar[TrainingNeeds] = "refused"

    lr: float = Field(0.1, gt=0, description="η: local learning rate in the first round")
    lr_decay: float = Field(0.998, gt=0, le=1, description="η is multiplied by this every round")
    weight_decay: float = Field(1e-3, ge=0, description="part of every client's objective, so of every gradient")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a minibatch gradient; none by default")
    batch_size: int = Field(50, ge=1, description="B")
    local_epochs: int = Field(5, ge=1, description="E: passes over a client's data in a round")
    local_steps: int | None = Field(None, ge=1, description="T: steps in a round; replaces the epochs when given")

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of what is sent for each slice; buffers are sent besides."""
        return ("dx",)

    def rate(self, round: int) -> float:
        """Return η in this round."""
        return self.lr * self.lr_decay**round

    def steps(self, examples: int) -> int:
        """Return T, for a client with this many examples: E·ceil(n/B), unless `local_steps` is set."""
        return self.local_steps or self.local_epochs * -(-examples // self.batch_size)

    @property
    def unbatchable_reason(self) -> str:
        """Why clients cannot be trained in one batch with this rule; empty if they can."""
        return ""

    def evaluations(self, examples: int, nbytes: int) -> int:
        """Return how many gradients of minibatches `train` computes in a round.

        Args:
            examples: of the client.
            nbytes: of the model's parameters.
        """
        return self.steps(examples)

    def refuses(self, model: nn.Module) -> str:
        """Return what this rule expects of a model and what it got, as a message; empty if it can train this one."""
        return ""

    # -- on a client

    def train(self, work: Work) -> None:
        """Move work.y by T steps."""
        raise NotImplementedError

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        """Return what corrects a gradient at work.y in place, weight decay not included, before each step."""
        raise NotImplementedError

    def project(self, work: Work) -> bool:
        """Move work.y back to where a step may lead; return whether there is anything to move."""
        return False

    def changes(self, work: Progress, s: slice) -> Channels:
        """Return the channels to send, on one slice, as new tensors: a codec may reuse their memory."""
        return {"dx": torch.sub(work.y[s], work.x[s], out=work.allocate_values(s.stop - s.start))}

    def new_controls(
        self, work: Progress, parts: Sequence[tuple[slice, Channels]]
    ) -> dict[str, list[tuple[slice, Tensor]]]:
        """Return the client's new controls on the coordinates it uploaded.

        Args:
            work: of the client.
            parts: the slices, and the decoded channels of each: the client adds exactly what the server will add.
        """
        return {name: [(s, work.state[name][s] + sent[f"d{name}"]) for s, sent in parts] for name in self.controls}

    # -- on both ends, from the decoded values, so that both get the same bits

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        """Return all channels of a slice, those that are not sent computed from those that are."""
        return sent

    # -- on the server

    def server_change(self, delta: Tensor, controls: Mapping[str, Tensor]) -> Tensor:
        """Return what the server rule gets for a slice: the mean change, unless the rule adds to it."""
        return delta
