"""Local rules: how does a client step, and what state does it keep?"""

from fedbcgd.local.rule import LocalRule
from fedbcgd.local.scaffold import Scaffold
from fedbcgd.local.sgd import SGD
from fedbcgd.parts import Registry

LOCALS: Registry[LocalRule] = Registry("local rule")
LOCALS.add("sgd", SGD)
LOCALS.add("scaffold", Scaffold)

__all__ = ["LOCALS", "SGD", "LocalRule", "Scaffold"]
