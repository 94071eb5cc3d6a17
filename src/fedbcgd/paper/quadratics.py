"""Floats until an error of ε, measured on quadratics whose β, μ, σ and G are known, compared with the theorems' orders.

The theorems hold for *some* learning rate, so each algorithm gets, for each N, the best of several rates, found with seed
0. Reported are other seeds at that rate or, if one of them does not reach ε, at the next smaller rate with which all do.
The floats are those of the ledger at the first of ten rounds whose mean f(x) − f* is at most ε: a single lucky round does
not count.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.engine.loop import RoundInfo, Row
from fedbcgd.errors import Diverged, UserError
from fedbcgd.models.problems import Problem, quadratics
from fedbcgd.paper.measurement_cache import MeasurementCache
from fedbcgd.paper.theory import Setting, order
from fedbcgd.simulation import simulate

ALGORITHMS = ("fedbcgd+", "fedbcgd", "fedavg", "scaffold")
BLOCKED = ("fedbcgd+", "fedbcgd")
RATES = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)  # in 1/β
BATCH = 2
WINDOW = 10  # rounds over which the mean gap must be at most ε
PATIENCE = 100  # rounds over which gaps are averaged to see whether they still fall
AGREE = 2.0  # measured and theorem agree on N if their ratios to N = 1 differ by at most this factor
SETTING = Setting(beta=100, mu=1, sigma=1, G=1, clients=16, cohort=8, blocks=1, steps=4, epsilon=1e-3)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    setting: Setting = SETTING
    blocks: tuple[int, ...] = (1, 2, 4, 8)
    dim: int = 32
    rates: tuple[float, ...] = RATES
    seeds: int = 3
    rounds: int = 3000  # of a run, at most

    def __post_init__(self) -> None:
        if self.blocks[0] != 1 or list(self.blocks) != sorted(set(self.blocks)):
            raise UserError(f"blocks: expected increasing numbers from 1, the base of all ratios; got {self.blocks}")
        largest = min(self.dim, self.setting.cohort)
        if self.blocks[-1] > largest:
            raise UserError(
                f"blocks: expected at most {largest}, so that each has a coordinate and a client; got {self.blocks[-1]}"
            )

    def problem(self) -> Problem:
        """Return the quadratics. They are the same for every seed: a seed changes only the draws of a run."""
        s = self.setting
        sigma = s.sigma * BATCH**0.5  # of an example, so that a minibatch has σ
        # conditioned=True: f itself must be badly conditioned, since β/μ in the theorems is that of the worst f.
        return quadratics(s.clients, self.dim, s.beta, s.mu, sigma, s.G, s.steps * BATCH, conditioned=True)


class StopAtEpsilon:
    """A callback that ends a run once it is at ε, or once its gap has stopped falling.

    Attributes:
        reached: the first row of `WINDOW` rounds whose mean gap is at most ε; None if there is none.
    """

    def __init__(self, epsilon: float):
        self.epsilon = epsilon
        self.rows: list[Row] = []
        self.reached: Row | None = None
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


def floats_to_epsilon(
    size: Size, problem: Problem, name: str, blocks: int, lr: float, seed: int, budget: float
) -> dict[str, Any]:
    """Run an algorithm until ε.

    Args:
        size: setting and limits.
        problem: what `size.problem()` returned.
        name: name of the algorithm.
        blocks: N; only for algorithms with blocks.
        lr: learning rate.
        seed: seed of the run.
        budget: upload in d after which to give up.

    Returns:
        The arguments and `floats_d`, `rounds`, `gradient_evaluations` and `stopped`. `floats_d` is infinite if ε was not
        reached.
    """
    options: dict[str, Any] = {"blocks": blocks, "momentum": 0.0, "shared": "none"} if name in BLOCKED else {}
    algorithm = make_algorithm(name, lr=lr, lr_decay=1.0, weight_decay=0.0, batch_size=BATCH, local_epochs=1, **options)
    rounds = size.rounds
    if budget < math.inf:
        upload = algorithm.upload_d(algorithm.uplink.layout(problem.model))
        rounds = min(rounds, int(budget / upload + 1e-9) + WINDOW - 1)
    stop = StopAtEpsilon(size.setting.epsilon)
    point = {"algorithm": name, "blocks": blocks, "lr": lr, "seed": seed}
    not_reached = {"floats_d": math.inf, "rounds": 0, "gradient_evaluations": 0}
    try:
        stopped = simulate(
            problem.model,
            problem.clients,
            algorithm,
            loss=problem.loss,
            metrics=problem.metrics,
            test=problem.test,
            rounds=rounds,
            cohort=size.setting.cohort,
            seed=seed,
            callbacks=[stop],
            progress=False,
            workers=0,
        ).stopped
    except Diverged:
        return point | not_reached | {"stopped": "diverged"}
    if stop.reached is None:
        return point | not_reached | {"stopped": "stalled" if stopped == "callback" else stopped}
    row = stop.reached
    spent = {"floats_d": row["upload_d"], "rounds": row["round"], "gradient_evaluations": row["gradient_evaluations"]}
    return point | spent | {"stopped": "target"}


@dataclass
class Measurements:
    """All runs on quadratics, as returned by `floats_to_epsilon`."""

    search: list[dict[str, Any]]  # every learning rate tried, with seed 0
    runs: list[dict[str, Any]]  # the chosen rates, with other seeds

    def floats(self, name: str, blocks: int) -> list[float]:
        """Return the floats until ε of an algorithm with N blocks, for each seed."""
        return [run["floats_d"] for run in self.runs if (run["algorithm"], run["blocks"]) == (name, blocks)]


def measured_points(size: Size) -> list[tuple[str, int]]:
    """Return the pairs of algorithm and N that are measured: each N for those with blocks, N = 1 for the others."""
    return [(name, n) for name in ALGORITHMS for n in (size.blocks if name in BLOCKED else (1,))]


def measure(size: Size, log: Callable[[str], None], cache: MeasurementCache | None = None) -> Measurements:
    """Measure the floats until ε of every algorithm and N.

    Args:
        size: how much to measure.
        log: called with a line about each algorithm and N.
        cache: measurements that need not be repeated.
    """
    problem = size.problem()
    cache = cache or MeasurementCache()
    fixed = {"dim": size.dim, "batch": BATCH, "window": WINDOW, "patience": PATIENCE, **asdict(size.setting)}

    def point(name: str, n: int, lr: float, seed: int, budget: float) -> dict[str, Any]:
        own = {"algorithm": name, "blocks": n, "lr": lr, "seed": seed, "budget": budget, "rounds": size.rounds}
        return cache.get({"setting": fixed, **own}, lambda: floats_to_epsilon(size, problem, name, n, lr, seed, budget))

    measured = Measurements([], [])
    points = measured_points(size)
    rates = [rate / size.setting.beta for rate in size.rates]
    for k, (name, n) in enumerate(points):
        best: dict[str, Any] | None = None
        for lr in rates:
            # A rate that has spent as much as the best one needed cannot win.
            trial = point(name, n, lr, 0, best["floats_d"] if best else math.inf)
            measured.search.append(trial)
            if trial["stopped"] == "target" and (best is None or trial["floats_d"] < best["floats_d"]):
                best = trial
        if best is None:
            log(f"{name}, N = {n}: no learning rate reached ε ({k + 1} of {len(points)})")
            continue
        # Seed 0 may have been lucky: a rate that fails for another seed is replaced by the next smaller one.
        for lr in (rate for rate in rates if rate <= best["lr"]):
            runs = [point(name, n, lr, 1 + s, math.inf) for s in range(size.seeds)]
            if all(run["stopped"] == "target" for run in runs):
                break
        measured.runs += runs
        mean = statistics.fmean(run["floats_d"] for run in runs)
        log(f"{name}, N = {n}: {mean:.4g} d to ε at lr {lr:g} ({k + 1} of {len(points)})")
    return measured


def compare(size: Size, measured: Measurements) -> list[dict[str, Any]]:
    """Return a row for each algorithm and N: measured and theorem, in d and as a ratio to N = 1 of the algorithm."""
    rows: list[dict[str, Any]] = []
    for name, n in measured_points(size):
        theorem = order(name, replace(size.setting, blocks=n)).floats
        first = order(name, replace(size.setting, blocks=1)).floats
        floats, base = _mean(measured.floats(name, n)), _mean(measured.floats(name, 1))
        rows.append(
            {
                "algorithm": name,
                "blocks": n,
                "measured_d": floats,
                "measured_sd": _deviation(measured.floats(name, n)),
                "theorem_d": theorem,
                "measured_ratio": floats / base if base and base < math.inf else math.nan,
                "theorem_ratio": theorem / first,
            }
        )
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return for each algorithm with blocks whether measured and theorem agree on the effect of N, in words."""
    texts = {}
    for name in BLOCKED:
        own = [row for row in rows if row["algorithm"] == name and row["blocks"] > 1]
        factors = {row["blocks"]: row["measured_ratio"] / row["theorem_ratio"] for row in own}
        missing = [n for n, factor in factors.items() if not 0 < factor < math.inf]
        if missing:
            texts[name] = f"not comparable: ε was not reached at N = {', '.join(map(str, missing))}"
            continue
        worst = max(factors, key=lambda n: max(factors[n], 1 / factors[n]))
        size = max(factors[worst], 1 / factors[worst])
        texts[name] = (
            f"measured and theorem {'agree' if size <= AGREE else 'do not agree'} within a factor of {AGREE:g}; the worst "
            f"is N = {worst}, where the measured ratio to N = 1 is {factors[worst]:.2f} times the theorem's"
        )
    return texts


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.inf


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and max(values) < math.inf else math.nan
