"""Figures of a run, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from scipy import stats

import checkpoint_evaluation
import run_summary
from config_schema import Price
from evaluation import EvaluationResult, SampleResult, TaskResult, summarise
from logger import StructuredLogger
from significance import score_interval


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
    watched = TaskResult("b", 1.0, 1, 0, weight=0.0)
    assert run_summary.overall_interval(result(a, watched)) == pytest.approx((0.1, 0.9))


def sample(identity: str, category: str | None, score: float, **more) -> SampleResult:
    return SampleResult("t", identity, 1, "q", "a", "a", score, category=category, **more)


def test_categories_are_ordered_by_how_sure_their_weakness_is():
    rows = [sample(f"x{n}", "x", float(n < 2)) for n in range(20)]
    rows += [sample(f"y{n}", "y", 0.0) for n in range(2)]
    rows += [sample("z", "z", 0.0), sample("0", None, 0.0)]
    found = run_summary.category_scores(rows)
    # 2 of 20 are surely weak (upper end 0.301), 0 of 2 less so (0.658), and one sample says nothing.
    assert list(found) == ["x", "y", "z"]
    x = stats.binomtest(2, 20).proportion_ci(method="wilson")
    assert found["x"] == {"score": 0.1, "n": 20, "ci_low": pytest.approx(x.low), "ci_high": pytest.approx(x.high)}
    y = stats.binomtest(0, 2).proportion_ci(method="wilson")
    assert (found["y"]["ci_low"], found["y"]["ci_high"]) == (0.0, pytest.approx(y.high))
    assert found["z"] == {"score": 0.0, "n": 1, "ci_low": None, "ci_high": None}
    assert run_summary.weakest(found, 2) == ["x", "y"]
    assert run_summary.weakest(run_summary.category_scores([sample("a", "fine", 1.0)])) == []


def test_what_failed_or_has_no_grade_says_nothing_of_a_category_and_epochs_are_one_sample():
    rows = [sample("1", "x", 1.0), sample("2", "x", 0.0, error="gone"), sample("3", "x", 0.0, grade_missing=True)]
    rows += [SampleResult("t", "4", epoch, "q", "a", "a", float(epoch == 1), category="x") for epoch in (1, 2)]
    assert (run_summary.category_scores(rows)["x"]["score"], run_summary.category_scores(rows)["x"]["n"]) == (0.75, 2)
    other = SampleResult("u", "1", 1, "q", "a", "a", 0.0, category="x")
    assert set(run_summary.category_scores([*rows, other])) == {"t: x", "u: x"}


def test_a_category_s_interval_allows_for_clusters():
    rows = [sample(f"x{n}", "x", float(n < 6), cluster=f"doc {n // 3}") for n in range(12)]
    expected = score_interval([row.score for row in rows], clusters=[row.cluster for row in rows])
    part = run_summary.category_scores(rows)["x"]
    assert (part["ci_low"], part["ci_high"]) == expected


def test_the_line_for_people_says_what_failed_was_cut_and_is_weak(capsys):
    rows = [sample(f"r{n}", "x" if n < 40 else "y", 1.0) for n in range(80)]
    rows += [sample(f"w{n}", "x", 0.0, stop_reason="max_tokens") for n in range(10)]
    rows += [sample(f"e{n}", "y", 0.0, error="HTTP 503") for n in range(10)]
    figures = run_summary.measured(summarise(rows), nll=None)
    assert (figures["score"], round(figures["answered_score"], 3), figures["errors"]) == (0.8, 0.889, 10)
    assert figures["tasks"][0]["answered_score"] == figures["answered_score"]
    checkpoint_evaluation.tell_score({**figures, "round": 1}, 8, StructuredLogger(None))
    shown = capsys.readouterr().out
    for part in ("round 1: validation score 0.800 [0.711, 0.867]", "10 failed, 0.889 of the answered"):
        assert part in shown
    assert "warning: round 1: 10% of the replies were cut at 8 tokens; if answers need more, raise" in shown
    assert shown.splitlines()[-1] == "  weakest: x 0.80 [0.67, 0.89] (n = 50)"


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
