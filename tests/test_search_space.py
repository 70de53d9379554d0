"""Ranges, a trial's configuration, proposals and the ranking, with numbers worked out by hand."""

from __future__ import annotations

import pytest

import search_space
from config_groups import HeldoutConfig
from config_schema import Price, TrainingConfig
from round_decision import Comparison
from search_space import Point, Proposals, TrialResult


def config(**changes) -> TrainingConfig:
    return TrainingConfig(**{"base_model": "Qwen/Qwen3-8B", "train_file": "t", "eval_file": "e", **changes})


def trial(number: int, score: float | None, rate: float = 1e-4, rank: int = 8, **more) -> TrialResult:
    known = {"ci_low": None, "ci_high": None, "n": None, "reason": "", **more}
    tokens = {"train": 1000, "prefill": 200, "sample": 30}
    status = "failed" if score is None else "completed"
    return TrialResult(number, rate, rank, f"run-{number}", status, score, tokens=tokens, wall_s=1.0, **known)


def test_ranges_around_what_is_configured():
    space = search_space.search_space(config(learning_rate=1e-3, lora_rank=12))
    assert (space.lowest, space.highest) == pytest.approx((2e-4, 5e-3))
    assert space.ranks == (3, 6, 12, 24, 48)
    assert search_space.search_space(config(lora_rank=2)).ranks == (1, 2, 4, 8)  # half a rank there is not


def test_the_recommended_rate_is_the_centre_where_it_is_asked_for():
    space = search_space.search_space(config(use_recommended_lr=True))
    assert space.start.learning_rate == pytest.approx(5e-4 * (2000 / 4096) ** 0.0775)
    tried = search_space.trial_config(config(use_recommended_lr=True), Point(2e-4, 8))
    assert (tried.use_recommended_lr, tried.learning_rate, tried.lora_rank) == (False, 2e-4, 8)


def test_the_rank_of_an_adapter_that_is_trained_further_is_not_searched():
    assert search_space.search_space(config(init_from="tinker://a/weights/b", lora_rank=8)).ranks == (8,)


@pytest.mark.parametrize(
    ("written", "steps", "rounds", "warmup"),
    [(30, 40, 4, 30), (100, 40, 4, 39), (None, 40, 4, 16), (3, 1, 4, 0), (None, 1, 2, 0)],
)
def test_a_trial_warms_up_as_the_first_round_of_the_whole_run_does(written, steps, rounds, warmup):
    whole = config(warmup_steps=written, steps_per_round=steps, max_rounds=rounds)
    tried = search_space.trial_config(whole, Point(1e-4, 16))
    assert (tried.warmup_steps, tried.max_rounds, tried.planned_steps) == (warmup, 1, steps)


def test_a_rate_below_the_floor_lowers_the_floor():
    low = Point(2e-5, 16)
    assert search_space.trial_config(config(min_lr=5e-5), low).min_lr == 2e-5
    assert search_space.best_config(config(min_lr=5e-5), low)["min_lr"] == 2e-5
    assert search_space.trial_config(config(min_lr=1e-6), low).min_lr == 1e-6


def test_a_trial_knows_neither_limits_nor_whom_to_tell_and_of_the_test_set_the_file_alone():
    whole = config(
        budget={"tokens": 9},
        evalops_enabled=True,
        evalops_test_suite_id="suite",
        decision={"target_rule": "lower_bound"},
        eval_threshold=0.4,
    ).model_copy(
        update={
            "heldout": HeldoutConfig(test_file="/nowhere/test.jsonl", family="f"),
            "notify": "n",
            "trackers": ("x",),
        }
    )
    tried = search_space.trial_config(whole, Point(1e-4, 16))
    assert tried.heldout == HeldoutConfig(test_file="/nowhere/test.jsonl")
    assert (tried.budget.tokens, tried.evalops_enabled, tried.notify, tried.trackers) == (None, False, None, ())
    assert (tried.eval_threshold, tried.decision.target_rule) == (1.0, "point")


def test_the_best_configuration_differs_in_what_was_searched_alone():
    whole = config(learning_rate=1e-3, budget={"tokens": 9})
    best = search_space.best_config(whole, Point(5e-4, 4))
    assert TrainingConfig.model_validate(best) == whole.model_copy(update={"learning_rate": 5e-4, "lora_rank": 4})


def test_proposals_begin_with_the_configuration_and_repeat_when_told_the_same():
    space = search_space.search_space(config(learning_rate=1e-3, lora_rank=8))
    scores = [0.3, None, 0.6, 0.1, 0.5, 0.55, 0.2, 0.4]

    def propose(count: int, seed: int) -> tuple[Proposals, list[Point]]:
        proposals, points = Proposals(space, seed), []
        for score in scores[:count]:
            points.append(proposals.next())
            proposals.tell(score)
        return proposals, points

    _, unbroken = propose(8, seed=3)
    assert unbroken[0] == Point(1e-3, 8)
    assert len(set(unbroken)) > 4
    assert all(2e-4 <= point.learning_rate <= 5e-3 and point.rank in (2, 4, 8, 16, 32) for point in unbroken)
    for broken_after in (1, 2, 5, 7):  # before and after the sampler stops drawing at random
        resumed, points = propose(broken_after, seed=3)
        assert points == unbroken[:broken_after]
        assert resumed.next() == unbroken[broken_after]
    assert propose(4, seed=4)[1][1:] != unbroken[1:4]


def test_of_equals_the_smaller_rank_and_then_the_lower_rate_comes_first():
    tied = 0.1 + 0.2  # 0.30000000000000004
    trials = [
        trial(1, 0.3, rate=2e-4, rank=16),
        trial(2, None),
        trial(3, tied, rate=3e-4, rank=8),
        trial(4, 0.3, rate=1e-4, rank=8),
        trial(5, 0.2, rank=2),
        trial(6, 0.4, rank=32),
    ]
    assert [row.trial for row in search_space.ranked(trials)] == [6, 4, 3, 1, 5]


def test_the_lead_is_told_with_the_paired_comparison():
    best, second = trial(1, 0.7), trial(2, 0.6)

    def said(p: float, low: float | None = -0.025, difference: float = 0.1) -> str:
        return search_space.lead_sentence(best, second, Comparison(1, 1, 100, difference, low, 0.213, p))

    assert said(0.04) == (
        "Trial 1 leads trial 2 by 0.100 (95 % interval -0.025 to +0.213, paired test over 100 samples, p = 0.04), "
        "beyond noise."
    )
    assert "within noise" in said(0.05)
    assert "within noise" in said(0.04, difference=-0.1)
    assert "interval unknown" in said(0.04, low=None)
    assert "no test can tell" in search_space.lead_sentence(best, second, None)
    assert "ties with" in search_space.lead_sentence(trial(1, 0.5), trial(2, 0.5), None)


def test_the_table_marks_the_best_and_adds_up():
    price = Price(prefill=0.0, sample=0.0, train=1000.0)  # a dollar per thousand trained tokens
    rows = [trial(1, 0.25, ci_low=0.1, ci_high=0.5, n=20), trial(2, None, reason="the loss | is\nnan")]
    lines = search_space.table(rows, {"score": 0.1, "ci_low": None, "ci_high": None, "n": 20}, ["A note."], price)
    assert "| base model | - | - | 0.100 | - | 20 | - | - | measured |" in lines
    assert "| **1** | 0.0001 | 8 | 0.250 | 0.100 to 0.500 | 20 | 1,230 | $1.00 | completed |" in lines
    assert "| 2 | 0.0001 | 8 | - | - | - | 1,230 | $1.00 | failed: the loss / is nan |" in lines
    assert lines.endswith("A note.\n\nTogether: 2,460 tokens, $2.00.\n")
