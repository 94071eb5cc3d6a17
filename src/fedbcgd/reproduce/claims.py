"""Verdicts on the claims of Section 5, from what was measured and nothing else."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from fedbcgd.reproduce.results import PanelResult, Results, shown, shown_final, shown_floats
from fedbcgd.reproduce.spec import FAILS, HOLDS, NOT_RUN, ONCE, PARTLY, UNTESTABLE, Claim, Item, Scale, Verdict

Test = Callable[[Results], Verdict]
Compared = Callable[[PanelResult, str, str], bool]


def judge(item: Item, claim: Claim, results: Results, scale: Scale) -> Verdict:
    """The verdict at this scale. Where a claim cannot be tested, what was measured is told all the same."""
    spoken_of = {key: result for key, result in results.items() if claim.panels in key}
    verdict = claim.test(spoken_of)
    missing = [result.panel.title for result in spoken_of.values() if not result.contenders]
    if verdict.status != NOT_RUN and missing:
        status = PARTLY if verdict.status == HOLDS else verdict.status
        verdict = Verdict(status, f"{verdict.evidence} Not run: {'; '.join(missing)}.", verdict.once)
    if scale in claim.scales:
        return Verdict(verdict.status + ONCE, verdict.evidence, True) if verdict.once else verdict
    seeds = "with one seed" if verdict.once else "all the same"
    return Verdict(UNTESTABLE, f"Measured {seeds}: {verdict.evidence}" if verdict.evidence else "", verdict.once)


def ends_better(one: str, others: Sequence[str]) -> Test:
    """`one` ends better than each of the others, by more than the spread of the seeds."""
    return _each(one, others, lambda r, a, b: r.beats(a, b), _with_finals)


def ends_no_worse(one: str, others: Sequence[str]) -> Test:
    """`one` does not end worse than any of the others, by more than the spread of the seeds."""
    return _each(one, others, lambda r, a, b: not r.beats(b, a), _with_finals)


def ends_no_better(one: str, others: Sequence[str]) -> Test:
    return _each(one, others, lambda r, a, b: not r.beats(a, b), _with_finals)


def reaches_sooner(one: str, others: Sequence[str], factor: float = 1.0) -> Test:
    """`one` reaches the target with less upload than each of the others, `factor` times less where that is claimed."""

    def sooner(result: PanelResult, a: str, b: str) -> bool:
        mine, theirs = result.to_target(a), result.to_target(b)
        return math.isfinite(mine) and (mine * factor < theirs if factor == 1 else mine * factor <= theirs)

    return _each(one, others, sooner, _with_floats)


def early(one: str, other: str, share: float = 0.25) -> Test:
    """`one` is ahead of `other` when this share of the budget is spent."""

    def look(r: PanelResult) -> tuple[bool, str]:
        upload = share * r.panel.budget
        a, b = (at_upload(r, key, upload) for key in (one, other))
        names = [r.panel.contender(key).title for key in (one, other)]
        return a > b if r.higher else a < b, f"{r.panel.title} at {upload:g}d: {names[0]} {a:.1f}, {names[1]} {b:.1f}"

    return _panel_by_panel((one, other), look)


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

    def look(r: PanelResult) -> tuple[bool, str]:
        good = any(all(r.beats(one, other) for other in rest) for one in best)
        return good, f"{r.panel.title}: {_told(r, keys, shown_final)}"

    return _panel_by_panel(keys, look)


def ever_sooner(keys: Sequence[str]) -> Test:
    """From each contender to the next, the upload to the target shrinks."""

    def look(r: PanelResult) -> tuple[bool, str]:
        floats = [r.to_target(key) for key in keys]
        good = math.isfinite(floats[-1]) and all(b < a for a, b in pairwise(floats))
        return good, f"{r.panel.title}, to {shown(r.target or math.nan)}: {_told(r, keys, shown_floats)}"

    return _panel_by_panel(keys, look)


def _panel_by_panel(keys: Sequence[str], look: Callable[[PanelResult], tuple[bool, str]]) -> Test:
    """Whether it is so in every panel that has all these contenders, and what is seen there."""

    def test(results: Results) -> Verdict:
        seen = [r for r in results.values() if r.has(*keys)]
        if not seen:
            return Verdict(NOT_RUN, "")
        looks = [look(r) for r in seen]
        status = HOLDS if all(good for good, _ in looks) else FAILS
        return Verdict(status, _text([line for _, line in looks]), _once(seen))

    return test


def _told(result: PanelResult, keys: Sequence[str], write: Callable[[PanelResult, str], str]) -> str:
    return ", ".join(f"{result.panel.contender(key).title}: {write(result, key)}" for key in keys)


def every(*tests: Test) -> Test:
    """All of them."""

    def test(results: Results) -> Verdict:
        verdicts = [t(results) for t in tests]
        ran = [v for v in verdicts if v.status != NOT_RUN]
        if not ran:
            return Verdict(NOT_RUN, "")
        whole = len(ran) == len(verdicts) and all(v.status != PARTLY for v in ran)
        held = HOLDS if whole else PARTLY
        status = FAILS if any(v.status == FAILS for v in ran) else held
        return Verdict(status, " ".join(v.evidence for v in ran), all(v.once for v in ran))

    return test


def _each(one: str, others: Sequence[str], better: Compared, told: Callable[[PanelResult, str], str]) -> Test:
    def test(results: Results) -> Verdict:
        seen = [r for r in results.values() if r.has(one) and any(r.has(other) for other in others)]
        if not seen:
            return Verdict(NOT_RUN, "")
        good = total = 0
        lines, missing = [], []
        for r in seen:
            against = [other for other in others if r.has(other)]
            absent = [c.title for c in r.panel.contenders if c.key in others and c.key not in against]
            missing += [f"{r.panel.title}: {', '.join(absent)}"] if absent else []
            won = [better(r, one, other) for other in against]
            good, total = good + sum(won), total + len(won)
            marked = ", ".join(f"{told(r, other)} {'✓' if w else '✗'}" for other, w in zip(against, won, strict=True))
            lines.append(f"{r.panel.title}: {told(r, one)} against {marked}")
        text = f"In {good} of {total} comparisons. {_text(lines)}"
        if missing:
            text += f" Not run: {'; '.join(missing)}."
        held = PARTLY if missing else HOLDS
        return Verdict(held if good == total else FAILS, text, _once(seen))

    return test


def _with_finals(result: PanelResult, key: str) -> str:
    return f"{result.panel.contender(key).title} {shown_final(result, key)}"


def _with_floats(result: PanelResult, key: str) -> str:
    return f"{result.panel.contender(key).title} {shown_floats(result, key)}"


def _text(lines: Sequence[str]) -> str:
    return "; ".join(lines) + "."


def _once(seen: Sequence[PanelResult]) -> bool:
    return {len(by_seed) for r in seen for by_seed in r.outcomes.values()} == {1}
