"""How replies are scored, and how samples become a score."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from error_handling import EvaluationError
from evaluation import (
    SampleResult,
    TaskRules,
    closed_label_set,
    normalise,
    refuse_failures,
    sample_category,
    score_reply,
    settled_samples,
    summarise,
)
from significance import score_interval

LABELS = ("bug", "bug report", "billing", "how to")


def sample(identity: str, score: float = 1.0, *, task: str = "t", epoch: int = 1, **more: object) -> SampleResult:
    known = {"input": "q", "target": "a", "output": "a", **more}
    return SampleResult(task=task, id=identity, epoch=epoch, score=score, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "target", "expected"),
    [
        ("billing", "billing", (1.0, 1.0)),
        ("  **Billing**.\n", "billing", (1.0, 1.0)),
        ("ｂｉｌｌｉｎｇ", "billing", (1.0, 1.0)),
        ("The label is billing.", "billing", (0.0, 1.0)),
        ("billing or bug", "billing", (0.0, 0.0)),
        ("rebilling", "billing", (0.0, 0.0)),
        ("", "billing", (0.0, 0.0)),
        ("this is a bug report", "bug", (0.0, 0.0)),
        ("this is a bug report", "bug report", (0.0, 1.0)),
        ("a bug report, or a bug", "bug report", (0.0, 0.0)),
        ("how\n to", "how to", (1.0, 1.0)),
        ("it costs $5", "$5", (0.0, 1.0)),
    ],
)
def test_a_reply_is_scored_strictly_and_leniently(output: str, target: str, expected: tuple[float, float]) -> None:
    assert score_reply(output, target, LABELS) == expected


def test_a_label_inside_the_target_does_not_count_against_it_when_the_target_is_not_listed() -> None:
    assert score_reply("surely a crash report", "crash report", ("crash", "billing")) == (0.0, 1.0)
    assert score_reply("a crash report, a crash", "crash report", ("crash",)) == (0.0, 0.0)


def test_a_target_without_a_word_cannot_be_scored() -> None:
    with pytest.raises(EvaluationError, match="empty after normalisation"):
        score_reply("anything", " ... ", LABELS)


def test_normalise_keeps_inner_punctuation_and_the_sign() -> None:
    assert normalise(' "Don\'t  PANIC!" ') == "don't panic"
    assert normalise("-1.5") == normalise("−1.5") == "-1.5"
    assert normalise("“Don’t – PANIC!”") == normalise('"Don\'t - panic!"')


def test_targets_form_a_closed_set_when_each_is_used_twice() -> None:
    assert closed_label_set(["b", "a", "b", "a"]) == ("a", "b")
    assert closed_label_set(["a", "b", "c", "a"]) == ()
    assert closed_label_set([f"l{n}" for n in range(51)] * 4) == ()


def test_a_row_s_category_is_its_own_else_its_target_in_a_closed_set() -> None:
    assert sample_category("mine", "bug", LABELS) == "mine"
    assert sample_category(None, "bug", LABELS) == "bug"
    assert sample_category(None, "Paris", LABELS) is None


def test_failed_and_ungraded_samples_stay_in_the_denominator() -> None:
    samples = [sample(f"r{n}") for n in range(80)] + [sample(f"w{n}", 0.0) for n in range(10)]
    samples += [sample(f"e{n}", 0.0, error="gone") for n in range(6)]
    samples += [sample(f"g{n}", 0.0, grade_missing=True) for n in range(4)]
    result = summarise(samples)
    assert (result.score, result.n, result.errors) == (0.80, 100, 6)
    assert result.tasks[0].answered_score == result.metrics["answered_score"] == pytest.approx(80 / 94)
    low, high = result.tasks[0].ci_low, result.tasks[0].ci_high
    assert low is not None
    assert high is not None
    # Wilson: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n) with p = 0.8, n = 100, z = 1.96, by hand.
    assert (round(low, 4), round(high, 4)) == (0.7112, 0.8666)


def test_epochs_are_averaged_or_combined_as_the_task_says() -> None:
    samples = [sample("a", s, epoch=e) for e, s in ((1, 1.0), (2, 0.0))] + [sample("b", 0.0, epoch=e) for e in (1, 2)]
    assert (summarise(samples).score, summarise(samples).n) == (0.25, 2)
    assert summarise(samples, rules={"t": TaskRules(reduce=max)}).score == 0.5


def test_tasks_are_weighted_and_keep_their_thresholds() -> None:
    samples = [sample("a", 1.0, task="x"), sample("a", 0.0, task="y"), sample("b", 0.0, task="y")]
    result = summarise(samples, rules={"x": TaskRules(weight=3.0), "y": TaskRules(threshold=0.5)})
    assert result.score == 0.75
    assert {task.task: task.threshold for task in result.tasks} == {"x": None, "y": 0.5}


def test_a_sample_counted_twice_and_an_evaluation_of_nothing_have_no_score() -> None:
    with pytest.raises(EvaluationError, match="counted twice"):
        summarise([sample("a"), sample("a")])
    with pytest.raises(EvaluationError, match="no samples"):
        summarise([])
    with pytest.raises(EvaluationError, match="add up to zero"):
        summarise([sample("a")], rules={"t": TaskRules(weight=0.0)})


def test_metrics_tell_truncation_and_the_lenient_score() -> None:
    cut = replace(sample("b", 0.0, lenient_score=1.0), stop_reason="max_tokens")
    result = summarise([sample("a", lenient_score=1.0), cut, sample("c", 0.0, error="gone"), sample("d", 0.0)])
    assert result.metrics == {"truncated": 0.25, "lenient_score": 0.5, "answered_score": pytest.approx(1 / 3)}
    assert "lenient_score" not in summarise([sample("a")]).metrics


def test_failures_up_to_the_limit_are_borne_per_task() -> None:
    def mixed(failed: int, of: int, task: str) -> list[SampleResult]:
        return [sample(str(n), 0.0, task=task, error="HTTP 500" if n < failed else None) for n in range(of)]

    refuse_failures(mixed(29, 100, "t"), 0.29)
    with pytest.raises(EvaluationError, match=r"30 of 100 samples of t failed.*sample 0: HTTP 500"):
        refuse_failures(mixed(30, 100, "t"), 0.29)
    with pytest.raises(EvaluationError, match="2 of 2 samples of small failed"):
        refuse_failures(mixed(0, 200, "big") + mixed(2, 2, "small"), 0.05)


def test_the_last_result_without_an_error_is_settled() -> None:
    failed, right = sample("a", 0.0, error="gone"), sample("a")
    assert settled_samples([failed, right, sample("b", 0.0, error="gone")]) == {right.key: right}
    assert settled_samples([right, failed]) == {right.key: right}


def test_a_sample_survives_its_row() -> None:
    before = sample("a", 0.5, category="c", metadata={"source": "x"}, stop_reason="stop", tokens_in=3)
    row = json.loads(json.dumps(before.to_row()))
    assert SampleResult.from_row({**row, "of_a_later_version": 1}) == before


def test_an_evaluation_in_which_nothing_got_a_grade_has_no_score():
    lost = [
        SampleResult(task="t", id=str(n), epoch=1, input="q", target="a", output="b", score=0.0, grade_missing=True)
        for n in range(3)
    ]
    with pytest.raises(EvaluationError, match="none of its 3 samples a grade"):
        refuse_failures(lost, 0.5)
    refuse_failures([*lost, replace(lost[0], id="graded", grade_missing=False)], 0.5)


def test_of_eighty_right_ten_wrong_and_ten_failed_the_answered_share_stands_beside_the_score():
    samples = [sample(f"r{n}") for n in range(80)] + [sample(f"w{n}", 0.0) for n in range(10)]
    samples += [sample(f"e{n}", 0.0, error="gone") for n in range(10)]
    refuse_failures(samples, 0.2)
    result = summarise(samples)
    assert (result.score, round(result.metrics["answered_score"], 3)) == (0.8, 0.889)
    lost = [sample("a"), sample("b", 0.0, task="u", error="gone")]
    assert "answered_score" not in summarise(lost).metrics
    assert {task.task: task.answered_score for task in summarise(lost).tasks} == {"t": 1.0, "u": None}


def test_clusters_widen_the_interval_and_belong_to_all_samples_of_a_task_or_to_none():
    plain = [sample(f"s{n:02d}", float(n % 4 < 2)) for n in range(40)]
    tied = [replace(one, cluster=f"doc {n % 4}") for n, one in enumerate(plain)]
    loose, tight = summarise(plain).tasks[0], summarise(tied).tasks[0]
    assert (loose.clusters, tight.clusters) == (None, 4)
    assert (tight.ci_low, tight.ci_high) == score_interval([s.score for s in tied], clusters=[s.cluster for s in tied])
    assert tight.ci_low < loose.ci_low
    assert loose.ci_high < tight.ci_high
    summarise([*tied, sample("a", task="other")])
    with pytest.raises(EvaluationError, match="40 of 41 samples of t have a cluster"):
        summarise([*tied, sample("z")])
    assert summarise([sample("only", cluster="a")]).tasks[0].ci_low is None


def test_a_score_that_is_no_mean_is_computed_over_all_samples_and_has_an_interval():
    def share_of_best(groups):
        best = [max(one.score for one in group) for group in groups]

        def figure(positions):
            return (sum(best[p] for p in positions) / len(positions)) ** 2

        return figure

    samples = [sample(f"s{n}", float(n < 6)) for n in range(9)] + [sample("s9", 0.0, error="gone")]
    rules = {"t": TaskRules(make_figure=share_of_best, metric="squared")}
    (task,) = summarise(samples, rules=rules).tasks
    assert (task.score, task.metric) == (pytest.approx(0.36), "squared")
    assert task.answered_score == pytest.approx((6 / 9) ** 2)
    assert 0.0 < task.ci_low < 0.36 < task.ci_high < 1.0


def test_epochs_that_no_reducer_can_settle_are_no_grade():
    samples = [sample("a", s, epoch=e) for e, s in ((1, 1.0), (2, 0.0))]
    assert summarise(samples, rules={"t": TaskRules(reduce=lambda scores: float("nan"))}).score == 0.0
