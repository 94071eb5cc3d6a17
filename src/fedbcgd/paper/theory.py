"""Table 1 of the paper in numbers: orders of rounds and floats until an error of ε.

Every constant that the O hides is taken as 1. So the numbers show how a cost changes with N, G, σ, …; they do not show
which of two algorithms is cheaper.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from fedbcgd.errors import UserError

CASES = ("strongly convex", "non-convex")
MIN, MAX = 1e-30, 1e30  # beyond them, products of several quantities leave the range of a float


@dataclass(frozen=True)
class Setting:
    """The quantities of the table, with the paper's symbols.

    Raises:
        UserError: a value is outside its range.
    """

    beta: float = 100.0  # β: smoothness
    mu: float = 1.0  # μ: strong convexity
    sigma: float = 1.0  # σ: deviation of a stochastic gradient from its client's
    G: float = 1.0  # deviation of clients' gradients from the mean
    clients: int = 100  # M
    cohort: int = 10  # S
    blocks: int = 5  # N
    steps: int = 10  # T: local steps of a client in a round
    epsilon: float = 1e-3  # ε
    momentum: float = 0.0  # λ
    F: float = 1.0  # f(x⁰) − f*
    tau: float = 1.0  # τ: second-order heterogeneity

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            integer = field.type is int
            positive = field.name in ("beta", "mu", "epsilon")
            low = 1 if integer else MIN if positive else 0
            if not low <= value <= MAX:  # NaN fails too
                kind = "an integer" if integer else "a number"
                raise UserError(f"{field.name}: expected {kind} from {low:g} to {MAX:g}, got {value:g}")
        if self.mu > self.beta:
            raise UserError(
                f"mu: expected at most beta = {self.beta:g}, as a β-smooth function is at most β-strongly convex; "
                f"got {self.mu:g}"
            )
        if self.cohort > self.clients:
            raise UserError(f"cohort: expected at most clients = {self.clients}, got {self.cohort}")
        if self.epsilon >= 1:
            raise UserError(f"epsilon: expected less than 1, so that log 1/ε is positive; got {self.epsilon:g}")
        if self.momentum >= 1:
            raise UserError(f"momentum: expected less than 1, got {self.momentum:g}")

    @property
    def K(self) -> float:
        """Clients that upload one block in a round: S/N."""
        return self.cohort / self.blocks

    @property
    def alpha(self) -> float:
        """α = 1/(1 − λ)."""
        return 1 / (1 - self.momentum)

    @property
    def log(self) -> float:
        """log 1/ε."""
        return math.log(1 / self.epsilon)


Terms = tuple[float, ...]  # the summands of an order
Rounds = Callable[[Setting], Terms]


def _fedavg_convex(s: Setting) -> Terms:
    noise = (s.sigma**2 + s.G**2) / (s.mu * s.cohort * s.steps * s.epsilon)
    return noise, (s.sigma + s.G) / (s.mu * math.sqrt(s.epsilon)), s.beta / s.mu * s.log


def _fedavg_nonconvex(s: Setting) -> Terms:
    noise = s.beta * s.sigma**2 / (s.steps * s.cohort * s.epsilon**2)
    return noise, _drift(s, s.G), s.F * s.beta / s.epsilon


def _fedbcgd_convex(s: Setting) -> Terms:
    noise = (s.sigma**2 + s.G**2) / (s.mu * s.K * s.steps * s.epsilon)
    return noise, (s.sigma + s.G) / (s.alpha * s.mu * math.sqrt(s.epsilon)), s.beta / s.mu * s.log


def _fedbcgd_nonconvex(s: Setting) -> Terms:
    noise = s.beta * s.sigma**2 / (s.steps * s.K * s.epsilon**2)
    return noise, _drift(s, s.G), s.F * s.beta / s.epsilon


def _scaffold_convex(s: Setting) -> Terms:
    noise = s.sigma**2 / (s.mu * s.cohort * s.steps * s.epsilon)
    return noise, s.sigma / (s.mu * math.sqrt(s.epsilon)), (s.clients / s.cohort + s.beta / s.mu) * s.log


def _scaffold_nonconvex(s: Setting) -> Terms:
    noise = s.beta * s.sigma**2 / (s.steps * s.cohort * s.epsilon**2)
    return noise, _drift(s, 0.0), s.beta * s.F / s.epsilon * (s.clients / s.cohort) ** (2 / 3)


def _condition(s: Setting) -> Terms:
    return (s.beta / s.mu * s.log,)


def _ce_lsgd_nonconvex(s: Setting) -> Terms:
    return (s.G * s.F * s.tau / (s.clients * s.epsilon**1.5),)


def _bvr_nonconvex(s: Setting) -> Terms:
    all_steps = s.clients * s.steps * s.epsilon
    return (
        s.F * s.tau / s.epsilon,
        s.F * s.beta / (math.sqrt(s.steps) * s.epsilon),
        s.sigma**2 / all_steps,
        (s.sigma * s.F * s.beta / all_steps) ** 1.5,
    )


def _fedbcgd_plus_convex(s: Setting) -> Terms:
    """The statement in the appendix has exp(−min{M/30K, …}R); its proof has K/30M, and so M/K here (erratum 7)."""
    return s.clients / s.K * s.log, s.beta / s.mu * s.log


def _fedbcgd_plus_nonconvex(s: Setting) -> Terms:
    return (s.beta * s.F / s.epsilon * (s.clients / s.K) ** (2 / 3),)


def _drift(s: Setting, G: float) -> float:
    """Return the term of client drift, which FedAvg and SCAFFOLD share."""
    return (math.sqrt(s.beta) * G + math.sqrt(s.beta / s.steps) * s.sigma) / s.epsilon**1.5


@dataclass(frozen=True)
class Row:
    """An algorithm of Table 1."""

    name: str
    algorithm: str  # its name in this package; empty if it is not implemented
    rounds: Mapping[str, Rounds]  # by case; cases that the table leaves open are absent
    vectors: int  # how many vectors a client sends in a round, of d or of d/N floats
    blocked: bool  # whether the vectors have d/N floats
    source: str

    def floats_per_round(self, s: Setting) -> float:
        """Return the floats that a client sends in a round, in d."""
        return self.vectors / s.blocks if self.blocked else float(self.vectors)


def _row(name: str, algorithm: str, convex: Rounds | None, nonconvex: Rounds | None, vectors: int, source: str) -> Row:
    rounds = {case: f for case, f in zip(CASES, (convex, nonconvex), strict=True) if f is not None}
    return Row(name, algorithm, rounds, vectors, "FedBCGD" in name, source)


TABLE = (
    _row("FedAvg", "fedavg", _fedavg_convex, _fedavg_nonconvex, 1, "Table 1, quoting Karimireddy et al. 2020"),
    _row("FedBCGD", "fedbcgd", _fedbcgd_convex, _fedbcgd_nonconvex, 1, "Theorem 1"),
    _row("SCAFFOLD", "scaffold", _scaffold_convex, _scaffold_nonconvex, 2, "Table 1, quoting Karimireddy et al. 2020"),
    _row("FedLin", "", _condition, None, 2, "Table 1, quoting Mitra et al. 2021"),
    _row("S-Local-GD", "", _condition, None, 2, "Table 1, quoting Gorbunov et al. 2021"),
    _row("CE-LSGD", "", None, _ce_lsgd_nonconvex, 3, "Table 1, quoting Patel et al. 2022"),
    _row("BVR-L-SGD", "", None, _bvr_nonconvex, 3, "Table 1, quoting Murata and Suzuki 2021"),
    _row("FedBCGD+", "fedbcgd+", _fedbcgd_plus_convex, _fedbcgd_plus_nonconvex, 2, "Theorem 2, with erratum 7"),
)


@dataclass(frozen=True)
class Order:
    """The cost of an algorithm in a case."""

    name: str
    case: str
    terms: Terms  # of the rounds
    floats_per_round: float  # in d
    source: str

    @property
    def rounds(self) -> float:
        """The sum of the terms."""
        return sum(self.terms)

    @property
    def floats(self) -> float:
        """Rounds times the floats of a round, in d."""
        return self.rounds * self.floats_per_round


def order(name: str, s: Setting, case: str = CASES[0]) -> Order:
    """Return the cost of an algorithm, named as in the table or as in this package."""
    row = next(row for row in TABLE if name in (row.name, row.algorithm))
    return Order(row.name, case, row.rounds[case](s), row.floats_per_round(s), row.source)


def orders(s: Setting, case: str) -> list[Order]:
    """Return the costs of all algorithms for which the table covers this case."""
    return [order(row.name, s, case) for row in TABLE if case in row.rounds]


NOTES = (
    "Orders with every hidden constant taken as 1: how a number changes with N, G or σ means something; that one "
    "algorithm's is below another's does not.",
    "Floats are rounds times the floats of a round in the table's last column, so 2d/N a round for FedBCGD+ and 2d for "
    "SCAFFOLD; the theorem's Com leaves the 2 out.",
    "Table 1 prints FedBCGD+ at N = √(β/μ), where M/S + β/(μN) is M/S + √(β/μ); here N is the one given.",
    "FedLin and S-Local-GD need every client in every round and full gradients.",
)


def notes(s: Setting) -> tuple[str, ...]:
    """Return notes on a setting that the theorems do not cover."""
    if s.blocks > s.cohort:
        return (
            f"K = S/N = {s.K:g}: with {s.cohort} clients a round and {s.blocks} blocks not every block is uploaded in a "
            "round; the theorems speak of K ≥ 1.",
        )
    return ()
