"""Blocks that fit the clients' links: large ones for fast uplinks."""

from collections.abc import Sequence
from math import floor

import numpy as np
from pydantic import Field
from torch import nn

from fedbcgd.algorithms.uplinks.assignment import fastest
from fedbcgd.algorithms.uplinks.blocks import EXPECTED_DIVIDER, Blocks
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError


class Matched(Blocks):
    """Assigns blocks by the clients' links: a round takes as little time as possible, and each client serves every block.

    In a share `haste` of the rounds, the fast ones, blocks are assigned by the links (`assignment.py`). In the others, the
    fair ones, which are spread evenly over the run, they are assigned at random, as the uplink `blocks` does. Each of the
    two kinds of rounds has a round-robin of its own: with one for both, and a cohort that is no multiple of N, fair rounds
    could assign the same blocks each time. So in the long run every client, however slow, serves each block in at least a
    share (1 − haste)/N of the rounds in which it is sampled.
    """

    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "links",
        description="links (sizes that fit the links), or as for blocks: layers, even, relative sizes, …",
        json_schema_extra={"expected": f"'links', {EXPECTED_DIVIDER}"},
    )
    haste: float = Field(
        0.9,
        ge=0,
        le=1,
        description="share of the rounds in which blocks are assigned by speed; in the others at random",
    )

    @property
    def fits_links(self) -> bool:
        """Whether the block sizes must still be computed from the links."""
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
        assigned: int | None = None,
    ) -> list[int]:
        to_assign = self._round_robin(len(cohort), round, blocks, assigned)
        if self.fair(round) or not len(cohort):
            return to_assign
        if costs is None or rng is None:
            raise UserError(_NO_LINKS)
        return fastest(costs, to_assign, rng)

    def fair(self, round: int) -> bool:
        """Return whether blocks are assigned at random in this round, which is one in 1/(1 − haste) rounds."""
        return self.fair_before(round + 1) > self.fair_before(round)

    def fair_before(self, round: int) -> int:
        """Return how many rounds before this one were fair."""
        return floor(round * (1 - self.haste) + 1e-9)


_NO_LINKS = (
    "network: expected one with uplink 'matched', which assigns blocks by the clients' links, got none; give a section "
    "[network], or simulate(…, network='4g'), or take uplink 'blocks'"
)
