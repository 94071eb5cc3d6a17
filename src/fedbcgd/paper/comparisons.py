"""The comparisons that claims consist of: who ends better, who reaches the target sooner, who is ahead early on."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from fedbcgd.paper.claims import Observation, Test, labelled, over_panels
from fedbcgd.paper.results import PanelResult, format_final, format_floats, format_number

Compare = Callable[[PanelResult, str, str], int]  # 1: the first contender is ahead, −1: the second, 0: level
AHEAD, NOT_BEHIND, NOT_AHEAD = {1}, {0, 1}, {-1, 0}


def ends_better(contender: str, others: Sequence[str]) -> Test:
    """Test that a contender ends better than each of the others, by more than the spread of the seeds."""
    return _against_each(contender, others, compare_finals, AHEAD, format_final)


def ends_no_worse(contender: str, others: Sequence[str]) -> Test:
    """Test that none of the others ends better, by more than the spread of the seeds."""
    return _against_each(contender, others, compare_finals, NOT_BEHIND, format_final)


def ends_no_better(contender: str, others: Sequence[str]) -> Test:
    """Test that a contender ends better than none of the others, by more than the spread of the seeds."""
    return _against_each(contender, others, compare_finals, NOT_AHEAD, format_final)


def reaches_sooner(contender: str, others: Sequence[str]) -> Test:
    """Test that a contender reaches the target with less upload than each of the others, by more than one evaluation."""
    return _against_each(contender, others, compare_floats, AHEAD, format_floats)


def times_sooner(contender: str, other: str, factor: float, strictly: bool = False) -> Test:
    """Test that a contender reaches the target this many times sooner, where floats are rounded to whole d.

    With `strictly` it must be more than this many times, and nothing is rounded.
    """

    def compare(r: PanelResult, first: str, second: str) -> int:
        own, others = r.mean_floats_to_target(first), r.mean_floats_to_target(second)
        sooner = own * factor < others if strictly else (own - 0.5) * factor <= others + 0.5
        return 1 if math.isfinite(own) and sooner else -1

    return _against_each(contender, [other], compare, AHEAD, format_floats)


def ahead_early(contender: str, other: str, share: float = 0.25) -> Test:
    """Test that a contender is ahead of another when this share of the budget is spent."""

    def observe(r: PanelResult, others: Sequence[str]) -> Observation:
        upload = share * r.panel.budget
        own, its = (at_upload(r, key, upload) for key in (contender, other))
        digits = _digits(r, [own, its])
        texts = labelled(r, (contender, other), lambda r, key: format_number(at_upload(r, key, upload), digits))
        decided = not (r.at_chance(own) and r.at_chance(its))
        confirmed = (own > its if r.higher_is_better else own < its,) if decided else ()
        return Observation(confirmed, f"{r.panel.title} at {upload:g}d: {', '.join(texts.values())}")

    return over_panels((contender, other), (), observe)


def at_upload(result: PanelResult, key: str, upload: float) -> float:
    """Return the mean over seeds of a contender's last evaluation within this upload, in d."""
    values = []
    for outcome in result.outcomes[key].values():
        inside = [row for row in outcome.rows if row["upload_d"] <= upload + 1e-9] or outcome.rows[:1]
        values.append(result.unit * inside[-1][result.metric] if inside else math.nan)
    return sum(values) / len(values)


def ends_best(keys: Sequence[str], best: Sequence[str]) -> Test:
    """Test that one of `best` ends better than all contenders that are not in it, by more than the spread of the seeds."""
    rest = [key for key in keys if key not in best]

    def observe(r: PanelResult, others: Sequence[str]) -> Observation:
        confirmed = any(all(r.beats(key, other) for other in rest) for key in best)
        return Observation((confirmed,), f"{r.panel.title}: {', '.join(labelled(r, keys, format_final).values())}")

    return over_panels(keys, (), observe)


def each_sooner(keys: Sequence[str]) -> Test:
    """Test that each contender reaches the target with less upload than the one before, by more than one evaluation."""

    def observe(r: PanelResult, others: Sequence[str]) -> Observation:
        steps = [(a, b, compare_floats(r, b, a)) for a, b in pairwise(keys)]
        target = format_number(math.nan if r.target is None else r.target, r.digits)
        text = f"{r.panel.title}, to {target}: {', '.join(labelled(r, keys, format_floats).values())}"
        level = [f"{r.title(a)} and {r.title(b)}" for a, b, sign in steps if sign == 0]
        text += f" (level: {', '.join(level)})" if level else ""
        return Observation((all(sign == 1 for _, _, sign in steps),), text, len(level))

    return over_panels(keys, (), observe)


def compare_finals(r: PanelResult, first: str, second: str) -> int:
    """Compare final values: 1 if `first` ended better, −1 if `second` did or `first` diverged, 0 if they are level."""
    if r.beats(first, second):
        return 1
    return -1 if r.beats(second, first) or math.isnan(r.final(first)[0]) else 0


def compare_floats(r: PanelResult, first: str, second: str) -> int:
    """Compare floats to the target: 1 if `first` was sooner, −1 if it was later or never reached it, 0 if level.

    Two contenders are level if their uploads differ by no more than the upload between two evaluations.
    """
    own, others = r.mean_floats_to_target(first), r.mean_floats_to_target(second)
    if not math.isfinite(own):
        return -1
    if abs(others - own) <= max(r.resolution(first), r.resolution(second)) * (1 + 1e-9):
        return 0
    return 1 if own < others else -1


def _against_each(
    contender: str, others: Sequence[str], compare: Compare, expected: Collection[int], number: Callable[..., str]
) -> Test:
    """Return a test that compares a contender with each of the others."""

    def observe(r: PanelResult, available: Sequence[str]) -> Observation:
        keys = (contender, *available)
        signs = [compare(r, contender, other) for other in available]
        texts = labelled(r, keys, _with_enough_digits(r, keys, number))
        confirmed = [sign in expected for sign in signs]
        marks = ["✓" if ok else "level" if sign == 0 else "✗" for sign, ok in zip(signs, confirmed, strict=True)]
        against = ", ".join(f"{texts[other]} {mark}" for other, mark in zip(available, marks, strict=True))
        text = f"{r.panel.title}: {texts[contender]} against {against}"
        return Observation(tuple(confirmed), text, marks.count("level"))

    has = PanelResult.has_final if number is format_final else PanelResult.has
    return over_panels((contender,), others, observe, counted=True, available_in=has)


def _with_enough_digits(
    r: PanelResult, keys: Sequence[str], number: Callable[..., str]
) -> Callable[[PanelResult, str], str]:
    """Return `number` with enough digits to tell the first contender's value from the others'."""
    final = number is format_final
    values = [r.final(key)[0] if final else r.mean_floats_to_target(key) for key in keys]
    digits = _digits(r, values, r.digits if final else 1)
    return lambda result, key: number(result, key, digits)


def _digits(r: PanelResult, values: Sequence[float], usual: int | None = None) -> int:
    """Return how many digits tell the first value from the others: at least the usual number, at most three more."""
    first, *rest = values
    usual = r.digits if usual is None else usual
    for digits in range(usual, usual + 3):
        if all(math.isclose(v, first) or format_number(v, digits) != format_number(first, digits) for v in rest):
            return digits
    return usual + 3
