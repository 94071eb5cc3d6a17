"""Verdicts on the claims of Section 5, from what was measured and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedbcgd.paper.results import PanelResult, Results
from fedbcgd.paper.spec import (
    FAILS,
    HOLDS,
    NOT_RUN,
    ONCE,
    PARTLY,
    UNTESTABLE,
    Claim,
    Item,
    Scale,
    Verdict,
    left_out,
)

Test = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Seen:
    """What a test saw in a panel."""

    marks: tuple[bool, ...]  # of each comparison, whether it came out as claimed; none where nothing can be decided
    text: str
    level: int = 0  # comparisons without a winner


Look = Callable[[PanelResult, Sequence[str]], Seen]


def judge(item: Item, claim: Claim, results: Results, scale: Scale) -> Verdict:
    """The verdict at this scale. Where a claim cannot be tested, what was measured is told all the same."""
    spoken_of = {key: result for key, result in results.items() if claim.panels in key}
    verdict = claim.test(spoken_of)
    if verdict.status == NOT_RUN and scale in claim.scales:
        return verdict
    absent = left_out(item, [result.panel for result in results.values()]) if results else []
    missing = [*verdict.missing, *(panel.title for panel in absent if claim.panels in panel.key)]
    evidence = verdict.evidence
    if missing and evidence:
        evidence += f" Not run: {'; '.join(missing)}."
    if scale in claim.scales and verdict.status != UNTESTABLE:
        status = PARTLY if missing and verdict.status == HOLDS else verdict.status
        return Verdict(status + ONCE if verdict.once else status, evidence, verdict.once)
    if verdict.measured and evidence:
        evidence = f"Measured {'with one seed' if verdict.once else 'all the same'}: {evidence}"
    return Verdict(UNTESTABLE, evidence, verdict.once)


def every(*tests: Test) -> Test:
    """All of them."""

    def test(results: Results) -> Verdict:
        verdicts = [t(results) for t in tests]
        ran = [v for v in verdicts if v.status != NOT_RUN]
        missing = tuple(dict.fromkeys(m for v in verdicts for m in v.missing))
        if not ran:
            return Verdict(NOT_RUN, "", missing=missing)
        statuses = {v.status for v in verdicts}
        if FAILS in statuses:
            status = FAILS
        elif {v.status for v in ran} == {UNTESTABLE}:
            status = UNTESTABLE
        else:
            status = HOLDS if statuses == {HOLDS} else PARTLY
        return Verdict(status, " ".join(v.evidence for v in ran), any(v.once for v in ran), missing)

    return test


def never_measured(why: str) -> Test:
    """What nothing here looks at, whatever the scale."""
    return lambda results: Verdict(UNTESTABLE, why, measured=False)


def on_train_loss(test: Test) -> Test:
    """The same, of the loss in training instead of the panel's metric."""
    return lambda results: test({key: replace(r, measured="train_loss") for key, r in results.items()})


def over_panels(needed: Sequence[str], others: Sequence[str], look: Look, counted: bool = False) -> Test:
    """Whether it is so in every panel. `look` is asked where all that are needed were run, and one of the others; it gets
    those of the others that were. What was not run is named, and a panel near chance decides nothing."""

    def test(results: Results) -> Verdict:
        seen: list[tuple[PanelResult, list[str], Seen]] = []
        missing = []
        for r in results.values():
            there = [key for key in others if r.has(key)]
            absent = [key for key in (*needed, *others) if not r.has(key)]
            if absent:
                some = len(absent) < len(needed) + len(others)
                missing.append(f"{r.panel.title}: {', '.join(map(r.title, absent))}" if some else r.panel.title)
            if r.has(*needed) and (there or not others):
                compared = [*needed, *there]
                seen.append((r, compared, _at_chance(r, compared, look(r, there))))
        return _verdict(seen, tuple(missing), counted)

    return test


def _at_chance(r: PanelResult, compared: Sequence[str], seen: Seen) -> Seen:
    """What was seen, without marks where it decides nothing; searches that found nothing are told."""
    if r.near_chance(compared) or not seen.marks:
        return Seen((), f"{seen.text} (near chance, which is {r.chance:g} %: decides nothing)")
    lost = [r.title(key) for key in compared if r.searched_in_vain(key)]
    told = f" (no learning rate tried took {', '.join(lost)} away from chance)" if lost else ""
    return replace(seen, text=seen.text + told)


def _verdict(
    seen: Sequence[tuple[PanelResult, Sequence[str], Seen]], missing: tuple[str, ...], counted: bool
) -> Verdict:
    if not seen:
        return Verdict(NOT_RUN, "", missing=missing)
    marks = [mark for _, _, panel in seen for mark in panel.marks]
    level = sum(panel.level for _, _, panel in seen)
    text = "; ".join(panel.text for _, _, panel in seen) + "."
    if counted and marks:
        tied = f", {level} level" if level else ""
        text = f"In {sum(marks)} of {len(marks)} comparisons{tied}. {text}"
    whole = not missing and all(panel.marks for _, _, panel in seen)
    status = UNTESTABLE if not marks else FAILS if not all(marks) else HOLDS if whole else PARTLY
    once = any(len(r.outcomes[key]) < 2 for r, compared, _ in seen for key in compared)
    return Verdict(status, text, once, missing)


def told(result: PanelResult, keys: Sequence[str], write: Callable[[PanelResult, str], str]) -> Mapping[str, str]:
    """The title and the number of each."""
    return {key: f"{result.title(key)} {write(result, key)}" for key in keys}
