"""What a run will take, in tokens and dollars, before anything is sent; and whether a budget has room for it.

Pure: sizes that were measured without asking a model in, token counts as `run_summary.token_counts` has them out::

    estimate = estimate_run(EvaluationSize(...), TrainingSize(...), max_rounds=4)
    for line in describe(estimate, price): print(line)
    refuse_over_budget("the baseline", estimate.baseline, config)

All of it is estimated from above. Sampled tokens: every reply as long as `evaluation.max_tokens`. Trained ones: the
rows of a round, at three standard deviations above what as many rows drawn at random take. Prefilled ones: the
evaluation's prompts, the targets whose likelihood is measured, and from round 2 on the rows at which the label guard
looks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import run_summary
from error_handling import ConfigurationError

if TYPE_CHECKING:
    from config_schema import BudgetConfig, Price, TrainingConfig

T = TypeVar("T")

LENGTH_SAMPLE = 500
"""Of more items than this, lengths are those of a seeded sample of as many."""

DEVIATIONS = 3.0
"""Standard deviations that the rows of a round are taken to lie above the mean."""

# A mean times the number of rows may come out a hair above the whole number that it is.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class EvaluationSize:
    """One evaluation: `asked` samples (epochs counted), `prompt_tokens` of all their prompts, `target_tokens` of the
    sequences whose likelihood is measured (prompt and target together)."""

    asked: int
    prompt_tokens: int
    target_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class TrainingSize:
    """What a round trains: `supply` rows to choose from, of `row_tokens` tokens each in the mean with a standard
    deviation of `row_sd`, none listed more than `max_repeats` times; `guarded` says whether the label guard measures
    them too."""

    supply: int
    row_tokens: float
    batch_size: int
    steps: int
    row_sd: float = 0.0
    max_repeats: int = 1
    guarded: bool = False


@dataclass(frozen=True)
class RunEstimate:
    """Tokens of the baseline, of round 1 and of each round after it; `notes` say what is known less well."""

    baseline: Mapping[str, int]
    first_round: Mapping[str, int]
    later_round: Mapping[str, int]
    max_rounds: int
    notes: tuple[str, ...] = ()

    def round(self, number: int) -> Mapping[str, int]:
        """The estimate of a round by its number; 0 is the baseline."""
        return self.baseline if number == 0 else self.first_round if number == 1 else self.later_round

    @property
    def total(self) -> dict[str, int]:
        """The baseline and all rounds together."""
        return run_summary.add_tokens(self.round(number) for number in range(self.max_rounds + 1))


def estimate_run(
    evaluation: EvaluationSize,
    first: TrainingSize,
    later: TrainingSize | None = None,
    *,
    max_rounds: int,
    notes: Sequence[str] = (),
) -> RunEstimate:
    """The estimate of a run whose first round trains `first` and whose others train `later` (default: the same)."""
    measured = {
        "train": 0,
        "prefill": evaluation.prompt_tokens + evaluation.target_tokens,
        "sample": evaluation.asked * evaluation.max_tokens,
    }
    return RunEstimate(
        baseline=measured,
        # In round 1 the label guard has no evaluation of a trained model to judge by, so it measures nothing.
        first_round=run_summary.add_tokens([measured, _training_tokens(first, guarded=False)]),
        later_round=run_summary.add_tokens(
            [measured, _training_tokens(later or first, guarded=(later or first).guarded)]
        ),
        max_rounds=max_rounds,
        notes=tuple(notes),
    )


def rows_trained(listed: int, batch_size: int, steps: int) -> int:
    """Rows that `steps` steps train when `listed` rows are cycled, the last batch of every epoch holding the rest."""
    full_epochs, rest = divmod(steps, -(-listed // batch_size))
    return full_epochs * listed + min(rest * batch_size, listed)


def _training_tokens(size: TrainingSize, *, guarded: bool) -> dict[str, int]:
    listed = min(size.steps * size.batch_size, size.supply * size.max_repeats)
    different = min(listed, size.supply)
    # The sum of a draw without replacement: its variance vanishes when every row is drawn.
    spread = size.row_sd * math.sqrt(different * (1 - different / size.supply))
    row = size.row_tokens + DEVIATIONS * spread / different
    return {
        "train": math.ceil(rows_trained(listed, size.batch_size, size.steps) * row - _ROUNDING),
        "prefill": math.ceil(different * row - _ROUNDING) if guarded else 0,
        "sample": 0,
    }


def some(items: Sequence[T], seed: int) -> list[T]:
    """All of `items`, or a seeded sample of `LENGTH_SAMPLE` where there are more."""
    if len(items) <= LENGTH_SAMPLE:
        return list(items)
    return [items[index] for index in random.Random(f"lengths/{seed}").sample(range(len(items)), LENGTH_SAMPLE)]


def mean_length(items: Sequence[T], length: Callable[[T], int], seed: int) -> float:
    """Mean of `length` over `some` of the items; 0 for no items."""
    chosen = some(items, seed)
    return sum(map(length, chosen)) / len(chosen) if chosen else 0.0


def expected_round(
    upper: Mapping[str, int], baseline: Mapping[str, int], rounds: Sequence[Mapping[str, int]]
) -> dict[str, int]:
    """The most tokens that the next round is expected to take, of which `upper` is the estimate.

    The estimate holds however short the replies were so far: a model in training may begin to fill them up to
    `evaluation.max_tokens`. What took more than was estimated is expected to do so again.
    """
    seen = [upper, baseline, *rounds]
    return {kind: max(row[kind] for row in seen) for kind in ("train", "prefill", "sample")}


def describe(estimate: RunEstimate, price: Price | None) -> list[str]:
    """Lines for the terminal."""
    rounds = estimate.max_rounds
    lines = ["estimate in tokens, from above (every reply is taken to be evaluation.max_tokens long):"]
    named = [("baseline", estimate.baseline), ("round 1", estimate.first_round)]
    if rounds > 1 and estimate.later_round != estimate.first_round:
        named.append(("each later round", estimate.later_round))
    elif rounds > 1:
        named[1] = ("each round", estimate.first_round)
    named.append((f"baseline and {rounds} round{'s' if rounds > 1 else ''}", estimate.total))
    lines += [f"  {name}: {amount(tokens, price)}" for name, tokens in named]
    return lines + [f"  {note}" for note in estimate.notes]


def amount(tokens: Mapping[str, int], price: Price | None) -> str:
    """Token counts, and dollars where there is a price, in a phrase."""
    parts = [f"up to {tokens['train']:,} trained"] if tokens["train"] else []
    parts += [f"{tokens['prefill']:,} prefilled", f"up to {tokens['sample']:,} sampled"]
    cost = run_summary.money(tokens, price)
    return ", ".join(parts) + ("" if cost is None else f"; up to {dollars(cost)}")


def dollars(value: float) -> str:
    """Dollars to the cent, small amounts to two figures that count."""
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.2g}" if value >= 1e-4 else f"${value:.1e}"


def limit_passed(
    budget: BudgetConfig,
    *,
    spent: Mapping[str, int],
    expected: Mapping[str, int],
    price: Price | None,
    seconds_spent: float = 0.0,
    seconds_expected: float = 0.0,
) -> str | None:
    """A phrase that names the first limit that `expected` on top of `spent` would pass; None while there is room."""
    whole = run_summary.add_tokens([spent, expected])
    tokens, before = sum(whole.values()), sum(spent.values())
    if budget.tokens is not None and tokens > budget.tokens:
        return (
            f"{before:,} tokens are spent and up to {tokens - before:,} more would pass budget.tokens={budget.tokens}"
        )
    cost, paid = run_summary.money(whole, price), run_summary.money(spent, price)
    if budget.money is not None and cost is not None and paid is not None and cost > budget.money:
        return (
            f"{dollars(paid)} are spent and up to {dollars(cost - paid)} more would pass budget.money={budget.money:g}"
        )
    if budget.seconds is not None and seconds_spent + seconds_expected > budget.seconds:
        return (
            f"{seconds_spent:,.0f} s are spent and about {seconds_expected:,.0f} s more would pass "
            f"budget.seconds={budget.seconds:g}"
        )
    return None


def refuse_over_budget(what: str, expected: Mapping[str, int], config: TrainingConfig) -> None:
    """Raise `ConfigurationError` when `what` alone may take more than a budget that is untouched."""
    nothing = {"train": 0, "prefill": 0, "sample": 0}
    price = config.prices.get(config.base_model)
    why = limit_passed(config.budget, spent=nothing, expected=expected, price=price)
    if why is not None:
        raise ConfigurationError(
            f"the budget does not hold {what} ({amount(expected, price)}): {why}. Nothing was sent. Raise the limit, "
            "lower evaluation.max_tokens, or evaluate fewer samples."
        )
