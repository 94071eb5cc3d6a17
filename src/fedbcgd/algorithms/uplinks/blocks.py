"""FedBCGD's uplink (Liu et al. 2024): each client sends one block and the shared block."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator
from torch import nn

from fedbcgd.core.blocks import divide
from fedbcgd.core.uplink import Uplink
from fedbcgd.core.vector import Layout


class Blocks(Uplink):
    """Each client sends one of N blocks and the shared block: about 1/N of the model."""

    blocks: int = Field(5, ge=1, description="N: parameter blocks, the shared block not counted")
    divider: str | Sequence[str | Sequence[str]] | Sequence[float] = Field(
        "auto",
        description="layers, even, auto, paper (its table for its networks), relative sizes of the blocks, or name "
        "patterns for each block",
    )
    shared: str | Sequence[str] = Field("last", description="the shared block: last (layer), none, or name patterns")

    @field_validator("divider", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(size, bool) for size in value):
            raise ValueError("expected numbers as sizes of blocks")
        return value

    @field_validator("shared", mode="before")
    @classmethod
    def _allow_none(cls, value: Any) -> Any:
        return "none" if value is None else value  # TOML has no null

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, self.blocks, self.divider, self.shared))
