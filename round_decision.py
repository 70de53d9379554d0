"""What a run does after an evaluation: stop or go on, from which state, at which learning rate, and why.

Pure: the history of evaluations and the configuration in, a `Decision` out; nothing is read, written or asked::

    decision = decide(history, config, learning_rate=1e-4, tokens_spent=120_000, seconds_spent=340.0)
    if decision.action == "stop": ...
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import hyperparam_utils
import significance
from error_handling import EvaluationError

if TYPE_CHECKING:
    from config_schema import TrainingConfig

NOISE_P = 0.05
"""A drop whose paired p is at or above this is within noise."""

# Weighted means of right/wrong scores carry rounding errors; a score that equals the threshold must count as met.
_EQUAL = 1e-9

SampleKey = tuple[str, str, int]

Status = Literal[
    "target_met",
    "target_missed",
    "budget_spent",
    "patience_spent",
    "baseline",
    "improved",
    "not_improved",
    "rolled_back",
]


class TaskScore(NamedTuple):
    """One task's score in [0, 1]; `threshold` None: it sets no condition; `ci_low` None: not known."""

    task: str
    score: float
    threshold: float | None = None
    ci_low: float | None = None


@dataclass(frozen=True)
class RoundRecord:
    """One evaluated round; round 0 is the untouched base model.

    `score` and the 95 % interval `ci_low`..`ci_high` (None: unknown) are in [0, 1] over `n` samples, `errors` of which
    failed. `task_scores` holds (task, score, threshold or None[, ci_low or None]) each. `sample_scores` maps a sample's
    key to its score and pairs rounds in tests; `task_weights` says how much each task's samples count there (empty:
    every sample alike), `clusters` which samples belong together. `checkpoint` is where its weights are.
    """

    round: int
    score: float
    ci_low: float | None = None
    ci_high: float | None = None
    n: int = 0
    errors: int = 0
    task_scores: tuple[tuple[str, float, float | None] | TaskScore, ...] = ()
    sample_scores: Mapping[SampleKey, float] = field(default_factory=dict)
    task_weights: Mapping[str, float] = field(default_factory=dict)
    clusters: Mapping[SampleKey, str] = field(default_factory=dict)
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.round < 0:
            raise EvaluationError(f"rounds count from 0, got {self.round}")
        if not (math.isfinite(self.score) and 0 <= self.score <= 1):
            raise EvaluationError(f"round {self.round}: a score must be in 0..1, got {self.score}")


@dataclass(frozen=True)
class Comparison:
    """`later` against `earlier` over the `n` samples that both have, failed ones counted as not correct.

    `difference` is later minus earlier, each task weighted as in the score, with its 95 % interval (None: unknown);
    `p` is that of the two-sided paired test.
    """

    earlier: int
    later: int
    n: int
    difference: float
    ci_low: float | None
    ci_high: float | None
    p: float

    @property
    def within_noise(self) -> bool:
        return self.p >= NOISE_P


@dataclass(frozen=True)
class Decision:
    """What comes next.

    `status` says why in one word: `target_met`, `target_missed` (rounds used up), `budget_spent` or `patience_spent`
    stop the run, the others go on. `best_round` names the checkpoint to keep. On "continue" `next_lr` is the next
    round's peak learning rate and `rollback_to` the round whose weights and optimizer it starts from (None: the last
    round's); on "stop" both are None. `reason` is for people.
    """

    action: Literal["stop", "continue"]
    reason: str
    status: Status
    best_round: int
    next_lr: float | None = None
    rollback_to: int | None = None


def decide(
    history: Sequence[RoundRecord],
    config: TrainingConfig,
    *,
    learning_rate: float,
    tokens_spent: int = 0,
    seconds_spent: float = 0.0,
    money_spent: float | None = None,
    next_tokens: int = 0,
    next_seconds: float = 0.0,
    next_money: float = 0.0,
) -> Decision:
    """The decision after the last round of `history`, which holds every round of the run in order.

    `learning_rate` is the peak rate of the last round (of the first one, after the baseline). Spent and expected
    (`next_*`, of one more round) tokens, seconds and dollars are compared with `config.budget`: the run stops before
    a limit is passed. Raises `EvaluationError` when `history` is empty or out of order, or when a limit in money
    cannot be checked because `money_spent` is unknown.
    """
    if not history:
        raise EvaluationError("there is no evaluated round to decide about")
    if any(later.round <= earlier.round for earlier, later in itertools.pairwise(history)):
        raise EvaluationError(f"rounds are out of order: {[record.round for record in history]}")
    last = history[-1]
    met = [record for record in history if target_met(record, config)[0]]
    if met:
        # Whatever others scored, this is what the target asked for. An earlier round meets one that was lowered since.
        record = best_record(met)
        standing = target_met(record, config)[1]
        prefix = f"{_capital(_start(record))} already meets the target: r" if record.round == 0 else "R"
        return Decision("stop", f"{prefix}{standing[1:]}", "target_met", record.round)

    standing = target_met(last, config)[1]
    best = best_record(history)
    budget = config.budget
    spent = _budget_spent(
        [
            _Limit("tokens", budget.tokens, tokens_spent, next_tokens, "{:,.0f} tokens"),
            _Limit("money", budget.money, money_spent, next_money, "${:,.2f}"),
            _Limit("seconds", budget.seconds, seconds_spent, next_seconds, "{:,.0f} s"),
        ]
    )
    stale = last.round - best.round
    if last.round >= config.max_rounds:
        reason = f"{standing} {_all_rounds(config.max_rounds)}; {_name(best)}."
        return Decision("stop", reason, "target_missed", best.round)
    if spent:
        return Decision("stop", f"{standing} {spent} {_capital(_name(best))}.", "budget_spent", best.round)
    patience = config.decision.patience
    if patience is not None and stale >= patience:
        reason = f"{standing} No round improved on round {best.round} in {_rounds(stale)}, and patience is {patience}; "
        return Decision("stop", f"{reason}{_name(best)}.", "patience_spent", best.round)
    return _go_on(history, config, learning_rate, best, standing)


def target_met(record: RoundRecord, config: TrainingConfig) -> tuple[bool, str]:
    """Whether the round meets the target, and a sentence that says by which numbers.

    By `decision.target_rule` the score (`point`) or the lower end of its 95 % interval (`lower_bound`) must reach
    `eval_threshold`, and the same of every task its own threshold. An unknown interval meets nothing.
    """
    lower_bound = config.decision.target_rule == "lower_bound"
    threshold = config.eval_threshold
    tasks = [TaskScore(*item) for item in record.task_scores]
    shown = f"Round {record.round} scored {_number(record.score)} ({_interval(record)}n = {record.n}"
    shown += f", {record.errors} failed)" if record.errors else ")"
    problems = []
    figure = record.ci_low if lower_bound else record.score
    what = "the lower end of its interval" if lower_bound else "the score"
    if figure is None:
        problems.append("its interval is unknown, so the lower end cannot reach the target")
    elif figure < threshold - _EQUAL:
        problems.append(f"{what} is below the target of {threshold:g}")
    for task in tasks:
        if task.threshold is None:
            continue
        figure = task.ci_low if lower_bound else task.score
        if figure is None:
            problems.append(f"the interval of task {task.task} is unknown")
        elif figure < task.threshold - _EQUAL:
            end = "the lower end of " if lower_bound else ""
            problems.append(f"{end}task {task.task} ({_number(figure)}) is below its own {task.threshold:g}")
    if problems:
        return False, f"{shown}: {'; '.join(problems)}."
    conditions = sum(task.threshold is not None for task in tasks)
    each = (
        "the task with a threshold of its own reaches it"
        if conditions == 1
        else (f"all {conditions} tasks with thresholds of their own reach them")
    )
    own = f", and {each}" if conditions else ""
    sure = _how_sure(record, threshold) + _how_sure_of_tasks(tasks)
    return True, f"{shown}: {what} reaches the target of {threshold:g}{own}. {sure}"


def _how_sure(record: RoundRecord, threshold: float) -> str:
    """What the interval says of a target that is met, whichever rule met it."""
    if record.ci_low is None:
        return "How sure that is, is not known: the score has no interval."
    if record.ci_low >= threshold - _EQUAL:
        return f"The whole interval is above it: the lower end is {_number(record.ci_low)}."
    return (
        f"The interval reaches below it, to {_number(record.ci_low)}: on other samples of this kind the model may miss."
    )


def _how_sure_of_tasks(tasks: Sequence[TaskScore]) -> str:
    """The tasks whose own threshold is met by the score and not by the whole interval; empty when there are none."""
    unsure = [
        f"that of {task.task} is unknown"
        if task.ci_low is None
        else f"that of {task.task} reaches below its own {task.threshold:g}, to {_number(task.ci_low)}"
        for task in tasks
        if task.threshold is not None and (task.ci_low is None or task.ci_low < task.threshold - _EQUAL)
    ]
    return f" Of the tasks' intervals, {'; '.join(unsure)}." if unsure else ""


def best_record(history: Sequence[RoundRecord]) -> RoundRecord:
    """The round with the highest score, the earlier one on ties."""
    best = history[0]
    for record in history[1:]:
        if record.score > best.score + _EQUAL:
            best = record
    return best


def _go_on(
    history: Sequence[RoundRecord], config: TrainingConfig, learning_rate: float, best: RoundRecord, standing: str
) -> Decision:
    last = history[-1]
    if last.round == 0:
        reason = f"{standing} This is the baseline; training starts at a learning rate of {learning_rate:.3g}."
        return Decision("continue", reason, "baseline", best.round, next_lr=learning_rate)
    improved = best.round == last.round
    status: Status = "improved" if improved else "not_improved"
    rollback_to = None
    if improved:
        course = "It is the best round so far."
    else:
        significant, course = _drop(best, last)
        if significant and config.decision.on_regression == "rollback":
            rollback_to, status = best.round, "rolled_back"
            course += f" Training goes back to the state of round {best.round}."
        elif significant:
            course += " Training goes on from it, as on_regression says."
    if improved and config.decision.lr_policy == "plateau":
        next_lr = learning_rate
    else:
        next_lr = hyperparam_utils.decayed_lr(learning_rate, config.lr_decay, 1, min(config.min_lr, learning_rate))
    moved = f"goes from {learning_rate:.3g} to {next_lr:.3g}" if next_lr != learning_rate else f"stays {next_lr:.3g}"
    reason = f"{standing} {course} The learning rate {moved}."
    return Decision("continue", reason, status, best.round, next_lr=next_lr, rollback_to=rollback_to)


def _drop(best: RoundRecord, last: RoundRecord) -> tuple[bool, str]:
    """Whether `last` is worse than `best` beyond noise, with a sentence; only samples that both have are compared."""
    if last.score >= best.score - _EQUAL:
        return False, f"It equals the best, round {best.round} ({_number(best.score)})."
    lead = f"It is below round {best.round} ({_number(best.score)})"
    compared = compare(best, last)
    if compared is None:
        return False, f"{lead}; without samples in common no test can tell whether beyond noise, so nothing is undone."
    # The samples in common may have moved against the score: that is no evidence of a drop.
    significant = not compared.within_noise and compared.difference < 0
    verdict = "beyond noise" if significant else "within noise"
    return significant, f"{lead}, {verdict} (paired test over {compared.n} samples, p = {compared.p:.2g})."


def compare(earlier: RoundRecord, later: RoundRecord) -> Comparison | None:
    """The paired comparison of two rounds; None when they have no sample that counts in common.

    Exact McNemar where all samples count alike and each is right or wrong, else a sign-flip test; by cluster where
    samples have one. See `significance.paired_p_value` and `significance.paired_difference`.
    """
    common = earlier.sample_scores.keys() & later.sample_scores.keys()
    weights = _sample_weights(common, later.task_weights or earlier.task_weights)
    keys = sorted(key for key in common if weights[key] > 0)
    if not keys:
        return None
    before = [weights[key] * earlier.sample_scores[key] for key in keys]
    after = [weights[key] * later.sample_scores[key] for key in keys]
    named = later.clusters or earlier.clusters
    # Tasks do not share clusters, and a sample without one is its own.
    clusters = [(key[0], named[key]) if key in named else key for key in keys] if named else None
    change = significance.paired_difference(before, after, clusters=clusters)
    p = significance.paired_p_value(before, after, clusters=clusters)
    return Comparison(earlier.round, later.round, len(keys), change.difference, change.low, change.high, p)


def leads(history: Sequence[RoundRecord], best_round: int) -> tuple[Comparison, ...]:
    """How far `best_round` is ahead of the baseline and of the runner-up (one comparison where these are one round).

    The runner-up is the best of the others, the earlier one on ties. Empty for a history of one round.
    """
    best = next(record for record in history if record.round == best_round)
    others = [record for record in history if record.round != best_round]
    if not others:
        return ()
    baseline = [record for record in others if record is history[0]]
    rivals = {record.round: record for record in (*baseline, best_record(others))}
    compared = (compare(rival, best) for rival in rivals.values())
    return tuple(found for found in compared if found is not None)


def describe_lead(lead: Comparison) -> str:
    """A sentence for people, such as "ahead of the baseline by 0.12 [0.03, 0.21], beyond noise (...)"."""
    other = "the baseline" if lead.earlier == 0 else f"round {lead.earlier}"
    interval = "interval unknown" if lead.ci_low is None else f"[{lead.ci_low:+.3f}, {lead.ci_high:+.3f}]"
    verdict = "within noise" if lead.within_noise else "beyond noise"
    test = f"paired test over {lead.n} samples, p = {lead.p:.2g}"
    return f"against {other} {lead.difference:+.3f} {interval}, {verdict} ({test})"


def _sample_weights(keys: Collection[SampleKey], task_weights: Mapping[str, float]) -> dict[SampleKey, float]:
    """By which factor a sample's score counts so that the mean over `keys` is the mean weighted by tasks.

    Exactly 1.0 each where no weights are given, where there is one task, and where weights fit the tasks' sizes.
    """
    sizes = Counter(task for task, _, _ in keys)
    weights = {task: task_weights.get(task, 1.0) for task in sizes}
    counting = sum(size for task, size in sizes.items() if weights[task] > 0)
    total = sum(weights.values())
    factors = {task: weights[task] / total * counting / size if total > 0 else 0.0 for task, size in sizes.items()}
    if not task_weights or all(abs(factor - 1) < _EQUAL for factor in factors.values()):
        return dict.fromkeys(keys, 1.0)
    return {key: factors[key[0]] for key in keys}


class _Limit(NamedTuple):
    """One limit of the budget with what is spent of it and what one more round is expected to take."""

    key: str
    limit: float | None
    spent: float | None
    expected: float
    form: str


def _budget_spent(limits: Sequence[_Limit]) -> str | None:
    """A sentence naming the first limit that is reached or that one more round would pass; None while there is room."""
    for item in limits:
        if item.limit is None:
            continue
        if item.spent is None:
            raise EvaluationError(f"budget.{item.key} is set and what was spent of it is not known; see prices")
        used = f"{item.form.format(item.spent)} of budget.{item.key} ({item.form.format(item.limit)}) are spent"
        if item.spent >= item.limit:
            return f"{used}."
        if item.spent + item.expected > item.limit:
            return f"{used}, and one more round of about {item.form.format(item.expected)} would pass it."
    return None


def _number(score: float) -> str:
    return f"{score:.3f}"


def _interval(record: RoundRecord) -> str:
    if record.ci_low is None or record.ci_high is None:
        return "interval unknown, "
    return f"95 % interval {_number(record.ci_low)} to {_number(record.ci_high)}, "


def _name(best: RoundRecord) -> str:
    where = _start(best) if best.round == 0 else f"round {best.round}"
    return f"the best is {where} with {_number(best.score)}"


def _start(baseline: RoundRecord) -> str:
    """What the baseline measured: the base model, or the adapter that the run starts from."""
    return "the base model" if baseline.checkpoint is None else "the starting adapter"


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _all_rounds(count: int) -> str:
    return "The only round allowed is used" if count == 1 else f"All {count} rounds are used"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
