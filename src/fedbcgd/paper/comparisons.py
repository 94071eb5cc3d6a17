"""The comparisons that claims are made of: who ends better, who reaches the target sooner, who is ahead early on."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from fedbcgd.paper.claims import Seen, Test, over_panels, told
from fedbcgd.paper.results import PanelResult, shown, shown_final, shown_floats

Compared = Callable[[PanelResult, str, str], int]  # 1: the first is ahead, −1: the second, 0: level
AHEAD, NOT_BEHIND, NOT_AHEAD = {1}, {0, 1}, {-1, 0}


def ends_better(one: str, others: Sequence[str]) -> Test:
    """`one` ends better than each of the others, by more than the spread of the seeds."""
    return _each(one, others, ended, AHEAD, shown_final)


def ends_no_worse(one: str, others: Sequence[str]) -> Test:
    """`one` does not end worse than any of the others, by more than the spread of the seeds."""
    return _each(one, others, ended, NOT_BEHIND, shown_final)


def ends_no_better(one: str, others: Sequence[str]) -> Test:
    return _each(one, others, ended, NOT_AHEAD, shown_final)


def reaches_sooner(one: str, others: Sequence[str]) -> Test:
    """`one` reaches the target with less upload than each of the others, by more than one evaluation."""
    return _each(one, others, reached, AHEAD, shown_floats)


def times_sooner(one: str, other: str, factor: float) -> Test:
    """So many times sooner, as far as floats in whole d can tell."""

    def compare(r: PanelResult, a: str, b: str) -> int:
        mine, theirs = r.to_target(a), r.to_target(b)
        return 1 if math.isfinite(mine) and (mine - 0.5) * factor <= theirs + 0.5 else -1

    return _each(one, [other], compare, AHEAD, shown_floats)


def more_than_times_sooner(one: str, other: str, factor: float) -> Test:
    def compare(r: PanelResult, a: str, b: str) -> int:
        mine, theirs = r.to_target(a), r.to_target(b)
        return 1 if math.isfinite(mine) and mine * factor < theirs else -1

    return _each(one, [other], compare, AHEAD, shown_floats)


def early(one: str, other: str, share: float = 0.25) -> Test:
    """`one` is ahead of `other` when this share of the budget is spent."""

    def look(r: PanelResult, others: Sequence[str]) -> Seen:
        upload = share * r.panel.budget
        a, b = (at_upload(r, key, upload) for key in (one, other))
        digits = _digits(r, [a, b])
        text = f"{r.panel.title} at {upload:g}d: {r.title(one)} {shown(a, digits)}, {r.title(other)} {shown(b, digits)}"
        decided = not (r.at_chance(a) and r.at_chance(b))
        return Seen((a > b if r.higher else a < b,) if decided else (), text)

    return over_panels((one, other), (), look)


def at_upload(result: PanelResult, key: str, upload: float) -> float:
    """The mean over seeds of the last evaluation within so much upload."""
    values = []
    for outcome in result.outcomes[key].values():
        inside = [row for row in outcome.rows if row["upload_d"] <= upload + 1e-9] or outcome.rows[:1]
        values.append(result.unit * inside[-1][result.metric] if inside else math.nan)
    return sum(values) / len(values)


def best_ends(keys: Sequence[str], best: Sequence[str]) -> Test:
    """Of these contenders one of `best` ends better than all the others, by more than the spread of the seeds."""
    rest = [key for key in keys if key not in best]

    def look(r: PanelResult, others: Sequence[str]) -> Seen:
        good = any(all(r.beats(one, other) for other in rest) for one in best)
        return Seen((good,), f"{r.panel.title}: {', '.join(told(r, keys, shown_final).values())}")

    return over_panels(keys, (), look)


def ever_sooner(keys: Sequence[str]) -> Test:
    """From each contender to the next, the upload to the target shrinks by more than one evaluation."""

    def look(r: PanelResult, others: Sequence[str]) -> Seen:
        steps = [(a, b, reached(r, b, a)) for a, b in pairwise(keys)]
        text = f"{r.panel.title}, to {_target(r)}: {', '.join(told(r, keys, shown_floats).values())}"
        level = [f"{r.title(a)} and {r.title(b)}" for a, b, sign in steps if sign == 0]
        text += f" (level: {', '.join(level)})" if level else ""
        return Seen((all(sign == 1 for _, _, sign in steps),), text, len(level))

    return over_panels(keys, (), look)


def ended(r: PanelResult, a: str, b: str) -> int:
    if r.beats(a, b):
        return 1
    return -1 if r.beats(b, a) or math.isnan(r.final(a)[0]) else 0


def reached(r: PanelResult, a: str, b: str) -> int:
    """Who met the target sooner. A run is looked at only now and then, so uploads no further apart than the evaluations are
    level; what never got there is behind, also behind another that did not."""
    mine, theirs = r.to_target(a), r.to_target(b)
    if not math.isfinite(mine):
        return -1
    if abs(theirs - mine) <= max(r.resolution(a), r.resolution(b)) * (1 + 1e-9):
        return 0
    return 1 if mine < theirs else -1


def _each(
    one: str, others: Sequence[str], compare: Compared, wanted: Collection[int], write: Callable[..., str]
) -> Test:
    def look(r: PanelResult, there: Sequence[str]) -> Seen:
        signs = [compare(r, one, other) for other in there]
        texts = told(r, (one, *there), _writer(r, (one, *there), write))
        marks = [sign in wanted for sign in signs]
        words = ["✓" if mark else "level" if sign == 0 else "✗" for sign, mark in zip(signs, marks, strict=True)]
        against = ", ".join(f"{texts[other]} {word}" for other, word in zip(there, words, strict=True))
        return Seen(tuple(marks), f"{r.panel.title}: {texts[one]} against {against}", words.count("level"))

    return over_panels((one,), others, look, counted=True)


def _writer(r: PanelResult, keys: Sequence[str], write: Callable[..., str]) -> Callable[[PanelResult, str], str]:
    """With as many digits as it takes to tell numbers apart that are not the same."""
    values = [r.final(key)[0] if write is shown_final else r.to_target(key) for key in keys]
    usual = r.digits if write is shown_final else 1
    digits = _digits(r, values, usual)
    return lambda result, key: write(result, key, digits)


def _digits(r: PanelResult, values: Sequence[float], usual: int | None = None) -> int:
    """Of the first of the values against the others."""
    first, *rest = values
    usual = r.digits if usual is None else usual
    for digits in range(usual, usual + 3):
        if all(math.isclose(v, first) or shown(v, digits) != shown(first, digits) for v in rest):
            return digits
    return usual + 3


def _target(r: PanelResult) -> str:
    return shown(math.nan if r.target is None else r.target, r.digits)
