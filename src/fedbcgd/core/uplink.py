"""What an uplink does: it divides the vector into blocks, and assigns a block to each client of a round."""

from typing import ClassVar, Self

import numpy as np
from torch import nn

from fedbcgd.core.parts import Part
from fedbcgd.core.vector import Layout


class Uplink(Part):
    """Base of uplinks. The fields of a subclass are its options."""

    pooled: ClassVar[bool] = False  # whether all data is in one place, so that nothing is uploaded

    def layout(self, model: nn.Module) -> Layout:
        """Return the layout of the model's vector, with its blocks."""
        raise NotImplementedError

    def for_cohort(self, cohort: int) -> Self:
        """Return this uplink with the options that depend on the cohort's size filled in, such as blocks="auto"."""
        return self

    def turn(self, round: int) -> tuple[str, int]:
        """Return the name of the sequence of rounds that this round belongs to, and how many rounds of it came before.

        Blocks are assigned round-robin within each sequence.
        """
        return "rounds", round

    def assign(
        self,
        cohort: np.ndarray,
        round: int,
        blocks: int,
        costs: np.ndarray | None = None,
        rng: np.random.Generator | None = None,
        assigned: int | None = None,
    ) -> list[int]:
        """Assign a block to each client of the cohort.

        The cohort is in random order, so assigning the blocks round-robin splits it at random into groups. The round-robin
        continues from round to round: groups differ by at most one client, and over time each block is served equally
        often, also if the cohort's size is no multiple of N, is below N, or varies.

        Args:
            cohort: the clients.
            round: which round it is.
            blocks: N.
            costs: seconds that each client takes with each block, if known.
            rng: for assignments that draw.
            assigned: blocks assigned in the earlier rounds of this sequence; None: assume that each had this cohort's size.

        Returns:
            The block of each client.
        """
        return self._round_robin(len(cohort), round, blocks, assigned)

    def _round_robin(self, cohort: int, round: int, blocks: int, assigned: int | None) -> list[int]:
        start = self.turn(round)[1] * cohort if assigned is None else assigned
        return [(start + k) % blocks for k in range(cohort)]
