"""What an evaluation yields, whichever evaluator made it, and the rules by which a reply is scored.

`SampleResult` is one row of `samples/round_NN.jsonl`; `EvaluationResult` is a checkpoint's whole evaluation. Both
evaluators score a reply through `score_reply`, so that they cannot disagree about one.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from error_handling import EvaluationError

EVAL_FILE_TASK = "eval_file"
"""The name of the task that the rows of `eval_file` are."""


@dataclass(frozen=True)
class SampleResult:
    """One evaluated sample. Key: (task, id, epoch).

    `score` and `lenient_score` are in [0, 1]; a sample that failed (`error` set) or has no grade (`grade_missing`)
    has score 0.0 and stays in the denominator. `stop_reason` is "stop" (a stop token ended the reply), "max_tokens"
    (cut) or "unknown". `seconds` is wall-clock time from request to reply. `cluster` names what the sample has in
    common with others, so that they may be right or wrong together (`evaluation.cluster_by`). `grade` is what the
    scorer gave (value, answer, metadata), kept where the task's metric needs more than the score. `turns` are the
    messages asked (role, content) where there are several, and `input` is then the last one of the user's.
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
    cluster: str | None = None
    grade: Mapping[str, Any] | None = None
    turns: Sequence[Mapping[str, str]] | None = None

    @property
    def question(self) -> str:
        """What is asked, for similarity: of a dialogue of `eval_file` the user turns (`overlap.question_text`), of a
        task's, whose earlier turns are mostly examples that all its samples share, the last user turn."""
        if self.turns is None or self.task != EVAL_FILE_TASK:
            return self.input
        return "\n".join(turn["content"] for turn in self.turns if turn["role"] == "user")

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.task, self.id, self.epoch)

    def to_row(self) -> dict[str, Any]:
        # Not `asdict`, which copies every value deeply: this is done for every sample.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> SampleResult:
        """The inverse of `to_row`; keys this version does not know are ignored."""
        known = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**known)


def asked(messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """`SampleResult.input` and `SampleResult.turns` of a sample that asks these messages."""
    spoken = [turn["content"] for turn in messages if turn["role"] == "user"]
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    return {"input": spoken[-1] if spoken else "", "turns": turns if len(turns) > 1 else None}


@dataclass(frozen=True)
class TaskResult:
    """The score of one task of an evaluation, in [0, 1] over all `n` samples, `errors` of which failed.

    `ci_low`/`ci_high`: 95 % interval, None when unknown. `answered_score` is the same figure over the samples that did
    not fail, None when all did. `metric` says what the score is, for people (None: the mean of the samples' scores);
    `clusters` in how many clusters the samples are (None: each on its own).
    """

    task: str
    score: float
    n: int
    errors: int
    weight: float = 1.0
    threshold: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    answered_score: float | None = None
    metric: str | None = None
    clusters: int | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """A checkpoint's evaluation.

    `score` in [0, 1] is over all `n` samples (after epochs are combined), failed ones counted as not correct, and
    over several tasks the weighted mean. `metrics` holds further figures by name (`lenient_score`, `nll`,
    `truncated` as a share in [0, 1], `answered_score` over the samples that did not fail...). `log_paths` are Inspect
    logs, absent for the built-in evaluator. `sample_scores` holds each sample's score, epochs combined, by (task, id).
    """

    score: float
    n: int
    errors: int
    samples: tuple[SampleResult, ...]
    metrics: Mapping[str, float]
    tasks: tuple[TaskResult, ...]
    log_paths: tuple[str, ...] = ()
    sample_scores: Mapping[tuple[str, str], float] = field(default_factory=dict)


Figure = Callable[[Sequence[int]], float]
"""A score in [0, 1] from positions of sample groups (as many as wanted, repeated ones counted again)."""

MakeFigure = Callable[[Sequence[Sequence[SampleResult]]], Figure]
"""A `Figure` over groups of samples, each group holding the epochs of one sample."""


@dataclass(frozen=True)
class TaskRules:
    """How one task's samples become its score and what that counts for.

    `reduce` combines a sample's scores over epochs (default: their mean). `make_figure` gives a score that is no mean
    of those; None: the mean. `metric` is its name for people.
    """

    weight: float = 1.0
    threshold: float | None = None
    reduce: Callable[[Sequence[float]], float] = fmean
    make_figure: MakeFigure | None = None
    metric: str | None = None


_TYPOGRAPHIC = {"'": "‘’‚‛", '"': "“”„‟", "-": "‐‑‒–—―−"}
_PLAIN_PUNCTUATION = {ord(sign): plain for plain, signs in _TYPOGRAPHIC.items() for sign in signs}


def plain_punctuation(text: str) -> str:
    """Typographic quotes, dashes and the minus sign as the ASCII ones that keyboards give."""
    return text if text.isascii() else text.translate(_PLAIN_PUNCTUATION)


_PAIRS = frozenset({("(", ")"), ("[", "]"), ("{", "}"), ("<", ">"), ("*", "*"), ('"', '"'), ("'", "'")})


def normalise(text: str) -> str:
    """NFKC, lower case, ASCII quotes and dashes, surrounding white space and punctuation removed, inner white space
    folded to one blank."""
    folded = plain_punctuation(unicodedata.normalize("NFKC", text))
    if "  " in folded or not folded.isprintable():  # of white space, only the blank is printable
        folded = " ".join(folded.split())
    return folded.lower().strip(" \t\n\r.,;:!?\"'`*()[]{}<>")


def with_signs(text: str) -> str:
    """As `normalise`, but with outer signs that can mean something: "<5" and ">5" differ, "Yes." and "yes" do not."""
    folded = " ".join(plain_punctuation(unicodedata.normalize("NFKC", text)).lower().split())
    while len(folded) > 1 and (folded[0], folded[-1]) in _PAIRS:
        folded = folded[1:-1].strip()
    return folded.strip("\"'`*").rstrip(".,;:!? ")


def mentions(text: str, label: str) -> bool:
    """Whether the label is in the text as whole words; both as they are."""
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
    if not mentions(said, wanted):
        return 0.0, 0.0
    rest = said
    # Longest first, so that what is inside the wanted label is gone before shorter labels are looked for.
    for label in sorted({normalise(name) for name in labels} - {""} | {wanted}, key=len, reverse=True):
        if label == wanted:
            rest = re.sub(rf"(?<!\w){re.escape(label)}(?!\w)", " ", rest)
        elif mentions(rest, label):
            return 0.0, 0.0
    return 0.0, 1.0


def closed_label_set(targets: Sequence[str], *, max_labels: int = 50) -> tuple[str, ...]:
    """The distinct targets when they form a closed set (each used about twice or more), else empty.

    A set counts as closed when it has at most `max_labels` members and no more than half as many as there are
    targets: questions with an answer of their own each are not a classification.
    """
    distinct = sorted(set(targets))
    if any(not target.strip() for target in distinct):  # a judge needs no target; what has none is no label
        return ()
    return tuple(distinct) if len(distinct) <= max_labels and 2 * len(distinct) <= len(targets) else ()


def sample_category(category: str | None, target: str, labels: Iterable[str]) -> str | None:
    """The category of an evaluated row: its own, else its target where the targets form a closed set."""
    return category if category is not None else (target if target in labels else None)


def is_cluster(value: object) -> bool:
    """Whether a field's value can name a cluster: a text that is not empty, or a number."""
    return isinstance(value, str | int | float) and value != ""


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
    rules: Mapping[str, TaskRules] | None = None,
    log_paths: Sequence[str] = (),
) -> EvaluationResult:
    """One `EvaluationResult` from all its samples; see there for what `score` counts.

    `rules` holds those of each task by name. Epochs of a sample are combined first, so `n` counts distinct (task, id).
    Raises `EvaluationError` when there are no samples, because an evaluation of nothing has no score, when a sample
    is there twice, and when only some of a task's samples have a cluster.
    """
    if not samples:
        raise EvaluationError("the evaluation has no samples, so there is no score")
    if len({sample.key for sample in samples}) < len(samples):
        raise EvaluationError("a sample is counted twice: two results have the same task, id and epoch")
    by_task: dict[str, dict[str, list[SampleResult]]] = {}
    for sample in sorted(samples, key=lambda s: s.key):
        by_task.setdefault(sample.task, {}).setdefault(sample.id, []).append(sample)
    tasks = []
    sample_scores: dict[tuple[str, str], float] = {}
    for name, groups in by_task.items():
        rule = (rules or {}).get(name, TaskRules())
        scores = [_number(rule.reduce([sample.score for sample in group])) for group in groups.values()]
        sample_scores |= {(name, identity): score for identity, score in zip(groups, scores, strict=True)}
        tasks.append(_task_result(name, list(groups.values()), scores, rule))
    total = sum(task.weight for task in tasks)
    if total <= 0:
        raise EvaluationError("the weights of the evaluation's tasks add up to zero")
    metrics = {"truncated": sum(s.stop_reason == "max_tokens" for s in samples) / len(samples)}
    lenient = [(task.weight, _lenient_score(by_task[task.task].values())) for task in tasks]
    answered = [(task.weight, task.answered_score) for task in tasks]
    for name, parts in (("lenient_score", lenient), ("answered_score", answered)):
        known = [weight * score for weight, score in parts if score is not None]
        if len(known) == len(tasks):
            metrics[name] = sum(known) / total
    return EvaluationResult(
        score=sum(task.weight * task.score for task in tasks) / total,
        n=sum(task.n for task in tasks),
        errors=sum(task.errors for task in tasks),
        samples=tuple(samples),
        metrics=metrics,
        tasks=tuple(tasks),
        log_paths=tuple(log_paths),
        sample_scores=sample_scores,
    )


def _task_result(
    name: str, groups: Sequence[Sequence[SampleResult]], scores: Sequence[float], rules: TaskRules
) -> TaskResult:
    """The result of a task from its samples' epochs and the score that these combine to, in the same order."""
    import significance

    clusters = _clusters(name, groups)
    answered = [index for index, group in enumerate(groups) if not any(sample.error for sample in group)]

    def mean(positions: Sequence[int]) -> float:
        return math.fsum(scores[position] for position in positions) / len(positions)

    figure: Figure = mean
    if rules.make_figure is None:
        low, high = significance.score_interval(scores, clusters=clusters)
    else:
        figure = rules.make_figure(groups)
        low, high = significance.figure_interval(len(groups), figure, clusters=clusters)
    return TaskResult(
        task=name,
        score=figure(range(len(groups))),
        n=len(groups),
        errors=len(groups) - len(answered),
        weight=rules.weight,
        threshold=rules.threshold,
        ci_low=low,
        ci_high=high,
        answered_score=figure(answered) if answered else None,
        metric=rules.metric,
        clusters=None if clusters is None else len(set(clusters)),
    )


def _number(score: float) -> float:
    # A reducer that finds no agreement between epochs gives NaN: that is no grade, and counts as not correct.
    return 0.0 if math.isnan(score) else score


def _clusters(task: str, groups: Sequence[Sequence[SampleResult]]) -> list[str] | None:
    named = [group[0].cluster for group in groups if group[0].cluster is not None]
    if named and len(named) < len(groups):
        raise EvaluationError(f"{len(named)} of {len(groups)} samples of {task} have a cluster; give it to all or none")
    return named or None


def _lenient_score(groups: Iterable[Sequence[SampleResult]]) -> float | None:
    """Mean lenient score over all samples of a task, those without one counted as 0; None when none has one."""
    soft = [sample.lenient_score for group in groups for sample in group]
    known = [score for score in soft if score is not None]
    return sum(known) / len(soft) if known else None
