"""Uplinks: which coordinates does each client send?"""

from collections.abc import Sequence
from math import floor
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator
from torch import nn

from fedbcgd.blocks import divide
from fedbcgd.errors import UserError
from fedbcgd.flat import Layout
from fedbcgd.network.assignment import fastest
from fedbcgd.parts import Part, Registry


class Uplink(Part):
    """Divides the vector, and tells each client of a cohort which block to upload."""

    pooled: ClassVar[bool] = False  # whether all data is in one place, so that nothing is uploaded

    def layout(self, model: nn.Module) -> Layout:
        raise NotImplementedError

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


class Whole(Uplink):
    """Every client sends everything."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, 1, "even", "none"))


class Central(Whole):
    """There are no clients: all data is in one place and nothing is sent."""

    pooled: ClassVar[bool] = True


class Blocks(Uplink):
    """Each client sends one of N blocks and the shared block: about 1/N of the traffic."""

    blocks: int = Field(5, ge=1, description="N: parameter blocks, the shared block not counted")
    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "auto",
        description="layers, even, auto, paper (its table for its networks), relative sizes of the blocks, or name "
        "patterns for each block",
    )
    shared: str | Sequence[str] = Field("last", description="the shared block: last (layer), none, or name patterns")

    @field_validator("divider", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(size, bool) for size in value):
            raise ValueError("sizes of blocks are numbers")
        return value

    @field_validator("shared", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return "none" if value is None else value  # TOML has no null

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, self.blocks, self.divider, self.shared))


class Matched(Blocks):
    """Blocks as the links can bear them: the makespan of a round is as small as can be, and every block keeps its clients.

    A share `haste` of the rounds is assigned by the links (`network/assignment.py`); the others, spread evenly over the
    run, are dealt out at random as by `blocks`. Both kinds take turns of their own: were it one turn for both, and the
    cohort no multiple of N, fair rounds could deal the same blocks again and again. So of the rounds in which a client is
    sampled it serves each block in a share (1 − haste)/N at least, in the long run, however slow it is.
    """

    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "links", description="links (sizes that fit the links), or as for blocks: layers, even, relative sizes, …"
    )
    haste: float = Field(0.9, ge=0, le=1, description="from 0, fair (blocks are dealt at random), to 1, fast")

    @property
    def fits_links(self) -> bool:
        return self.divider == "links"

    def fitted(self, sizes: Sequence[float]) -> "Matched":
        """The same with block sizes in the place of `links`."""
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
        """Whether this round is dealt at random: of any 1/(1 − haste) rounds in a row one is."""
        return self.fair_before(round + 1) > self.fair_before(round)

    def fair_before(self, round: int) -> int:
        """How many of the rounds before this one were."""
        return floor(round * (1 - self.haste) + 1e-9)


_NO_LINKS = (
    "uplink 'matched' assigns blocks by the clients' links, and none are known: give a network (a section [network], or "
    "simulate(…, network='4g')), or take uplink 'blocks'"
)

UPLINKS: Registry[Uplink] = Registry("uplink")
UPLINKS.add("whole", Whole)
UPLINKS.add("blocks", Blocks)
UPLINKS.add("matched", Matched)
UPLINKS.add("central", Central)
