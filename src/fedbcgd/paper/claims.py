"""Verdicts on the claims of Section 5, from measured results alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedbcgd.paper.results import PanelResult, Results
from fedbcgd.paper.spec import (
    FAILS,
    HOLDS,
    NOT_RUN,
    ONE_SEED,
    PARTLY,
    UNTESTABLE,
    Claim,
    Item,
    Scale,
    Verdict,
    omitted_panels,
)

Test = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Observation:
    """The comparisons of a claim in one panel."""

    confirmed: tuple[bool, ...]  # for each comparison, whether it came out as claimed; empty: nothing is decided
    text: str
    level: int = 0  # how many comparisons have no winner


Observe = Callable[[PanelResult, Sequence[str]], Observation]


def judge(item: Item, claim: Claim, results: Results, scale: Scale) -> Verdict:
    """Test a claim at a scale.

    Args:
        item: the item that makes the claim.
        claim: the claim.
        results: the results of the item's panels.
        scale: the scale at which they were measured.

    Returns:
        The verdict. If the scale cannot test the claim, the verdict still has the measured numbers as evidence.
    """
    verdict = claim.test({key: result for key, result in results.items() if claim.panels in key})
    if verdict.status == NOT_RUN and scale in claim.scales:
        return verdict
    omitted = omitted_panels(item, [result.panel for result in results.values()]) if results else []
    missing = [*verdict.missing, *(panel.title for panel in omitted if claim.panels in panel.key)]
    evidence = verdict.evidence
    if missing and evidence:
        evidence += f" Not run: {'; '.join(missing)}."
    if scale in claim.scales and verdict.status != UNTESTABLE:
        status = PARTLY if missing and verdict.status == HOLDS else verdict.status
        return Verdict(status + ONE_SEED if verdict.one_seed else status, evidence, verdict.one_seed)
    if verdict.measured and evidence:
        evidence = f"Measured {'with one seed' if verdict.one_seed else 'all the same'}: {evidence}"
    return Verdict(UNTESTABLE, evidence, verdict.one_seed)


def all_of(*tests: Test) -> Test:
    """Return a test that holds if all these tests hold."""

    def test(results: Results) -> Verdict:
        verdicts = [t(results) for t in tests]
        ran = [v for v in verdicts if v.status != NOT_RUN]
        missing = tuple(dict.fromkeys(panel for v in verdicts for panel in v.missing))
        if not ran:
            return Verdict(NOT_RUN, "", missing=missing)
        statuses = {v.status for v in verdicts}
        if FAILS in statuses:
            status = FAILS
        elif {v.status for v in ran} == {UNTESTABLE}:
            status = UNTESTABLE
        else:
            status = HOLDS if statuses == {HOLDS} else PARTLY
        return Verdict(status, " ".join(v.evidence for v in ran), any(v.one_seed for v in ran), missing)

    return test


def never_measured(why: str) -> Test:
    """Return a test for a claim about something that is measured at no scale."""
    return lambda results: Verdict(UNTESTABLE, why, measured=False)


def on_train_loss(test: Test) -> Test:
    """Return the same test on the training loss instead of the panel's metric."""
    return lambda results: test({key: replace(r, other_metric="train_loss") for key, r in results.items()})


def over_panels(
    needed: Sequence[str],
    others: Sequence[str],
    observe: Observe,
    counted: bool = False,
    available_in: Callable[[PanelResult, str], bool] = PanelResult.has,
) -> Test:
    """Return a test that holds if a comparison comes out as claimed in every panel.

    The verdict names contenders that were not run. A panel whose values are near chance decides nothing.

    Args:
        needed: contenders that must have been run in a panel, or the panel is left out.
        others: further contenders; if there are any, at least one must have been run.
        observe: a function of the result of a panel and of those of `others` that were run; it makes the comparisons.
        counted: whether the evidence begins with the number of confirmed comparisons.
        available_in: returns whether the result of a panel has what the test compares of a contender.
    """

    def test(results: Results) -> Verdict:
        observed: list[tuple[PanelResult, list[str], Observation]] = []
        missing = []
        for r in results.values():
            available = [key for key in others if available_in(r, key)]
            absent = [key for key in (*needed, *others) if not available_in(r, key)]
            if absent:
                some = len(absent) < len(needed) + len(others)
                missing.append(f"{r.panel.title}: {', '.join(map(r.title, absent))}" if some else r.panel.title)
            if not set(needed) & set(absent) and (available or not others):
                compared = [*needed, *available]
                observed.append((r, compared, _note_chance(r, compared, observe(r, available))))
        return _verdict(observed, tuple(missing), counted)

    return test


def _note_chance(r: PanelResult, compared: Sequence[str], observation: Observation) -> Observation:
    """Drop comparisons near chance, and name the contenders whose search found nothing better than chance."""
    if r.near_chance(compared) or not observation.confirmed:
        return Observation((), f"{observation.text} (near chance, which is {r.chance:g} %: decides nothing)")
    failed = [r.title(key) for key in compared if r.search_failed(key)]
    note = f" (no learning rate tried took {', '.join(failed)} away from chance)" if failed else ""
    return replace(observation, text=observation.text + note)


def _verdict(
    observed: Sequence[tuple[PanelResult, Sequence[str], Observation]], missing: tuple[str, ...], counted: bool
) -> Verdict:
    if not observed:
        return Verdict(NOT_RUN, "", missing=missing)
    observations = [observation for _, _, observation in observed]
    confirmed = [ok for observation in observations for ok in observation.confirmed]
    level = sum(observation.level for observation in observations)
    text = "; ".join(observation.text for observation in observations) + "."
    if counted and confirmed:
        tied = f", {level} level" if level else ""
        text = f"In {sum(confirmed)} of {len(confirmed)} comparisons{tied}. {text}"
    complete = not missing and all(observation.confirmed for observation in observations)
    status = UNTESTABLE if not confirmed else FAILS if not all(confirmed) else HOLDS if complete else PARTLY
    one_seed = any(len(r.outcomes[key]) < 2 for r, compared, _ in observed for key in compared)
    return Verdict(status, text, one_seed, missing)


def labelled(result: PanelResult, keys: Sequence[str], number: Callable[[PanelResult, str], str]) -> Mapping[str, str]:
    """Return title and number of each contender, by key."""
    return {key: f"{result.title(key)} {number(result, key)}" for key in keys}
