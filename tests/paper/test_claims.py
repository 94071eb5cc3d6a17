"""Verdicts from outcomes that are invented, both ways."""

import math
from dataclasses import replace

import pytest

from fedbcgd.paper.claims import all_of, judge, never_measured, on_train_loss
from fedbcgd.paper.comparisons import (
    ahead_early,
    at_upload,
    each_sooner,
    ends_best,
    ends_better,
    ends_no_better,
    ends_no_worse,
    reaches_sooner,
    times_sooner,
)
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.results import Trial, format_final, format_floats
from fedbcgd.paper.spec import FAILS, HOLDS, NOT_RUN, ONE_SEED, PARTLY, SCALES, UNTESTABLE, Claim
from tests.paper.invented import outcome, panel, result

ONE, FOUR = ITEMS["figure7"], ITEMS["table2"]  # so many panels has the paper there


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
    assert verdict.one_seed
    two = [outcome(0.5), outcome(0.6)]
    assert ends_better("a", ["b"])({"p": result(a=two, b=[outcome(0.4)])}).one_seed
    assert not ends_better("a", ["b"])({"p": result(a=two, b=[outcome(0.3), outcome(0.4)], c=[outcome(0.1)])}).one_seed
    mixed = all_of(ends_better("a", ["b"]), ends_better("a", ["c"]))
    assert mixed({"p": result(a=two, b=[outcome(0.3), outcome(0.4)], c=[outcome(0.1)])}).one_seed
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
    assert format_final(result(a=[lost, outcome(0.5)]), "a") == "1 of 2 diverged"


def test_the_target_is_what_fedavg_ends_with():
    """FedAvg ends at 30 %, at 3 d. a has it after 2 rounds of 0.5 d, b never."""
    r = result(
        fedavg=[outcome(0.1, 0.2, 0.3)], a=[outcome(0.2, 0.35, 0.3, cost=0.5)], b=[outcome(0.2, 0.29, 0.29, cost=0.5)]
    )
    assert r.target == pytest.approx(30.0)
    assert [format_floats(r, key) for key in ("fedavg", "a", "b")] == ["3.0d", "1.0d", "∞"]
    assert reaches_sooner("a", ["fedavg", "b"])({"p": r}).status == HOLDS
    assert reaches_sooner("b", ["fedavg"])({"p": r}).status == FAILS
    assert reaches_sooner("fedavg", ["a"])({"p": r}).status == FAILS


def test_a_panel_may_name_another_reference():
    r = result(replace(panel("a", "b"), reference="b"), a=[outcome(0.1, 0.2)], b=[outcome(0.1, 0.4)])
    assert r.reference == "b"
    assert r.target == pytest.approx(40.0)
    assert ITEMS["figure5"].panels["cpu"][0].reference == "share"


def test_a_printed_target_is_taken_as_it_is_and_a_factor_must_be_reached():
    """To 40 %: FedAvg 60 d, a 20 d: three times sooner and not more; floats in whole d can stand for 60.5/19.5 = 3.10."""
    where = panel("fedavg", "a", target=40.0)
    r = result(where, fedavg=[outcome(*[0.1] * 5, 0.4, cost=10.0)], a=[outcome(0.1, 0.4, cost=10.0)])
    assert times_sooner("a", "fedavg", 3.1)({"p": r}).status == HOLDS
    assert times_sooner("a", "fedavg", 3.2)({"p": r}).status == FAILS
    assert times_sooner("a", "fedavg", 2.9, strictly=True)({"p": r}).status == HOLDS
    assert times_sooner("a", "fedavg", 3.0, strictly=True)({"p": r}).status == FAILS
    never = result(where, fedavg=[outcome(0.4)], a=[outcome(0.1)])
    assert times_sooner("a", "fedavg", 3.0)({"p": never}).status == FAILS


def test_uploads_no_further_apart_than_the_evaluations_are_level():
    """a is looked at each 0.5 d and meets 40 % at 1.5 d; b each 1 d, at 2 d: it may have met it at 1.1 d. 3 d is later."""
    where = panel("a", "b", target=40.0)
    a, near, later = outcome(0.1, 0.1, 0.4, cost=0.5), outcome(0.1, 0.4), outcome(0.1, 0.1, 0.4)
    verdict = reaches_sooner("a", ["b"])({"p": result(where, a=[a], b=[near])})
    assert verdict.status == FAILS
    assert verdict.evidence == "In 0 of 1 comparisons, 1 level. panel p: A 1.5d against B 2.0d level."
    assert reaches_sooner("b", ["a"])({"p": result(where, a=[a], b=[near])}).status == FAILS
    assert reaches_sooner("a", ["b"])({"p": result(where, a=[a], b=[later])}).status == HOLDS
    assert reaches_sooner("b", ["a"])({"p": result(where, a=[a], b=[later])}).evidence.endswith("A 1.5d ✗.")


def test_numbers_that_differ_look_different():
    r = {"p": result(a=[outcome(0.11112)], b=[outcome(0.11108)])}
    assert "A 11.11 against B 11.1 ✓" not in ends_better("a", ["b"])(r).evidence
    assert "A 11.112 against B 11.108 ✓" in ends_better("a", ["b"])(r).evidence
    assert (
        "A 50.0 against B 50.0 level"
        in ends_better("a", ["b"])({"p": result(a=[outcome(0.5)], b=[outcome(0.5)])}).evidence
    )


def chanced(chance=10.0, **runs):
    return replace(result(panel("fedavg", "a", "b"), **runs), chance=chance)


def test_near_chance_nothing_is_decided():
    """Of ten classes guessing has 10 %: a target of 14 % decides nothing, however far somebody is; one of 25 % does."""
    claim = Claim("c", "", reaches_sooner("a", ["fedavg"]))
    low = chanced(fedavg=[outcome(0.1, 0.1, 0.14)], a=[outcome(0.5)])
    verdict = judge(ONE, claim, {"p": low}, "cpu")
    assert verdict.status == UNTESTABLE
    assert "A 1.0d against FEDAVG 3.0d" in verdict.evidence
    assert "near chance, which is 10 %: decides nothing" in verdict.evidence
    high = chanced(fedavg=[outcome(0.1, 0.1, 0.25)], a=[outcome(0.5)])
    assert reaches_sooner("a", ["fedavg"])({"p": high}).status == HOLDS
    assert reaches_sooner("a", ["fedavg"])({"p": high, "q": low}).status == PARTLY
    assert reaches_sooner("fedavg", ["a"])({"p": high, "q": low}).status == FAILS
    both = {"p": chanced(fedavg=[outcome(0.9)], a=[outcome(0.15)], b=[outcome(0.12)])}
    assert ends_better("a", ["b"])(both).status == UNTESTABLE
    assert ends_better("fedavg", ["b"])(both).status == HOLDS
    late = chanced(fedavg=[outcome(0.12, *[0.9] * 9)], a=[outcome(0.1, *[0.9] * 9)])
    assert ahead_early("fedavg", "a", 0.05)({"p": late}).status == UNTESTABLE
    assert ahead_early("fedavg", "a", 0.05)({"p": replace(late, chance=None)}).status == HOLDS
    assert all_of(ends_better("a", ["b"]), ends_better("b", ["a"]))(both).status == UNTESTABLE


def test_a_search_that_found_nothing_is_named():
    r = chanced(fedavg=[outcome(0.5)], a=[outcome(0.1)])
    trials = tuple(
        Trial(key, {"lr": lr}, s, 1, False) for key, lr, s in (("a", 1, 0.1), ("a", 2, 0.15), ("fedavg", 1, 0.4))
    )
    text = ends_better("fedavg", ["a"])({"p": replace(r, trials=trials)}).evidence
    assert "(no learning rate tried took A away from chance)" in text
    assert (
        "chance"
        not in ends_better("fedavg", ["a"])(
            {"p": replace(r, trials=(trials[1], replace(trials[0], score=0.3)))}
        ).evidence
    )


def test_the_loss_in_training_can_be_what_is_compared():
    where = panel("a", "b")
    a, b = outcome(0.5), outcome(0.6)  # the train loss is the same number: lower is better there
    assert ends_better("a", ["b"])({"p": result(where, a=[a], b=[b])}).status == FAILS
    verdict = on_train_loss(ends_better("a", ["b"]))({"p": result(where, a=[a], b=[b])})
    assert verdict.status == HOLDS
    assert "A 0.5000 against B 0.6000" in verdict.evidence


def test_what_is_never_measured_is_untestable_everywhere():
    claim = Claim("c", "", never_measured("Nobody looks."))
    for scale in SCALES:
        verdict = judge(ONE, claim, {}, scale)
        assert (verdict.status, verdict.evidence) == (UNTESTABLE, "Nobody looks.")


def test_where_one_of_two_seeds_gets_there_the_mean_is_infinity():
    r = result(panel("a", target=40.0), a=[outcome(0.4), outcome(0.3)])
    assert r.mean_floats_to_target("a") == math.inf
    assert format_floats(r, "a") == "∞ (1 of 2 reached it)"


def test_more_blocks_must_be_sooner_step_by_step():
    where = panel("a", "b", "c", target=40.0)
    runs = [[outcome(*[0.1] * 8, 0.4)], [outcome(*[0.1] * 4, 0.4)], [outcome(0.4)]]
    rising, mixed = dict(zip("abc", runs, strict=True)), dict(zip("acb", runs, strict=True))
    assert each_sooner("abc")({"p": result(where, **rising)}).status == HOLDS
    assert each_sooner("abc")({"p": result(where, **mixed)}).status == FAILS
    level = each_sooner("abc")({"p": result(where, **rising | {"b": [outcome(0.1, 0.4)]})})
    assert level.status == FAILS
    assert level.evidence.endswith("(level: B and C).")
    never = rising | {"c": [outcome(0.1)]}
    assert each_sooner("abc")({"p": result(where, **never)}).status == FAILS


def test_who_ends_best():
    runs = {"a": [outcome(0.1)], "b": [outcome(0.3)], "c": [outcome(0.2)]}
    assert status(ends_best("abc", ["b"]), **runs) == HOLDS
    assert status(ends_best("abc", ["a", "c"]), **runs) == FAILS


def test_the_best_is_best_beyond_the_spread_of_the_seeds():
    """b: 50, 54 (mean 52, deviation √8) is ahead of c: 49, 51 (50, √2) by less than √10."""
    b, c = [outcome(0.50), outcome(0.54)], [outcome(0.49), outcome(0.51)]
    assert status(ends_best("bc", ["b"]), b=b, c=c) == FAILS
    assert status(ends_best("bc", ["b"]), b=b, c=[outcome(0.40), outcome(0.42)]) == HOLDS


def test_early_looks_at_a_quarter_of_the_budget():
    """Of 4 d that is 1 d: a's first evaluation, b's second."""
    a, b = [outcome(0.3, 0.3, 0.3, 0.3)], [outcome(0.1, 0.2, 0.9, 0.9, cost=0.5)]
    r = result(panel("a", "b", budget=4.0), a=a, b=b)
    assert (at_upload(r, "a", 1.0), at_upload(r, "b", 1.0)) == (30.0, 20.0)
    assert ahead_early("a", "b")({"p": r}).status == HOLDS
    assert ahead_early("b", "a")({"p": r}).status == FAILS


def test_all_panels_that_ran_must_agree_and_parts_can_be_named():
    good, bad = result(a=[outcome(0.5)], b=[outcome(0.4)]), result(a=[outcome(0.4)], b=[outcome(0.5)])
    both = {"one": good, "two": bad}
    verdict = ends_better("a", ["b"])(both)
    assert verdict.status == FAILS
    assert verdict.evidence.startswith("In 1 of 2 comparisons.")
    item = ONE
    assert judge(item, Claim("c", "", ends_better("a", ["b"]), panels="one"), both, "cpu").status == HOLDS + ONE_SEED
    assert judge(item, Claim("c", "", ends_better("a", ["b"])), both, "cpu").status == FAILS + ONE_SEED
    assert all_of(ends_better("a", ["b"]), ends_better("b", ["a"]))({"one": good}).status == FAILS
    assert all_of(ends_better("a", ["b"]), ends_no_better("b", ["a"]))({"one": good}).status == HOLDS


def test_what_was_not_run_is_never_said_to_hold():
    for item in ITEMS.values():
        for claim in item.claims:
            for scale in SCALES:
                expected = NOT_RUN if scale in claim.scales and not claim.key.endswith("minima") else UNTESTABLE
                assert judge(item, claim, {}, scale).status == expected, claim.key
    half = all_of(ends_better("a", ["b"]), ends_better("a", ["missing"]))
    assert status(half, a=[outcome(0.5)], b=[outcome(0.4)]) == PARTLY
    verdict = judge(ONE, Claim("c", "", half), {"p": result(a=[outcome(0.5)], b=[outcome(0.4)])}, "cpu")
    assert verdict.evidence.endswith("Not run: panel p: missing.")
    assert "In 1 of 1" in verdict.evidence
    assert status(half, a=[outcome(0.3)], b=[outcome(0.4)]) == FAILS


def test_what_was_run_in_part_holds_in_part():
    claim = Claim("c", "a is better", ends_better("a", ["b"]))
    good, bad = ({"a": [outcome(x)], "b": [outcome(0.4)]} for x in (0.5, 0.3))
    nothing = result(panel("a", "b", key="q"))
    verdict = judge(ONE, claim, {"p": result(**good), "q": nothing}, "cpu")
    assert verdict.status == PARTLY + ONE_SEED
    assert verdict.evidence.endswith("Not run: panel q.")
    assert judge(ONE, claim, {"p": result(**bad), "q": nothing}, "cpu").status == FAILS + ONE_SEED
    assert judge(ONE, claim, {"q": nothing}, "cpu").status == NOT_RUN


def test_a_panel_that_lacks_what_is_compared_is_named():
    claim = Claim("c", "a is better", ends_better("a", ["b"]))
    whole, half = result(a=[outcome(0.5)], b=[outcome(0.4)]), result(panel("a", "b", key="q"), b=[outcome(0.4)])
    verdict = judge(FOUR, claim, {"p": whole, "q": half, "r": whole, "s": whole}, "cpu")
    assert verdict.status == PARTLY + ONE_SEED
    assert verdict.evidence.endswith("Not run: panel q: A.")
    two = judge(FOUR, Claim("c", "", ends_best("ab", ["a"])), {"p": whole, "q": half, "r": whole, "s": whole}, "cpu")
    assert two.status == PARTLY + ONE_SEED
    assert two.evidence.endswith("Not run: panel q: A.")


def test_panels_of_the_paper_that_a_scale_leaves_out_were_not_run():
    two = {f"{d}-vit": result(fedbcgd=[outcome(0.5)], fedavg=[outcome(0.4)]) for d in ("cifar100", "tiny-imagenet")}
    item = ITEMS["table5"]
    claim = Claim("c", "", ends_better("fedbcgd", ["fedavg"]))
    small = {"cifar100-vit": replace(two["cifar100-vit"], panel=replace(two["cifar100-vit"].panel, key="cifar100-vit"))}
    verdict = judge(item, claim, small, "cpu")
    assert verdict.status == PARTLY + ONE_SEED
    assert verdict.evidence.endswith("Not run: ViT-Base, Tiny ImageNet.")
    assert judge(item, replace(claim, panels="cifar100"), small, "cpu").status == HOLDS + ONE_SEED


def test_contenders_that_were_not_run_are_named_and_nothing_simply_holds():
    claim = Claim("c", "a is better", ends_better("a", ["b", "c"]))
    three = panel("a", "b", "c")
    verdict = judge(ONE, claim, {"p": result(three, a=[outcome(0.5)], b=[outcome(0.4)])}, "cpu")
    assert verdict.status == PARTLY + ONE_SEED
    assert verdict.evidence.endswith("Not run: panel p: C.")
    both = all_of(ends_better("a", ["b", "c"]), ends_better("a", ["b"]))
    assert both({"p": result(three, a=[outcome(0.5)], b=[outcome(0.4)])}).status == PARTLY
    assert judge(ONE, claim, {"p": result(three, a=[outcome(0.3)], b=[outcome(0.4)])}, "cpu").status == (
        FAILS + ONE_SEED
    )


def test_what_reached_the_target_and_then_diverged_has_not_reached_it():
    lost = outcome(0.9, 0.9, stopped="diverged")
    r = result(panel("fedavg", "a"), fedavg=[outcome(0.1, 0.5)], a=[lost])
    assert r.floats_to_target("a") == [math.inf]
    assert reaches_sooner("a", ["fedavg"])({"p": r}).status == FAILS


def test_rounding_does_not_decide_whether_a_target_was_reached():
    """100·0.2001/100 is more than 0.2001, and single precision has 0.1 as 0.10000000149."""
    assert 100 * 0.2001 / 100 > 0.2001
    r = result(panel("fedavg"), fedavg=[outcome(0.1, 0.2001)])
    assert r.floats_to_target("fedavg") == [2.0]
    tied = result(panel("fedavg", "a"), fedavg=[outcome(0.10000000149)], a=[outcome(0.0999999996)])
    assert tied.floats_to_target("a") == [1.0]
    assert result(panel("fedavg", "a"), fedavg=[outcome(0.1)], a=[outcome(0.09999)]).floats_to_target("a") == [math.inf]


def test_ending_no_worse():
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.5)], b=[outcome(0.5)]) == HOLDS
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.4)], b=[outcome(0.5)]) == FAILS
    near = [outcome(0.49), outcome(0.51)]
    assert status(ends_no_worse("a", ["b"]), a=[outcome(0.48), outcome(0.50)], b=near) == HOLDS


def test_a_claim_that_a_scale_cannot_test_gets_no_verdict_there_but_its_evidence():
    claim = Claim("c", "a is better", ends_better("a", ["b"]), scales=("paper",))
    results = {"p": result(a=[outcome(0.5)], b=[outcome(0.4)])}
    item = ONE
    assert judge(item, claim, results, "paper").status == HOLDS + ONE_SEED
    verdict = judge(item, claim, results, "cpu")
    assert verdict.status == UNTESTABLE
    assert "A 50.0 against B 40.0" in verdict.evidence


def test_no_claim_is_testable_in_a_trial_of_the_machinery():
    assert all("smoke" not in claim.scales for item in ITEMS.values() for claim in item.claims)
