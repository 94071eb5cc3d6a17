"""Local rules: how does a client step, and what state does it keep?"""

from fedbcgd.algorithms.local_rules.feddc import FedDC
from fedbcgd.algorithms.local_rules.scaffold import Scaffold
from fedbcgd.algorithms.local_rules.sgd import SGD, Frozen, Prox
from fedbcgd.algorithms.local_rules.svrg import SVRG, SVRGControl
from fedbcgd.core.local_rule import LocalRule
from fedbcgd.core.parts import Registry

LOCALS: Registry[LocalRule] = Registry("local rule")
LOCALS.add("sgd", SGD)
LOCALS.add("frozen", Frozen)
LOCALS.add("prox", Prox)
LOCALS.add("scaffold", Scaffold)
LOCALS.add("feddc", FedDC)
LOCALS.add("svrg", SVRG)
LOCALS.add("svrg+control", SVRGControl)

__all__ = ["LOCALS", "SGD", "SVRG", "FedDC", "Frozen", "LocalRule", "Prox", "SVRGControl", "Scaffold"]
