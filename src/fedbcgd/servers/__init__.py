"""Server rules: how does the server move x, given the mean change of a slice?"""

from fedbcgd.parts import Registry
from fedbcgd.servers.adaptive import Adam, Yogi
from fedbcgd.servers.average import Average
from fedbcgd.servers.momentum import Momentum
from fedbcgd.servers.rule import ServerRule

SERVERS: Registry[ServerRule] = Registry("server rule")
SERVERS.add("average", Average)
SERVERS.add("momentum", Momentum)
SERVERS.add("adam", Adam)
SERVERS.add("yogi", Yogi)

__all__ = ["SERVERS", "Adam", "Average", "Momentum", "ServerRule", "Yogi"]
