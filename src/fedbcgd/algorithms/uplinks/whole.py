"""Every client sends the whole model; or all data is in one place, and nothing is sent."""

from typing import ClassVar

from torch import nn

from fedbcgd.core.blocks import divide
from fedbcgd.core.uplink import Uplink
from fedbcgd.core.vector import Layout


class Whole(Uplink):
    """Every client sends the whole model."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout.of(model, divide(model, 1, "even", "none"))


class Central(Whole):
    """Centralised training: all data is at one client, and nothing is sent."""

    pooled: ClassVar[bool] = True
