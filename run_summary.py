"""What a run cost and how it came out: the figures of `summary.json`, worked out from what the run folder holds.

Pure functions: results, samples and rendered rows in, plain dicts out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

    `ci_low` and `ci_high` are the 95 % interval of the score, None when that of a task is unknown (one sample).
    """
    low, high = overall_interval(result)
    return {
        "score": result.score,
        "lenient_score": result.metrics.get("lenient_score"),
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
            }
            for task in result.tasks
        ],
        "categories": category_scores(result.samples),
    }


def overall_interval(result: EvaluationResult) -> tuple[float | None, float | None]:
    """95 % interval of the weighted mean of the tasks' scores, from their own intervals.

    Square-and-add (Zou and Donner 2008, "Construction of confidence limits about effect measures"): the distance from
    the mean to each limit is the root of the summed squares of the weighted distances of the tasks. With one task it
    is that task's interval.
    """
    total = sum(task.weight for task in result.tasks)
    below = above = 0.0
    for task in result.tasks:
        if task.ci_low is None or task.ci_high is None:
            return None, None
        share = task.weight / total
        below += (share * (task.score - task.ci_low)) ** 2
        above += (share * (task.ci_high - task.score)) ** 2
    return max(0.0, result.score - math.sqrt(below)), min(1.0, result.score + math.sqrt(above))


def category_scores(samples: Iterable[SampleResult]) -> dict[str, dict[str, float | int]]:
    """Mean score and number of samples per category, worst first; samples without a category are left out."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        if sample.category is not None:
            scores.setdefault(sample.category, []).append(sample.score)
    means = {name: {"score": sum(values) / len(values), "n": len(values)} for name, values in scores.items()}
    return dict(sorted(means.items(), key=lambda item: (item[1]["score"], item[0])))


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
    wall_s: float,
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of `summary.json`. `final_checkpoint` is None when the untouched base model scored best."""
    by_round = {row["round"]: row for row in rounds}
    tokens = add_tokens(row["tokens"] for row in rounds)
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
        "wall_s": wall_s,
        **notes,
        "rounds": [{key: row.get(key) for key in ROUND_KEYS} for row in rounds],
    }
