"""Floats until an error of ε, measured on quadratics whose β, μ, σ and G are known, beside what the theorems say.

The theorems hold for *some* learning rate, so each algorithm gets, for each N, the best one of a ladder, found with seed 0
of the draws; what is reported are other seeds at that rate, or at the next smaller one with which all of them get there. The
floats are those of the ledger at the first round from which on the mean of f(x) − f* over ten rounds is at most ε: one lucky
round does not count.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.engine.loop import RoundInfo, Row
from fedbcgd.errors import Diverged, UserError
from fedbcgd.models.problems import Problem, quadratics
from fedbcgd.paper.points import Points
from fedbcgd.paper.theory import Setting, order
from fedbcgd.simulation import simulate

ALGORITHMS = ("fedbcgd+", "fedbcgd", "fedavg", "scaffold")
BLOCKED = ("fedbcgd+", "fedbcgd")
RATES = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)  # in 1/β
BATCH = 2
WINDOW = 10  # rounds over which the gap's mean is to be at most ε
PATIENCE = 100  # rounds over which a gap is averaged before it is said to have stopped falling
AGREE = 2.0  # measured and theorem agree on N if their ratios to N = 1 differ by no more than this factor
SETTING = Setting(beta=100, mu=1, sigma=1, G=1, clients=16, cohort=8, blocks=1, steps=4, epsilon=1e-3)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    setting: Setting = SETTING
    blocks: tuple[int, ...] = (1, 2, 4, 8)
    dim: int = 32
    rates: tuple[float, ...] = RATES
    seeds: int = 3
    rounds: int = 3000  # none is run further

    def __post_init__(self) -> None:
        if self.blocks[0] != 1 or list(self.blocks) != sorted(set(self.blocks)):
            raise UserError("blocks: from 1 upwards is wanted, each once: what is compared is the ratio to N = 1")
        if self.blocks[-1] > min(self.dim, self.setting.cohort):
            raise UserError(
                f"blocks: at most {min(self.dim, self.setting.cohort)}, the smaller of dimension and cohort, can each "
                f"get a client, given {self.blocks[-1]}"
            )

    def problem(self) -> Problem:
        s = self.setting
        # The clients are the same for every seed, so that a seed changes the draws of a run and nothing else.
        # f itself has to be badly conditioned: the theorems' β/μ is that of the worst f.
        sigma = s.sigma * BATCH**0.5  # of an example, so that a minibatch has σ
        return quadratics(s.clients, self.dim, s.beta, s.mu, sigma, s.G, s.steps * BATCH, conditioned=True)


class Judge:
    """Ends a run once it is at ε, or once its gap has stopped falling: then this learning rate does not get there."""

    def __init__(self, epsilon: float):
        self.epsilon = epsilon
        self.rows: list[Row] = []
        self.reached: Row | None = None  # the first row of WINDOW whose gaps have a mean of at most ε
        self._gaps: list[float] = []

    def __call__(self, info: RoundInfo) -> None:
        if not info.row:
            return
        self.rows.append(info.row)
        self._gaps.append(info.row["test_gap"])
        if len(self._gaps) >= WINDOW and statistics.fmean(self._gaps[-WINDOW:]) <= self.epsilon:
            self.reached = self.rows[-WINDOW]
            info.stop()
        third = len(self._gaps) // 3
        if third >= PATIENCE and len(self._gaps) % 50 == 0:
            before, after = (statistics.fmean(self._gaps[-k * third :][:third]) for k in (2, 1))
            if after > 0.97 * before:
                info.stop()


def floats_to(size: Size, p: Problem, name: str, blocks: int, lr: float, seed: int, budget: float) -> dict[str, Any]:
    """One run until ε, given up where that costs more than `budget`; where it did not get there, `floats_d` is infinite."""
    options: dict[str, Any] = {"blocks": blocks, "momentum": 0.0, "shared": "none"} if name in BLOCKED else {}
    algorithm = make_algorithm(name, lr=lr, lr_decay=1.0, weight_decay=0.0, batch_size=BATCH, local_epochs=1, **options)
    judge = Judge(size.setting.epsilon)
    allowed = size.rounds
    if budget < math.inf:
        allowed = min(allowed, int(budget / algorithm.upload_d(algorithm.uplink.layout(p.model)) + 1e-9) + WINDOW - 1)
    tried = {"algorithm": name, "blocks": blocks, "lr": lr, "seed": seed}
    nowhere = {"floats_d": math.inf, "rounds": 0, "gradient_evaluations": 0}
    try:
        stopped = simulate(
            p.model,
            p.clients,
            algorithm,
            loss=p.loss,
            metrics=p.metrics,
            test=p.test,
            rounds=allowed,
            cohort=size.setting.cohort,
            seed=seed,
            callbacks=[judge],
            progress=False,
            workers=0,
        ).stopped
    except Diverged:
        return tried | nowhere | {"stopped": "diverged"}
    if judge.reached is None:
        return tried | nowhere | {"stopped": "stalled" if stopped == "callback" else stopped}
    row = judge.reached
    spent = {"floats_d": row["upload_d"], "rounds": row["round"], "gradient_evaluations": row["gradient_evaluations"]}
    return tried | spent | {"stopped": "target"}


@dataclass
class Measured:
    search: list[dict[str, Any]]  # every learning rate that was tried
    runs: list[dict[str, Any]]  # the chosen ones, with other seeds

    def floats(self, name: str, blocks: int) -> list[float]:
        return [run["floats_d"] for run in self.runs if (run["algorithm"], run["blocks"]) == (name, blocks)]


def points(size: Size) -> list[tuple[str, int]]:
    """What is measured: the blocked algorithms for each N, the others once."""
    return [(name, n) for name in ALGORITHMS for n in (size.blocks if name in BLOCKED else (1,))]


def measure(size: Size, say: Callable[[str], None], kept: Points | None = None) -> Measured:
    """Everything; what `kept` has is not measured again."""
    p = size.problem()
    kept = kept or Points()

    def point(name: str, n: int, lr: float, seed: int, budget: float) -> dict[str, Any]:
        asked = {"algorithm": name, "blocks": n, "lr": lr, "seed": seed, "budget": budget, "rounds": size.rounds}
        fixed = {"dim": size.dim, "batch": BATCH, "window": WINDOW, "patience": PATIENCE, **asdict(size.setting)}
        return kept.once({"setting": fixed, **asked}, lambda: floats_to(size, p, name, n, lr, seed, budget))

    measured = Measured([], [])
    wanted = points(size)
    for k, (name, n) in enumerate(wanted):
        best: dict[str, Any] | None = None
        for rate in size.rates:
            lr = rate / size.setting.beta
            # A rate that has spent as much as the best one needed is out of the race.
            budget = best["floats_d"] if best else math.inf
            tried = point(name, n, lr, 0, budget)
            measured.search.append(tried)
            if best is None or tried["floats_d"] < best["floats_d"]:
                best = tried if tried["stopped"] == "target" else best
        if best is None:
            say(f"{name}, N = {n}: no learning rate reached ε ({k + 1} of {len(wanted)})")
            continue
        # A rate may have got there by luck: one that fails for another seed gives way to the next smaller one.
        for lr in (rate / size.setting.beta for rate in size.rates if rate / size.setting.beta <= best["lr"]):
            runs = [point(name, n, lr, 1 + s, math.inf) for s in range(size.seeds)]
            if all(run["stopped"] == "target" for run in runs):
                break
        measured.runs += runs
        mean = statistics.fmean(run["floats_d"] for run in runs)
        say(f"{name}, N = {n}: {mean:.4g} d to ε at lr {lr:g} ({k + 1} of {len(wanted)})")
    return measured


def compare(size: Size, measured: Measured) -> list[dict[str, Any]]:
    """For each point: measured and theorem, absolute and as a ratio to N = 1 of the same algorithm."""
    rows: list[dict[str, Any]] = []
    for name, n in points(size):
        theorem = order(name, replace(size.setting, blocks=n)).floats
        first = order(name, replace(size.setting, blocks=1)).floats
        found, base = _mean(measured.floats(name, n)), _mean(measured.floats(name, 1))
        rows.append(
            {
                "algorithm": name,
                "blocks": n,
                "measured_d": found,
                "measured_sd": _deviation(measured.floats(name, n)),
                "theorem_d": theorem,
                "measured_ratio": found / base if base and base < float("inf") else float("nan"),
                "theorem_ratio": theorem / first,
            }
        )
    return rows


@dataclass(frozen=True)
class Fit:
    """The theorem's form a + b/N with constants of its own: what does not change with N, and what falls as 1/N."""

    steady: float
    falling: float
    off: float  # the largest factor between it and what was measured

    def at(self, blocks: int) -> float:
        return self.steady + self.falling / blocks


def fit(rows: Sequence[Mapping[str, Any]], name: str) -> Fit | None:
    """Least squares of the relative error, with constants that are not negative."""
    own = [(row["blocks"], row["measured_d"]) for row in rows if row["algorithm"] == name]
    if len(own) < 3 or not all(math.isfinite(y) for _, y in own):
        return None
    basis = np.array([[1 / y, 1 / (n * y)] for n, y in own])
    found = np.linalg.lstsq(basis, np.ones(len(own)), rcond=None)[0]
    if found.min() < 0:  # then the other part alone
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = basis[:, kept].sum() / np.square(basis[:, kept]).sum()
    relative = basis @ found
    return Fit(float(found[0]), float(found[1]), float(max(relative.max(), 1 / relative.min())))


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For each algorithm with blocks: do measured and theorem agree on what N does?"""
    out = {}
    for name in BLOCKED:
        own = [row for row in rows if row["algorithm"] == name and row["blocks"] > 1]
        factors = {row["blocks"]: row["measured_ratio"] / row["theorem_ratio"] for row in own}
        missing = [n for n, factor in factors.items() if not 0 < factor < float("inf")]
        if missing:
            out[name] = f"not comparable: ε was not reached at N = {', '.join(map(str, missing))}"
            continue
        worst = max(factors, key=lambda n: max(factors[n], 1 / factors[n]))
        size = max(factors[worst], 1 / factors[worst])
        words = "agree" if size <= AGREE else "do not agree"
        out[name] = (
            f"measured and theorem {words} within a factor of {AGREE:g}; the worst is N = {worst}, where the measured "
            f"ratio to N = 1 is {factors[worst]:.2f} times the theorem's"
        )
        form = fit(rows, name)
        if form is not None:
            out[name] += (
                f". Its form a + b/N with constants of its own, a = {form.steady:.3g} d and b = {form.falling:.3g} d, "
                f"is within a factor of {form.off:.2f} of what was measured"
            )
    return out


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("inf")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and max(values) < float("inf") else float("nan")
