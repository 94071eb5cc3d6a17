"""Blocks that fit the clients' links: large ones for fast uplinks."""

from collections.abc import Sequence
from math import floor

import numpy as np
from pydantic import Field
from torch import nn

from fedbcgd.algorithms.uplinks.assignment import fastest
from fedbcgd.algorithms.uplinks.blocks import Blocks
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError


class Matched(Blocks):
    """Assign blocks by the links: the slowest client of a round is as fast as possible, and each block is served by all.

    In a share `haste` of the rounds, the fast ones, blocks are assigned by the links (`assignment.py`). In the others, the
    fair ones, spread evenly over the run, they are dealt at random as by `blocks`. Both kinds deal in turns of their own:
    with one turn for both, and a cohort that is no multiple of N, fair rounds could deal the same blocks again and again.
    So of the rounds in which a client is sampled it serves each block in a share of at least (1 − haste)/N, in the long
    run, however slow it is.
    """

    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "links", description="links (sizes that fit the links), or as for blocks: layers, even, relative sizes, …"
    )
    haste: float = Field(0.9, ge=0, le=1, description="from 0, fair (blocks are dealt at random), to 1, fast")

    @property
    def fits_links(self) -> bool:
        """Whether the block sizes are still to be chosen by the links."""
        return self.divider == "links"

    def fitted(self, sizes: Sequence[float]) -> "Matched":
        """Return the same uplink with these block sizes instead of `links`."""
        return self.model_copy(update={"divider": tuple(sizes)})

    def layout(self, model: nn.Module) -> Layout:
        if self.fits_links:
            raise UserError(_NO_LINKS)
        return super().layout(model)

    def turn(self, round: int) -> tuple[str, int]:
        fair = self.fair_before(round)
        return ("fair", fair) if self.fair(round) else ("fast", round - fair)

    def assign(
        self,
        cohort: np.ndarray,
        round: int,
        blocks: int,
        costs: np.ndarray | None = None,
        rng: np.random.Generator | None = None,
        dealt: int | None = None,
    ) -> list[int]:
        slots = self._deal(len(cohort), round, blocks, dealt)
        if self.fair(round) or not len(cohort):
            return slots
        if costs is None or rng is None:
            raise UserError(_NO_LINKS)
        return fastest(costs, slots, rng)

    def fair(self, round: int) -> bool:
        """Return whether blocks are dealt at random in this round: in one of any 1/(1 − haste) rounds in a row."""
        return self.fair_before(round + 1) > self.fair_before(round)

    def fair_before(self, round: int) -> int:
        """Return how many rounds before this one were fair."""
        return floor(round * (1 - self.haste) + 1e-9)


_NO_LINKS = (
    "uplink: expected a network with 'matched', which assigns blocks by the clients' links, got none; give a network (a "
    "section [network], or simulate(…, network='4g')), or take uplink 'blocks'"
)
