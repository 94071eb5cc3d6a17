"""Verdicts from outcomes that are made up, both ways."""

import math
from dataclasses import replace

import pytest
from tests.reproduce.made import outcome, panel, result

from fedbcgd.reproduce.claims import (
    at_upload,
    best_ends,
    early,
    ends_better,
    ends_no_better,
    ends_no_worse,
    ever_sooner,
    every,
    judge,
    reaches_sooner,
)
from fedbcgd.reproduce.items import ITEMS
from fedbcgd.reproduce.results import shown_final, shown_floats
from fedbcgd.reproduce.spec import FAILS, HOLDS, NOT_RUN, ONCE, PARTLY, SCALES, UNTESTABLE, Claim


def status(test, **runs):
    return test({"p": result(**runs)}).status


def test_ending_better_counts_only_beyond_the_spread_of_the_seeds():
    """a: 50, 54 (mean 52, deviation √8); b: 49, 51 (50, √2): ahead by 2, which is less than √10. With b at 40, 42 by 11."""
    a = [outcome(0.50), outcome(0.54)]
    near, far = [outcome(0.49), outcome(0.51)], [outcome(0.40), outcome(0.42)]
    assert status(ends_better("a", ["b"]), a=a, b=near) == FAILS
    assert status(ends_better("a", ["b"]), a=a, b=far) == HOLDS
    assert status(ends_better("b", ["a"]), a=a, b=far) == FAILS
    assert status(ends_no_better("a", ["b"]), a=a, b=near) == HOLDS
    assert status(ends_no_better("a", ["b"]), a=a, b=far) == FAILS


def test_one_seed_is_said_to_be_one():
    verdict = ends_better("a", ["b"])({"p": result(a=[outcome(0.5)], b=[outcome(0.4)])})
    assert verdict.status == HOLDS
    assert verdict.once
    assert not ends_better("a", ["b"])({"p": result(a=[outcome(0.5), outcome(0.6)], b=[outcome(0.4)])}).once
    assert "A 50.0 against B 40.0 ✓" in verdict.evidence


def test_a_lower_loss_is_better():
    where = panel("a", "b", metric="loss")
    low, high = [outcome(0.2, metric="test_loss")], [outcome(0.3, metric="test_loss")]
    assert ends_better("a", ["b"])({"p": result(where, a=low, b=high)}).status == HOLDS
    assert ends_better("a", ["b"])({"p": result(where, a=high, b=low)}).status == FAILS


def test_a_run_that_diverged_beats_nobody_and_is_called_so():
    lost = outcome(0.9, stopped="diverged")
    assert status(ends_better("a", ["b"]), a=[outcome(0.1)], b=[lost]) == HOLDS
    assert status(ends_better("a", ["b"]), a=[lost], b=[outcome(0.1)]) == FAILS
    assert status(ends_better("a", ["b"]), a=[lost], b=[lost]) == FAILS
    assert shown_final(result(a=[lost, outcome(0.5)]), "a") == "1 of 2 diverged"


def test_the_target_is_what_fedavg_ends_with():
    """FedAvg ends at 30 %, at 3 d. a has it after 2 rounds of 0.5 d, b never."""
    r = result(
        fedavg=[outcome(0.1, 0.2, 0.3)], a=[outcome(0.2, 0.35, 0.3, cost=0.5)], b=[outcome(0.2, 0.29, 0.29, cost=0.5)]
    )
    assert r.target == pytest.approx(30.0)
    assert [shown_floats(r, key) for key in ("fedavg", "a", "b")] == ["3.0d", "1.0d", "∞"]
    assert reaches_sooner("a", ["fedavg", "b"])({"p": r}).status == HOLDS
    assert reaches_sooner("b", ["fedavg"])({"p": r}).status == FAILS
    assert reaches_sooner("fedavg", ["a"])({"p": r}).status == FAILS


def test_a_panel_may_name_another_reference():
    r = result(replace(panel("a", "b"), reference="b"), a=[outcome(0.1, 0.2)], b=[outcome(0.1, 0.4)])
    assert r.reference == "b"
    assert r.target == pytest.approx(40.0)
    assert ITEMS["figure5"].panels["cpu"][0].reference == "share"


def test_a_printed_target_is_taken_as_it_is_and_a_factor_must_be_reached():
    """To 40 %: FedAvg 6 d, a 2 d: three times sooner, not four."""
    where = panel("fedavg", "a", target=40.0)
    r = result(where, fedavg=[outcome(*[0.1] * 5, 0.4)], a=[outcome(0.1, 0.4)])
    assert reaches_sooner("a", ["fedavg"], 3.0)({"p": r}).status == HOLDS
    assert reaches_sooner("a", ["fedavg"], 4.0)({"p": r}).status == FAILS


def test_where_one_of_two_seeds_gets_there_the_mean_is_infinity():
    r = result(panel("a", target=40.0), a=[outcome(0.4), outcome(0.3)])
    assert r.to_target("a") == math.inf
    assert shown_floats(r, "a") == "∞ (1 of 2 reached it)"


def test_more_blocks_must_be_sooner_step_by_step():
    where = panel("a", "b", "c", target=40.0)
    runs = [[outcome(0.1, 0.1, 0.4)], [outcome(0.1, 0.4)], [outcome(0.4)]]
    rising, mixed = dict(zip("abc", runs, strict=True)), dict(zip("acb", runs, strict=True))
    assert ever_sooner("abc")({"p": result(where, **rising)}).status == HOLDS
    assert ever_sooner("abc")({"p": result(where, **mixed)}).status == FAILS
    never = rising | {"c": [outcome(0.1)]}
    assert ever_sooner("abc")({"p": result(where, **never)}).status == FAILS


def test_who_ends_best():
    runs = {"a": [outcome(0.1)], "b": [outcome(0.3)], "c": [outcome(0.2)]}
    assert status(best_ends("abc", ["b"]), **runs) == HOLDS
    assert status(best_ends("abc", ["a", "c"]), **runs) == FAILS


def test_the_best_is_best_beyond_the_spread_of_the_seeds():
    """b: 50, 54 (mean 52, deviation √8) is ahead of c: 49, 51 (50, √2) by less than √10."""
    b, c = [outcome(0.50), outcome(0.54)], [outcome(0.49), outcome(0.51)]
    assert status(best_ends("bc", ["b"]), b=b, c=c) == FAILS
    assert status(best_ends("bc", ["b"]), b=b, c=[outcome(0.40), outcome(0.42)]) == HOLDS


def test_early_looks_at_a_quarter_of_the_budget():
    """Of 4 d that is 1 d: a's first evaluation, b's second."""
    a, b = [outcome(0.3, 0.3, 0.3, 0.3)], [outcome(0.1, 0.2, 0.9, 0.9, cost=0.5)]
    r = result(panel("a", "b", budget=4.0), a=a, b=b)
    assert (at_upload(r, "a", 1.0), at_upload(r, "b", 1.0)) == (30.0, 20.0)
    assert early("a", "b")({"p": r}).status == HOLDS
    assert early("b", "a")({"p": r}).status == FAILS


def test_all_panels_that_ran_must_agree_and_parts_can_be_named():
    good, bad = result(a=[outcome(0.5)], b=[outcome(0.4)]), result(a=[outcome(0.4)], b=[outcome(0.5)])
    both = {"one": good, "two": bad}
    verdict = ends_better("a", ["b"])(both)
    assert verdict.status == FAILS
    assert verdict.evidence.startswith("In 1 of 2 comparisons.")
    item = ITEMS["table2"]
    assert judge(item, Claim("c", "", ends_better("a", ["b"]), panels="one"), both, "cpu").status == HOLDS + ONCE
    assert judge(item, Claim("c", "", ends_better("a", ["b"])), both, "cpu").status == FAILS + ONCE
    assert every(ends_better("a", ["b"]), ends_better("b", ["a"]))({"one": good}).status == FAILS
    assert every(ends_better("a", ["b"]), ends_no_better("b", ["a"]))({"one": good}).status == HOLDS


def test_what_was_not_run_is_never_said_to_hold():
    for item in ITEMS.values():
        for claim in item.claims:
            for scale in SCALES:
                wanted = NOT_RUN if scale in claim.scales else UNTESTABLE
                assert judge(item, claim, {}, scale).status == wanted, claim.key
    half = every(ends_better("a", ["b"]), ends_better("a", ["missing"]))
    assert status(half, a=[outcome(0.5)], b=[outcome(0.4)]) == PARTLY
    assert status(half, a=[outcome(0.3)], b=[outcome(0.4)]) == FAILS


def test_what_was_run_in_part_holds_in_part():
    claim = Claim("c", "a is better", ends_better("a", ["b"]))
    good, bad = ({"a": [outcome(x)], "b": [outcome(0.4)]} for x in (0.5, 0.3))
    nothing = result(panel("a", "b", key="q"))
    told = judge(ITEMS["table2"], claim, {"p": result(**good), "q": nothing}, "cpu")
    assert told.status == PARTLY + ONCE
    assert told.evidence.endswith("Not run: panel q.")
    assert judge(ITEMS["table2"], claim, {"p": result(**bad), "q": nothing}, "cpu").status == FAILS + ONCE
    assert judge(ITEMS["table2"], claim, {"q": nothing}, "cpu").status == NOT_RUN


def test_contenders_that_were_not_run_are_named_and_nothing_simply_holds():
    claim = Claim("c", "a is better", ends_better("a", ["b", "c"]))
    three = panel("a", "b", "c")
    told = judge(ITEMS["table2"], claim, {"p": result(three, a=[outcome(0.5)], b=[outcome(0.4)])}, "cpu")
    assert told.status == PARTLY + ONCE
    assert told.evidence.endswith("Not run: panel p: C.")
    both = every(ends_better("a", ["b", "c"]), ends_better("a", ["b"]))
    assert both({"p": result(three, a=[outcome(0.5)], b=[outcome(0.4)])}).status == PARTLY
    assert judge(ITEMS["table2"], claim, {"p": result(three, a=[outcome(0.3)], b=[outcome(0.4)])}, "cpu").status == (
        FAILS + ONCE
    )


def test_what_reached_the_target_and_then_diverged_has_not_reached_it():
    lost = outcome(0.9, 0.9, stopped="diverged")
    r = result(panel("fedavg", "a"), fedavg=[outcome(0.1, 0.5)], a=[lost])
    assert r.floats("a") == [math.inf]
    assert reaches_sooner("a", ["fedavg"])({"p": r}).status == FAILS


def test_rounding_does_not_decide_whether_a_target_was_reached():
    """100·0.2001/100 is more than 0.2001, and single precision has 0.1 as 0.10000000149."""
    assert 100 * 0.2001 / 100 > 0.2001
    r = result(panel("fedavg"), fedavg=[outcome(0.1, 0.2001)])
    assert r.floats("fedavg") == [2.0]
    tied = result(panel("fedavg", "a"), fedavg=[outcome(0.10000000149)], a=[outcome(0.0999999996)])
    assert tied.floats("a") == [1.0]
    assert result(panel("fedavg", "a"), fedavg=[outcome(0.1)], a=[outcome(0.09999)]).floats("a") == [math.inf]


def test_ending_no_worse():
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.5)], b=[outcome(0.5)]) == HOLDS
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.4)], b=[outcome(0.5)]) == FAILS
    near = [outcome(0.49), outcome(0.51)]
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.48), outcome(0.50)], b=near) == HOLDS


def test_a_claim_that_a_scale_cannot_test_gets_no_verdict_there_but_its_evidence():
    claim = Claim("c", "a is better", ends_better("a", ["b"]), scales=("paper",))
    results = {"p": result(a=[outcome(0.5)], b=[outcome(0.4)])}
    item = ITEMS["table2"]
    assert judge(item, claim, results, "paper").status == HOLDS + ONCE
    told = judge(item, claim, results, "cpu")
    assert told.status == UNTESTABLE
    assert "A 50.0 against B 40.0" in told.evidence


def test_no_claim_is_testable_in_a_trial_of_the_machinery():
    assert all("smoke" not in claim.scales for item in ITEMS.values() for claim in item.claims)
