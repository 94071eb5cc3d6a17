"""Server rules: how does the server move x, given the mean change of a slice?"""

from fedbcgd.algorithms.server_rules.adaptive import Adam, Yogi
from fedbcgd.algorithms.server_rules.momentum import Average, Momentum
from fedbcgd.core.parts import Registry
from fedbcgd.core.server_rule import ServerRule

SERVERS: Registry[ServerRule] = Registry("server rule")
SERVERS.add("average", Average)
SERVERS.add("momentum", Momentum)
SERVERS.add("adam", Adam)
SERVERS.add("yogi", Yogi)

__all__ = ["SERVERS", "Adam", "Average", "Momentum", "ServerRule", "Yogi"]
