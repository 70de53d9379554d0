"""What `--tune` searches: the ranges, a trial's and the winner's configuration, Optuna's proposals, the ranking.

Nothing here is run or sent::

    space = search_space(config)
    proposals = Proposals(space, config.seed)
    point = proposals.next()                       # the first is the configuration as it stands
    trial = trial_config(config, point)            # one round, nothing submitted
    proposals.tell(0.61)

A trial is one round of `steps_per_round` steps, trained as the first round of the whole run would be: the same warm-up
(as far as it fits into the round) and the same horizon of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import config_schema
import cost_estimate
import preparation
import run_summary
from config_groups import BudgetConfig, DecisionConfig, HeldoutConfig, Price
from config_schema import TrainingConfig
from error_handling import DependencyError

if TYPE_CHECKING:
    from round_decision import Comparison

LEARNING_RATE_FACTOR = 5.0
"""The learning rate is searched, log-uniformly, from the starting one divided by this to it times this."""

RANK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""LoRA ranks tried: the configured one times these, as far as they are whole."""

RANDOM_TRIALS = 4
"""Trials before TPE (Bergstra et al. 2011, Algorithms for hyper-parameter optimization) has enough to go by."""


@dataclass(frozen=True)
class Point:
    """A learning rate (the peak of the first round) and a LoRA rank."""

    learning_rate: float
    rank: int


@dataclass(frozen=True)
class SearchSpace:
    """`start` is the configuration's own point; `lowest` to `highest` is the range of the learning rate."""

    start: Point
    lowest: float
    highest: float
    ranks: tuple[int, ...]

    def describe(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"learning rate {self.lowest:.3g} to {self.highest:.3g} (the starting {self.start.learning_rate:.3g} by a "
            f"factor of {LEARNING_RATE_FACTOR:g} either way, log-uniform), LoRA rank {ranks}"
        )


@dataclass(frozen=True)
class TrialResult:
    """A trial that came to its end. `score` (with its 95 % interval) is None when it failed, for the `reason` given.

    `tokens` are what it was paid for; a baseline whose answers it took over from an earlier trial is not among them.
    `run` is the name of its run folder.
    """

    trial: int
    learning_rate: float
    rank: int
    run: str
    status: str
    score: float | None
    ci_low: float | None
    ci_high: float | None
    n: int | None
    tokens: Mapping[str, int]
    wall_s: float
    reason: str

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> TrialResult:
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def search_space(config: TrainingConfig) -> SearchSpace:
    """The ranges around the configured (or, with `use_recommended_lr`, recommended) learning rate and the rank.

    The rank of an adapter that the run starts from cannot change: with `init_from` it is not searched.
    """
    rate = preparation.starting_learning_rate(config)
    factors = (1.0,) if config.init_from else RANK_FACTORS
    ranks = [config.lora_rank * factor for factor in factors]
    return SearchSpace(
        start=Point(rate, config.lora_rank),
        lowest=rate / LEARNING_RATE_FACTOR,
        highest=rate * LEARNING_RATE_FACTOR,
        ranks=tuple(int(rank) for rank in ranks if rank == int(rank) and rank >= 1),
    )


def trial_config(config: TrainingConfig, point: Point) -> TrainingConfig:
    """The configuration of the trial at `point`.

    It has one round; a threshold that only a perfect base model meets, so that it does train; no limits of its own,
    because the search keeps them; and nothing that tells others of a run. Of the test set it keeps the file alone, with
    which training rows are compared so that none asks what it asks; no trial asks or scores it.
    """
    changes: dict[str, Any] = {
        **_point_keys(config, point),
        "max_rounds": 1,
        "warmup_steps": min(config.resolved_warmup_steps, config.steps_per_round - 1),
        "eval_threshold": 1.0,
        "decision": DecisionConfig(),
        "budget": BudgetConfig(),
        "heldout": HeldoutConfig(test_file=config.heldout.test_file),
        "evalops_enabled": False,
        "trackers": (),
        "notify": None,
    }
    written = config.model_copy(update=changes).to_json_dict()
    return config_schema.TrainingConfig.model_validate(written)


def best_config(config: TrainingConfig, point: Point) -> dict[str, Any]:
    """`config` with the winner's learning rate and rank: a whole configuration, ready to be written and run."""
    return config.model_copy(update=_point_keys(config, point)).to_json_dict()


def _point_keys(config: TrainingConfig, point: Point) -> dict[str, Any]:
    return {
        "learning_rate": point.learning_rate,
        "use_recommended_lr": False,
        "lora_rank": point.rank,
        # A floor above the rate would contradict it.
        "min_lr": min(config.min_lr, point.learning_rate),
    }


class Proposals:
    """The points to try, one after the other: Optuna's TPE sampler, seeded, on the evaluation score.

    Every proposal follows from the seed and what was told before, so telling the same again proposes the same again.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        try:
            import optuna
        except ImportError as err:
            raise DependencyError(
                "--tune needs the optuna package, which is not installed: python -m pip install -r requirements.txt"
            ) from err
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._failed = optuna.trial.TrialState.FAIL
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._study.enqueue_trial(
            {"learning_rate": space.start.learning_rate, "rank": space.ranks.index(space.start.rank)}
        )
        self._asked: Any = None

    def next(self) -> Point:
        """The next point; `tell` how it came out before asking for another."""
        self._asked = self._study.ask()
        rate = self._asked.suggest_float("learning_rate", self._space.lowest, self._space.highest, log=True)
        # By position, so that the sampler knows that ranks have an order.
        rank = self._space.ranks[self._asked.suggest_int("rank", 0, len(self._space.ranks) - 1)]
        first = self._asked.number == 0
        return Point(self._space.start.learning_rate if first else float(f"{rate:.4g}"), rank)

    def tell(self, score: float | None) -> None:
        """The score of the point asked for last, None when its trial failed."""
        if score is None:
            self._study.tell(self._asked, state=self._failed)
        else:
            self._study.tell(self._asked, score)


def ranked(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """The trials with a score, best first; of equals the smaller rank, then the lower learning rate."""
    scored = [trial for trial in trials if trial.score is not None]
    # Weighted means of right and wrong answers carry rounding errors, which must not break a tie.
    return sorted(scored, key=lambda trial: (-round(trial.score or 0.0, 9), trial.rank, trial.learning_rate))


def lead_sentence(best: TrialResult, second: TrialResult, compared: Comparison | None) -> str:
    """How sure it is that `best` is better than `second`; `compared` is the paired comparison, where there is one."""
    lead = (best.score or 0.0) - (second.score or 0.0)
    if round(lead, 9) == 0:
        return f"Trial {best.trial} ties with trial {second.trial}; of equals the smaller rank and lower rate is taken."
    said = f"Trial {best.trial} leads trial {second.trial} by {lead:.3f}"
    if compared is None:
        return f"{said}; without samples in common no test can tell whether beyond noise."
    low, high = compared.ci_low, compared.ci_high
    interval = "interval unknown" if low is None else f"95 % interval {low:+.3f} to {high:+.3f}"
    # The samples in common may have moved against the score: that is no evidence of a lead.
    sure = not compared.within_noise and compared.difference > 0
    verdict = "beyond noise" if sure else "within noise: the order of the two may be chance"
    return f"{said} ({interval}, paired test over {compared.n} samples, p = {compared.p:.2g}), {verdict}."


def table(
    trials: Sequence[TrialResult], baseline: Mapping[str, Any] | None, notes: Sequence[str], price: Price | None
) -> str:
    """The search as a Markdown table, trials in their order, with the best one marked; `notes` below it."""
    order = ranked(trials)
    best = order[0].trial if order else None
    head = ("trial", "learning rate", "rank", "score", "95 % interval", "n", "tokens", "cost", "status")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    if baseline is not None:
        lines.append(_line(["base model", "-", "-", *_figures(baseline), "-", "-", "measured"]))
    for trial in trials:
        cost = run_summary.money(trial.tokens, price)
        status = trial.status if trial.score is not None else f"{trial.status}: {trial.reason}"
        name = f"**{trial.trial}**" if trial.trial == best else str(trial.trial)
        figures = _figures(asdict(trial))
        paid = [f"{sum(trial.tokens.values()):,}", "-" if cost is None else cost_estimate.dollars(cost)]
        lines.append(_line([name, f"{trial.learning_rate:.4g}", str(trial.rank), *figures, *paid, status]))
    whole = run_summary.add_tokens(trial.tokens for trial in trials)
    spent = run_summary.money(whole, price)
    total = f"{sum(whole.values()):,} tokens" + ("" if spent is None else f", {cost_estimate.dollars(spent)}")
    return "\n".join([*lines, "", *(f"{note}\n" for note in notes), f"Together: {total}.", ""])


def _line(cells: Sequence[str]) -> str:
    # A message may hold what would end a cell or a row.
    clean = [" ".join(cell.replace("|", "/").split()) for cell in cells]
    return f"| {' | '.join(clean)} |"


def _figures(row: Mapping[str, Any]) -> list[str]:
    low, high = row["ci_low"], row["ci_high"]
    return [
        "-" if row["score"] is None else f"{row['score']:.3f}",
        "-" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        "-" if row["n"] is None else str(row["n"]),
    ]
