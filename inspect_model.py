"""What Inspect AI needs registered to evaluate our checkpoints: the model, a scorer, and a hook that delivers samples.

Importing this module imports Inspect AI (seconds), so `inspect_eval` imports it only when it evaluates::

    delivery = Delivery(on_samples)
    with delivering(delivery):
        logs = await eval_async(tasks, model=sampler_model(sampler, "Qwen/Qwen3-8B", delivery), ...)
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspect_ai.hooks import Hooks, SampleEnd, TaskStart, hooks
from inspect_ai.log import EvalSample
from inspect_ai.log._samples import sample_active  # the only way for a model to learn which epoch it is asked in
from inspect_ai.model import (
    ChatMessage,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer, stderr, value_to_float
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolChoice, ToolInfo

from error_handling import ConfigurationError, DataError, EvaluationError
from evaluation import SampleResult, asked, sample_category, score_reply
from inspect_planning import PlannedTask, target_text
from simple_eval import ENDS_EVALUATION, FAILED_REQUEST, Sampler

PROVIDER = "evalloop"
LENIENT = "lenient"
_STOP_REASONS = {"stop": "stop", "max_tokens": "max_tokens"}
_GRADES = frozenset({"C", "I", "P", "N"})
_WORDS = frozenset({"yes", "no", "true", "false"})


@dataclass
class Delivery:
    """Where one evaluation's samples go as they end.

    `plans` are the tasks by name, which say what of a sample counts. `fatal` is what must end the evaluation at once;
    `stop` is then called.
    """

    on_samples: Callable[[Sequence[SampleResult]], None] | None = None
    plans: Mapping[str, PlannedTask] = field(default_factory=dict)
    results: dict[tuple[str, str, int], SampleResult] = field(default_factory=dict)
    fatal: BaseException | None = None
    stop: Callable[[], object] = lambda: None
    model_key: str = ""
    _task_of: dict[str, str] = field(default_factory=dict)

    def task_started(self, eval_id: str, task: str) -> None:
        self._task_of[eval_id] = task

    def end(self, error: BaseException) -> None:
        """Remember the first error that ends the evaluation, and have it stopped."""
        if self.fatal is None:
            self.fatal = error
            self.stop()

    def sample_ended(self, eval_id: str, sample: EvalSample) -> None:
        """Keep and pass on a sample; Inspect swallows a hook's exceptions, so they are kept in `fatal` instead."""
        if self.fatal is not None:
            return
        task = self._task_of[eval_id]
        try:
            result = sample_result(sample, self.plans[task], model_key=self.model_key)
            self.results[result.key] = result
            if self.on_samples is not None:
                self.on_samples([result])
        except Exception as err:  # noqa: BLE001 - raised again by the evaluation, which it ends
            self.end(err)


_active: Delivery | None = None


@contextlib.contextmanager
def delivering(delivery: Delivery) -> Iterator[None]:
    """Have the hook deliver to `delivery`; hooks are registered once per process, so this names the current one."""
    global _active  # noqa: PLW0603
    _active = delivery
    try:
        yield
    finally:
        _active = None


@hooks(name="evalloop_samples", description="Delivers each evaluated sample of the evaluation loop as it ends")
class SampleHook(Hooks):
    """Passes tasks and samples of the running evaluation on to its `Delivery`."""

    def enabled(self) -> bool:
        return _active is not None

    async def on_task_start(self, data: TaskStart) -> None:
        if _active is not None:
            _active.task_started(data.eval_id, data.spec.task)

    async def on_sample_end(self, data: SampleEnd) -> None:
        if _active is not None:
            _active.sample_ended(data.eval_id, data.sample)


@modelapi(name=PROVIDER)
class SamplerAPI(ModelAPI):
    """Inspect's view of a checkpoint: every request goes through the sampler that all evaluators share."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        config: GenerateConfig | None = None,
        sampler: Sampler | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if sampler is None:
            raise ConfigurationError(
                f"the model {PROVIDER}/{model_name} exists only inside an evaluation of this project, which hands it "
                "a sampler; give another model to Inspect's own command line"
            )
        self.sampler = sampler
        self.delivery = delivery or Delivery()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        if self.delivery.fatal is not None:
            raise EvaluationError(f"the evaluation has ended: {self.delivery.fatal}")
        try:
            if tools:
                raise ConfigurationError(
                    f"the task offers the model tools ({', '.join(tool.name for tool in tools)}), which chat formats "
                    "here cannot express; name a task that works without tools"
                )
            sampler = _as_asked(self.sampler, config)
            active = sample_active()
            reply = await sampler.reply(flatten_messages(input), epoch=active.epoch if active else 1)
        except ENDS_EVALUATION as err:
            self.delivery.end(err)
            raise
        except FAILED_REQUEST:
            raise
        except Exception as err:
            self.delivery.end(err)  # a bug: every sample would fail alike
            raise
        text, stop_reason = _cut(reply.text, reply.stop_reason, config.stop_seqs or ())
        output = ModelOutput.from_content(self.model_name, text, _STOP_REASONS.get(stop_reason, "unknown"))  # type: ignore[arg-type]
        output.usage = ModelUsage(
            input_tokens=reply.tokens_in,
            output_tokens=reply.tokens_out,
            total_tokens=reply.tokens_in + reply.tokens_out,
        )
        output.time = reply.seconds
        return output

    async def count_text_tokens(self, text: str) -> int:
        """Tokens by the model's own tokenizer; Inspect's default would download another one's."""
        chat_format = getattr(self.sampler, "chat_format", None)
        if chat_format is None:
            raise NotImplementedError("this sampler has no chat format, so its tokens cannot be counted")
        return len(chat_format.tokenizer.encode(text))

    def connection_key(self) -> str:
        return f"{PROVIDER}/{self.model_name}"

    def should_retry(self, ex: Exception) -> bool:
        """No: the SDK below has already tried what can pass again."""
        return False


def sampler_model(sampler: Sampler, model_name: str, delivery: Delivery) -> Model:
    """An Inspect model over `sampler`, its settings in the model's configuration so that logs tell them."""
    config = GenerateConfig(max_tokens=sampler.max_tokens, temperature=sampler.temperature)
    api = SamplerAPI(model_name, config=config, sampler=sampler, delivery=delivery)
    model = Model(api, config)
    api.qualified_model_name = str(model)
    delivery.model_key = str(model)
    return model


def flatten_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Inspect's messages as role and text; raises `DataError` for what a chat format cannot express."""
    flat = []
    for message in messages:
        if isinstance(message, ChatMessageTool) or getattr(message, "tool_calls", None):
            raise DataError("the sample holds tool calls or their results, which chat formats here cannot express")
        if isinstance(message.content, str):
            flat.append({"role": message.role, "content": message.content})
            continue
        parts = []
        for part in message.content:
            if isinstance(part, ContentText):
                parts.append(part.text)
            elif not isinstance(part, ContentReasoning):
                # Reasoning of an earlier turn is left out, as chat templates do.
                raise DataError(f"the sample holds {part.type} content; only text can be sent to the model")
        flat.append({"role": message.role, "content": "\n".join(parts)})
    return flat


def _as_asked(sampler: Sampler, config: GenerateConfig) -> Sampler:
    """`sampler`, or a copy with the settings that a task's own `generate(...)` call asks for."""
    refused = {
        "num_choices": config.num_choices not in (None, 1),
        "best_of": config.best_of not in (None, 1),
        "logit_bias": bool(config.logit_bias),
        "frequency_penalty": bool(config.frequency_penalty),
        "presence_penalty": bool(config.presence_penalty),
        "top_logprobs": bool(config.top_logprobs),
    }
    if any(refused.values()):
        names = ", ".join(name for name, asked in refused.items() if asked)
        raise ConfigurationError(f"the task asks the model for {names}, which this evaluation cannot provide")
    changes = {
        name: value
        for name, value in (
            ("max_tokens", config.max_tokens),
            ("temperature", config.temperature),
            ("top_p", config.top_p),
        )
        if value is not None and value != getattr(sampler, name, value)
    }
    if not changes:
        return sampler
    asked = copy.copy(sampler)
    for name, value in changes.items():
        setattr(asked, name, value)
    return asked


def _cut(text: str, stop_reason: str, stop_sequences: Sequence[str]) -> tuple[str, str]:
    """The reply up to the first of a task's stop sequences, which the sampler does not know of."""
    ends = [at for at in (text.find(sequence) for sequence in stop_sequences) if at >= 0]
    return (text[: min(ends)], "stop") if ends else (text, stop_reason)


def sample_result(sample: EvalSample, plan: PlannedTask, *, model_key: str) -> SampleResult:
    """An ended Inspect sample as a `SampleResult`; `EvaluationError` for a score outside [0, 1].

    Tokens are those of the model under test, without a grader's.
    """
    error = sample.error.message or "unknown error" if sample.error else None
    task, scoring, spec = plan.name, plan.scoring, plan.spec
    counted = None if error else pick_score(sample.scores, scoring.scorer, task)
    grade, lenient, kept = None, None, None
    if counted is not None:
        score, value = counted
        grade = _grade_value(value, f"{task}, scorer {scoring.scorer}")
        lenient = (score.metadata or {}).get(LENIENT)
        if grade is not None and scoring.make_figure is not None:
            kept = _as_json({"value": value, "answer": score.answer, "metadata": score.metadata})
    usage = sample.model_usage.get(model_key)
    answered = bool(sample.output.choices)
    target = target_text(sample.target)
    category = sample.metadata.get(spec.category_field or "category")
    cluster = sample.metadata.get(spec.cluster_by) if spec.cluster_by else None
    question: dict[str, Any]
    if isinstance(sample.input, str):
        question = {"input": sample.input, "turns": None}
    else:
        question = asked([{"role": message.role, "content": message.text} for message in sample.input])
    return SampleResult(
        task=task,
        id=str(sample.id),
        epoch=sample.epoch,
        **question,
        target=target,
        output=sample.output.completion,
        score=0.0 if grade is None else grade,
        lenient_score=lenient,
        stop_reason=_STOP_REASONS.get(sample.output.stop_reason, "unknown") if answered else "unknown",
        error=error,
        category=sample_category(None if category is None else str(category), target, plan.labels),
        tokens_in=usage.input_tokens if usage else 0,
        tokens_out=usage.output_tokens if usage else 0,
        seconds=sample.output.time or sample.total_time or 0.0,
        grade_missing=error is None and grade is None,
        metadata=_as_json(sample.metadata),
        cluster=None if cluster is None else str(cluster),
        grade=kept,
    )


def _as_json(value: Any) -> Any:
    # What a dataset or a scorer puts into metadata need not be JSON, and these rows are written as JSON.
    return json.loads(json.dumps(value, default=str))


def pick_score(scores: dict[str, Score] | None, scorer_name: str, task: str) -> tuple[Score, Any] | None:
    """The score of the named scorer ("scorer", or "scorer.key" of one that gives several) with the value that counts.

    None where there is none at all. Raises `EvaluationError` when the named scorer gave nothing although others did.
    """
    if not scores:
        return None
    name, key = scorer_name, None
    if name not in scores and "." in name:
        name, _, key = name.rpartition(".")
    if name not in scores:
        raise EvaluationError(f"{task} has no scorer {scorer_name!r}; it has {', '.join(scores)}")
    value: Any = scores[name].value
    if isinstance(value, dict):
        value = value.get(key) if key is not None else next(iter(value.values()), None)
    return scores[name], value


def _grade_value(value: Any, where: str) -> float | None:
    if isinstance(value, str) and value not in _GRADES and value.lower() not in _WORDS:
        try:
            value = float(value)
        except ValueError:
            return None
    if value is None:
        return None
    if not isinstance(value, str | int | float):
        raise EvaluationError(f"{where}: a score of type {type(value).__name__} is not a number in [0, 1]")
    number = value_to_float()(value)
    if math.isnan(number):
        return None
    if not 0.0 <= number <= 1.0:
        raise EvaluationError(
            f"{where}: the score {number:g} is outside [0, 1], so it cannot be compared with a target"
        )
    return number


@scorer(metrics=[accuracy(), stderr()])
def label_match(labels: Sequence[str] = ()) -> Scorer:
    """Scores as the built-in evaluator does: the strict score is the value, the lenient one is in the metadata."""

    async def score(state: TaskState, target: Target) -> Score:
        strict, lenient = score_reply(state.output.completion, target.text, labels)
        return Score(value=strict, answer=state.output.completion, metadata={LENIENT: lenient})

    return score
