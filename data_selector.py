"""Which rows the next round trains on, and why.

Use::

    selector = DataSelector(train.rows, pool.rows, evaluation.rows, selection_config=config.selection, seed=42)
    chosen = selector.select(round=2, count=128, seen={"train:7": 1}, samples=result.samples)
    [row.to_json() for row in chosen.rows]        # {"id", "weight", "why"} for the run folder

The first round takes random rows of the training file. Later rounds draw on training file and pool by
`selection.strategy`; the default, `balanced_failures`, spreads three quarters equally over the evaluation's categories
and takes one quarter nearest to the failed samples: spreading is what helps when the pool is imbalanced, chasing only
failures or the highest losses overshoots and collects wrong labels. Of a category, rows never trained on come first,
then those trained on least. Everything is a function of the arguments and (seed, round).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from config_groups import STRATEGIES
from custom_strategy import SelectionRequest, Strategy, chosen_rows, load_strategy
from embedding_index import Embedder, EmbeddingIndex, load_embedder
from error_handling import ConfigurationError, DataError, SelectionError
from evaluation import SampleResult, normalise
from evaluation_items import EvaluationItems
from import_paths import is_import_path
from label_guard import SetAside, labels_by_task, replies_are_labels, suspect_labels
from overlap import question_text
from record_files import first_ten, quote
from row_draw import Draw
from row_record import Row
from row_supply import RowSupply
from text_index import Neighbours, TextIndex


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
    @property
    def embedding_model(self) -> str | None: ...


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
    `notes` tell a person what was done and what was not; `set_aside` is what the label guard kept out; `overlapping`
    counts the rows that are evaluation items or nearly so, which is 0 unless overlap was allowed."""

    rows: tuple[SelectedRow, ...]
    notes: tuple[str, ...]
    set_aside: tuple[SetAside, ...] = ()
    overlapping: int = 0


def check_settings(settings: SelectionSettings) -> tuple[Embedder | None, Strategy | None]:
    """(embedding function, strategy of the user's own) that the settings name, each None when they name none.

    Raises `ConfigurationError` when one cannot be had; a run asks before anything is spent.
    """
    name = settings.embedding_model
    embed = None if name is None else load_embedder(name)
    if settings.strategy in STRATEGIES:
        return embed, None
    if is_import_path(settings.strategy):
        return embed, load_strategy(settings.strategy)
    known = ", ".join(STRATEGIES)
    raise ConfigurationError(
        f"selection.strategy {quote(settings.strategy)} is unknown; known are {known}, and package.module:function"
    )


class DataSelector:
    """Chooses rows from a training file and a pool. Rows that ask what an evaluation item asks, or hold most of one,
    are never chosen, unless `allow_overlap` (overfitting on purpose); nor are those for which `can_train` is False,
    which is asked only of rows that are about to be chosen.

    Raises `DataError` when an id names two rows; `SelectionError` when no row is left; `ConfigurationError` for an
    unknown strategy, a function that cannot be imported or an embedding model that cannot be loaded.
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
        self._embed, self._strategy = check_settings(selection_config)
        self.settings = selection_config
        self.seed = seed
        self.allow_overlap = allow_overlap
        self._supply = RowSupply(train_rows, pool_rows)
        self._supply.refuse_shared_ids()
        self._n_train = len(train_rows)
        self._can_train = can_train
        self._items = EvaluationItems(self._supply, eval_rows)

    @cached_property
    def _index(self) -> Neighbours:
        questions = (question_text(row) for row in self._supply)
        return TextIndex(questions) if self._embed is None else EmbeddingIndex(questions, self._embed)

    def uses_losses(self, round: int) -> bool:
        """Whether `select` looks at `row_losses` in this round."""
        mines = self._strategy is None and self.settings.strategy != "none"
        return self.settings.label_guard and mines and round > 1

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
        row id was trained on so far; `samples` the newest evaluation (not mined in round 1); `row_losses` the loss of
        each row's target in nats per trained token, without which the label guard cannot work."""
        if count < 1:
            raise DataError(f"a round needs at least one row, asked for {count}")
        notes: list[str] = []
        items = self._items.with_samples(samples)
        levels = np.zeros(len(self._supply), dtype=np.int64)
        for identity, times in seen.items():
            if (position := self._supply.find(identity)) is not None:
                levels[position] = times
        near: dict[int, str] = {}

        def accepts(position: int) -> bool:
            row = self._supply[position]
            if not self.allow_overlap and (held := items.held_by(row)):
                near[position] = f"{row.where} ({held})"
                return False
            return self._can_train is None or self._can_train(row)

        rng = random.Random(f"rows/{self.seed}/{round}")
        draw = Draw(levels, max_repeats=self.settings.max_repeats, rng=rng, accepts=accepts)
        if not self.allow_overlap:
            self._bar(draw, items, notes)
        set_aside: tuple[SetAside, ...] = ()
        strategy = self.settings.strategy
        if self._strategy is not None:
            refusal = partial(self._refusal, items)
            request = SelectionRequest(
                round=round,
                count=count,
                rows=self._supply,
                n_train=self._n_train,
                samples=tuple(sorted(samples, key=lambda sample: sample.key)),
                seen=dict(seen),
                max_repeats=self.settings.max_repeats,
                seed=self.seed,
                rng=draw.random,
                can_use=lambda row: refusal(row) is None,
            )
            for position, why in chosen_rows(self._strategy, strategy, request, self._supply, refusal):
                draw.take(position, why)
            if self.settings.label_guard and round > 1:
                notes.append("label guard not applied: the rows are chosen by a function of your own")
        elif strategy == "none" or round <= 1:
            draw.open[self._n_train :] = False
            why = "training file in order" if strategy == "none" else "first round: random order"
            draw.fill(count, why, in_order=strategy == "none")
        else:
            set_aside = self._guard(draw, samples, row_losses, notes)
            if strategy in {"balanced_failures", "failures"}:
                share = self.settings.hard_fraction if strategy == "balanced_failures" else 1.0
                self._take_neighbours(draw, int(share * count + 0.5), samples, notes)
            if strategy in {"balanced_failures", "balanced"}:
                self._take_balanced(draw, count, samples, notes)
            draw.fill(count, "random")
        if near:
            listed = ", ".join(first_ten(near[position] for position in sorted(near)))
            notes.append(f"{len(near)} rows hold most of an evaluation item and are left out: {listed}")
        if not draw.taken:
            raise SelectionError("no row is left to train on: " + ("; ".join(notes) or "no row can be trained on"))
        if len(draw.taken) < count:
            notes.append(f"{len(draw.taken)} rows for {count} places: the list is cycled")
        rows = {position: self._supply[position] for position, _ in draw.taken}
        overlapping = sum(items.asks_same(row) or bool(items.held_by(row)) for row in rows.values())
        if overlapping:
            notes.append(f"allow_overlap: {overlapping} of the rows are evaluation items, or nearly")
        chosen = tuple(SelectedRow(rows[position], 1.0, why) for position, why in draw.taken)
        return Selection(chosen, tuple(notes), set_aside, overlapping)

    def _bar(self, draw: Draw, items: EvaluationItems, notes: list[str]) -> None:
        """Close the rows that ask the same as an item. Samples count too: the items of a task are in no file."""
        barred = [at for at in self._supply.asking(items.keys).tolist() if items.asks_same(self._supply[at])]
        draw.open[barred] = False
        if barred:
            listed = ", ".join(self._supply[position].where for position in barred[:10])
            more = f", ... and {len(barred) - 10} more" if len(barred) > 10 else ""
            notes.append(f"{len(barred)} rows ask what an evaluation item asks and are never chosen: {listed}{more}")

    def _refusal(self, items: EvaluationItems, row: Row) -> str | None:
        """Why a row must not be trained on; None when it may."""
        if not self.allow_overlap and items.asks_same(row):
            return "asks what an evaluation item asks"
        if not self.allow_overlap and (held := items.held_by(row)):
            return f"holds {held}"
        if self._can_train is not None and not self._can_train(row):
            return "cannot be trained on: it is too long, or no token of it would be trained"
        return None

    def _take_neighbours(self, draw: Draw, wanted: int, samples: Sequence[SampleResult], notes: list[str]) -> None:
        """Take up to `wanted` rows nearest to the failed samples: one for each failure in turn, none twice.

        The most wrong failures (lowest mean score over epochs) have their turn first. Among a failure's neighbours
        those trained on least come first, then the most similar.
        """
        failures = _failures(samples)
        if not failures or not wanted:
            notes.append("no failed sample to learn from" if not failures else "no row nearest to failures wanted")
            return
        draw.random.shuffle(failures)
        failures.sort(key=lambda pair: pair[1])
        taken, served = 0, set()
        turned_down = True
        while turned_down and taken < wanted:  # again for those whose neighbours were turned down
            turned_down = False
            among = draw.open.copy()
            among[list(draw.listed)] = False
            inputs = [sample.question for sample, _ in failures]
            near = self._index.nearest(inputs, limit=wanted, among=among, levels=draw.levels)
            queues = [(sample, found[::-1]) for (sample, _), found in zip(failures, near, strict=True)]
            while taken < wanted and any(queue for _, queue in queues):
                for sample, queue in queues:
                    while queue and taken < wanted:
                        position, score = queue.pop()
                        if draw.listed[position]:
                            continue
                        if not draw.accepts(position):
                            turned_down = True
                            continue
                        why = f"nearest to failed sample {sample.task}/{sample.id} (similarity {score:.2f})"
                        draw.take(position, why)
                        taken += 1
                        served.add(sample.key)
                        break
        notes.append(f"{taken} rows nearest to {len(served)} of {len(failures)} failed samples")

    def _take_balanced(self, draw: Draw, count: int, samples: Sequence[SampleResult], notes: list[str]) -> None:
        """Fill up to `count`, equally over the tasks and over the categories of each task; of each category the rows
        trained on least."""
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
            # The spread comes before the unseen: a small category whose rows were all trained on keeps its share, or a
            # round without it would have the model forget it.
            able = [cell for cell in cells if queues[cell[1]].level() is not None]
            if not able:
                break
            cell = min(able, key=lambda cell: (per_task[cell[0]], per_cell[cell]))
            position = queues[cell[1]].pop()
            if position is None:
                continue
            of_task = f" of task {cell[0]}" if many else ""
            draw.take(position, f"category {quote(cell[1])}{of_task}, {_times(int(draw.levels[position]))}")
            per_task[cell[0]] += 1
            per_cell[cell] += 1
        notes.append(f"{per_cell.total()} rows spread over {len(per_cell)} categories")

    def _cells(self, draw: Draw, samples: Sequence[SampleResult]) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
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
        labelled = {label: self._supply.answering(label) for label in all_labels}
        nothing = np.zeros(0, dtype=np.int64)
        for by_task, own in ((named, True), (labels, False)):
            supply: dict[str, np.ndarray] = {}
            for name in sorted(set().union(*by_task.values())):
                positions = labelled.get(name, nothing)
                if own:
                    unnamed = positions[~np.isin(positions, self._supply.with_category())]
                    positions = np.union1d(self._supply.of_category(name), unnamed)
                positions = positions[draw.open[positions]]
                if len(positions):
                    supply[name] = positions
            if supply:
                return {task: sorted(names) for task, names in sorted(by_task.items())}, supply
        return {}, {}

    def _guard(
        self,
        draw: Draw,
        samples: Sequence[SampleResult],
        row_losses: Mapping[str, float] | None,
        notes: list[str],
    ) -> tuple[SetAside, ...]:
        """Close the rows that the label guard sets aside."""
        if not self.settings.label_guard:
            return ()
        if row_losses is None:
            notes.append("label guard not applied: the rows' losses were not measured")
            return ()
        if not labels_by_task(samples):
            notes.append("label guard not applied: the evaluation's targets are no closed set of labels")
            return ()
        if not replies_are_labels(samples):
            notes.append("label guard not applied: no reply is a label alone, so no class is known to be known")
            return ()
        if not row_losses:  # asked for the candidates whose losses are to be measured
            return ()
        guarded = suspect_labels(self._supply, draw.open, self._index, samples, row_losses)
        for aside in guarded:
            position = self._supply.find(aside.row.id)
            draw.open[position] = False
        listed = ": " + ", ".join(first_ten(aside.row.where for aside in guarded)) if guarded else ""
        notes.append(f"label guard: {len(guarded)} of the {len(row_losses)} rows measured are set aside{listed}")
        return guarded


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
