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
    """Base of local rules. The fields are the options that all of them have; a subclass adds its own.

    A rule must have `train`. One with `controls` also sends their change: `channels` names it, and `changes` or `complete`
    computes it.
    """

    # For each name in `controls` every client keeps a vector, and the server keeps their mean. The change of control `c` is
    # sent in channel `dc`. The server's vectors that are named in `broadcasts` are sent to the clients.
    controls: ClassVar[tuple[str, ...]] = ()
    broadcasts: ClassVar[tuple[str, ...]] = ()

    # What the rule needs if a user's function trains instead of `train`. "free": nothing. "corrected": to correct the
    # function's gradients (`corrector`, `project`). "anchored": each minibatch's gradient at x as well. "refused": the rule
    # cannot take such a function. Not inherited: a subclass that steps in another way must say what it needs.
    own_training: ClassVar[TrainingNeeds] = "refused"

    lr: float = Field(0.1, gt=0, description="η: local learning rate in the first round")
    lr_decay: float = Field(0.998, gt=0, le=1, description="η is multiplied by this every round")
    weight_decay: float = Field(
        1e-3, ge=0, description="added to every gradient: weight_decay·y (an L2 penalty in every client's objective)"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="largest norm of a minibatch's gradient, weight decay included; unset: no limit"
    )
    batch_size: int = Field(50, ge=1, description="B: examples of a minibatch")
    local_epochs: int = Field(5, ge=1, description="E: passes over a client's data in a round")
    local_steps: int | None = Field(None, ge=1, description="T: steps in a round; replaces the epochs when given")

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the vectors that are sent for each slice. Buffers are sent in a channel of their own."""
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
        """Return how many gradients of minibatches `train` computes in a round, by default one for each step.

        Override it if `train` computes more or fewer: the simulated network's clock uses it.

        Args:
            examples: how many the client has.
            nbytes: size of the model's parameters, in bytes.
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
        """Return a function that corrects a gradient at work.y in place. It is called before each step.

        What it adds must not depend on the gradient: a user's function gives gradients without weight decay, `train` may
        give them with it.
        """
        raise NotImplementedError

    def project(self, work: Work) -> bool:
        """Undo, after a step, changes of work.y that this rule does not allow; return whether it restricts y at all."""
        return False

    def changes(self, work: Progress, s: slice) -> Channels:
        """Return the channels to send, on one slice, as new tensors: a codec may reuse their memory.

        Args:
            work: the client's round, after training.
            s: one of the slices that the client uploads.
        """
        return {"dx": torch.sub(work.y[s], work.x[s], out=work.allocate_values(s.stop - s.start))}

    def new_controls(
        self, work: Progress, parts: Sequence[tuple[slice, Channels]]
    ) -> dict[str, list[tuple[slice, Tensor]]]:
        """Return the client's new controls on the coordinates it uploaded.

        Args:
            work: the client's round.
            parts: the uploaded slices, each with its decoded channels.
        """
        return {name: [(s, work.state[name][s] + sent[f"d{name}"]) for s, sent in parts] for name in self.controls}

    # -- on both ends, from the decoded values, so that both get the same bits

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        """Return all channels of a slice: those that were sent, and those that are computed from them.

        Client and server both call it, with the same decoded values, so that they get the same bits.

        Args:
            sent: the decoded channels of the slice, by name.
            controls: the server's control vectors on the slice.
            rate: η of the round.
            steps: T, how many steps the client made.
        """
        return sent

    # -- on the server

    def server_change(self, delta: Tensor, controls: Mapping[str, Tensor]) -> Tensor:
        """Return what the server rule gets for a slice: the mean change, unless the rule adds to it.

        Args:
            delta: the mean change on the slice.
            controls: the server's control vectors on the slice, with the changes of this round.
        """
        return delta
