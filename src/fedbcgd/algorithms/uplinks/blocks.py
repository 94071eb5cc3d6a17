"""Each client sends the whole model; or one block and the shared block, as in FedBCGD (Liu et al. 2024); or nothing."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator
from torch import nn

from fedbcgd.core.blocks import divide, paper_blocks
from fedbcgd.core.uplink import Uplink
from fedbcgd.core.vector import Layout

DEFAULT_BLOCKS = 5  # N with blocks="auto", unless the cohort is smaller or the divider lists the blocks
EXPECTED_DIVIDER = "'auto', 'layers', 'even', 'paper', or a list of relative sizes or of name patterns for each block"


class Whole(Uplink):
    """Every client sends the whole model."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, 1, "even", "none"))


class Central(Whole):
    """Centralised training: all data is at one client, and nothing is sent."""

    pooled: ClassVar[bool] = True


class Blocks(Uplink):
    """Each client sends one of N blocks and the shared block: about 1/N of the model."""

    blocks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="N: number of blocks without the shared block, ≥ 1; auto: as many as the divider lists, else 5, or the "
        "cohort if that is smaller, so that each round serves every block",
        json_schema_extra={"expected": "an integer ≥ 1 or 'auto'"},
    )
    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "auto",
        description="layers, even, auto, paper (the paper's table, for the networks it has one for), relative sizes of the "
        "blocks, or name patterns for each block",
        json_schema_extra={"expected": EXPECTED_DIVIDER},
    )
    shared: str | Sequence[str] = Field(
        "last",
        description="the layer that every client uploads too: last, none, or name patterns",
        json_schema_extra={"expected": "'last', 'none' or a list of name patterns"},
    )

    @field_validator("divider", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(size, bool) for size in value):
            raise ValueError("expected numbers as sizes of the blocks")
        return value

    @field_validator("shared", mode="before")
    @classmethod
    def _allow_none(cls, value: Any) -> Any:
        return "none" if value is None else value  # TOML has no null

    def for_cohort(self, cohort: int) -> Self:
        if self.blocks != "auto" or self.divider == "paper":
            return self
        count = min(DEFAULT_BLOCKS, cohort) if isinstance(self.divider, str) else len(self.divider)
        return self.model_copy(update={"blocks": count})

    def layout(self, model: nn.Module) -> Layout:
        blocks = self.for_cohort(DEFAULT_BLOCKS).blocks
        count = paper_blocks(model) if blocks == "auto" else blocks
        return Layout.of(model, divide(model, count, self.divider, self.shared))
