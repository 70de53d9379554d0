"""Figures of a run, against numbers worked out by hand."""

from __future__ import annotations

import pytest

import run_summary
from config_schema import Price
from evaluation import EvaluationResult, SampleResult, TaskResult


def result(*tasks: TaskResult) -> EvaluationResult:
    total = sum(task.weight for task in tasks)
    score = sum(task.weight * task.score for task in tasks) / total
    return EvaluationResult(score, sum(t.n for t in tasks), 0, (), {"truncated": 0.0}, tasks)


def test_the_interval_of_one_task_is_its_own():
    only = TaskResult("a", 0.5, 10, 0, ci_low=0.2, ci_high=0.8)
    assert run_summary.overall_interval(result(only)) == pytest.approx((0.2, 0.8))


def test_intervals_of_tasks_add_up_in_squares():
    a = TaskResult("a", 0.5, 10, 0, weight=1.0, ci_low=0.1, ci_high=0.9)
    b = TaskResult("b", 0.9, 10, 0, weight=3.0, ci_low=0.5, ci_high=1.0)
    # Weights 1/4 and 3/4: the mean is 0.8; below sqrt(0.1**2 + 0.3**2), above sqrt(0.1**2 + 0.075**2).
    assert run_summary.overall_interval(result(a, b)) == pytest.approx((0.8 - 0.1**0.5, 0.925))


def test_one_unknown_interval_makes_the_whole_unknown():
    a = TaskResult("a", 0.5, 10, 0, ci_low=0.1, ci_high=0.9)
    b = TaskResult("b", 1.0, 1, 0)
    assert run_summary.overall_interval(result(a, b)) == (None, None)


def sample(identity: str, category: str | None, score: float, **more) -> SampleResult:
    return SampleResult("t", identity, 1, "q", "a", "a", score, category=category, **more)


def test_categories_are_listed_worst_first():
    rows = [sample("1", "x", 1.0), sample("2", "x", 0.0), sample("3", "y", 0.0), sample("4", None, 0.0)]
    assert run_summary.category_scores(rows) == {"y": {"score": 0.0, "n": 1}, "x": {"score": 0.5, "n": 2}}
    assert list(run_summary.category_scores(rows)) == ["y", "x"]


def test_tokens_and_money():
    rows = [sample("1", None, 1.0, tokens_in=30, tokens_out=5), sample("2", None, 1.0, tokens_in=20, tokens_out=7)]
    tokens = run_summary.token_counts(trained=100, likelihood=60, samples=rows)
    assert tokens == {"train": 100, "prefill": 110, "sample": 12}
    both = run_summary.add_tokens([tokens, {"train": 1, "prefill": 2, "sample": 3}])
    assert both == {"train": 101, "prefill": 112, "sample": 15}
    price = Price(prefill=0.1, sample=0.4, train=2.0)
    assert run_summary.money(tokens, price) == pytest.approx((100 * 2.0 + 110 * 0.1 + 12 * 0.4) / 1e6)
    assert run_summary.money(tokens, None) is None


def test_samples_without_a_grade_are_counted():
    rows = (sample("1", None, 1.0), sample("2", None, 0.0, grade_missing=True))
    whole = EvaluationResult(0.5, 2, 0, rows, {"truncated": 0.0}, (TaskResult("t", 0.5, 2, 0),))
    assert run_summary.measured(whole, nll=None)["ungraded"] == 1
