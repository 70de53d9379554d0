"""What a run cost and how it came out: the figures of `summary.json`, worked out from what the run folder holds.

Pure functions: results, samples and rendered rows in, plain dicts out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import round_decision
from evaluation import EvaluationResult, SampleResult

if TYPE_CHECKING:
    from config_schema import Price

ON_TRAINING_DATA = "on training data"
"""What the scores are when evaluation items are in the training data; no such key where they are not."""

# The keys of an item of `summary.rounds`, in the order in which they are written.
ROUND_KEYS = (
    "round",
    "score",
    "lenient_score",
    "answered_score",
    "ci_low",
    "ci_high",
    "n",
    "errors",
    "ungraded",
    "truncated",
    "nll",
    "learning_rate",
    "steps",
    "rows",
    "checkpoint",
    "decision",
    "reason",
    "tasks",
    "categories",
    "tokens",
    "cost",
)


def measured(result: EvaluationResult, nll: float | None) -> dict[str, Any]:
    """The figures of one evaluation as `summary.rounds` holds them.

    `answered_score` is over the samples that did not fail, while `score` counts those as not correct. `ci_low` and
    `ci_high` are the 95 % interval of the score, None when that of a task is unknown (one sample).
    """
    low, high = overall_interval(result)
    return {
        "score": result.score,
        "lenient_score": result.metrics.get("lenient_score"),
        "answered_score": result.metrics.get("answered_score"),
        "ci_low": low,
        "ci_high": high,
        "n": result.n,
        "errors": result.errors,
        "ungraded": sum(sample.grade_missing for sample in result.samples),
        "truncated": result.metrics["truncated"],
        "nll": nll,
        "tasks": [
            {
                "task": task.task,
                "score": task.score,
                "n": task.n,
                "errors": task.errors,
                "weight": task.weight,
                "threshold": task.threshold,
                "ci_low": task.ci_low,
                "ci_high": task.ci_high,
                "answered_score": task.answered_score,
                "metric": task.metric,
                "clusters": task.clusters,
            }
            for task in result.tasks
        ],
        "categories": category_scores(result.samples, result.sample_scores),
    }


def overall_interval(result: EvaluationResult) -> tuple[float | None, float | None]:
    """95 % interval of the weighted mean of the tasks' scores, from their own intervals.

    Square-and-add (Zou and Donner 2008, "Construction of confidence limits about effect measures"): the distance from
    the mean to each limit is the root of the summed squares of the weighted distances of the tasks. With one task it
    is that task's interval. Tasks without weight do not matter.
    """
    total = sum(task.weight for task in result.tasks)
    below = above = 0.0
    for task in result.tasks:
        if task.weight == 0:
            continue
        if task.ci_low is None or task.ci_high is None:
            return None, None
        share = task.weight / total
        below += (share * (task.score - task.ci_low)) ** 2
        above += (share * (task.ci_high - task.score)) ** 2
    return max(0.0, result.score - math.sqrt(below)), min(1.0, result.score + math.sqrt(above))


def by_category(samples: Iterable[SampleResult]) -> dict[str, list[SampleResult]]:
    """The samples of each category. Where several tasks have categories, a name is "task: category".

    Left out are samples without a category, and those that failed or have no grade: they say nothing of the model.
    """
    graded = [s for s in samples if s.category is not None and not s.error and not s.grade_missing]
    several = len({sample.task for sample in graded}) > 1
    found: dict[str, list[SampleResult]] = {}
    for sample in graded:
        found.setdefault(f"{sample.task}: {sample.category}" if several else str(sample.category), []).append(sample)
    return found


def category_scores(
    samples: Iterable[SampleResult], combined: Mapping[tuple[str, str], float] | None = None
) -> dict[str, dict[str, Any]]:
    """Score, 95 % interval and number of samples of each category: where the model is weak, the surest first.

    Ordered by the upper end of the interval, so that a category is weak by evidence and not by having two samples; an
    unknown interval comes last. See `by_category` for which samples count. Of a sample with several epochs the
    score in `combined` counts, by (task, id), else their mean.
    """
    import significance

    groups: dict[str, dict[tuple[str, str], list[SampleResult]]] = {}
    for name, members in by_category(samples).items():
        for sample in members:
            groups.setdefault(name, {}).setdefault((sample.task, sample.id), []).append(sample)
    found: dict[str, dict[str, Any]] = {}
    for name, by_id in groups.items():
        scores = [
            (combined or {}).get(key, sum(s.score for s in epochs) / len(epochs)) for key, epochs in by_id.items()
        ]
        clusters = [epochs[0].cluster for epochs in by_id.values()]
        low, high = significance.score_interval(scores, clusters=None if None in clusters else clusters)
        found[name] = {"score": sum(scores) / len(scores), "n": len(scores), "ci_low": low, "ci_high": high}

    def weakness(name: str) -> tuple[float, float, str]:
        part = found[name]
        return (math.inf if part["ci_high"] is None else part["ci_high"], part["score"], name)

    return {name: found[name] for name in sorted(found, key=weakness)}


def weakest(categories: Mapping[str, Mapping[str, Any]], count: int = 3) -> list[str]:
    """The names of the `count` weakest of `category_scores` that are not without fault."""
    return [name for name, part in categories.items() if part["score"] < 1][:count]


def token_counts(*, trained: int, likelihood: int, samples: Sequence[SampleResult]) -> dict[str, int]:
    """Tokens by how they are billed. `trained`: forward and backward; `likelihood`: forward only, over whole rows."""
    return {
        "train": trained,
        "prefill": likelihood + sum(sample.tokens_in for sample in samples),
        "sample": sum(sample.tokens_out for sample in samples),
    }


def add_tokens(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of `token_counts`."""
    total = {"train": 0, "prefill": 0, "sample": 0}
    for count in counts:
        for key in total:
            total[key] += count[key]
    return total


def money(tokens: Mapping[str, int], price: Price | None) -> float | None:
    """Dollars for `tokens` at `price` (dollars per million tokens), None where no price is configured."""
    if price is None:
        return None
    dollars = tokens["train"] * price.train + tokens["prefill"] * price.prefill + tokens["sample"] * price.sample
    return dollars / 1e6


def build_summary(
    *,
    run_id: str,
    status: str,
    exit_code: int,
    reason: str,
    rounds: Sequence[Mapping[str, Any]],
    best_round: int,
    threshold: float,
    final_checkpoint: str | None,
    final_state: str | None,
    price: Price | None,
    taken_back: Mapping[str, int],
    wall_s: float,
    leads: Sequence[round_decision.Comparison],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of `summary.json`. `final_checkpoint` is None when the untouched base model scored best; `leads`
    compare the best round with the baseline and the runner-up. `taken_back` are tokens of rounds that are not among
    `rounds` any more; the totals hold them."""
    by_round = {row["round"]: row for row in rounds}
    tokens = add_tokens([*(row["tokens"] for row in rounds), taken_back])
    return {
        "run_id": run_id,
        "status": status,
        "exit_code": exit_code,
        "reason": reason,
        "baseline_score": by_round[0]["score"],
        "best_round": best_round,
        "best_score": by_round[best_round]["score"],
        "threshold": threshold,
        "final_checkpoint": final_checkpoint,
        "final_state": final_state,
        "tokens": tokens,
        "cost": money(tokens, price),
        "taken_back": {"tokens": dict(taken_back), "cost": money(taken_back, price)},
        "wall_s": wall_s,
        "leads": [
            {
                **dataclasses.asdict(lead),
                "within_noise": lead.within_noise,
                "text": round_decision.describe_lead(lead),
            }
            for lead in leads
        ],
        **notes,
        "rounds": [{key: row.get(key) for key in ROUND_KEYS} for row in rounds],
    }
