"""Evaluation of a checkpoint with Inspect AI, its tasks checked before anything is paid for.

    check_tasks([TaskSpec("my_tasks.py@capitals"), TaskSpec("inspect_evals/arc_easy", weight=2.0)])
    result = await run_inspect_evaluation(sampler, specs, model_name=..., log_dir=..., metadata={"round": 1})

One task is ours, for the rows of a file; it also runs from Inspect's own command line, on any model:

    inspect eval inspect_eval.py@labelled_rows -T eval_file=data/triage_eval.jsonl --model openai/gpt-4o-mini

Inspect AI is imported only when a task is checked or run, so that importing this module is cheap and possible without
it. What Inspect writes beside its logs (a trace of warnings, the place of the last log) goes to a folder in the log
folder on Linux; on macOS and Windows it keeps its own data folder for these, which cannot be moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from error_handling import EvalLoopError, EvaluationError
from evaluation import (
    EvaluationResult,
    SampleResult,
    TaskRules,
    closed_label_set,
    refuse_failures,
    sample_category,
    settled_samples,
    summarise,
)
from inspect_planning import LABELLED_ROWS, PlannedTask, TaskSpec, check_tasks, inspect_available
from simple_eval import Sampler, check_rows, row_cluster

if TYPE_CHECKING:
    from inspect_model import Delivery

__all__ = [
    "LABELLED_ROWS",
    "PlannedTask",
    "TaskSpec",
    "check_tasks",
    "inspect_available",
    "labelled_rows",
    "run_inspect_evaluation",
]

_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def run_inspect_evaluation(
    sampler: Sampler,
    tasks: Sequence[TaskSpec],
    *,
    model_name: str,
    log_dir: str | Path,
    metadata: Mapping[str, Any],
    done: Iterable[SampleResult] = (),
    on_samples: Callable[[Sequence[SampleResult]], None] | None = None,
    max_errors: float = 0.05,
    max_connections: int = 64,
    digests: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Run `tasks` on the checkpoint behind `sampler`; the result's samples are in the order of tasks and data sets.

    `metadata` (round, checkpoint) is written into the logs, which go to `log_dir`. `done` are results of an
    interrupted attempt: those that did not fail are part of the result and never asked again. `on_samples` is called
    with new results as their samples end. `sampler`'s max_tokens and temperature outrank a task's own configuration
    (not what its solver asks for in a `generate` call). `digests` are those of the tasks by name when the run began:
    one that asks something else by now raises `EvaluationError` before anything is asked.

    A sample that failed has score 0 and stays in the denominator; when more than the share `max_errors` of a task's
    failed, or when a sample never came back, `EvaluationError` is raised. A refused key, an error of `on_samples` and
    a bug end the evaluation at once, unchanged. Evaluations that are started at the same time run one by one.
    """
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        plans = check_tasks(tasks)
        settled = settled_samples(done)
        _refuse_vanished(plans, settled)
        for plan in plans:
            if digests is not None and plan.digest != digests.get(plan.name):
                raise EvaluationError(
                    f"the questions or answers of {plan.name} are not those of the run's start, so its scores could "
                    f"not be compared. Put {plan.spec.task} and its data back as they were and resume, or start a new "
                    "run."
                )
        from inspect_model import Delivery

        delivery = Delivery(on_samples=on_samples, plans={plan.name: plan for plan in plans})
        pending = [plan for plan in plans if any(key not in settled for key in plan.keys)]
        logs: Sequence[Any] = ()
        if pending:
            for plan in pending:
                plan.task.early_stopping = SkipSettled(plan.name, settled)
            logs = await _run(
                [plan.task for plan in pending],
                delivery,
                sampler=sampler,
                model_name=model_name,
                log_dir=Path(log_dir),
                metadata=metadata,
                max_connections=max_connections,
            )
    results = {**delivery.results, **settled}
    _refuse_incomplete(pending, results, logs)
    ordered = [results[key] for plan in plans for key in plan.keys]
    refuse_failures(ordered, max_errors)
    # Scores are worked out here and not read from the logs: those know nothing of samples answered before.
    return summarise(
        ordered, rules={plan.name: _rules(plan) for plan in plans}, log_paths=[log.location for log in logs]
    )


async def _run(
    tasks: Sequence[Any],
    delivery: Delivery,
    *,
    sampler: Sampler,
    model_name: str,
    log_dir: Path,
    metadata: Mapping[str, Any],
    max_connections: int,
) -> Sequence[Any]:
    """Inspect's logs of `tasks`, its samples having gone to `delivery`; raises what ended the evaluation early."""
    from inspect_ai import eval_async

    from inspect_model import delivering, sampler_model

    with _contained(log_dir, [task.name for task in tasks]), delivering(delivery):
        running = asyncio.ensure_future(
            eval_async(
                list(tasks),
                model=sampler_model(sampler, model_name, delivery),
                log_dir=str(log_dir),
                log_format="eval",
                metadata=dict(metadata),
                tags=[f"{name}:{value}" for name, value in metadata.items() if name in ("round", "checkpoint")],
                fail_on_error=False,
                score_on_error=True,
                retry_on_error=0,
                max_connections=max_connections,
                max_tokens=sampler.max_tokens,
                temperature=sampler.temperature,
                log_level="error",
                log_realtime=False,
                log_buffer=1000,
                log_model_api=False,
                score_display=False,
                ctl_server=False,
            )
        )
        delivery.stop = running.cancel
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as cancelled:
            # Inspect may take a cancellation for the failure of every sample and end as if it had succeeded.
            delivery.end(cancelled)
            await asyncio.wait({running})
            raise
    if delivery.fatal is not None:
        if not running.cancelled():
            running.exception()  # looked at, so that asyncio does not report it as lost
        raise delivery.fatal
    try:
        return running.result()
    except EvalLoopError:
        raise
    except Exception as err:
        raise EvaluationError(f"Inspect could not run the evaluation: {type(err).__name__}: {err}") from err


class SkipSettled:
    """Tells Inspect not to ask samples whose result is known: its protocol for stopping single samples early."""

    def __init__(self, task: str, settled: Mapping[tuple[str, str, int], SampleResult]) -> None:
        self._task = task
        self._settled = settled

    async def start_task(self, task: Any, samples: Sequence[Any], epochs: int) -> str:
        return "results of an earlier attempt"

    async def schedule_sample(self, id: str | int, epoch: int) -> Any:
        if (self._task, str(id), epoch) not in self._settled:
            return None
        from inspect_ai.util import EarlyStop

        return EarlyStop(id=id, epoch=epoch, reason="measured in an earlier attempt")

    async def complete_sample(self, id: str | int, epoch: int, scores: Any) -> None:
        return None

    async def complete_task(self) -> dict[str, Any]:
        return {}


def _refuse_vanished(plans: Sequence[PlannedTask], settled: Mapping[tuple[str, str, int], SampleResult]) -> None:
    names = {plan.name for plan in plans}
    gone = sorted({key for key in settled if key[0] in names} - {key for plan in plans for key in plan.keys})
    if gone:
        task, identity, epoch = gone[0]
        raise EvaluationError(
            f"{len(gone)} samples measured before the interruption are no longer in their data set (the first: sample "
            f"{identity}, epoch {epoch}, of {task}), so old and new results do not belong together. Restore the data "
            "set, or start a new run."
        )


def _refuse_incomplete(
    pending: Sequence[PlannedTask], results: Mapping[tuple[str, str, int], SampleResult], logs: Sequence[Any]
) -> None:
    """Every sample of the data set must have a result, whatever status Inspect gives the whole."""
    reasons = {log.eval.task: log.error.message for log in logs if log.error}
    for plan in pending:
        missing = [key for key in plan.keys if key not in results]
        if missing:
            reason = f": {reasons[plan.name]}" if plan.name in reasons else ""
            raise EvaluationError(
                f"{len(missing)} of {len(plan.keys)} samples of {plan.name} gave no result; there is no score{reason}"
            )


def _rules(plan: PlannedTask) -> TaskRules:
    return TaskRules(
        weight=plan.weight,
        threshold=plan.spec.threshold,
        reduce=plan.scoring.reduce,
        make_figure=plan.scoring.make_figure,
        metric=plan.scoring.describe(),
    )


@contextlib.contextmanager
def _contained(log_dir: Path, tasks: Iterable[str]) -> Iterator[None]:
    """Keep Inspect's display, logging and side files from reaching beyond this evaluation.

    It prints to the terminal, adds a handler to the root logger, lowers that logger's level, and writes a trace into
    the user's data folder. It names a log after its task, also where no file can have that name.
    """
    from inspect_ai.util._display import init_display_type

    log_dir.mkdir(parents=True, exist_ok=True)
    init_display_type("none")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    wanted = {"XDG_DATA_HOME": str(log_dir.resolve() / "inspect_data"), "INSPECT_TRACE_LEVEL": "WARNING"}
    if not all(re.fullmatch(r"[\w./-]{1,100}", name) for name in tasks):
        wanted["INSPECT_EVAL_LOG_FILE_PATTERN"] = "{id}"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        root.handlers[:] = handlers
        root.setLevel(level)


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inspect's `task` decorator where Inspect is loaded; without it nothing is there to register with.

    Inspect finds tasks in a file by this name, and executes the file anew when it does.
    """
    if sys.modules.get("inspect_ai") is None:
        return function
    from inspect_ai import task as register

    registered: Callable[..., Any] = register(function)
    return registered


@task
def labelled_rows(eval_file: str, category_field: str | None = None, cluster_by: str | None = None) -> Any:
    """The rows of `eval_file`, each a prompt and a target, scored as the built-in evaluator scores them.

    Every shape of row that training takes is an evaluation row: the last assistant turn is the target.
    `category_field` and `cluster_by` name fields of the rows. Under Inspect's own command line a relative path counts
    from this file's folder.
    """
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
    from inspect_ai.solver import generate

    import data_loader
    from inspect_model import label_match

    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}
    rows = data_loader.load_rows(eval_file, purpose="eval", category_field=category_field).rows
    check_rows(rows, cluster_by=cluster_by, category_field=category_field)
    labels = closed_label_set([row.target for row in rows])
    samples = []
    for row in rows:
        metadata = dict(row.metadata)
        category = sample_category(row.category, row.target, labels)
        if category is not None:
            metadata["category"] = category
        if cluster_by is not None:
            metadata[cluster_by] = row_cluster(row, cluster_by, category_field)
        samples.append(
            Sample(
                input=[kinds[turn["role"]](content=turn["content"]) for turn in row.prompt],
                target=row.target,
                id=row.id,
                metadata=metadata,
            )
        )
    return Task(
        dataset=MemoryDataset(samples, name=Path(eval_file).stem), solver=generate(), scorer=label_match(labels)
    )
