"""What is wrong with a configuration though each of its values alone is fine.

Pure: a `config_schema.TrainingConfig` in, faults out. `config_schema` calls `contradictions` whenever one is made.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import hyperparam_utils
from config_faults import UNAVAILABLE, UNAVAILABLE_IN_HELDOUT, not_available
from config_file import KeyPath, dotted, in_json
from config_groups import STRATEGIES
from error_handling import ConfigurationError
from import_paths import is_import_path

if TYPE_CHECKING:
    from config_schema import TrainingConfig


@dataclass(frozen=True)
class Contradiction:
    """`path` is where the message points; `involved` are all keys that it rests on, groups written with a dot."""

    path: KeyPath
    involved: frozenset[str]
    message: str


def _fault(*path: str | int, rests_on: tuple[str, ...] = (), message: str) -> Contradiction:
    owner = dotted(path).partition("[")[0]
    return Contradiction(path, frozenset({owner, *rests_on}), message)


def contradictions(config: TrainingConfig) -> Iterator[Contradiction]:
    """Every pair of values that cannot both be meant, and every key that is not served yet."""
    yield from _unavailable(config)
    yield from _evaluation(config)
    yield from _selection(config)
    yield from _schedule(config)
    yield from _services(config)
    if config.init_from and "/sampler_weights/" in config.init_from:
        yield _fault(
            "init_from",
            message=f"{config.init_from} holds weights for sampling, which cannot be trained on; give the path of a "
            "saved state (tinker://<run>/weights/<name>)",
        )


def _unavailable(config: TrainingConfig) -> Iterator[Contradiction]:
    for name, field in type(config).model_fields.items():
        value, default = getattr(config, name), field.get_default(call_default_factory=True)
        if name in UNAVAILABLE and value != default:
            yield _fault(name, message=not_available(name))
    for key in UNAVAILABLE_IN_HELDOUT:
        if getattr(config.heldout, key) not in (None, ()):
            yield _fault("heldout", key, message=not_available(key))


def _evaluation(config: TrainingConfig) -> Iterator[Contradiction]:
    tasks = config.eval_tasks
    if config.eval_file is None and not tasks:
        message = "neither eval_file nor eval_tasks is given; without one there is nothing to measure"
        yield _fault("eval_file", rests_on=("eval_tasks",), message=message)
    for index, task in enumerate(tasks):
        if task in tasks[:index]:
            yield _fault("eval_tasks", index, message=f"{task.task} is named twice with the same args; keep one")
    if tasks and config.eval_file is None and not any(task.weight for task in tasks):
        message = "the weights add up to 0; give at least one task a weight above 0"
        yield _fault("eval_tasks", rests_on=("eval_file",), message=message)
    if config.evaluation.evaluator == "simple" and tasks:
        message = (
            "the built-in evaluator (simple) cannot run the Inspect tasks of eval_tasks; write inspect, or give "
            "eval_file and no eval_tasks"
        )
        yield _fault("evaluation", "evaluator", rests_on=("eval_tasks",), message=message)


def _selection(config: TrainingConfig) -> Iterator[Contradiction]:
    strategy = config.selection.strategy
    if strategy not in STRATEGIES and not is_import_path(strategy):
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(STRATEGIES)
        message = f"must be one of {known}, or package.module:function, got {in_json(strategy)}{hint}"
        yield _fault("selection", "strategy", message=message)


def _schedule(config: TrainingConfig) -> Iterator[Contradiction]:
    try:
        peak = (
            hyperparam_utils.get_recommended_lr(config.base_model)
            if config.use_recommended_lr
            else config.learning_rate
        )
    except ConfigurationError:
        # Told once the service has said whether it knows the model at all: that may be the real fault.
        peak = None
    if peak is not None and config.min_lr > peak:
        name = "the recommended learning rate" if config.use_recommended_lr else "learning_rate"
        message = f"{config.min_lr:g} is above {name} {peak:g}; lower min_lr (0 is allowed)"
        source = "base_model" if config.use_recommended_lr else "learning_rate"
        yield _fault("min_lr", rests_on=(source, "use_recommended_lr"), message=message)
    planned, warmup = config.planned_steps, config.resolved_warmup_steps
    keys = ("warmup_steps", "steps_per_round", "max_rounds", "max_steps")
    if config.warmup_steps is not None and warmup >= planned:
        message = (
            f"{planned} steps planned (steps_per_round {config.steps_per_round} x max_rounds {config.max_rounds}), "
            f"warm-up {warmup} written; write fewer than {planned}, or null to have it chosen"
        )
        yield _fault("warmup_steps", rests_on=keys, message=message)
    elif config.max_steps <= warmup:
        message = (
            f"the schedule would end at step {config.max_steps}, before its warm-up of {warmup} steps is over; raise "
            "max_steps or write a shorter warmup_steps"
        )
        yield _fault("max_steps", rests_on=keys, message=message)


def _services(config: TrainingConfig) -> Iterator[Contradiction]:
    if config.evalops_enabled and config.evalops_test_suite_id is None:
        message = "evalops_enabled needs the id of the test suite; write it, or set evalops_enabled to false"
        yield _fault("evalops_test_suite_id", rests_on=("evalops_enabled",), message=message)
    if config.evalops_api_url is not None and (problem := _url_problem(config.evalops_api_url)):
        yield _fault("evalops_api_url", message=problem)
    if config.budget.money is not None and config.base_model not in config.prices:
        message = (
            f"a limit in dollars needs prices for {config.base_model}: write "
            f'"prices": {{"{config.base_model}": {{"prefill": P, "sample": S, "train": T}}}} in dollars per million '
            "tokens"
        )
        yield _fault("budget", "money", rests_on=("prices", "base_model"), message=message)


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host: Any = parts.hostname
    except ValueError:
        return "is not an address; write https://host"
    if parts.username or parts.password:
        return "holds a user name or password; set the environment variable EVALOPS_API_KEY instead"
    return None if parts.scheme in ("http", "https") and host else "is not an address; write https://host"
