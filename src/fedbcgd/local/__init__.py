"""Local rules: how does a client step, and what state does it keep?"""

from fedbcgd.local.feddc import FedDC
from fedbcgd.local.rule import LocalRule
from fedbcgd.local.scaffold import Scaffold
from fedbcgd.local.sgd import SGD, Frozen, Prox
from fedbcgd.local.svrg import SVRG, SVRGControl
from fedbcgd.parts import Registry

LOCALS: Registry[LocalRule] = Registry("local rule")
LOCALS.add("sgd", SGD)
LOCALS.add("frozen", Frozen)
LOCALS.add("prox", Prox)
LOCALS.add("scaffold", Scaffold)
LOCALS.add("feddc", FedDC)
LOCALS.add("svrg", SVRG)
LOCALS.add("svrg+control", SVRGControl)

__all__ = ["LOCALS", "SGD", "SVRG", "FedDC", "Frozen", "LocalRule", "Prox", "SVRGControl", "Scaffold"]
