"""A federated algorithm is four independent choices: uplink, local rule, server rule, codec."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from torch import nn

from fedbcgd.core.codec import Codec
from fedbcgd.core.local_rule import LocalRule
from fedbcgd.core.messages import BUFFERS
from fedbcgd.core.norms import MaxNorm, OverNorm, parse
from fedbcgd.core.server_rule import ServerRule
from fedbcgd.core.uplink import Uplink
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError, unknown

RESIDUAL = "residual"  # the client state of error feedback: what was not sent yet

Weighting = Literal["uniform", "examples"]


@dataclass(frozen=True)
class Algorithm:
    """Four parts, and the options that concern all of them, each with its meaning for the table of options.

    Raises:
        UserError: the parts or options do not fit each other.
    """

    name: str
    uplink: Annotated[Uplink, "what each client sends"]
    local: Annotated[LocalRule, "how a client steps, and what state it keeps"]
    server: Annotated[ServerRule, "how the server moves the model"]
    codec: Annotated[Codec, "how floats become bytes"]
    weighting: Annotated[Weighting, "weight of the clients in a mean: uniform, as in the paper, or examples"] = (
        "uniform"
    )
    max_norm: Annotated[
        MaxNorm,
        'largest norm of an upload: a number, or a multiple such as "20x" of the largest value that the running median of '
        "all uploads' norms has had; unset: no limit in a simulation, 20x on Flower",
    ] = None
    over_norm: Annotated[OverNorm, "what to do with a larger upload: refuse it, or scale it down to the limit"] = (
        "refuse"
    )

    def __post_init__(self) -> None:
        for name, choices in (("weighting", Weighting), ("over_norm", OverNorm)):
            if getattr(self, name) not in get_args(choices):
                raise unknown(name, getattr(self, name), get_args(choices))
        parse(self.max_norm)
        if self.over_norm == "scale" and self.state_names:
            raise UserError(
                f"over_norm: expected 'refuse' with {self.name}, got 'scale': its clients keep state that depends on "
                "what they sent, so the server cannot use scaled values"
            )
        if self.codec.residual and getattr(self.local, "derived", False):
            raise UserError(
                f"derived: expected False with codec {self.codec.registered_name()!r}, got True: the change that arrives "
                "has parts of earlier rounds, so the control change cannot be derived from it"
            )

    def for_cohort(self, cohort: int) -> "Algorithm":
        """Return this algorithm with the options filled in that depend on the cohort's size, such as blocks="auto"."""
        return replace(self, uplink=self.uplink.for_cohort(cohort))

    def check(self, model: nn.Module) -> None:
        """Check that this algorithm can train a model.

        Raises:
            UserError: it cannot; the message says why.
        """
        if reason := self.local.refuses(model):
            raise UserError(f"model, for {self.name}: {reason}")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The vectors that each client keeps between rounds."""
        return self.local.controls + ((RESIDUAL,) if self.codec.residual else ())

    def lengths(self, layout: Layout, block: int) -> dict[str, list[int]]:
        """Return the bytes of each slice of each channel of an upload of this block; the most possible if that varies."""
        sizes = [s.stop - s.start for s in layout.slices(block)]
        lengths = {channel: [self.codec.nbytes(n, layout.dtype) for n in sizes] for channel in self.local.channels}
        buffers = (layout.size - layout.dim) * layout.dtype.itemsize
        return lengths | ({BUFFERS: [buffers]} if buffers else {})

    def upload_d(self, layout: Layout) -> float:
        """Return the upload of a client in one round, averaged over the blocks, in units of d."""
        if self.uplink.pooled:
            return 0.0
        uploads = [sum(map(sum, self.lengths(layout, j).values())) for j in range(layout.blocks)]
        return sum(uploads) / len(uploads) / (layout.dim * layout.dtype.itemsize)

    def options(self) -> dict[str, Any]:
        """Return every hyper-parameter by name: `make_algorithm(**options)` makes this algorithm again.

        That needs its four parts to be registered.
        """
        kinds = ("uplink", "local", "server", "codec")
        chosen: dict[str, Any] = {kind: getattr(self, kind).registered_name() for kind in kinds}
        for kind in kinds:
            chosen |= getattr(self, kind).model_dump()
        # No limit is no option, so that a run without one has the same options on Flower and in a simulation.
        limits = {"max_norm": self.max_norm, "over_norm": self.over_norm} if self.max_norm is not None else {}
        return {"name": self.name, **chosen, "weighting": self.weighting, **limits}
