"""Which rows the next round trains on, and why.

Use::

    selector = DataSelector(train.rows, pool.rows, evaluation.rows, selection_config=config.selection, seed=42)
    chosen = selector.select(round=2, count=128, seen={"train:7": 1}, samples=result.samples)
    [row.to_json() for row in chosen.rows]        # {"id", "weight", "why"} for the run folder

The first round takes random rows of the training file. Later rounds draw on training file and pool by
`selection.strategy`; the default, `balanced_failures`, spreads three quarters equally over the evaluation's categories
and takes one quarter nearest to the failed samples: spreading is what helps when the pool is imbalanced, chasing only
failures or the highest losses overshoots and collects wrong labels. Rows never trained on come first, then those
trained on least. Everything is a function of the arguments and (seed, round).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from error_handling import ConfigurationError, DataError
from evaluation import SampleResult, normalise
from label_guard import SetAside, labels_by_task, suspect_labels
from overlap import TextIndex, fingerprint, prompt_key, question_keys, question_text
from record_files import first_ten, quote
from row_files import Row

STRATEGIES = ("balanced_failures", "balanced", "failures", "random", "none")


class SelectionSettings(Protocol):
    """`config_schema`'s selection group. `hard_fraction` is in [0, 1], `max_repeats` at least 1."""

    @property
    def strategy(self) -> str: ...
    @property
    def hard_fraction(self) -> float: ...
    @property
    def max_repeats(self) -> int: ...
    @property
    def label_guard(self) -> bool: ...


@dataclass(frozen=True)
class SelectedRow:
    """A row of the round. `weight` multiplies its loss (1.0 in every strategy here); `why` is for people."""

    row: Row
    weight: float
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.row.id, "weight": self.weight, "why": self.why}


@dataclass(frozen=True)
class Selection:
    """The rows of a round, at most `count` of them (fewer when the supply is smaller; training cycles through them).
    `notes` tell a person what was done and what was not; `set_aside` is what the label guard kept out."""

    rows: tuple[SelectedRow, ...]
    notes: tuple[str, ...]
    set_aside: tuple[SetAside, ...] = ()


class DataSelector:
    """Chooses rows from a training file and a pool. Rows that ask what an evaluation item asks are never chosen,
    unless `allow_overlap` (overfitting on purpose). `can_train` is asked when a row's turn comes; where it says no,
    the next one takes its place.

    Raises `DataError` when an id names two rows, or no row is left; `ConfigurationError` for an unknown strategy.
    """

    def __init__(
        self,
        train_rows: Sequence[Row],
        pool_rows: Sequence[Row],
        eval_rows: Sequence[Row],
        *,
        selection_config: SelectionSettings,
        seed: int,
        allow_overlap: bool = False,
        can_train: Callable[[Row], bool] | None = None,
    ) -> None:
        if selection_config.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ConfigurationError(
                f"selection.strategy {quote(selection_config.strategy)} is unknown; known are {known}"
            )
        self.settings = selection_config
        self.seed = seed
        self.allow_overlap = allow_overlap
        self._can_train = can_train
        self._rows = (*train_rows, *pool_rows)
        self._n_train = len(train_rows)
        self._eval_keys = {prompt_key(row) for row in eval_rows}
        first: dict[str, Row] = {}
        for row in self._rows:
            if first.setdefault(row.id, row) is not row:
                raise DataError(f"the id {quote(row.id)} names both {first[row.id].where} and {row.where}")

    @cached_property
    def _index(self) -> TextIndex:
        return TextIndex([question_text(row) for row in self._rows])

    @cached_property
    def _keys(self) -> list[set[bytes]]:
        return [question_keys(row) for row in self._rows]

    def select(
        self,
        *,
        round: int,
        count: int,
        seen: Mapping[str, int],
        samples: Sequence[SampleResult],
        row_losses: Mapping[str, float] | None = None,
    ) -> Selection:
        """The rows of `round` (from 1). `count` is the number of rows the round's steps take; `seen` how often each
        row id was trained on so far; `samples` the newest evaluation (not used in round 1); `row_losses` the loss of
        each row's target in nats per trained token, without which the label guard cannot work."""
        if count < 1:
            raise DataError(f"a round needs at least one row, asked for {count}")
        notes: list[str] = []
        allowed = self._without_evaluation_items(samples, notes)
        rng = random.Random(f"rows/{self.seed}/{round}")
        draw = _Draw(self._rows, allowed, seen, self.settings.max_repeats, rng=rng, can_train=self._can_train)
        strategy = self.settings.strategy
        set_aside: tuple[SetAside, ...] = ()
        if strategy == "none":
            draw.restrict(index for index in allowed if index < self._n_train)
            draw.fill(count, "training file in order", in_order=True)
        elif round <= 1:
            draw.restrict(index for index in allowed if index < self._n_train)
            draw.fill(count, "first round: random order")
        else:
            set_aside = self._guard(allowed, samples, row_losses, notes)
            draw.restrict(set(allowed) - {self._position[aside.row.id] for aside in set_aside})
            if strategy in {"balanced_failures", "failures"}:
                share = self.settings.hard_fraction if strategy == "balanced_failures" else 1.0
                self._take_neighbours(draw, int(share * count + 0.5), samples, notes)
            if strategy in {"balanced_failures", "balanced"}:
                self._take_balanced(draw, count, samples, notes)
            draw.fill(count, "random")
        if not draw.taken:
            raise DataError("no row is left to train on: " + ("; ".join(notes) or "the training file is empty"))
        if len(draw.taken) < count:
            notes.append(f"{len(draw.taken)} rows for {count} places: the list is cycled")
        rows = tuple(SelectedRow(self._rows[index], 1.0, why) for index, why in draw.taken)
        return Selection(rows, tuple(notes), set_aside)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {row.id: index for index, row in enumerate(self._rows)}

    def _without_evaluation_items(self, samples: Sequence[SampleResult], notes: list[str]) -> list[int]:
        """Positions of the rows that may be trained on. Samples count too: the items of a task are in no file."""
        if self.allow_overlap:
            return list(range(len(self._rows)))
        asked = self._eval_keys | {fingerprint([sample.input]) for sample in samples}
        barred = [index for index, keys in enumerate(self._keys) if not keys.isdisjoint(asked)]
        if barred:
            listed = ", ".join(first_ten(self._rows[index].where for index in barred))
            notes.append(f"{len(barred)} rows ask what an evaluation item asks and are never chosen: {listed}")
        barred_set = set(barred)
        return [index for index in range(len(self._rows)) if index not in barred_set]

    def _take_neighbours(self, draw: _Draw, wanted: int, samples: Sequence[SampleResult], notes: list[str]) -> None:
        """Take up to `wanted` rows nearest to the failed samples: one for each failure in turn, none twice.

        The most wrong failures (lowest mean score over epochs) have their turn first. Among a failure's neighbours
        those trained on least come first, then the most similar.
        """
        import numpy as np

        failures = _failures(samples)
        if not failures or not wanted:
            notes.append("no failed sample to learn from" if not failures else "no row nearest to failures wanted")
            return
        draw.random.shuffle(failures)
        failures.sort(key=lambda pair: pair[1])
        among, levels = np.zeros(len(self._rows), dtype=bool), np.array(draw.level)
        among[list(draw.open)] = True
        queues: list[tuple[SampleResult, list[tuple[int, float]]]] = []
        for sample, _ in failures:
            near = self._index.nearest(sample.input, limit=wanted, among=among, levels=levels)
            queues.append((sample, near[::-1]))
        taken, served = 0, set()
        while taken < wanted and any(queue for _, queue in queues):
            for sample, queue in queues:
                while queue and (draw.listed[queue[-1][0]] or draw.refuses(queue[-1][0])):
                    queue.pop()
                if queue and taken < wanted:
                    index, score = queue.pop()
                    draw.take(index, f"nearest to failed sample {sample.task}/{sample.id} (similarity {score:.2f})")
                    taken += 1
                    served.add(sample.key)
        notes.append(f"{taken} rows nearest to {len(served)} of {len(failures)} failed samples")

    def _take_balanced(self, draw: _Draw, count: int, samples: Sequence[SampleResult], notes: list[str]) -> None:
        """Fill up to `count`, equally over the tasks and over the categories of each task."""
        by_task, supply = self._cells(draw, samples)
        if not supply:
            notes.append(
                "no training row has a category of the evaluation: the rest is random; expect 0 to 3 points from this"
                " (with categories about 5 more where data is imbalanced)"
            )
            return
        cells = [(task, name) for task, names in by_task.items() for name in names]
        missing = sorted({name for _, name in cells if name not in supply})
        if missing:
            listed = ", ".join(first_ten(map(quote, missing)))
            notes.append(f"categories of the evaluation without a row to train on: {listed}")
        cells = [cell for cell in cells if cell[1] in supply]
        draw.random.shuffle(cells)  # so that places that do not divide evenly are not always the same category's
        queues = {name: draw.queue(positions) for name, positions in supply.items()}
        per_task: Counter[str] = Counter()
        per_cell: Counter[tuple[str, str]] = Counter()
        many = len(by_task) > 1
        while len(draw.taken) < count:
            levels = {cell: queues[cell[1]].level() for cell in cells}
            open_levels = [level for level in levels.values() if level is not None]
            if not open_levels:
                break
            lowest = min(open_levels)
            cell = min(
                (cell for cell in cells if levels[cell] == lowest), key=lambda cell: (per_task[cell[0]], per_cell[cell])
            )
            index = queues[cell[1]].pop()
            of_task = f" of task {cell[0]}" if many else ""
            draw.take(index, f"category {quote(cell[1])}{of_task}, {_times(draw.level[index])}")
            per_task[cell[0]] += 1
            per_cell[cell] += 1
        notes.append(f"{per_cell.total()} rows spread over {len(per_cell)} categories")

    def _cells(self, draw: _Draw, samples: Sequence[SampleResult]) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
        """(categories by task, open rows by category), both normalised.

        The evaluation's categories are its samples' `category`, or, when no row has one of those, their targets where
        these form a closed set. A row's is its own category, or its target where that is such a label.
        """
        labels = labels_by_task(samples)
        all_labels = set().union(*labels.values())
        named: dict[str, set[str]] = {}
        for sample in samples:
            if sample.category is not None:
                named.setdefault(sample.task, set()).add(normalise(sample.category))
        for by_task, own in ((named, True), (labels, False)):
            wanted = set().union(*by_task.values())
            supply: dict[str, list[int]] = {}
            for index in sorted(draw.open):
                row = self._rows[index]
                label = normalise(row.target)
                category = normalise(row.category) if own and row.category is not None else None
                if category is None and label in all_labels:
                    category = label
                if category in wanted and category is not None:
                    supply.setdefault(category, []).append(index)
            if supply:
                return {task: sorted(names) for task, names in sorted(by_task.items())}, supply
        return {}, {}

    def _guard(
        self,
        allowed: Sequence[int],
        samples: Sequence[SampleResult],
        row_losses: Mapping[str, float] | None,
        notes: list[str],
    ) -> tuple[SetAside, ...]:
        if not self.settings.label_guard:
            return ()
        if row_losses is None:
            notes.append("label guard not applied: the rows' losses were not measured")
            return ()
        if not labels_by_task(samples):
            notes.append("label guard not applied: the evaluation's targets are no closed set of labels")
            return ()
        guarded = suspect_labels(self._rows, allowed, self._index, samples, row_losses)
        measured = sum(self._rows[index].id in row_losses for index in allowed)
        listed = ": " + ", ".join(first_ten(aside.row.where for aside in guarded)) if guarded else ""
        notes.append(f"label guard: {len(guarded)} of the {measured} rows measured are set aside{listed}")
        return guarded


class _Draw:
    """Rows taken so far, and which may still be taken. `level` is how often a row was trained on before."""

    def __init__(
        self,
        rows: Sequence[Row],
        allowed: Iterable[int],
        seen: Mapping[str, int],
        max_repeats: int,
        *,
        rng: random.Random,
        can_train: Callable[[Row], bool] | None = None,
    ) -> None:
        self.random = rng
        self._rows, self._can_train = rows, can_train
        self.max_repeats = max_repeats
        self.level = [seen.get(row.id, 0) for row in rows]
        self.open = set(allowed)
        self.listed: Counter[int] = Counter()
        self.taken: list[tuple[int, str]] = []
        self._rank = list(range(len(rows)))
        rng.shuffle(self._rank)

    def restrict(self, allowed: Iterable[int]) -> None:
        self.open &= set(allowed)

    def refuses(self, index: int) -> bool:
        """Whether the row turns out not to be trainable, now that its turn has come."""
        return self._can_train is not None and not self._can_train(self._rows[index])

    def take(self, index: int, why: str) -> None:
        self.taken.append((index, why))
        self.listed[index] += 1

    def queue(self, positions: Iterable[int], *, in_order: bool = False) -> _Queue:
        return _Queue(self, positions, in_order)

    def fill(self, count: int, why: str, *, in_order: bool = False) -> None:
        """Take open rows, the least seen first, until there are `count` or the supply is used up."""
        queue = self.queue(self.open, in_order=in_order)
        while len(self.taken) < count and queue.level() is not None:
            self.take(queue.pop(), why)

    def entry(self, index: int, in_order: bool) -> tuple[int, int, int]:
        return self.level[index] + self.listed[index], index if in_order else self._rank[index], index


class _Queue:
    """Rows by (times trained on and listed, random rank); a row comes back until it is listed `max_repeats` times."""

    def __init__(self, draw: _Draw, positions: Iterable[int], in_order: bool) -> None:
        self._draw, self._in_order = draw, in_order
        self._heap = [
            draw.entry(index, in_order)
            for index in positions
            if index in draw.open and draw.listed[index] < draw.max_repeats
        ]
        heapq.heapify(self._heap)

    def level(self) -> int | None:
        """How often the next row was trained on or listed; None when the queue is empty."""
        while self._heap and self._draw.refuses(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self) -> int:
        """The next row; the caller lists it at once."""
        index = heapq.heappop(self._heap)[2]
        if self._draw.listed[index] + 1 < self._draw.max_repeats:
            level, rank, _ = self._draw.entry(index, self._in_order)
            heapq.heappush(self._heap, (level + 1, rank, index))
        return index


def _times(level: int) -> str:
    return "unseen" if level == 0 else f"seen {level} time{'s' if level > 1 else ''}"


def _failures(samples: Sequence[SampleResult]) -> list[tuple[SampleResult, float]]:
    """(sample, mean score over its epochs) of those graded below 1. A sample that failed to run, or has no grade,
    says nothing about the model, so it is left out."""
    groups: dict[tuple[str, str], list[SampleResult]] = {}
    for sample in sorted(samples, key=lambda sample: sample.key):
        if sample.error is None and not sample.grade_missing:
            groups.setdefault((sample.task, sample.id), []).append(sample)
    means = [(group[0], sum(sample.score for sample in group) / len(group)) for group in groups.values()]
    return [(sample, mean) for sample, mean in means if mean < 1]
