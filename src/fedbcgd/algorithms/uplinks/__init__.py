"""Uplinks: which coordinates does each client send?"""

from fedbcgd.algorithms.uplinks.blocks import Blocks, Central, Whole
from fedbcgd.algorithms.uplinks.matched import Matched
from fedbcgd.core.parts import Registry
from fedbcgd.core.uplink import Uplink

UPLINKS: Registry[Uplink] = Registry("uplink")
UPLINKS.add("whole", Whole)
UPLINKS.add("blocks", Blocks)
UPLINKS.add("matched", Matched)
UPLINKS.add("central", Central)

__all__ = ["UPLINKS", "Blocks", "Central", "Matched", "Uplink", "Whole"]
