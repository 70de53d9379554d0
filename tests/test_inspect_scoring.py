"""Which scorer, metric and reducer make a task's score: real tasks, real metrics, scripted replies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_sampler import ScriptedSampler, write_rows
from sklearn.metrics import f1_score

from data_loader import load_rows
from error_handling import ConfigurationError, DataError, EvaluationError, ServiceError
from evaluation import EvaluationResult, SampleResult
from inspect_eval import LABELLED_ROWS, TaskSpec, check_tasks, run_inspect_evaluation
from inspect_scoring import Scoring
from significance import score_interval
from simple_eval import run_simple_evaluation

TASKS = Path(__file__).resolve().parent / "inspect_tasks"
LABELS = ("bug", "billing", "refund")


def scored(task: str, /, **more: object) -> TaskSpec:
    return TaskSpec(f"{TASKS / 'scored_tasks.py'}@{task}", **more)  # type: ignore[arg-type]


def small(task: str, /, **more: object) -> TaskSpec:
    return TaskSpec(f"{TASKS / 'small_tasks.py'}@{task}", **more)  # type: ignore[arg-type]


def scoring(spec: TaskSpec) -> Scoring:
    (plan,) = check_tasks([spec])
    return plan.scoring


def seen(found: Scoring) -> tuple[str, str, str, bool]:
    return found.scorer, found.metric, found.reducer, found.make_figure is not None


async def run(sampler: ScriptedSampler, tmp_path: Path, *specs: TaskSpec, **more: object) -> EvaluationResult:
    settings = {"model_name": "m", "log_dir": tmp_path / "evals", "metadata": {}, **more}
    return await run_inspect_evaluation(sampler, specs, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (small("numbers"), ("exact", "mean", "mean", False)),
        (scored("labels"), ("label_read", "f1_macro", "mean", True)),
        (scored("labels", args={"headline": "exact"}), ("exact", "mean", "mean", False)),
        (scored("labels", scorer="exact"), ("exact", "mean", "mean", False)),
        (scored("labels", metric="accuracy"), ("label_read", "accuracy", "mean", False)),
        (scored("labels", metric="grouped.bug"), ("label_read", "grouped.bug", "mean", True)),
        (scored("labels", args={"epochs": 3}), ("label_read", "f1_macro", "max", True)),
        (scored("valued"), ("two_values.style", "mean", "mean", False)),
        (scored("valued", args={"metric": "facts"}), ("two_values.facts", "mean", "mean", False)),
        (scored("valued", scorer="two_values.facts"), ("two_values.facts", "mean", "mean", False)),
        (scored("unsure", metric="accuracy"), ("only_spread", "accuracy", "mean", False)),
        (small("repeated", reducer="pass_at_2"), ("exact", "mean", "pass_at_2", False)),
        (small("repeated", reducer="at_least_3"), ("exact", "mean", "at_least_3", False)),
        (scored("collected", reducer="median"), ("exact", "mean", "median", False)),
    ],
)
def test_what_is_named_counts_and_else_the_headline_metric(spec, expected):
    assert seen(scoring(spec)) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (small("two_scorers", scorer="exat"), r"no scorer 'exat'; it has always, exact"),
        (scored("valued", scorer="two_values.tone"), r"'two_values' gives no value 'tone'; it gives style, facts"),
        (
            scored("labels", metric="f1"),
            r"'f1' is no metric .*these can: accuracy, mean, f1_macro, needs_label, grouped",
        ),
        (scored("labels", metric="stderr"), r"'stderr' is no metric that can be its score"),
        (scored("unsure"), r"\(stderr\) say how sure a score is, not how good; name metric: accuracy or mean"),
        (scored("lost_headline"), r"headline metric is of a scorer 'judge', which it does not have; it has exact"),
        (scored("collected"), r"reducer collect gives no single score; name reducer: mean, median, mode, max"),
        (small("repeated", reducer="best"), r"'best' is no reducer; these are: mean, median, mode, max, at_least_K"),
        (small("repeated", reducer="pass_at_4"), r"'pass_at_4' needs more epochs than its 3"),
        (small("numbers", reducer="at_least_2"), r"'at_least_2' needs more epochs than its 1"),
    ],
)
def test_a_name_that_fits_nothing_is_refused_before_anything_is_asked(spec, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_tasks([spec])
    assert spec.task in str(caught.value)


def test_reducers_combine_epochs_as_their_names_say():
    scores = [1.0, 0.0, 1.0]
    expected = {
        "mean": 2 / 3,
        "median": 1.0,
        "mode": 1.0,
        "max": 1.0,
        "at_least_2": 1.0,
        "at_least_3": 0.0,
        "pass_at_1": 2 / 3,
        "pass_at_2": 1.0,  # of the three pairs none is without a right one
        "pass_k_2": 1 / 3,  # one of the three pairs is right twice
    }
    found = {name: scoring(small("repeated", reducer=name)).reduce(scores) for name in expected}
    assert found == pytest.approx(expected)
    assert scoring(small("repeated", reducer="median")).reduce([0.0, 0.25, 1.0]) == 0.25


def test_targets_that_form_a_closed_set_are_categories_but_letters_of_choices_are_not():
    closed, letters, open_ended = check_tasks([scored("labels"), scored("multiple_choice_letters"), small("numbers")])
    assert (closed.labels, letters.labels, open_ended.labels) == (tuple(sorted(LABELS)), (), ())


def replies(question: str, epoch: int = 1) -> str | BaseException:
    n = int(question.rsplit(maxsplit=1)[-1])
    if n == 11:
        return ServiceError("HTTP 503")
    return LABELS[n % 3] if n < 6 else "bug"


async def test_a_metric_of_the_task_s_own_is_computed_over_all_samples_also_after_an_interruption(tmp_path):
    wanted = [LABELS[n % 3] for n in range(12)]
    said = [*wanted[:6], *["bug"] * 5, ""]
    truth = f1_score(wanted, said, labels=sorted(LABELS), average="macro")
    spec = scored("labels", threshold=0.5)
    whole = await run(ScriptedSampler(replies), tmp_path, spec, max_errors=0.2)
    (task,) = whole.tasks
    assert (whole.score, task.metric, task.errors) == (pytest.approx(truth), "f1_macro of label_read", 1)
    assert task.answered_score == pytest.approx(f1_score(wanted[:11], said[:11], average="macro"))
    assert task.ci_low < task.score < task.ci_high
    assert [sample.category for sample in whole.samples] == wanted
    assert whole.samples[0].grade == {"value": "C", "answer": "bug", "metadata": {"weight": 0.0}}
    # The rows survive their file; the samples asked again are the failed one and one that was lost.
    done = [SampleResult.from_row(s.to_row()) for s in whole.samples if s.id != "t03"]
    again = ScriptedSampler(replies)
    resumed = await run(again, tmp_path, spec, max_errors=0.2, done=done)
    assert sorted(question for question, _ in again.asked) == ["ticket 11", "ticket 3"]
    assert (resumed.score, resumed.tasks) == (whole.score, whole.tasks)


async def test_a_metric_that_cannot_be_computed_or_is_no_score_ends_the_evaluation(tmp_path):
    for metric, message in (
        ("needs_label", r"needs_label could not be computed \(1 samples without a grade .*: TypeError|KeyError"),
        ("grouped.rug", "grouped gives bug, billing, refund, all; name one of them as metric: grouped.KEY"),
        ("f1_macro.bug", "gives one number and no value 'bug'"),
    ):
        with pytest.raises(EvaluationError, match=message):
            await run(ScriptedSampler(replies), tmp_path, scored("labels", metric=metric), max_errors=0.2)


async def test_a_grouped_metric_and_one_value_of_several_can_be_the_score(tmp_path):
    specs = [
        scored("labels", metric="grouped.bug", name="bugs"),
        scored("labels", metric="grouped", name="all"),
        scored("valued", scorer="two_values.facts", weight=2.0),
    ]
    result = await run(ScriptedSampler(replies), tmp_path, *specs, max_errors=0.2)
    # Of the tickets about bugs all four are right; of all twelve 4 + 2 + 2.
    assert [task.score for task in result.tasks] == pytest.approx([8 / 12, 1.0, 0.75])
    assert result.score == pytest.approx((8 / 12 + 1.0 + 2 * 0.75) / 4)


async def test_a_judge_s_grade_that_cannot_be_read_is_no_grade_and_is_told(tmp_path):
    verdicts = [
        "GRADE: C",
        "**GRADE:** C",
        "**GRADE: C**",
        "GRADE: I",
        "GRADE: CI",
        "no verdict",
        "GRADE: P",
        "C, then I. GRADE: C\nno, GRADE: I",
    ]
    result = await run(
        ScriptedSampler(lambda *_: "x"), tmp_path, scored("judged", args={"verdicts": verdicts}), max_connections=1
    )
    # Without a grade: one word that is none, none at all, one that was not offered, and one behind an emphasis mark.
    assert sum(sample.grade_missing for sample in result.samples) == 4
    assert sum(sample.score for sample in result.samples) == 2.0
    assert (result.n, result.errors, result.score) == (8, 0, 0.25)


# ---- clusters


async def test_clusters_come_from_the_samples_metadata_and_widen_the_interval(tmp_path):
    spec = scored("labels", scorer="exact", cluster_by="author")
    sampler = ScriptedSampler({f"ticket {n}": LABELS[n % 3] if n < 6 else "no" for n in range(12)})
    result = await run(sampler, tmp_path, spec)
    (task,) = result.tasks
    assert [sample.cluster for sample in result.samples[:4]] == ["a0", "a0", "a1", "a1"]
    expected = score_interval([1.0] * 6 + [0.0] * 6, clusters=[n // 2 for n in range(12)])
    assert (task.clusters, task.ci_low, task.ci_high) == (6, *expected)
    with pytest.raises(ConfigurationError, match=r"12 of 12 samples have no .*'writer'.*t00\); .*: author, label"):
        check_tasks([replace(spec, cluster_by="writer")])


async def test_rows_without_their_cluster_are_refused_with_their_line_by_both_evaluators(tmp_path):
    rows = [{"input": f"q {n}", "target": "yes" if n % 2 else "no", "doc": n // 4} for n in range(8)]
    path = write_rows(tmp_path / "eval.jsonl", rows)
    spec = TaskSpec(LABELLED_ROWS, {"eval_file": str(path), "cluster_by": "doc"}, name="eval_file", cluster_by="doc")
    sampler = ScriptedSampler(lambda *_: "yes")
    one = await run(sampler, tmp_path, spec)
    two = await run_simple_evaluation(sampler, load_rows(path, purpose="eval").rows, cluster_by="doc")
    assert [sample.cluster for sample in one.samples] == ["0"] * 4 + ["1"] * 4
    assert [sample.cluster for sample in two.samples] == ["0"] * 4 + ["1"] * 4
    assert one.tasks[0].clusters == two.tasks[0].clusters == 2
    assert (one.tasks[0].ci_low, one.tasks[0].ci_high) == (two.tasks[0].ci_low, two.tasks[0].ci_high)
    bad = write_rows(tmp_path / "bad.jsonl", [*rows, {"input": "q 9", "target": "no", "doc": None}])
    with pytest.raises(DataError, match=r"bad\.jsonl:9: no text or number in the field 'doc'.*: doc"):
        check_tasks([replace(spec, args={"eval_file": str(bad), "cluster_by": "doc"})])
    with pytest.raises(DataError, match=r"bad\.jsonl:9: no text or number in the field 'doc'"):
        await run_simple_evaluation(ScriptedSampler({}), load_rows(bad, purpose="eval").rows, cluster_by="doc")


async def test_a_category_can_be_the_cluster(tmp_path):
    rows = [{"input": f"q {n}", "target": f"answer {n}", "area": "north" if n < 3 else "south"} for n in range(6)]
    path = write_rows(tmp_path / "eval.jsonl", rows)
    loaded = load_rows(path, purpose="eval", category_field="area").rows
    result = await run_simple_evaluation(
        ScriptedSampler(lambda *_: "x"), loaded, cluster_by="area", category_field="area"
    )
    assert {sample.cluster for sample in result.samples} == {"north", "south"}
    assert math.isclose(result.tasks[0].ci_high, score_interval([0.0] * 6, clusters="aaabbb")[1] or 0)
