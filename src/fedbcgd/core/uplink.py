"""What an uplink is: it divides the vector, and says which coordinates each client sends."""

from typing import ClassVar, Self

import numpy as np
from torch import nn

from fedbcgd.core.parts import Part
from fedbcgd.core.vector import Layout


class Uplink(Part):
    """Divides the vector, and tells each client of a cohort which block to upload."""

    pooled: ClassVar[bool] = False  # whether all data is in one place, so that nothing is uploaded

    def layout(self, model: nn.Module) -> Layout:
        raise NotImplementedError

    def for_cohort(self, cohort: int) -> Self:
        """Return this uplink with what it leaves to the size of the cohort settled."""
        return self

    def turn(self, round: int) -> tuple[str, int]:
        """The turn in which the blocks of this round are dealt out, by its name, and how many rounds it had before."""
        return "rounds", round

    def assign(
        self,
        cohort: np.ndarray,
        round: int,
        blocks: int,
        costs: np.ndarray | None = None,
        rng: np.random.Generator | None = None,
        dealt: int | None = None,
    ) -> list[int]:
        """A block for each client of the cohort.

        The cohort comes in random order, so dealing blocks out in turn is a random split into groups. The turn goes
        on from round to round: groups differ by at most one client, and over time each block is served equally often,
        also when the cohort is no multiple of N, smaller than N, or of another size in each round.

        Args:
            cohort: the clients.
            round: which round it is.
            blocks: N.
            costs: seconds that each of the clients takes with each block, where known.
            rng: for assignments that draw.
            dealt: blocks dealt so far in the turn of this round; None: as if each of its rounds had such a cohort.

        Returns:
            The block of each client.
        """
        return self._deal(len(cohort), round, blocks, dealt)

    def _deal(self, cohort: int, round: int, blocks: int, dealt: int | None) -> list[int]:
        start = self.turn(round)[1] * cohort if dealt is None else dealt
        return [(start + k) % blocks for k in range(cohort)]
