import itertools
import math
from typing import Any

import pytest

from config_schema import TrainingConfig
from error_handling import EvaluationError
from round_decision import (
    RoundRecord,
    TaskScore,
    best_record,
    compare,
    decide,
    describe_lead,
    leads,
    target_met,
)


def settings(**changes):
    defaults: dict[str, Any] = {
        "base_model": "m",
        "train_file": "t",
        "eval_file": "e",
        "eval_threshold": 0.85,
        "max_rounds": 5,
    }
    return TrainingConfig(**(defaults | changes))


def record(number, score, **fields):
    return RoundRecord(number, score, **fields)


def samples(right, n=40):
    """The first `right` of `n` samples right."""
    return {("t", str(i), 1): 1.0 if i < right else 0.0 for i in range(n)}


def measured(number, right, n=40, **fields):
    return RoundRecord(number, right / n, n=n, sample_scores=samples(right, n), **fields)


def after(*history, config=None, **spent):
    return decide(history, config or settings(), **{"learning_rate": 1e-4, **spent})


def test_a_missed_baseline_starts_training_at_the_full_rate():
    decision = after(record(0, 0.1, ci_low=0.05, ci_high=0.2, n=80))
    assert (decision.action, decision.status, decision.best_round) == ("continue", "baseline", 0)
    assert (decision.next_lr, decision.rollback_to) == (1e-4, None)
    assert "Round 0 scored 0.100 (95 % interval 0.050 to 0.200, n = 80)" in decision.reason
    assert "below the target of 0.85" in decision.reason


def test_a_base_model_that_meets_the_target_stops_the_run():
    decision = after(record(0, 0.9, n=10))
    assert (decision.action, decision.status, decision.best_round) == ("stop", "target_met", 0)
    assert decision.reason.startswith("The base model already meets the target: round 0 scored 0.900")
    assert decision.next_lr is None


@pytest.mark.parametrize(("score", "met"), [(0.85, True), (0.8499, False), (1.0, True)])
def test_the_point_rule_compares_the_score(score, met):
    assert target_met(record(1, score), settings())[0] is met


def test_a_score_that_only_rounding_put_below_the_threshold_meets_it():
    mean = 0.1 * 0.85 * 10 - 1e-15  # as a weighted mean in floating point may come out
    assert mean < 0.85
    assert target_met(record(1, mean), settings())[0]
    assert not target_met(record(1, 0.85 - 1e-6), settings())[0]


@pytest.mark.parametrize(("low", "met"), [(0.85, True), (0.84, False), (None, False)])
def test_the_lower_bound_rule_compares_the_lower_end_and_unknown_meets_nothing(low, met):
    config = settings(decision={"target_rule": "lower_bound"})
    got, sentence = target_met(record(1, 1.0, ci_low=low, ci_high=None if low is None else 1.0), config)
    assert got is met
    assert ("unknown" in sentence) is (low is None)
    assert "lower end" in sentence


def test_every_task_must_reach_its_own_threshold():
    tasks = (("easy", 0.99, 0.9), ("hard", 0.75, 0.8), ("free", 0.1, None))
    met, sentence = target_met(record(2, 0.9, task_scores=tasks), settings())
    assert not met
    assert "task hard (0.750) is below its own 0.8" in sentence
    assert "easy" not in sentence
    assert "free" not in sentence
    met, sentence = target_met(record(2, 0.9, task_scores=(("easy", 0.99, 0.9), ("free", 0.1, None))), settings())
    assert met
    assert "the task with a threshold of its own reaches it" in sentence


def test_the_lower_bound_rule_holds_for_tasks_too():
    config = settings(decision={"target_rule": "lower_bound"})

    def met(*tasks):
        return target_met(record(1, 0.95, ci_low=0.9, ci_high=1.0, task_scores=tasks), config)

    assert met(TaskScore("a", 0.9, 0.8, ci_low=0.81))[0]
    assert not met(TaskScore("a", 0.9, 0.8, ci_low=0.79))[0]
    assert "the interval of task a is unknown" in met(("a", 0.9, 0.8))[1]


def test_all_reasons_of_a_miss_are_named():
    _, sentence = target_met(record(1, 0.5, errors=2, n=20, task_scores=(("a", 0.4, 0.6),)), settings())
    assert "n = 20, 2 failed" in sentence
    assert "below the target of 0.85" in sentence
    assert "task a (0.400) is below its own 0.6" in sentence


def test_a_round_that_meets_the_target_is_final_though_an_earlier_one_scored_higher():
    config = settings(eval_threshold=0.8)
    unmet = record(1, 0.95, task_scores=(("a", 0.5, 0.6),))
    decision = after(record(0, 0.1), unmet, record(2, 0.82, task_scores=(("a", 0.7, 0.6),)), config=config)
    assert (decision.status, decision.best_round) == ("target_met", 2)


def test_meeting_the_target_in_the_last_round_over_budget_is_still_meeting_it():
    config = settings(max_rounds=1, budget={"tokens": 10}, decision={"patience": 1})
    decision = after(record(0, 0.1), record(1, 0.9), config=config, tokens_spent=10**9)
    assert decision.status == "target_met"


def test_the_best_is_the_highest_and_on_ties_the_earlier():
    history = [record(0, 0.1), record(1, 0.7), record(2, 0.7 + 1e-16), record(3, 0.6)]
    assert best_record(history).round == 1
    assert best_record([*history, record(4, 0.71)]).round == 4
    assert after(*history, config=settings(max_rounds=3)).best_round == 1


def test_all_rounds_used_stops_with_the_best_named():
    decision = after(record(0, 0.1), record(1, 0.8), record(2, 0.7), config=settings(max_rounds=2))
    assert (decision.action, decision.status, decision.best_round) == ("stop", "target_missed", 1)
    assert "All 2 rounds are used; the best is round 1 with 0.800." in decision.reason


def test_a_missed_round_lowers_the_rate_by_the_factor():
    decision = after(record(0, 0.1), record(1, 0.5), config=settings(lr_decay=0.8))
    assert (decision.action, decision.status, decision.rollback_to) == ("continue", "improved", None)
    assert decision.next_lr == pytest.approx(8e-5)
    assert "The learning rate goes from 0.0001 to 8e-05." in decision.reason
    decision = after(record(0, 0.1), record(1, 0.5), record(2, 0.6), learning_rate=decision.next_lr)
    assert decision.next_lr == pytest.approx(6.4e-5)


def test_the_rate_never_falls_below_min_lr():
    config = settings(lr_decay=0.1, min_lr=5e-5)
    assert after(record(0, 0.1), record(1, 0.5), config=config).next_lr == 5e-5
    decision = after(record(0, 0.1), record(1, 0.5), config=config, learning_rate=5e-5)
    assert decision.next_lr == 5e-5
    assert "stays 5e-05" in decision.reason


def test_the_plateau_policy_keeps_the_rate_while_scores_rise():
    config = settings(decision={"lr_policy": "plateau"})
    assert after(record(0, 0.1), record(1, 0.5), config=config).next_lr == 1e-4
    assert after(record(0, 0.1), record(1, 0.5), record(2, 0.5), config=config).next_lr == pytest.approx(8e-5)


def test_a_drop_beyond_noise_goes_back_to_the_best_state():
    # 32 right, then 26: the same 26 are still right, 6 lost and none won: p = 2 / 64 = 0.031
    decision = after(measured(0, 2), measured(1, 32), measured(2, 26))
    assert (decision.status, decision.best_round, decision.rollback_to) == ("rolled_back", 1, 1)
    assert decision.next_lr == pytest.approx(8e-5)
    assert "beyond noise (paired test over 40 samples, p = 0.031)" in decision.reason
    assert "goes back to the state of round 1" in decision.reason


def test_a_drop_within_noise_never_goes_back():
    # 5 lost and none won: p = 2 / 32 = 0.0625
    decision = after(measured(0, 2), measured(1, 32), measured(2, 27))
    assert (decision.status, decision.rollback_to) == ("not_improved", None)
    assert "within noise (paired test over 40 samples, p = 0.06" in decision.reason


def test_on_regression_continue_goes_on_from_the_worse_state():
    config = settings(decision={"on_regression": "continue"})
    decision = after(measured(0, 2), measured(1, 32), measured(2, 20), config=config)
    assert (decision.status, decision.rollback_to, decision.best_round) == ("not_improved", None, 1)
    assert "beyond noise" in decision.reason
    assert "as on_regression says" in decision.reason


def test_training_that_hurts_the_base_model_goes_back_to_it():
    assert after(measured(0, 30), measured(1, 10)).rollback_to == 0


def test_the_drop_is_measured_against_the_best_not_against_the_round_before():
    decision = after(measured(0, 2), measured(1, 32), measured(2, 28), measured(3, 25))
    assert decision.rollback_to == 1
    assert "below round 1 (0.800)" in decision.reason


def test_only_samples_that_both_rounds_have_are_compared():
    best = measured(1, 32)
    last = RoundRecord(2, 0.6, n=40, sample_scores={key: 0.0 for key in list(samples(40))[:5]})
    decision = after(measured(0, 2), best, last)
    assert "paired test over 5 samples" in decision.reason
    assert decision.rollback_to is None


def test_without_samples_in_common_nothing_is_undone_and_that_is_said():
    decision = after(record(0, 0.1), record(1, 0.8), record(2, 0.2))
    assert decision.rollback_to is None
    assert "without samples in common" in decision.reason


def test_a_drop_of_the_weighted_score_alone_is_no_evidence():
    # The weighted score fell, yet on the samples 10 were won and none lost.
    history = [RoundRecord(1, 0.8, sample_scores=samples(10)), RoundRecord(2, 0.7, sample_scores=samples(20))]
    decision = after(*history)
    assert decision.rollback_to is None
    assert "within noise" in decision.reason


def test_graded_scores_are_tested_too():
    keys = [("t", str(i), 1) for i in range(8)]
    best = RoundRecord(1, 0.7, sample_scores=dict.fromkeys(keys, 0.7))
    last = RoundRecord(2, 0.5, sample_scores=dict.fromkeys(keys, 0.5))
    decision = after(record(0, 0.1), best, last)  # all 8 down: 2 of 256 sign patterns
    assert decision.rollback_to == 1
    assert "p = 0.0078" in decision.reason


@pytest.mark.parametrize(("patience", "status"), [(1, "patience_spent"), (2, "patience_spent"), (3, "not_improved")])
def test_patience_counts_rounds_since_the_best(patience, status):
    config = settings(decision={"patience": patience})
    decision = after(record(0, 0.1), record(1, 0.5), record(2, 0.4), record(3, 0.5), config=config)
    assert decision.status == status
    assert decision.best_round == 1


def test_patience_says_how_long_it_waited_and_starts_at_the_baseline():
    config = settings(decision={"patience": 1})
    assert after(record(0, 0.4), config=config).action == "continue"
    decision = after(record(0, 0.4), record(1, 0.3), config=config)
    assert "No round improved on round 0 in 1 round, and patience is 1; the best is the base model" in decision.reason


@pytest.mark.parametrize(
    ("budget", "spent", "sentence"),
    [
        ({"tokens": 1000}, {"tokens_spent": 1000}, "1,000 tokens of budget.tokens (1,000 tokens) are spent."),
        ({"tokens": 1000}, {"tokens_spent": 700, "next_tokens": 301}, "one more round of about 301 tokens would pass"),
        ({"seconds": 60}, {"seconds_spent": 61.0}, "61 s of budget.seconds (60 s) are spent."),
        (
            {"money": 2},
            {"money_spent": 1.5, "next_money": 0.75},
            "$1.50 of budget.money ($2.00) are spent, and one",
        ),
    ],
)
def test_a_budget_stops_the_run_before_it_is_passed(budget, spent, sentence):
    config = settings(budget=budget, prices={"m": {"prefill": 1, "sample": 1, "train": 1}})
    decision = after(record(0, 0.1), record(1, 0.5), config=config, **spent)
    assert (decision.action, decision.status, decision.best_round) == ("stop", "budget_spent", 1)
    assert sentence in decision.reason
    assert decision.reason.endswith("The best is round 1 with 0.500.")


def test_a_budget_with_room_for_exactly_one_more_round_goes_on():
    config = settings(budget={"tokens": 1000, "seconds": 10})
    decision = after(record(0, 0.1), config=config, tokens_spent=600, next_tokens=400, seconds_spent=9.9)
    assert decision.action == "continue"


def test_a_limit_in_money_without_a_known_cost_is_an_error():
    config = settings(budget={"money": 2}, prices={"m": {"prefill": 1, "sample": 1, "train": 1}})
    with pytest.raises(EvaluationError, match=r"budget\.money"):
        after(record(0, 0.1), config=config)


def test_decisions_depend_on_the_history_alone_and_survive_a_reload():
    history = [measured(0, 2), measured(1, 32), measured(2, 26)]
    assert after(*history) == after(*[RoundRecord(**vars(item)) for item in history])


def test_histories_that_cannot_be_are_refused():
    with pytest.raises(EvaluationError, match="no evaluated round"):
        decide([], settings(), learning_rate=1e-4)
    with pytest.raises(EvaluationError, match="out of order"):
        after(record(1, 0.1), record(1, 0.2))
    for bad in (math.nan, -0.1, 1.1, math.inf):
        with pytest.raises(EvaluationError):
            record(1, bad)
    with pytest.raises(EvaluationError):
        record(-1, 0.5)


def test_every_reason_is_made_of_sentences():
    for history in ([measured(0, 2)], [measured(0, 2), measured(1, 32), measured(2, 26)], [measured(0, 40)]):
        reason = after(*history).reason
        assert reason[0].isupper()
        assert reason.endswith(".")
        assert "  " not in reason


def test_a_target_that_is_met_says_how_sure_that_is():
    def reason(low, **changes):
        high = None if low is None else 0.95
        return after(record(0, 0.1), record(1, 0.9, ci_low=low, ci_high=high), config=settings(**changes)).reason

    assert "The whole interval is above it: the lower end is 0.860." in reason(0.86)
    assert "The interval reaches below it, to 0.840" in reason(0.84)
    assert "no interval" in reason(None)
    assert "The whole interval is above it" in reason(0.85, decision={"target_rule": "lower_bound"})
    tasks = (TaskScore("easy", 0.9, 0.8, 0.82), TaskScore("hard", 0.81, 0.8, 0.7), TaskScore("tiny", 1.0, 0.5))
    sentence = target_met(record(1, 0.9, ci_low=0.86, ci_high=0.93, task_scores=tasks), settings())[1]
    assert "that of hard reaches below its own 0.8, to 0.700; that of tiny is unknown." in sentence
    assert "easy" not in sentence


def test_a_run_from_an_adapter_is_not_said_to_be_the_base_model():
    start = record(0, 0.9, checkpoint="tinker://x:train:0/sampler_weights/start")
    assert after(start).reason.startswith("The starting adapter already meets the target")
    worse = [record(0, 0.5, checkpoint=start.checkpoint), record(1, 0.4)]
    assert "the best is the starting adapter" in after(*worse, config=settings(max_rounds=1)).reason


def test_the_best_round_is_compared_with_the_baseline_and_the_runner_up():
    # Of 40 samples 10, 24 and 30 are right, always the first ones: no pair turns from right to wrong.
    history = [measured(0, 10), measured(1, 24), measured(2, 30), measured(3, 20)]
    over_baseline, over_runner_up = leads(history, best_round=2)
    assert (over_baseline.earlier, over_baseline.later, over_baseline.n) == (0, 2, 40)
    assert over_baseline.difference == pytest.approx(0.5)
    assert over_baseline.p == pytest.approx(2 * 0.5**20)  # 20 discordant pairs, all one way
    assert not over_baseline.within_noise
    assert (over_runner_up.earlier, over_runner_up.difference) == (1, pytest.approx(0.15))
    assert over_runner_up.p == pytest.approx(2 * 0.5**6)  # 0.031
    assert "against the baseline +0.500 [" in describe_lead(over_baseline)
    assert "against round 1 +0.150 [" in describe_lead(over_runner_up)
    assert over_runner_up.ci_low < 0.15 < over_runner_up.ci_high


def test_a_lead_of_five_samples_is_within_noise_and_one_rival_gives_one_lead():
    (lead,) = leads([measured(0, 10), measured(1, 15)], best_round=1)
    assert lead.p == pytest.approx(2 * 0.5**5)  # 0.0625
    assert "within noise" in describe_lead(lead)
    assert leads([measured(0, 10)], best_round=0) == ()
    # A base model that was best is compared with the best of the rounds.
    (behind,) = leads([measured(0, 30), measured(1, 10), measured(2, 20)], best_round=0)
    assert (behind.earlier, behind.later, behind.difference) == (2, 0, pytest.approx(0.25))


def test_tasks_count_in_a_comparison_as_they_do_in_the_score():
    def weighed(number, small, large, weights):
        scores = {("small", str(i), 1): float(i < small) for i in range(4)}
        scores |= {("large", str(i), 1): float(i < large) for i in range(12)}
        return RoundRecord(number, 0.5, sample_scores=scores, task_weights=weights)

    def difference(weights):
        return compare(weighed(0, 0, 6, weights), weighed(1, 4, 3, weights)).difference

    # small: 0 -> 1, large: 0.5 -> 0.25
    assert difference({"small": 1.0, "large": 1.0}) == pytest.approx((1.0 - 0.25) / 2)
    assert difference({"small": 1.0, "large": 3.0}) == pytest.approx((1.0 - 3 * 0.25) / 4)
    assert difference({}) == pytest.approx((4 - 3) / 16)
    assert difference({"small": 0.0, "large": 1.0}) == pytest.approx(-0.25)
    assert compare(weighed(0, 0, 6, {}), record(1, 0.5)) is None


def test_weights_that_fit_the_sizes_leave_the_exact_test_in_place():
    def both(number, right):
        scores = {("a", str(i), 1): float(i < right) for i in range(8)} | {("b", "x", 1): 1.0}
        return RoundRecord(number, 0.5, sample_scores=scores, task_weights={"a": 8.0, "b": 1.0})

    assert compare(both(0, 0), both(1, 5)).p == pytest.approx(2 * 0.5**5)


def test_samples_of_one_cluster_are_no_independent_evidence_of_a_drop():
    best, last = measured(1, 20), measured(2, 10)
    assert after(record(0, 0.1), best, last).rollback_to == 1  # 10 pairs, all worse: p = 0.002
    clusters = {("t", str(i), 1): "one text" if 10 <= i < 20 else str(i) for i in range(40)}
    best, last = (measured(row.round, round(40 * row.score), clusters=clusters) for row in (best, last))
    decision = after(record(0, 0.1), best, last)
    assert decision.rollback_to is None
    assert "within noise (paired test over 40 samples, p = 1)" in decision.reason


def expected_decision(rights, config):
    """(action, status, best round, rollback) of rounds that differ in how many of 40 samples are right: the rules in
    the order in which the README states them, written anew."""
    last = len(rights) - 1
    top = rights.index(max(rights))
    if max(rights) / 40 >= config.eval_threshold:
        return "stop", "target_met", top, None
    if last == config.max_rounds:
        return "stop", "target_missed", top, None
    if config.decision.patience and last - top >= config.decision.patience:
        return "stop", "patience_spent", top, None
    if last == 0:
        return "continue", "baseline", 0, None
    if top == last:
        return "continue", "improved", last, None
    worse_pairs = rights[top] - rights[last]
    beyond = 2 * 0.5**worse_pairs < 0.05
    if beyond and config.decision.on_regression == "rollback":
        return "continue", "rolled_back", top, top
    return "continue", "not_improved", top, None


def test_every_history_of_four_rounds_under_every_setting_is_decided_by_the_rules():
    counted = 0
    for length in (1, 2, 3, 4):
        for rights in itertools.product((0, 20, 25, 26, 36), repeat=length):
            history = [measured(number, right) for number, right in enumerate(rights)]
            for patience, on_regression, max_rounds in itertools.product((None, 2), ("rollback", "continue"), (3, 9)):
                config = settings(
                    max_rounds=max_rounds, decision={"patience": patience, "on_regression": on_regression}
                )
                got = after(*history, config=config)
                wanted = expected_decision(rights, config)
                assert (got.action, got.status, got.best_round, got.rollback_to) == wanted, (rights, config.decision)
                assert (got.next_lr is None) is (got.action == "stop")
                assert got.reason.startswith(("Round", "The base model"))
                counted += 1
    assert counted == 8 * (5 + 25 + 125 + 625)
