"""Finds, checks and builds the Inspect tasks of an evaluation, before anything is paid for.

    plans = check_tasks([TaskSpec("my_tasks.py@capitals"), TaskSpec("inspect_evals/arc_easy", weight=2.0)])

Inspect itself says nothing of a task that does not exist, only warns of an unknown argument, and runs an empty data
set; each of these would end in a score for something else than was asked for.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from error_handling import ConfigurationError, EvalLoopError
from evaluation import closed_label_set, is_cluster
from inspect_scoring import Scoring, resolve_scoring

# Our own task, for the rows of a file; it stands in `inspect_eval`.
LABELLED_ROWS = f"{Path(__file__).resolve().with_name('inspect_eval.py')}@labelled_rows"


def inspect_available() -> bool:
    """True when Inspect AI is installed; does not import it."""
    return importlib.util.find_spec("inspect_ai") is not None


@dataclass(frozen=True)
class TaskSpec:
    """An Inspect task to run.

    `task` is a registered name (`inspect_evals/arc_easy`), `file.py@task`, or a `file.py` all of whose tasks run;
    these then share `weight` (0 or more, in the overall score) equally. `threshold` in [0, 1] is the task's own
    target. `name` is what results call the task (default: its own name). `category_field` names the sample metadata
    that holds the category, `cluster_by` the one that holds what samples have in common. `scorer` ("name" or
    "name.key"), `metric` and `reducer` say what its score is (default: the task's headline metric).
    """

    task: str
    args: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    threshold: float | None = None
    name: str | None = None
    category_field: str | None = None
    scorer: str | None = None
    metric: str | None = None
    reducer: str | None = None
    cluster_by: str | None = None


@dataclass(frozen=True)
class PlannedTask:
    """A built task with what is known of it before it runs. `keys` are its samples' keys, in order.

    `labels` are its targets where they form a closed set; a sample without a category has its target for one. `digest`
    is equal for equal questions and answers, in whatever order the samples and a sample's choices are.
    """

    name: str
    spec: TaskSpec
    task: Any
    weight: float
    keys: tuple[tuple[str, str, int], ...]
    scoring: Scoring
    labels: tuple[str, ...] = ()
    digest: str = ""


def check_tasks(specs: Sequence[TaskSpec]) -> tuple[PlannedTask, ...]:
    """Find, argument-check and build every task, each spec alone.

    Raises `ConfigurationError` for a spec that names nothing, an unknown or missing argument, a task without samples
    or without a scorer, and one that could not be compared between rounds or resumed; errors of our own task about
    its file go through unchanged.
    """
    if not specs:
        raise ConfigurationError("no evaluation task is named, so there is nothing to measure")
    if not inspect_available():
        raise ConfigurationError("eval_tasks needs the inspect-ai package: python -m pip install -r requirements.txt")
    from inspect_ai.hooks._startup import init_hooks

    # Inspect announces hooks on the terminal when it first starts; started before ours is there, only other people's.
    init_hooks()
    planned: list[PlannedTask] = []
    for spec in specs:
        built = _build(spec)
        for task in built:
            name = _result_name(spec, task, several=len(built) > 1)
            if any(other.name == name for other in planned):
                raise ConfigurationError(
                    f"two evaluation tasks are called {name!r}; their results could not be told apart"
                )
            planned.append(_plan(spec, task, name, spec.weight / len(built)))
    if not any(plan.weight > 0 for plan in planned):
        raise ConfigurationError("the weights of the evaluation tasks add up to zero")
    return tuple(planned)


def _result_name(spec: TaskSpec, task: Any, *, several: bool) -> str:
    own = str(task.name)
    if spec.name is None:
        return own
    return f"{spec.name}/{own}" if several else spec.name


def _plan(spec: TaskSpec, task: Any, name: str, weight: float) -> PlannedTask:
    from inspect_ai import task_with

    def refuse(why: str) -> ConfigurationError:
        return ConfigurationError(f"evaluation task {spec.task!r}: {why}")

    if task.sample_source is not None:
        raise refuse("it makes up its samples while it runs, so rounds could not be compared")
    if task.early_stopping is not None:
        raise refuse("it decides while it runs which samples to ask, so rounds could not be compared")
    if task.model is not None:
        raise refuse(f"it names a model of its own ({task.model}), so it would not measure the checkpoint")
    if not task.scorer:
        raise refuse("it has no scorer, so there is nothing to measure")
    if len(task.dataset) == 0:
        raise refuse("its data set is empty")
    if any(sample.id is None for sample in task.dataset):
        if task.dataset.shuffled:
            raise refuse(
                "its data set is shuffled and has no ids, so its samples could not be found again; give it ids"
            )
        for position, sample in enumerate(task.dataset, start=1):
            sample.id = position if sample.id is None else sample.id
    ids = [str(sample.id) for sample in task.dataset]
    if len(set(ids)) < len(ids):
        twice = next(identity for identity in ids if ids.count(identity) > 1)
        raise refuse(f"its data set has the id {twice!r} twice; results are kept by id")
    if spec.cluster_by is not None:
        _check_clusters(task, spec.cluster_by, refuse)
    try:
        scoring = resolve_scoring(task, scorer=spec.scorer, metric=spec.metric, reducer=spec.reducer)
    except ConfigurationError as err:
        raise refuse(str(err)) from err
    task_with(task, name=name)
    epochs = range(1, (task.epochs or 1) + 1)
    keys = tuple((name, identity, epoch) for identity in ids for epoch in epochs)
    # The letters of a choice task are places in a list, not labels.
    choice = any(sample.choices for sample in task.dataset)
    labels = () if choice else closed_label_set([target_text(sample.target) for sample in task.dataset])
    return PlannedTask(
        name=name,
        spec=spec,
        task=task,
        weight=weight,
        keys=keys,
        scoring=scoring,
        labels=labels,
        digest=_digest(task.dataset),
    )


def _digest(samples: Iterable[Any]) -> str:
    """SHA-256 over what is asked and wanted. Choices may be shuffled anew whenever a task is built, so a letter that is
    wanted stands for the choice at its place."""
    asked = []
    for sample in samples:
        if isinstance(sample.input, str):
            messages = [["user", sample.input]]
        else:
            messages = [[message.role, message.text] for message in sample.input]
        wanted = [sample.target] if isinstance(sample.target, str) else list(sample.target)
        choices = list(sample.choices or ())
        places = [ord(letter) - ord("A") if len(letter) == 1 else -1 for letter in wanted]
        if choices and all(0 <= place < len(choices) for place in places):
            wanted = sorted(choices[place] for place in places)
        asked.append([str(sample.id), messages, sorted(choices), wanted])
    return hashlib.sha256(json.dumps(sorted(asked)).encode()).hexdigest()


def target_text(target: str | Sequence[str]) -> str:
    """An Inspect target as one text; several accepted ones are set apart by a bar."""
    return target if isinstance(target, str) else " | ".join(target)


def _check_clusters(task: Any, field: str, refuse: Callable[[str], ConfigurationError]) -> None:
    bad = [sample for sample in task.dataset if not is_cluster((sample.metadata or {}).get(field))]
    if bad:
        known = ", ".join(sorted({key for sample in task.dataset for key in sample.metadata or {}})) or "none"
        raise refuse(
            f"{len(bad)} of {len(task.dataset)} samples have no text or number in the metadata {field!r} that "
            f"evaluation.cluster_by names (the first: sample {bad[0].id}); further metadata of its samples: {known}"
        )


def _build(spec: TaskSpec) -> list[Any]:
    """The `Task` objects of one spec. Inspect's public functions cannot build tasks without running them."""
    from inspect_ai._eval.loader import create_file_tasks, load_file_tasks
    from inspect_ai._eval.registry import task_create
    from inspect_ai._util.decorator import parse_decorators
    from inspect_ai._util.registry import registry_lookup

    path, task_name = _split(spec.task)
    args = dict(spec.args)
    if path is None:
        if registry_lookup("task", spec.task) is None:
            raise ConfigurationError(_unknown_task(spec.task))
        _check_arguments(spec, registry_lookup("task", spec.task))
        with _explained(spec):
            return [task_create(spec.task, **args)]
    if not path.is_file():
        raise ConfigurationError(f"evaluation task {spec.task!r}: there is no file {path}")
    with _explained(spec):
        ast.parse(path.read_bytes(), filename=str(path))  # a syntax error would read as "no task"
        offered = [name for name, _ in parse_decorators(path, "task")]
        if offered:
            load_file_tasks(path)
    if not offered:
        raise ConfigurationError(f"evaluation task {spec.task!r}: {path} holds no function decorated with @task")
    if task_name is not None and task_name not in offered:
        raise ConfigurationError(
            f"evaluation task {spec.task!r}: {path} holds no task {task_name!r}; it holds {', '.join(sorted(offered))}"
        )
    wanted = [task_name] if task_name is not None else offered
    for name in wanted:
        _check_arguments(spec, registry_lookup("task", name))
    if spec.task == LABELLED_ROWS and "eval_file" in args:
        # Inspect builds a task in the folder of its file, where a relative path would mean something else.
        args["eval_file"] = str(Path(args["eval_file"]).resolve())
    with _explained(spec):
        return list(create_file_tasks(path, wanted, args))


def _split(task: str) -> tuple[Path | None, str | None]:
    """(file, task in it or None), or (None, None) for a registered name. A folder's name may hold an @."""
    file, at, name = task.rpartition("@")
    if at and file.endswith(".py"):
        return Path(file).expanduser().resolve(), name
    if task.endswith(".py"):
        return Path(task).expanduser().resolve(), None
    return None, None


def _unknown_task(name: str) -> str:
    from inspect_ai._util.registry import registry_find, registry_info

    known = sorted(registry_info(one).name for one in registry_find(lambda info: info.type == "task"))
    package = name.partition("/")[0]
    near = difflib.get_close_matches(name, known, n=3) or [one for one in known if one.startswith(f"{package}/")][:8]
    hint = f"near names are {', '.join(near)}" if near else "name a file as path/to/file.py@task"
    if "/" in name and not near and importlib.util.find_spec(package.replace("-", "_")) is None:
        hint = f"the package {package} is not installed"
    return f"evaluation task {name!r} is neither a file nor registered with Inspect; {hint}"


def _check_arguments(spec: TaskSpec, function: Any) -> None:
    """Inspect only warns of an unknown argument and then measures something else than was asked for."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        unknown = sorted(set(spec.args) - set(parameters))
        if unknown:
            takes = ", ".join(parameters) or "no arguments"
            raise ConfigurationError(
                f"evaluation task {spec.task!r}: unknown argument {', '.join(unknown)}; it takes {takes}"
            )
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and name not in spec.args
    ]
    if missing:
        raise ConfigurationError(f"evaluation task {spec.task!r}: the argument {', '.join(missing)} is not given")


@contextlib.contextmanager
def _explained(spec: TaskSpec) -> Iterator[None]:
    """Turn whatever a task's code raises while it is loaded or built into a `ConfigurationError` that names it."""
    try:
        yield
    except EvalLoopError:
        raise
    except (Exception, SystemExit) as err:
        args = f" with {json.dumps(dict(spec.args), default=str)}" if spec.args else ""
        raise ConfigurationError(
            f"evaluation task {spec.task!r}{args} could not be built: {type(err).__name__}: {err}"
        ) from err
