"""What an evaluation yields, whichever evaluator made it, and the rules by which a reply is scored.

`SampleResult` is one row of `samples/round_NN.jsonl`; `EvaluationResult` is a checkpoint's whole evaluation. Both
evaluators score a reply through `score_reply`, so that they cannot disagree about one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from error_handling import EvaluationError


@dataclass(frozen=True)
class SampleResult:
    """One evaluated sample. Key: (task, id, epoch).

    `score` and `lenient_score` are in [0, 1]; a sample that failed (`error` set) or has no grade (`grade_missing`)
    has score 0.0 and stays in the denominator. `stop_reason` is "stop" (a stop token ended the reply), "max_tokens"
    (cut) or "unknown". `seconds` is wall-clock time from request to reply.
    """

    task: str
    id: str
    epoch: int
    input: str
    target: str
    output: str
    score: float
    lenient_score: float | None = None
    stop_reason: str = "unknown"
    error: str | None = None
    category: str | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    grade_missing: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.task, self.id, self.epoch)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> SampleResult:
        """The inverse of `to_row`; keys this version does not know are ignored."""
        known = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**known)


@dataclass(frozen=True)
class TaskResult:
    """The score of one task of an evaluation. `ci_low`/`ci_high`: 95 % interval, None when unknown."""

    task: str
    score: float
    n: int
    errors: int
    weight: float = 1.0
    threshold: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """A checkpoint's evaluation.

    `score` in [0, 1] is over all `n` samples (after epochs are averaged), failed ones counted as not correct, and
    over several tasks the weighted mean. `metrics` holds further figures by name (`lenient_score`, `nll`,
    `truncated` as a share in [0, 1]...). `log_paths` are Inspect logs, absent for the built-in evaluator.
    """

    score: float
    n: int
    errors: int
    samples: tuple[SampleResult, ...]
    metrics: Mapping[str, float]
    tasks: tuple[TaskResult, ...]
    log_paths: tuple[str, ...] = ()


def normalise(text: str) -> str:
    """NFKC, lower case, surrounding white space and punctuation removed, inner white space folded to one blank."""
    folded = unicodedata.normalize("NFKC", text)
    if "  " in folded or not folded.isprintable():  # of white space, only the blank is printable
        folded = " ".join(folded.split())
    return folded.lower().strip(" \t\n\r.,;:!?\"'`*()[]{}<>")


def _mentions(text: str, label: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text) is not None


def score_reply(output: str, target: str, labels: Iterable[str] = ()) -> tuple[float, float]:
    """(strict, lenient) score of a reply, each 0.0 or 1.0.

    Strict: equal to the target after `normalise`. Lenient: the target is mentioned as whole words and no other of
    `labels` is (a label that is part of a longer mentioned label, such as "bug" in "bug report", does not count as
    mentioned beside it). A strict hit is always a lenient hit.
    """
    said, wanted = normalise(output), normalise(target)
    if not wanted:
        raise EvaluationError("a target that is empty after normalisation cannot be scored; give it a word")
    if said == wanted:
        return 1.0, 1.0
    if not _mentions(said, wanted):
        return 0.0, 0.0
    rest = said
    # Longest first, so that what is inside the wanted label is gone before shorter labels are looked for.
    for label in sorted({normalise(name) for name in labels} - {""} | {wanted}, key=len, reverse=True):
        if label == wanted:
            rest = re.sub(rf"(?<!\w){re.escape(label)}(?!\w)", " ", rest)
        elif _mentions(rest, label):
            return 0.0, 0.0
    return 0.0, 1.0


def closed_label_set(targets: Sequence[str], *, max_labels: int = 50) -> tuple[str, ...]:
    """The distinct targets when they form a closed set (each used about twice or more), else empty.

    A set counts as closed when it has at most `max_labels` members and no more than half as many as there are
    targets: questions with an answer of their own each are not a classification.
    """
    distinct = sorted(set(targets))
    return tuple(distinct) if len(distinct) <= max_labels and 2 * len(distinct) <= len(targets) else ()


def sample_category(category: str | None, target: str, labels: Iterable[str]) -> str | None:
    """The category of an evaluated row: its own, else its target where the targets form a closed set."""
    return category if category is not None else (target if target in labels else None)


def settled_samples(done: Iterable[SampleResult]) -> dict[tuple[str, str, int], SampleResult]:
    """Samples of an earlier, interrupted attempt that need not be asked again, by key.

    One that failed is asked again; of several results with one key the last that did not fail counts.
    """
    return {sample.key: sample for sample in done if sample.error is None}


def refuse_failures(samples: Sequence[SampleResult], max_errors: float) -> None:
    """Raise `EvaluationError` when more than `max_errors` (a share in [0, 1]) of any task's samples failed, or none of
    those that did not fail got a grade."""
    by_task: dict[str, list[SampleResult]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    for task, of_task in by_task.items():
        failed = [sample for sample in of_task if sample.error]
        # The small term keeps 0.29 * 100 = 28.999... from refusing 29 of 100.
        if len(failed) > max_errors * len(of_task) + 1e-9:
            raise EvaluationError(
                f"{len(failed)} of {len(of_task)} samples of {task} failed, more than evaluation.max_errors="
                f"{max_errors:g} allows, so there is no score. The first, sample {failed[0].id}: {failed[0].error}"
            )
        if all(sample.grade_missing or sample.error for sample in of_task):
            raise EvaluationError(
                f"the scorer of {task} gave none of its {len(of_task)} samples a grade between 0 and 1, so there is no "
                "score; look at the scorer"
            )


def summarise(
    samples: Sequence[SampleResult],
    *,
    weights: Mapping[str, float] | None = None,
    thresholds: Mapping[str, float] | None = None,
    reducers: Mapping[str, Callable[[Sequence[float]], float]] | None = None,
    log_paths: Sequence[str] = (),
) -> EvaluationResult:
    """One `EvaluationResult` from all its samples; see there for what `score` counts.

    Epochs of a sample are combined first (by the task's entry in `reducers`, else by their mean), so `n` counts
    distinct (task, id). Raises `EvaluationError` when there are no samples, because an evaluation of nothing has no
    score, and when a sample is there twice.
    """
    import significance

    if not samples:
        raise EvaluationError("the evaluation has no samples, so there is no score")
    if len({sample.key for sample in samples}) < len(samples):
        raise EvaluationError("a sample is counted twice: two results have the same task, id and epoch")
    by_task: dict[str, dict[str, list[SampleResult]]] = {}
    for sample in sorted(samples, key=lambda s: s.key):
        by_task.setdefault(sample.task, {}).setdefault(sample.id, []).append(sample)
    tasks = []
    lenient: list[tuple[float, float]] = []
    for name, groups in by_task.items():
        reduce = (reducers or {}).get(name, fmean)
        scores = [reduce([s.score for s in group]) for group in groups.values()]
        errors = sum(any(s.error for s in group) for group in groups.values())
        low, high = significance.score_interval(scores)
        weight = (weights or {}).get(name, 1.0)
        tasks.append(
            TaskResult(
                task=name,
                score=sum(scores) / len(scores),
                n=len(scores),
                errors=errors,
                weight=weight,
                threshold=(thresholds or {}).get(name),
                ci_low=low,
                ci_high=high,
            )
        )
        soft = [s.lenient_score for group in groups.values() for s in group if s.lenient_score is not None]
        if soft:
            total = sum(len(group) for group in groups.values())
            lenient.append((weight, sum(soft) / total))
    total_weight = sum(task.weight for task in tasks)
    if total_weight <= 0:
        raise EvaluationError("the weights of the evaluation's tasks add up to zero")
    metrics = {"truncated": sum(s.stop_reason == "max_tokens" for s in samples) / len(samples)}
    if len(lenient) == len(tasks):
        metrics["lenient_score"] = sum(w * score for w, score in lenient) / total_weight
    return EvaluationResult(
        score=sum(task.weight * task.score for task in tasks) / total_weight,
        n=sum(task.n for task in tasks),
        errors=sum(task.errors for task in tasks),
        samples=tuple(samples),
        metrics=metrics,
        tasks=tuple(tasks),
        log_paths=tuple(log_paths),
    )
