"""A selection strategy of the user's own: what it is given, what it must return.

    # mine.py, beside the configuration, which says "selection": {"strategy": "mine:longest_first"}
    def longest_first(request):
        rows = sorted(request.rows, key=lambda row: -len(row.question))
        unseen = [row for row in rows if row.id not in request.seen and request.can_use(row)]
        return [(row, "among the longest questions") for row in unseen[: request.count]]

It is called once for each round, the first included, and must be a function of the request alone: a run that is killed
while it chooses calls it again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from error_handling import SelectionError
from evaluation import SampleResult
from import_paths import load_function
from record_files import first_ten, quote
from row_record import Row
from row_supply import RowSupply

Strategy = Callable[["SelectionRequest"], Iterable[tuple[Row | str, str]]]


@dataclass(frozen=True)
class SelectionRequest:
    """What a strategy knows.

    `rows` are those of the training file and then of the pool (the first `n_train` are the file's); a large file is
    read as they are asked for. `can_use` says whether a row may be chosen: one may not that is an evaluation item or
    nearly, is too long, or has no token to train. `samples` is the newest evaluation (before round 1 the baseline's) in
    the order of their keys, `seen` how often each row id was trained on so far (absent: never). At most `count` rows
    may be chosen, each at most `max_repeats` times. `rng` is seeded from the run's `seed` and the `round`.
    """

    round: int
    count: int
    rows: Sequence[Row]
    n_train: int
    samples: Sequence[SampleResult]
    seen: Mapping[str, int]
    max_repeats: int
    seed: int
    rng: random.Random
    can_use: Callable[[Row], bool]


def load_strategy(path: str) -> Strategy:
    """The strategy at an import path; `ConfigurationError` when there is none that takes a request."""
    return load_function(path, key="selection.strategy", n_arguments=1)


def chosen_rows(
    strategy: Strategy,
    name: str,
    request: SelectionRequest,
    supply: RowSupply,
    refusal: Callable[[Row], str | None],
) -> list[tuple[int, str]]:
    """(position in `supply`, why) of the rows that the strategy chooses for `request`.

    `refusal` says why a row must not be trained on, None when it may. Raises `SelectionError`, naming the strategy and
    the place in what it returned, for anything but what `SelectionRequest` asks for.
    """
    place = f"selection.strategy {name}, round {request.round}"
    try:
        answer: Any = strategy(request)
        pairs = list(answer)
    except Exception as err:
        raise SelectionError(f"{place}: {type(err).__name__}: {err}") from err
    faults: list[str] = []
    chosen: list[tuple[int, str]] = []
    listed: Counter[int] = Counter()
    for number, pair in enumerate(pairs, start=1):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], str)):
            faults.append(f"item {number} is {quote(pair)}, expected (row or row id, why it was chosen)")
            continue
        identity = pair[0].id if isinstance(pair[0], Row) else pair[0]
        position = supply.find(identity) if isinstance(identity, str) else None
        if position is None:
            faults.append(f"item {number}: {quote(identity)} is the id of no training or pool row")
            continue
        listed[position] += 1
        if listed[position] == request.max_repeats + 1:
            times = "more than once" if request.max_repeats == 1 else f"more than {request.max_repeats} times"
            faults.append(f"item {number}: row {quote(identity)} is listed {times} (selection.max_repeats)")
        elif listed[position] == 1 and (reason := refusal(supply[position])):
            faults.append(f"item {number}: row {quote(identity)} {reason}")
        chosen.append((position, pair[1]))
    if len(pairs) > request.count:
        faults.append(f"{len(pairs)} rows for {request.count} places")
    if not pairs:
        faults.append("no row was chosen")
    if faults:
        raise SelectionError(f"{place} returned what cannot be trained on:\n" + "\n".join(first_ten(faults)))
    return chosen
