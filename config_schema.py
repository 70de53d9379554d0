"""The configuration: its keys, their defaults, and what is refused.

One JSON object, documented field by field below; `describe_config()` yields the README's table from it::

    config = load_and_validate_config("eval_loop_config.json", ["max_rounds=5", "evaluation.max_tokens=32"])
    config.planned_steps, config.evaluation.max_tokens

Everything that is wrong is told in one `ConfigurationError`: unknown keys with the nearest known name, wrong types,
values out of range, contradictions, each with its file and line or as "command line".
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from config_faults import Fault, explain, secrets
from config_file import KeyPath, dotted, in_json, on_one_line, parse_override, read_json_object, unusable_values
from config_groups import (
    LARGEST_COUNT,
    BudgetConfig,
    Count,
    DecisionConfig,
    EvalTask,
    EvaluationConfig,
    HeldoutConfig,
    NotNegative,
    Positive,
    Price,
    SelectionConfig,
    Share,
    StrictModel,
    Text,
    list_to_tuple,
    task_from_text,
)
from config_rules import Contradiction, contradictions
from error_handling import ConfigurationError
from import_paths import anchored, is_import_path

DEFAULT_WARMUP_STEPS = 100
"""Warm-up where none is written, in steps; a tenth of the planned steps when that is fewer."""


class TrainingConfig(StrictModel):
    """Everything a run is told. Paths are absolute once loaded; a secret is never part of it."""

    base_model: Text = Field(description="Model to fine-tune: a name the service offers, or a Hugging Face folder.")
    init_from: Annotated[str, Field(pattern=r"^tinker://.")] | None = Field(
        default=None, description="`tinker://` path of a saved state to start from; null: a fresh adapter."
    )
    train_file: Text = Field(description="Training rows: JSONL or a JSON array.")
    eval_file: Text | None = Field(default=None, description="Evaluation rows; this or `eval_tasks` is needed.")
    eval_tasks: Annotated[
        tuple[Annotated[EvalTask, BeforeValidator(task_from_text)], ...], BeforeValidator(list_to_tuple)
    ] = Field(
        default=(),
        description="Inspect tasks: each a registered name, `file.py@task`, or an object "
        "`{task, args, weight, threshold, scorer, metric, reducer}`.",
    )
    renderer_name: Text | None = Field(
        default=None, description="Chat renderer; null: the one recommended for the base model."
    )
    train_on_what: Literal[
        "last_assistant_turn",
        "last_assistant_message",
        "all_assistant_turns",
        "all_assistant_messages",
        "all_messages",
        "all_tokens",
        "all_user_and_system_messages",
    ] = Field(default="last_assistant_turn", description="The part of a conversation whose tokens carry the loss.")
    lora_rank: Count = Field(default=16, description="Rank of the LoRA adapter, at least 1.")
    learning_rate: Positive = Field(
        default=1e-4, description="Peak learning rate of the first round, finite and above 0."
    )
    use_recommended_lr: bool = Field(
        default=False, description="Take the learning rate from the base model's family and hidden size instead."
    )
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="Factor on the learning rate after a missed round, above 0 and at most 1."
    )
    min_lr: NotNegative = Field(default=1e-6, description="Lowest learning rate, 0 or more, at most `learning_rate`.")
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = Field(
        default=None,
        description="Steps of linear warm-up, fewer than the planned steps (`steps_per_round * max_rounds`); "
        f"null: {DEFAULT_WARMUP_STEPS}, or a tenth of the planned steps when that is fewer.",
    )
    max_steps: Count = Field(
        default=1000, description="Step at which the cosine reaches `min_lr`; not a cap on training."
    )
    batch_size: Count = Field(default=8, description="Rows per optimizer step, at least 1.")
    steps_per_round: Count = Field(default=1, description="Optimizer steps per round, at least 1.")
    eval_threshold: Share = Field(default=0.85, description="Validation score, 0..1, at which the target is met.")
    max_rounds: Count = Field(default=3, description="Most rounds of training, at least 1.")
    max_seq_length: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = Field(
        default=2048,
        description="Longest training sequence in tokens, at least 2; longer rows are dropped and counted.",
    )
    save_every: Count = Field(default=20, description="Steps between checkpoints within a round, at least 1.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=42, description="Seed of the adapter, the order of rows and sampling, 0..4294967295."
    )
    allow_overlap: bool = Field(
        default=False, description="Permit evaluation rows in the training data; scores then read as on training data."
    )
    evalops_enabled: bool = Field(
        default=False, description="Submit each evaluated round to EvalOps (key: `EVALOPS_API_KEY`)."
    )
    evalops_test_suite_id: Text | None = Field(default=None, description="EvalOps test suite that takes the results.")
    evalops_api_url: Text | None = Field(
        default=None, description="EvalOps server; null: `EVALOPS_API_URL`, else `https://api.evalops.dev`."
    )
    prices: dict[str, Price] = Field(
        default_factory=dict,
        description="Dollars per million tokens by base model: `{model: {prefill, sample, train}}`.",
    )
    trackers: Annotated[tuple[Text, ...], BeforeValidator(list_to_tuple)] = Field(
        default=(), description="Not available in this version."
    )
    notify: Text | None = Field(default=None, description="Not available in this version.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="How a checkpoint is measured.")
    decision: DecisionConfig = Field(default_factory=DecisionConfig, description="When to stop, and what comes next.")
    selection: SelectionConfig = Field(default_factory=SelectionConfig, description="Which rows a round trains on.")
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="Limits of a run.")
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig, description="What is kept for the final test.")

    @property
    def planned_steps(self) -> int:
        """Optimizer steps of a run that uses all its rounds."""
        return self.steps_per_round * self.max_rounds

    @property
    def resolved_warmup_steps(self) -> int:
        """Warm-up in steps: as written, else 100 or a tenth of the planned steps when that is fewer."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(DEFAULT_WARMUP_STEPS, self.planned_steps // 10)

    def to_json_dict(self) -> dict[str, Any]:
        """Every key with its value, ready for `json.dumps`; loading it again yields an equal configuration."""
        return self.model_dump(mode="json")

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> TrainingConfig:
        found = list(contradictions(self))
        sink = (info.context or {}).get("contradictions")
        if sink is not None:
            sink.extend(found)
        elif found:
            raise ValueError("; ".join(f"{dotted(item.path)}: {item.message}" for item in found))
        return self


GROUPS: Mapping[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in TrainingConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def _leaf_fields() -> dict[KeyPath, FieldInfo]:
    """Every key that holds a value, in the order written above; those of a group as (group, key)."""
    fields: dict[KeyPath, FieldInfo] = {}
    for name, field in TrainingConfig.model_fields.items():
        inner = GROUPS[name].model_fields if name in GROUPS else None
        fields |= {(name,): field} if inner is None else {(name, key): item for key, item in inner.items()}
    return fields


_LEAVES = _leaf_fields()


def load_and_validate_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a configuration file, apply `key=value` overrides (the last of duplicates wins), and validate.

    Relative paths in the file count from its folder, in overrides from the working folder; both are stored absolute.
    A group given as an object in an override changes the keys it names and no other. Raises one `ConfigurationError`
    that lists every fault, each with file:line or "command line", and the key.
    """
    written = read_json_object(path)
    data, faults = written.data, list(written.faults)
    overridden: set[KeyPath] = set()
    try:
        _make_paths_absolute(data, os.path.dirname(written.path))
        for argument in overrides:
            try:
                key, value = parse_override(argument, _takes_text)
                _apply_override(data, key, value, overridden)
            except ConfigurationError as err:
                faults.append(str(err))
        config, found = _validate(data)
    except RecursionError as err:
        raise ConfigurationError(f"{written.path}: objects or lists are nested too deeply") from err
    for where, message in found:
        prefixes = [where[:length] for length in range(len(where), 0, -1)]
        line = next((written.lines[prefix] for prefix in prefixes if prefix in written.lines), None)
        by_override = any(prefix in overridden for prefix in prefixes)
        place = "command line" if by_override else f"{written.path}:{line}" if line else str(written.path)
        faults.append(on_one_line(f"{place}: {dotted(where)}: {message}"))
    if faults or config is None:
        raise ConfigurationError("\n".join(dict.fromkeys(faults)))
    return config


def check_environment(config: TrainingConfig, env: Mapping[str, str]) -> None:
    """Refuse a configuration whose services lack their key in `env` (such as `os.environ`).

    The training service's own key is the business of the module that connects to it.
    """
    if config.evalops_enabled and not env.get("EVALOPS_API_KEY", "").strip():
        raise ConfigurationError(
            "evalops_enabled is true and the environment variable EVALOPS_API_KEY is not set; set it, or set "
            "evalops_enabled to false"
        )


def describe_config() -> list[tuple[str, str, str, str]]:
    """(key, type, default, description) of every key, for the table in the README; defaults as JSON."""
    rows = []
    for path, field in _LEAVES.items():
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            default = in_json(list(value) if isinstance(value, tuple) else value)
        rows.append((dotted(path), _type_name(field.annotation), default, field.description or ""))
    return rows


def _key_path(key: str) -> KeyPath:
    group, dot, inner = key.partition(".")
    return (group, inner) if dot and group in GROUPS else (key,)


def _takes_text(key: str) -> bool:
    field = _LEAVES.get(_key_path(key))
    return field is not None and _type_name(field.annotation).removesuffix(" or null").startswith(("text", "one of"))


def _apply_override(data: dict[str, Any], key: str, value: Any, overridden: set[KeyPath]) -> None:
    """Set one override in `data` and note in `overridden` which keys it decided."""
    path = _key_path(key)
    fragment: dict[str, Any] = {str(path[0]): value if len(path) == 1 else {path[1]: value}}
    _make_paths_absolute(fragment, os.getcwd())
    ((name, item),) = fragment.items()
    if name not in GROUPS or not isinstance(item, dict):
        data[name] = item
        overridden.add((name,))
        return
    held = data.setdefault(name, {})
    if not isinstance(held, dict):
        raise ConfigurationError(
            f"command line: {dotted(path)}: cannot be set, for {name} is {in_json(held)} and not an object"
        )
    held.update(item)
    overridden.update((name, inner) for inner in item)


_PATH_KEYS: tuple[KeyPath, ...] = (
    ("train_file",),
    ("eval_file",),
    ("selection", "pool_file"),
    ("heldout", "test_file"),
)


def _make_paths_absolute(data: dict[str, Any], base: str) -> None:
    """Rewrite the relative paths in raw `data`; whatever is not text is left for validation to refuse."""

    def absolute(value: str) -> str:
        return os.path.abspath(os.path.join(base, os.path.expanduser(value)))

    for path in _PATH_KEYS:
        holder = data if len(path) == 1 else data.get(str(path[0]))
        value = holder.get(str(path[-1])) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(value, str) and value:
            holder[str(path[-1])] = absolute(value)
    model = data.get("base_model")
    if isinstance(model, str) and model and os.path.isdir(absolute(model)):
        data["base_model"] = absolute(model)
    selection = data.get("selection")
    if isinstance(selection, dict):
        for key in ("strategy", "embedding_model"):
            named = selection.get(key)
            if isinstance(named, str) and is_import_path(named):
                selection[key] = anchored(named, [base, os.getcwd()])
            elif key == "embedding_model" and isinstance(named, str) and named and os.path.isdir(absolute(named)):
                selection[key] = absolute(named)
    tasks = data.get("eval_tasks")
    if not isinstance(tasks, list):
        return
    for index, item in enumerate(tasks):
        text = item.get("task") if isinstance(item, dict) else item
        match = re.fullmatch(r"(.+\.py)(@.*)?", text) if isinstance(text, str) else None
        if match:
            task = absolute(match[1]) + (match[2] or "")
            if isinstance(item, dict):
                item["task"] = task
            else:
                tasks[index] = task


def _validate(data: dict[str, Any]) -> tuple[TrainingConfig | None, list[Fault]]:
    """The configuration that raw `data` means, and everything that is wrong with it.

    Faulty keys are taken out and the rest is validated again, so that contradictions among the good keys are told
    together with the faults of the others. `data` is used up.
    """
    faults: list[Fault] = [*unusable_values(data), *secrets(data, _LEAVES)]
    for path, _ in faults:
        _take_out(data, path)
    found: list[Contradiction] = []
    config = None
    try:
        config = TrainingConfig.model_validate(data, context={"contradictions": found})
    except ValidationError as err:
        told = {_owner(path) for path, _ in faults}
        for error in err.errors(include_url=False):
            path, message = explain(error, _known_beside, _LEAVES)
            if error["type"] != "missing" or _owner(path) not in told:
                faults.append((path, message))
                _take_out(data, path)
        found.clear()
        placeholders = {"base_model": "-", "train_file": "-"}
        TrainingConfig.model_validate(placeholders | data, context={"contradictions": found})
    faulty = {dotted(_owner(path)) for path, _ in faults}
    for item in found:
        if not any(key in faulty or key.partition(".")[0] in faulty for key in item.involved):
            faults.append((item.path, item.message))
    return (None if faults else config), faults


def _known_beside(path: KeyPath) -> list[str]:
    """The keys that are valid where `path` stands."""
    inside: dict[str, type[BaseModel]] = {**GROUPS, "eval_tasks": EvalTask, "prices": Price}
    return list((inside[str(path[0])] if len(path) > 1 else TrainingConfig).model_fields)


def _owner(path: KeyPath) -> KeyPath:
    """The key of the configuration under which `path` lies: itself, or the group's key."""
    return path[:2] if path[0] in GROUPS else path[:1]


def _take_out(data: dict[str, Any], path: KeyPath) -> None:
    owner = _owner(path)
    holder = data if len(owner) == 1 else data.get(str(owner[0]))
    if isinstance(holder, dict):
        holder.pop(str(owner[-1]), None)


def _type_name(annotation: Any) -> str:
    """A type in words, as the README's table shows it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple or origin is dict:
        return "list" if origin is tuple else "object"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, "object")
