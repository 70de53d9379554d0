"""The groups of the configuration and the objects in its lists; `config_schema.TrainingConfig` holds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def list_to_tuple(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else value


def task_from_text(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
# No run reaches a billion of anything counted; beyond, products of two counts stop being numbers to compute with.
LARGEST_COUNT = 10**9
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
TokenCount = Annotated[int, Field(ge=1, le=10**15)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class EvalTask(StrictModel):
    """One Inspect task of `eval_tasks`; a bare string stands for `{"task": ...}`."""

    task: Text = Field(description="A registered Inspect task, or `file.py@task`.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task, by name.")
    weight: NotNegative = Field(default=1.0, description="Weight in the overall score, 0 or more.")
    threshold: Share | None = Field(default=None, description="Score in 0..1 that this task must reach for the target.")
    scorer: Text | None = Field(
        default=None,
        description="The task's scorer whose score counts, as `name` or `name.key`; null: that of its headline metric.",
    )
    metric: Text | None = Field(
        default=None,
        description="What the score is: `accuracy`, `mean` or another metric of the scorer; null: the headline metric.",
    )
    reducer: Text | None = Field(
        default=None,
        description="How epochs combine: `mean`, `median`, `mode`, `max`, `at_least_K`, `pass_at_K` or `pass_k_K`; "
        "null: the task's own, else the mean.",
    )


class Price(StrictModel):
    """What a base model costs, in dollars per million tokens, each 0 or more."""

    prefill: NotNegative = Field(description="Dollars per million prompt tokens.")
    sample: NotNegative = Field(description="Dollars per million sampled tokens.")
    train: NotNegative = Field(description="Dollars per million trained tokens.")


class EvaluationConfig(StrictModel):
    """How a checkpoint is measured."""

    evaluator: Literal["inspect", "simple"] = Field(
        default="inspect", description="`inspect`: Inspect AI. `simple`: the built-in evaluator, for `eval_file` only."
    )
    max_tokens: Count = Field(
        default=512, description="Longest reply, in tokens, at least 1; longer ones are cut and counted."
    )
    temperature: NotNegative = Field(default=0.0, description="Sampling temperature, 0 (greedy) or more.")
    max_errors: Share = Field(
        default=0.05, description="Share of samples, 0..1, that may fail before the evaluation fails."
    )
    cluster_by: Text | None = Field(
        default=None,
        description="Field of a row (of an Inspect sample's metadata) that names what it has in common with others, "
        "such as a document; intervals and tests then allow for that. null: each row stands alone.",
    )
    category_field: Text | None = Field(
        default=None, description="Field of a row that names its category; null: the target."
    )
    enable_thinking: bool = Field(default=False, description="Let a model that can think before it answers do so.")


class DecisionConfig(StrictModel):
    """When to stop, and what follows a round that missed the target."""

    target_rule: Literal["point", "lower_bound"] = Field(
        default="point", description="What must reach the threshold: the score, or the lower end of its 95 % interval."
    )
    on_regression: Literal["rollback", "continue"] = Field(
        default="rollback", description="After a drop beyond noise (p < 0.05): go back to the best state, or go on."
    )
    patience: Count | None = Field(
        default=None, description="Rounds without a new best score before stopping; null: no limit."
    )
    lr_policy: Literal["decay", "plateau"] = Field(
        default="decay",
        description="Lower the learning rate after every missed round, or only after one without improvement.",
    )


STRATEGIES = ("balanced_failures", "balanced", "failures", "random", "none")


class SelectionConfig(StrictModel):
    """Which rows a round trains on after a missed one."""

    strategy: Text = Field(
        default="balanced_failures",
        description="`balanced`: spread over the evaluation's categories. `failures`: nearest to the failed samples. "
        "`balanced_failures`: both. `random`: the control. `none`: the file in its order. Or your own, as "
        "`package.module:function`.",
    )
    pool_file: Text | None = Field(default=None, description="Further labelled rows that later rounds may draw on.")
    hard_fraction: Share = Field(default=0.25, description="Share of a round, 0..1, chosen nearest to the failures.")
    max_repeats: Count = Field(default=1, description="How often one row may be listed for a round, at least 1.")
    label_guard: bool = Field(default=True, description="Set rows aside whose label looks wrong, and list them.")
    embedding_model: Text | None = Field(
        default=None,
        description="What tells the rows nearest to a failure. null: the words they share (TF-IDF). Else a Hugging "
        "Face folder or name (safetensors), or a function of texts, as `package.module:function`.",
    )


class BudgetConfig(StrictModel):
    """Limits of a run; null: none. The run stops before a round that would pass one."""

    tokens: TokenCount | None = Field(default=None, description="Tokens trained, prefilled and sampled, at least 1.")
    money: Positive | None = Field(default=None, description="Dollars, above 0; needs `prices` for the base model.")
    seconds: Positive | None = Field(default=None, description="Wall-clock seconds, above 0.")


class HeldoutConfig(StrictModel):
    """What is kept for the final test. Of the scoreboard's settings only the file is used in this version."""

    test_file: Text | None = Field(
        default=None, description="Rows kept for a final test: training or pool rows that ask the same are refused."
    )
    family: Text | None = Field(default=None, description="Not available in this version.")
    metric: Text | None = Field(default=None, description="Not available in this version.")
    bar: Share | None = Field(default=None, description="Not available in this version.")
    guardrails: Annotated[tuple[Any, ...], BeforeValidator(list_to_tuple)] = Field(
        default=(), description="Not available in this version."
    )
    criteria: Annotated[tuple[Any, ...], BeforeValidator(list_to_tuple)] = Field(
        default=(), description="Not available in this version."
    )
