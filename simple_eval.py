"""The built-in evaluator: ask a checkpoint the rows of a file and compare its replies with their targets.

    result = await run_simple_evaluation(sampler, rows, on_samples=append_rows, done=rows_of_an_interrupted_attempt)

It needs nothing but a sampler, scores exactly as our Inspect task `labelled_rows` does, and costs little beside the
request itself (`benchmarks/evaluation_throughput.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from error_handling import AuthenticationError, ConfigurationError, DataError, EvalLoopError, InterruptedRunError
from evaluation import (
    EvaluationResult,
    SampleResult,
    TaskRules,
    asked,
    closed_label_set,
    is_cluster,
    normalise,
    refuse_failures,
    sample_category,
    score_reply,
    settled_samples,
    summarise,
    with_signs,
)

# What one request can fail with and the next need not. Anything else (a key that is refused, a setting that cannot
# be right, a bug) would fail every row alike, and ends the evaluation at once.
FAILED_REQUEST = (EvalLoopError, OSError, TimeoutError)
ENDS_EVALUATION = (AuthenticationError, ConfigurationError, InterruptedRunError, ImportError)


class EvalRow(Protocol):
    """What is needed of a row; `data_loader.Row` has it."""

    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def target(self) -> str: ...
    @property
    def category(self) -> str | None: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def where(self) -> str: ...


class SampledReply(Protocol):
    """What is needed of a reply; `chat_sampler.Reply` has it."""

    @property
    def text(self) -> str: ...
    @property
    def stop_reason(self) -> str: ...
    @property
    def tokens_in(self) -> int: ...
    @property
    def tokens_out(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Sampler(Protocol):
    """One checkpoint with its sampling settings; `chat_sampler.ChatSampler` is one."""

    max_tokens: int
    temperature: float

    async def reply(self, messages: Sequence[Mapping[str, str]], *, epoch: int = 1) -> SampledReply: ...


def row_cluster(row: EvalRow, field: str, category_field: str | None = None) -> str | None:
    """What names the row's cluster, None when the row has no usable value there: the category stands apart."""
    value = row.category if field in ("category", category_field) else row.metadata.get(field)
    return str(value) if is_cluster(value) else None


def check_rows(rows: Sequence[EvalRow], *, cluster_by: str | None = None, category_field: str | None = None) -> None:
    """Raise `DataError`, naming file and line, for rows that cannot be scored or told apart.

    With `cluster_by` every row needs a text or number in that field.
    """
    if not rows:
        raise DataError("the evaluation file holds no rows; give it at least one question with its target")
    seen: dict[str, str] = {}
    spelled: dict[str, tuple[str, EvalRow]] = {}
    faults = []
    for row in rows:
        if not normalise(row.target):
            faults.append(f"{row.where}: the target {row.target!r} has no word to compare a reply with")
        sign, first = spelled.setdefault(normalise(row.target), (with_signs(row.target), row))
        if sign != with_signs(row.target):
            faults.append(
                f"{row.where}: a reply cannot be told apart by the targets {row.target!r} and {first.target!r} "
                f"({first.where}), which differ in outer signs only; write them in words"
            )
        if row.id in seen:
            faults.append(f"{row.where}: the id {row.id!r} is already used at {seen[row.id]}")
        seen[row.id] = row.where
        if cluster_by is not None and row_cluster(row, cluster_by, category_field) is None:
            known = ", ".join(sorted({*row.metadata, *(["category"] if row.category is not None else [])})) or "none"
            faults.append(
                f"{row.where}: no text or number in the field {cluster_by!r} that evaluation.cluster_by names; further "
                f"fields of the row: {known}"
            )
    if faults:
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise DataError("these evaluation rows cannot be used:\n  " + "\n  ".join(faults[:10]) + more)


async def run_simple_evaluation(
    sampler: Sampler,
    rows: Sequence[EvalRow],
    *,
    labels: Sequence[str] = (),
    task: str = "eval_file",
    cluster_by: str | None = None,
    category_field: str | None = None,
    done: Iterable[SampleResult] = (),
    on_samples: Callable[[Sequence[SampleResult]], None] | None = None,
    concurrency: int = 64,
    max_errors: float = 0.05,
) -> EvaluationResult:
    """Ask `sampler` every row and score the replies by `evaluation.score_reply`.

    `labels` are the labels that a leniently scored reply must not mention beside the right one (default: the rows'
    targets where they form a closed set). `cluster_by` names the field of a row that holds what it has in common with
    others, `category_field` the one that its category came from. `done` are results of an interrupted attempt: those
    that did not fail are part of the result and never asked again. `on_samples` is called with new results as they
    arrive, those that arrive at the same time together. At most `concurrency` requests are in flight. The result's
    samples are in the order of `rows`.

    A row whose request failed has score 0 and stays in the denominator; when more than the share `max_errors` failed,
    `EvaluationError` is raised after all were asked. A refused key and errors that are no failed request end the
    evaluation at once, unchanged. Raises `DataError` for rows that cannot be scored, before any is asked.
    """
    check_rows(rows, cluster_by=cluster_by, category_field=category_field)
    if concurrency < 1:
        raise ConfigurationError(f"concurrency must be at least 1, got {concurrency}")
    labels = tuple(labels) or closed_label_set([row.target for row in rows])
    settled = settled_samples(done)
    results: dict[str, SampleResult] = {}
    to_ask = []
    for row in rows:
        known = settled.get((task, row.id, 1))
        if known is None:
            to_ask.append(row)
        else:
            results[row.id] = known
    queue = iter(to_ask)
    arrived: list[SampleResult] = []
    news = asyncio.Event()

    async def worker() -> None:
        for row in queue:
            cluster = row_cluster(row, cluster_by, category_field) if cluster_by else None
            results[row.id] = await _ask(sampler, row, labels, task, cluster)
            arrived.append(results[row.id])
            news.set()

    def deliver() -> int:
        batch = list(arrived)
        arrived.clear()
        if on_samples is not None and batch:
            on_samples(batch)
        return len(batch)

    async def deliverer() -> None:
        # A task of its own, so that replies of one turn of the loop cost one write and not one each.
        left = len(to_ask)
        try:
            while left:
                await news.wait()
                news.clear()
                left -= deliver()
        except asyncio.CancelledError:
            deliver()
            raise

    ended_by: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(deliverer())
            for _ in range(min(concurrency, len(to_ask))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:  # by then the group has cancelled the other workers
        ended_by = _first(errors)
    if ended_by is not None:
        raise ended_by
    ordered = [results[row.id] for row in rows]
    refuse_failures(ordered, max_errors)
    return summarise(ordered, rules={task: TaskRules(metric="accuracy")})


async def _ask(sampler: Sampler, row: EvalRow, labels: Sequence[str], task: str, cluster: str | None) -> SampleResult:
    known: dict[str, Any] = {
        "task": task,
        "id": row.id,
        "epoch": 1,
        **asked(row.prompt),
        "target": row.target,
        "category": sample_category(row.category, row.target, labels),
        "metadata": dict(row.metadata),
        "cluster": cluster,
    }
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        reply = await sampler.reply([{"role": turn["role"], "content": turn["content"]} for turn in row.prompt])
    except ENDS_EVALUATION:
        raise
    except FAILED_REQUEST as err:
        text = f"{type(err).__name__}: {err}"
        return SampleResult(**known, output="", score=0.0, error=text, seconds=loop.time() - started)
    strict, lenient = score_reply(reply.text, row.target, labels)
    return SampleResult(
        **known,
        output=reply.text,
        score=strict,
        lenient_score=lenient,
        stop_reason=reply.stop_reason,
        tokens_in=reply.tokens_in,
        tokens_out=reply.tokens_out,
        seconds=reply.seconds,
    )


def _first(errors: BaseExceptionGroup) -> BaseException:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
