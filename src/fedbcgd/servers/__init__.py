"""Server rules: how does the server move x, given the mean change of a slice?"""

from fedbcgd.parts import Registry
from fedbcgd.servers.average import Average
from fedbcgd.servers.momentum import Momentum
from fedbcgd.servers.rule import ServerRule

SERVERS: Registry[ServerRule] = Registry("server rule")
SERVERS.add("average", Average)
SERVERS.add("momentum", Momentum)

__all__ = ["SERVERS", "Average", "Momentum", "ServerRule"]
