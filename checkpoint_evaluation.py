"""A checkpoint's evaluation within a run: asked through whichever evaluator the run has, kept sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chat_sampler
import inspect_eval
import preparation
import run_summary
import simple_eval
import tinker_backend
from checkpoint_manager import CheckpointManager
from evaluation import EVAL_FILE_TASK, EvaluationResult, SampleResult
from logger import StructuredLogger, one_line

TRUNCATED_WARNING = 0.05
"""Share of replies cut at max_tokens above which the terminal says so."""


async def ask_checkpoint(
    prepared: preparation.Prepared,
    folder: CheckpointManager,
    backend: tinker_backend.Backend,
    log: StructuredLogger,
    *,
    round: int,
    model_path: str | None,
    name: str,
    state_path: str | None = None,
) -> EvaluationResult:
    """Evaluate the sampler weights at `model_path` (None: the untouched base model) as `round` of the run.

    `state_path` is their saved state, where an earlier process saved both: see `Backend.create_sampling_client`.

    Each sample is in the run folder before it is counted; those of an interrupted attempt are not asked again.
    Raises `EvaluationError` when too many fail: then there is no score.
    """
    settings = prepared.config.evaluation
    sampling_client = await backend.create_sampling_client(
        model_path=model_path,
        base_model=None if model_path else prepared.config.base_model,
        state_path=state_path,
    )
    sampler = chat_sampler.ChatSampler(
        sampling_client,
        prepared.chat_format,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=prepared.config.seed,
        watch=backend.watch,
    )
    known = folder.load_samples(round)
    answered = sum(sample.error is None for sample in known)
    if answered:
        log.say(f"{name}: {answered} samples were answered before the interruption and are kept")
    with log.progress(prepared.n_samples, f"evaluating {name}") as bar:
        if answered:
            bar.advance(answered)

        def keep(samples: Sequence[SampleResult]) -> None:
            folder.append_samples(round, samples)
            bar.advance(len(samples))

        if prepared.evaluator == "simple":
            assert prepared.evaluation_rows is not None, "the built-in evaluator is chosen only with an eval_file"
            return await simple_eval.run_simple_evaluation(
                sampler,
                prepared.evaluation_rows.rows,
                labels=prepared.labels,
                task=EVAL_FILE_TASK,
                cluster_by=settings.cluster_by,
                category_field=settings.category_field,
                done=known,
                on_samples=keep,
                max_errors=settings.max_errors,
            )
        return await inspect_eval.run_inspect_evaluation(
            sampler,
            prepared.tasks,
            model_name=prepared.config.base_model,
            log_dir=folder.evals_dir,
            metadata={"run_id": folder.run_id, "round": round, "checkpoint": model_path or "base model"},
            done=known,
            on_samples=keep,
            max_errors=settings.max_errors,
            digests=prepared.task_digests,
        )


def tell_score(row: Mapping[str, Any], max_tokens: int, log: StructuredLogger) -> None:
    """Say how an evaluation came out, and where the model is weak."""
    parts = [f"{row['n']} samples"]
    if row["lenient_score"] is not None:
        parts.append(f"lenient {row['lenient_score']:.3f}")
    if row["nll"] is not None:
        parts.append(f"{row['nll']:.3f} nats per target token")
    if row["errors"]:
        answered = "" if row["answered_score"] is None else f", {row['answered_score']:.3f} of the answered"
        parts.append(f"{row['errors']} failed{answered}")
    if row["ungraded"]:
        parts.append(f"{row['ungraded']} without a grade, counted as not correct")
    interval = "" if row["ci_low"] is None else f" [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
    name = "baseline" if row["round"] == 0 else f"round {row['round']}"
    kind = f"score {row['scores_are']}" if row.get("scores_are") else "validation score"
    log.say(f"{name}: {kind} {row['score']:.3f}{interval} ({', '.join(parts)})")
    if row["truncated"] > TRUNCATED_WARNING:
        log.warn(
            f"{name}: {row['truncated']:.0%} of the replies were cut at {max_tokens} tokens; if answers need more, "
            "raise evaluation.max_tokens",
            round=row["round"],
        )
    weak = run_summary.weakest(row["categories"])
    if weak:
        log.say("  weakest: " + ", ".join(_category(name, row["categories"][name]) for name in weak))


def _category(name: str, part: Mapping[str, Any]) -> str:
    interval = "" if part["ci_low"] is None else f" [{part['ci_low']:.2f}, {part['ci_high']:.2f}]"
    return f"{one_line(name)} {part['score']:.2f}{interval} (n = {part['n']})"
