"""The search for a contender's hyper-parameters on held-out data: what is tried, for how long, and which are continued.

Either all points of a grid are trained equally long, or the search is by successive halving (`Halving`). A trial is then
one run that is extended from rung to rung, so that nothing is computed twice and an interrupted search can be resumed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.engine.loop import Row
from fedbcgd.engine.run_folder import MAX_READ_BYTES, RunFolder, read_rows
from fedbcgd.errors import UserError
from fedbcgd.files import read_regular
from fedbcgd.paper import packs, plan
from fedbcgd.paper.measures import last_share
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.results import Trial
from fedbcgd.paper.spec import Contender, Panel
from fedbcgd.rng import stream
from fedbcgd.runs import config as configuration
from fedbcgd.runs import folder as run_folder
from fedbcgd.runs.batch import PlannedRun
from fedbcgd.runs.config import Config

SEED = 0  # the repetitions have seeds 1, 2, …
# The score of a trial is its mean over this share of its rounds, the last ones: without and with successive halving.
SCORED = {False: 0.1, True: 0.25}

Point = Mapping[str, float]


@dataclass(frozen=True)
class Rung:
    """A stage of the search, in which this many candidates are trained up to this round."""

    candidates: int
    rounds: int


@dataclass(frozen=True)
class Search:
    """The state of the search for a contender.

    Attributes:
        trials: what was tried in each finished rung, in order.
        due: the runs of the current rung that are not finished; empty if the search is finished.
        chosen: the winner; None: the search is not finished.
        folders: the folders of all finished runs; with halving, empty until the search is finished, since a trial may
            still be extended.
    """

    trials: tuple[Trial, ...] = ()
    due: tuple[PlannedRun, ...] = ()
    chosen: Point | None = None
    folders: frozenset[str] = frozenset()


def candidates(panel: Panel, contender: Contender) -> list[dict[str, float]]:
    """Return the option values that the search tries for a contender; empty if it takes those of another contender."""
    if contender.tuned_as is not None:
        return []
    grid = panel.effort.grid
    axes = [name for name in contender.grid if name not in contender.algorithm]
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*(grid[a] for a in axes))]
    most = len(points) if panel.effort.halving is None else panel.effort.halving.candidates
    return points if len(points) <= most else _draw(points, most)


def _draw(points: Sequence[dict[str, float]], count: int) -> list[dict[str, float]]:
    """Draw points so that every value of every option occurs about equally often, in the order of the grid."""
    left = [int(k) for k in stream(SEED, "search", len(points)).permutation(len(points))]
    used: Counter[tuple[str, float]] = Counter()
    drawn = []
    for _ in range(count):
        best = min(left, key=lambda k: sorted((used[item] for item in points[k].items()), reverse=True))
        left.remove(best)
        drawn.append(best)
        used.update(points[best].items())
    return [points[k] for k in sorted(drawn)]


def rungs(panel: Panel, contender: Contender) -> list[Rung]:
    """Return the stages of the search for a contender; empty if it needs no search."""
    left = len(candidates(panel, contender))
    if left < 2:
        return []
    whole = plan.count_rounds(panel, contender)
    halving = panel.effort.halving
    if halving is None:
        return [Rung(left, min(whole, max(panel.effort.min_rounds, math.ceil(panel.effort.share * whole))))]
    budget = halving.rounds / gradients(panel, contender)
    out: list[Rung] = []
    rounds, spent = 0, 0
    for number in range(1, halving.rungs + 1):
        more = max(1, math.floor((budget * number / halving.rungs - spent) / left + 1e-9))
        rounds, spent = min(whole, rounds + more), spent + more * left
        out.append(Rung(left, rounds))
        left = (left + 1) // 2
        if left < 2 or rounds == whole:
            break
    return out


def gradients(panel: Panel, contender: Contender) -> float:
    """Return a contender's gradient evaluations in a round as a multiple of those of plain SGD."""
    if contender.rounds_of is not None:  # as many minibatches as a cohort
        return 1.0
    rule = make_algorithm(**{**panel.local, **contender.algorithm}).local
    examples = plan.data_facts(panel).train // panel.data["clients"]
    nbytes = sum(p.nbytes for p in plan.network_shapes(panel).parameters())
    return rule.evaluations(examples, nbytes) / rule.steps(examples)


def trial(panel: Panel, contender: Contender, point: Point, rung: Rung, machine: Machine) -> PlannedRun:
    """Plan the run of a candidate up to the end of a rung, evaluated on held-out training data."""
    every = max(1, rung.rounds * 5 // (panel.effort.evaluations * 2))
    stop = {"rounds": rung.rounds, "evaluate_every": 1 if panel.effort.halving else every}
    text = ", ".join(f"{k} {v:g}" for k, v in point.items())
    label = f"search: {panel.title}, {contender.title}, {text}"
    extended = ("rounds",) if panel.effort.halving else ()
    if extended:
        label += f", to round {rung.rounds}"
    held_out = {"validation": panel.effort.validation}
    return plan.planned(panel, contender, point, SEED, stop, held_out, label, machine, extended)


def state(panel: Panel, contender: Contender, out: Path, machine: Machine) -> Search:
    """Read the state of the search for a contender from the runs in a folder, after unpacking those that are packed.

    The contender is one with a search of its own, not one that is tuned as another.
    """
    left: list[dict[str, float]] = candidates(panel, contender)
    stages = rungs(panel, contender)
    if not stages:
        return Search(chosen=left[0])
    packs.restore(out, (trial(panel, contender, point, stages[0], machine).folder for point in left))
    trials: list[Trial] = []
    folders: set[str] = set()
    for number, rung in enumerate(stages):
        planned = [trial(panel, contender, point, rung, machine) for point in left]
        reached = [_reached(p, rung.rounds, [r.rounds for r in stages[number:]], out / "runs") for p in planned]
        folders |= {p.folder for p, rows in zip(planned, reached, strict=True) if rows is not None}
        due = tuple(p for p, rows in zip(planned, reached, strict=True) if rows is None)
        if due:
            kept_folders = frozenset(folders) if panel.effort.halving is None else frozenset()
            return Search(tuple(trials), due, None, kept_folders)
        scores = [_score(rows, panel) for rows in reached if rows is not None]
        ranked = _rank(scores, panel.metric == "accuracy")
        most = stages[number + 1].candidates if number + 1 < len(stages) else 0
        kept = [k for k in ranked if not math.isnan(scores[k])][:most]
        last = len(kept) < 2
        trials += [
            Trial(contender.key, point, score, rung.rounds, last and k == ranked[0], number + 1)
            for k, (point, score) in enumerate(zip(left, scores, strict=True))
        ]
        if last:
            return Search(tuple(trials), (), left[ranked[0]], frozenset(folders))
        left = [left[k] for k in sorted(kept)]
    raise AssertionError("the last rung chooses")


def _reached(planned: PlannedRun, rounds: int, later: Sequence[int], runs: Path) -> list[Row] | None:
    """Return the evaluations of a trial up to a round.

    Args:
        planned: the trial, up to this round.
        rounds: the round.
        later: this round and the last rounds of the rungs that follow, since the trial may have been extended.
        runs: the folder of all runs.

    Returns:
        The evaluations; empty if the trial diverged before this round, None if it has not reached it yet.
    """
    folder = RunFolder(runs / planned.folder)
    config = configuration.complete(planned.config)
    for goal in later:
        extended = config.model_copy(update={"run": config.run.model_copy(update={"rounds": goal})})
        outcome = run_folder.finished(folder, extended)
        if outcome is not None:
            return [] if outcome.diverged and outcome.rounds <= rounds else _up_to(outcome.rows, rounds)
    rows = _rows_so_far(folder, config)  # its extension was begun
    return _up_to(rows, rounds) if rows and rows[-1]["round"] > rounds else None


def _rows_so_far(folder: RunFolder, config: Config) -> list[Row]:
    """Return the evaluations of an unfinished run; none if it is another run, or damaged."""
    try:
        if configuration.differences(run_folder.read_configuration(folder), config):
            return []
        return read_rows(read_regular(folder.metrics, MAX_READ_BYTES))[0]
    except (UserError, OSError):
        return []


def _up_to(rows: Sequence[Row], rounds: int) -> list[Row]:
    return [row for row in rows if row["round"] <= rounds]


def _score(rows: Sequence[Row], panel: Panel) -> float:
    """Return the score of a trial with these evaluations; NaN without any."""
    return last_share(rows, f"validation_{panel.metric}", SCORED[panel.effort.halving is not None])


def _rank(scores: Sequence[float], higher_is_better: bool) -> list[int]:
    """Return the indices from the best score to the worst, NaN (diverged) last; equal ones keep their order."""
    sign = -1.0 if higher_is_better else 1.0
    return sorted(range(len(scores)), key=lambda k: math.inf if math.isnan(scores[k]) else sign * scores[k])
