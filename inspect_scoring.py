"""Which of a task's scorers, metrics and ways of combining epochs make its score, checked before anything is paid for.

    scoring = resolve_scoring(task, scorer="judge.style", metric="f1_macro", reducer="max")
    rules = TaskRules(reduce=scoring.reduce, make_figure=scoring.make_figure, metric=scoring.describe())

Without names it is the task's headline metric. Inspect itself falls back to the first metric when a name fits nothing,
leaves failed samples out of every metric, and after an interruption computes them over the new samples alone; here
all samples count, and one that failed or has no grade is handed to a metric as an incorrect one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from error_handling import ConfigurationError, EvaluationError
from evaluation import Figure, MakeFigure, SampleResult

# The mean of the samples' scores under either name; any task can be scored by it.
MEANS = ("accuracy", "mean")
# These say how much scores vary or what they are, not how good they are.
_NO_SCORE = frozenset({"stderr", "bootstrap_stderr", "std", "var", "ci", "ci_wilson", "frequency"})
_REDUCER = re.compile(r"mean|median|mode|max|(?:at_least|pass_at|pass_k)_[1-9]\d*")
_REDUCERS = "mean, median, mode, max, at_least_K, pass_at_K, pass_k_K (K: a number of epochs)"


@dataclass(frozen=True)
class Scoring:
    """How one task's samples become its score.

    `scorer` is "name" or "name.key" (one value of a scorer that gives several). `reduce` combines a sample's scores
    over epochs. `make_figure` computes a `metric` that is not the mean of the samples' scores; None: it is the mean.
    """

    scorer: str
    metric: str
    reducer: str
    reduce: Callable[[Sequence[float]], float]
    make_figure: MakeFigure | None = None

    def describe(self) -> str:
        """For people: "accuracy of match", with the reducer where it is not the mean."""
        epochs = "" if self.reducer == "mean" else f", {self.reducer} of epochs"
        return f"{self.metric} of {self.scorer}{epochs}"


def resolve_scoring(
    task: Any, *, scorer: str | None = None, metric: str | None = None, reducer: str | None = None
) -> Scoring:
    """The scoring of a built Inspect `task`, by the names given, else by its headline metric.

    Raises `ConfigurationError` with the valid names for one that fits nothing, and for a metric that is no score.
    """
    from inspect_ai.scorer._reducer import reducer_log_name

    headline = task.headline_metric
    if scorer is None and headline is not None:
        metric = metric or headline.metric
    scorers = _scorers(task)
    name, key = _choose_scorer(scorers, scorer, headline)
    metric_name, chosen = _choose_metric(_metrics(scorers[name], name, key), metric, name)
    combine = _choose_reducer(task, reducer, headline)
    label, _, part = metric_name.partition(".")
    return Scoring(
        scorer=name if key is None else f"{name}.{key}",
        metric=metric_name,
        reducer=reducer_log_name(combine),
        reduce=_over_numbers(combine),
        make_figure=None if chosen is None else _figure_maker(chosen, label, part or None, combine),
    )


def _scorers(task: Any) -> dict[str, Any]:
    """The task's scorers by the names under which Inspect keeps their scores."""
    from inspect_ai.scorer._scorer import unique_scorer_name

    named: dict[str, Any] = {}
    for one in task.scorer:
        named[unique_scorer_name(one, list(named))] = one
    return named


def _choose_scorer(scorers: Mapping[str, Any], wanted: str | None, headline: Any) -> tuple[str, str | None]:
    """(name, key of the value or None) of the scorer that counts."""
    if wanted is None and headline is not None and headline.scorer is not None:
        key = headline.score if headline.score != headline.scorer else None
        if headline.scorer not in scorers:
            raise ConfigurationError(
                f"its headline metric is of a scorer {headline.scorer!r}, which it does not have; it has "
                f"{', '.join(scorers)}. Name one as scorer."
            )
        return headline.scorer, key
    if wanted is None:
        name = next(iter(scorers))
        if headline is not None and headline.metric is not None:
            # A metric on its own means the first scorer that has it.
            name = next((one for one in scorers if headline.metric in _names(scorers[one])), name)
        keys = _patterns(scorers[name])
        plain = keys and "*" not in keys[0] and not _simple(scorers[name])
        return name, keys[0] if plain else None
    if wanted in scorers:
        return wanted, None
    name, _, key = wanted.rpartition(".")
    if name in scorers:
        return name, key
    raise ConfigurationError(
        f"it has no scorer {wanted!r}; it has {', '.join(scorers)} (name.key for one value of a scorer that gives "
        "several)"
    )


def _items(scorer: Any) -> list[Any]:
    from inspect_ai.scorer._scorer import scorer_metrics

    raw = scorer_metrics(scorer)
    return [raw] if isinstance(raw, dict) else list(raw)


def _simple(scorer: Any) -> list[Any]:
    return [item for item in _items(scorer) if not isinstance(item, dict)]


def _patterns(scorer: Any) -> list[str]:
    """The keys, or patterns of keys, for which a scorer that gives several values declares metrics."""
    return [pattern for item in _items(scorer) if isinstance(item, dict) for pattern in item]


def _names(scorer: Any) -> list[str]:
    from inspect_ai._util.registry import registry_unqualified_name

    inner = [one for item in _items(scorer) if isinstance(item, dict) for group in item.values() for one in group]
    return [registry_unqualified_name(one) for one in (*_simple(scorer), *inner)]


def _metrics(scorer: Any, name: str, key: str | None) -> dict[str, Any]:
    """The metrics that the task declares for the scorer (for its value `key`), by their names, in order."""
    from inspect_ai._util.registry import registry_unqualified_name

    patterns = _patterns(scorer)
    if key is not None and patterns and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
        raise ConfigurationError(f"its scorer {name!r} gives no value {key!r}; it gives {', '.join(patterns)}")
    found = [] if key is not None and patterns else _simple(scorer)
    for item in _items(scorer):
        if isinstance(item, dict):
            for pattern, group in item.items():
                found += group if key is None or fnmatch.fnmatchcase(key, pattern) else []
    named: dict[str, Any] = {}
    for one in found:
        named.setdefault(registry_unqualified_name(one), one)
    return named


def _choose_metric(declared: Mapping[str, Any], wanted: str | None, scorer: str) -> tuple[str, Any | None]:
    """(name, Inspect's metric or None for the mean of the samples' scores)."""
    usable = [name for name in declared if name not in _NO_SCORE]
    if wanted is None:
        if declared and not usable:
            raise ConfigurationError(
                f"the metrics of its scorer {scorer!r} ({', '.join(declared)}) say how sure a score is, not how good; "
                "name metric: accuracy or mean, or one of your own"
            )
        wanted = usable[0] if usable else "mean"
    label = wanted if wanted in declared else wanted.partition(".")[0]
    if wanted in MEANS and (wanted not in declared or _is_mean(declared[wanted])):
        return wanted, None
    if label in usable:
        return wanted, declared[label]
    registered = None if label in _NO_SCORE or label.rpartition("/")[2] in _NO_SCORE else _registered_metric(label)
    if registered is not None:
        return wanted, registered
    valid = [*MEANS, *(name for name in usable if name not in MEANS)]
    raise ConfigurationError(
        f"{wanted!r} is no metric that can be its score; of scorer {scorer!r} these can: {', '.join(valid)} (or one "
        "registered with Inspect that needs no arguments)"
    )


def _is_mean(metric: Any) -> bool:
    """Whether it is Inspect's accuracy or mean as it stands: with a conversion of its own it may be anything."""
    from inspect_ai._util.registry import registry_info, registry_params

    return registry_info(metric).name in ("inspect_ai/accuracy", "inspect_ai/mean") and not registry_params(metric)


def _registered_metric(name: str) -> Any | None:
    from inspect_ai._util.registry import registry_lookup

    make = registry_lookup("metric", name)
    if make is None:
        return None
    with contextlib.suppress(TypeError):  # it needs arguments, which a name cannot give
        return make()  # type: ignore[operator]
    return None


def _choose_reducer(task: Any, wanted: str | None, headline: Any) -> Any:
    from inspect_ai.scorer._reducer import create_reducers, reducer_log_name, validate_reducer

    own = list(task.epochs_reducer or ())
    if wanted is None:
        if not own:
            return (create_reducers("mean") or [])[0]
        named = {reducer_log_name(one): one for one in own}
        chosen = named.get(headline.reducer or "", own[0]) if headline is not None else own[0]
        if reducer_log_name(chosen) == "collect":
            raise ConfigurationError(f"its reducer collect gives no single score; name reducer: {_REDUCERS}")
        return chosen
    if not _REDUCER.fullmatch(wanted):
        raise ConfigurationError(f"{wanted!r} is no reducer; these are: {_REDUCERS}")
    chosen = (create_reducers(wanted) or [])[0]
    try:
        validate_reducer(task.epochs or 1, chosen)
    except Exception as err:
        raise ConfigurationError(f"the reducer {wanted!r} needs more epochs than its {task.epochs or 1}") from err
    return chosen


def _over_numbers(reducer: Any) -> Callable[[Sequence[float]], float]:
    from inspect_ai.scorer import Score

    return lambda scores: float(reducer([Score(value=score) for score in scores]).as_float())


def _figure_maker(metric: Any, name: str, part: str | None, reducer: Any) -> MakeFigure:
    """The `MakeFigure` that calls an Inspect metric on all of a task's samples."""
    from inspect_ai._eval.task.results import is_metric_deprecated, reduce_scores
    from inspect_ai.scorer import SampleScore, Score
    from inspect_ai.scorer._metric import metric_scores

    bare = is_metric_deprecated(metric)  # an older form, which takes the scores without their samples
    each_epoch = metric_scores(metric) == "unreduced"

    def make(groups: Sequence[Sequence[SampleResult]]) -> Figure:
        letters = any(isinstance(s.grade["value"], str) for group in groups for s in group if s.grade)

        def as_inspect_has_it(sample: SampleResult) -> Any:
            grade = sample.grade or {"value": "I" if letters else 0.0}
            score = Score(value=grade["value"], answer=grade.get("answer"), metadata=grade.get("metadata"))
            return SampleScore(score=score, sample_id=sample.id, sample_metadata=dict(sample.metadata))

        prepared = [[as_inspect_has_it(sample) for sample in group] for group in groups]
        if not each_epoch:
            prepared = [scores if len(scores) == 1 else reduce_scores(scores, reducer) for scores in prepared]
        missing = sum(sample.grade is None for group in groups for sample in group)

        def figure(positions: Sequence[int]) -> float:
            chosen = [score for position in positions for score in prepared[position]]
            try:
                value = metric([one.score for one in chosen] if bare else chosen)
            except Exception as err:
                note = f" ({missing} samples without a grade were given to it as incorrect ones)" if missing else ""
                raise EvaluationError(
                    f"the metric {name} could not be computed{note}: {type(err).__name__}: {err}"
                ) from err
            return _one_number(value, name, part)

        return figure

    return make


def _one_number(value: Any, name: str, part: str | None) -> float:
    if isinstance(value, Mapping):
        key = "all" if part is None and "all" in value else part
        if key not in value:
            raise EvaluationError(
                f"the metric {name} gives {', '.join(map(str, value))}; name one of them as metric: {name}.KEY"
            )
        value = value[key]
    elif part is not None:
        raise EvaluationError(f"the metric {name} gives one number and no value {part!r}; name metric: {name}")
    if not isinstance(value, int | float) or math.isnan(value) or not 0.0 <= value <= 1.0:
        raise EvaluationError(
            f"the metric {name} gave {value!r}, which is no score in [0, 1] and cannot be compared with a target"
        )
    return float(value)
