"""Uplinks: which coordinates does each client send?"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator
from torch import nn

from fedbcgd.blocks import divide
from fedbcgd.flat import Layout
from fedbcgd.parts import Part, Registry


class Uplink(Part):
    """Divides the vector, and tells each client of a cohort which block to upload."""

    pooled: ClassVar[bool] = False  # whether all data is in one place, so that nothing is uploaded

    def layout(self, model: nn.Module) -> Layout:
        raise NotImplementedError

    def assign(self, cohort: np.ndarray, round: int, blocks: int) -> list[int]:
        """A block for each client of the cohort.

        The cohort comes in random order, so dealing blocks out in turn is a random split into groups. The turn goes
        on from round to round: groups differ by at most one client, and over time each block is served equally often,
        also when the cohort is no multiple of N or smaller than N.
        """
        start = round * len(cohort)
        return [(start + k) % blocks for k in range(len(cohort))]


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
    divider: str | Sequence[str | Sequence[str]] = Field(
        "auto", description="layers, even, auto, paper (its table for its networks), or name patterns for each block"
    )
    shared: str | Sequence[str] = Field("last", description="the shared block: last (layer), none, or name patterns")

    @field_validator("shared", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return "none" if value is None else value  # TOML has no null

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, self.blocks, self.divider, self.shared))


UPLINKS: Registry[Uplink] = Registry("uplink")
UPLINKS.add("whole", Whole)
UPLINKS.add("blocks", Blocks)
UPLINKS.add("central", Central)
