"""A checkpoint's evaluation within a run: asked through whichever evaluator the run has, kept sample by sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import chat_sampler
import inspect_eval
import preparation
import run_summary
import simple_eval
import tinker_backend
from checkpoint_manager import CheckpointManager
from error_handling import InterruptedRunError
from evaluation import EVAL_FILE_TASK, EvaluationResult, SampleResult
from logger import StructuredLogger, one_line
from service_waits import STOP_GRACE_S

TRUNCATED_WARNING = 0.05
"""Share of replies cut at max_tokens above which the terminal says so."""


# After the last reply to a run that stops, how long scorers may take until its sample counts as abandoned.
SCORING_GRACE_S = 2.0


class Traffic:
    """What is under way of one evaluation: requests `in_flight`, replies that came, answered samples that were kept."""

    def __init__(self) -> None:
        self.in_flight = self.replies = self.kept = 0
        self.moved = time.monotonic()

    def move(self, *, in_flight: int = 0, replies: int = 0, kept: int = 0) -> None:
        self.in_flight += in_flight
        self.replies += replies
        self.kept += kept
        self.moved = time.monotonic()

    def keep(self, samples: Sequence[SampleResult]) -> None:
        """Count `samples`, which are kept; one that failed answers for no reply."""
        self.move(kept=sum(sample.error is None for sample in samples))

    async def settle(self) -> None:
        """Wait until every reply on its way has come and its sample is kept, `STOP_GRACE_S` seconds at most.

        A sample may take several replies, and one that needs more is not kept: then `SCORING_GRACE_S` seconds without
        news are enough.
        """
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline:
            quiet = time.monotonic() - self.moved > SCORING_GRACE_S
            if not self.in_flight and (quiet or self.kept >= self.replies):
                return
            await asyncio.sleep(0.02)


class StoppableSampler(chat_sampler.ChatSampler):
    """A `ChatSampler` that, once `stop` is set, lets replies on their way come and begins no other request."""

    def __init__(self, *args: Any, stop: asyncio.Event, traffic: Traffic, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stop = stop
        self._traffic = traffic

    async def reply(self, messages: Sequence[Mapping[str, str]], *, epoch: int = 1) -> chat_sampler.Reply:
        if self._stop.is_set():
            await asyncio.get_running_loop().create_future()  # whoever waits here is cancelled
        self._traffic.move(in_flight=1)
        try:
            reply = await super().reply(messages, epoch=epoch)
            self._traffic.move(replies=1)
            return reply
        finally:
            self._traffic.move(in_flight=-1)


async def until_stopped(
    evaluation: Coroutine[Any, Any, EvaluationResult], stop: asyncio.Event, traffic: Traffic
) -> EvaluationResult:
    """The result of `evaluation`; once `stop` is set, it is ended as soon as what was asked is answered and kept.

    Raises `InterruptedRunError` then, unless it came to its end.
    """
    work = asyncio.ensure_future(evaluation)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            settled = asyncio.ensure_future(traffic.settle())
            await asyncio.wait({work, settled}, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
        if work.done():
            return work.result()
        raise InterruptedRunError("interrupted; every sample answered so far is kept")
    finally:
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=30)


async def ask_checkpoint(
    prepared: preparation.Prepared,
    folder: CheckpointManager,
    backend: tinker_backend.Backend,
    log: StructuredLogger,
    stop: asyncio.Event,
    *,
    round: int,
    model_path: str | None,
    name: str,
    state_path: str | None = None,
) -> EvaluationResult:
    """Evaluate the sampler weights at `model_path` (None: the untouched base model) as `round` of the run.

    `state_path` is their saved state, where an earlier process saved both: see `Backend.create_sampling_client`.

    Each sample is in the run folder before it is counted; those of an interrupted attempt are not asked again.
    Raises `EvaluationError` when too many fail: then there is no score. When `stop` is set, what was asked is waited
    for and kept, and `InterruptedRunError` raised.
    """
    settings = prepared.config.evaluation
    sampling_client = await backend.create_sampling_client(
        model_path=model_path,
        base_model=None if model_path else prepared.config.base_model,
        state_path=state_path,
    )
    traffic = Traffic()
    sampler = StoppableSampler(
        sampling_client,
        prepared.chat_format,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=prepared.config.seed,
        # Replies under way when the run is to stop are still wanted: `until_stopped` says when to end.
        watch=replace(backend.watch, stop=None),
        stop=stop,
        traffic=traffic,
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
            traffic.keep(samples)
            bar.advance(len(samples))

        if prepared.evaluator == "simple":
            assert prepared.evaluation_rows is not None, "the built-in evaluator is chosen only with an eval_file"
            work = simple_eval.run_simple_evaluation(
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
        else:
            work = inspect_eval.run_inspect_evaluation(
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
        return await until_stopped(work, stop, traffic)


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
