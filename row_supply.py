"""The rows of several files as one sequence, found by id, question or answer without reading the large ones.

    supply = RowSupply(train.rows, pool.rows)
    supply[7], supply.find("train:12"), supply.asking({prompt_key(item)})

Rows held in memory are looked at; of a `row_table.RowTable` the columns answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TypeVar, overload

import numpy as np

from error_handling import DataError
from evaluation import normalise
from overlap import fingerprint, question_keys
from record_files import quote
from row_record import Row
from row_table import RowTable, shared_ids

K = TypeVar("K")

Positions = np.ndarray
"""Positions in the supply, counted from 0 and ascending."""


class RowSupply(Sequence[Row]):
    """The rows of `parts`, one part after the other. Reading one again gives an equal row, not always the same."""

    def __init__(self, *parts: Sequence[Row]) -> None:
        self.parts = parts
        self._starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            if chosen.step != 1:
                return [self[position] for position in chosen]
            bounds = [(chosen.start - start, chosen.stop - start) for start in self._starts[: len(self.parts)]]
            return RowSupply(
                *(part[max(0, first) : max(0, end)] for part, (first, end) in zip(self.parts, bounds, strict=True))
            )
        position = range(len(self))[index]
        part = next(number for number, end in enumerate(self._starts[1:]) if position < end)
        return self.parts[part][position - self._starts[part]]

    @cached_property
    def _looked_up(self) -> list[RowTable | _Held]:
        return [part if isinstance(part, RowTable) else _Held(part) for part in self.parts]

    def find(self, identity: str) -> int | None:
        """The position of the row with an id; None when there is none."""
        for part, start in zip(self._looked_up, self._starts, strict=False):
            position = part.find(identity) if isinstance(part, RowTable) else part.ids.get(identity)
            if position is not None:
                return int(start) + position
        return None

    def refuse_shared_ids(self) -> None:
        """Raise `DataError` when an id names rows of two parts; within a part ids are unique."""
        for number, part in enumerate(self.parts):
            for other in self.parts[:number]:
                for row, second in shared_ids(other, part):
                    raise DataError(f"the id {quote(row.id)} names both {row.where} and {second.where}")

    def asking(self, keys: Collection[bytes]) -> Positions:
        """Rows that answer a question whose `overlap.prompt_key` is in `keys`."""
        wanted = frozenset(keys)
        return self._joined(lambda table: table.rows_asking(wanted), lambda held: held.among(held.questions, wanted))

    def answering(self, answer: str) -> Positions:
        """Rows whose target is `answer` but for case, white space and surrounding punctuation."""
        wanted = {fingerprint([answer])}
        return self._joined(lambda table: table.rows_answering(wanted), lambda held: held.among(held.answers, wanted))

    def of_category(self, category: str) -> Positions:
        """Rows whose own category is `category`, likewise."""
        name = normalise(category)
        return self._joined(
            lambda table: table.rows_of_category(lambda other: normalise(other) == name),
            lambda held: held.among(held.categories, {name}),
        )

    def with_category(self) -> Positions:
        """Rows that have a category of their own."""
        return self._joined(
            lambda table: table.rows_of_category(lambda _: True),
            lambda held: held.among(held.categories, held.categories.keys()),
        )

    def _joined(self, of_table: Callable[[RowTable], Positions], of_held: Callable[[_Held], list[int]]) -> Positions:
        found = [
            np.asarray(of_table(part) if isinstance(part, RowTable) else of_held(part), dtype=np.int64) + start
            for part, start in zip(self._looked_up, self._starts, strict=False)
        ]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


class _Held:
    """Positions of rows in memory by id, and by what they ask, answer and are about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.ids: dict[str, int] = {}
        self.questions: dict[bytes, list[int]] = {}
        self.answers: dict[bytes, list[int]] = {}
        self.categories: dict[str, list[int]] = {}
        for position, row in enumerate(rows):
            if self.ids.setdefault(row.id, position) != position:
                first = rows[self.ids[row.id]]
                raise DataError(f"the id {quote(row.id)} names both {first.where} and {row.where}")
            for key in question_keys(row):
                self.questions.setdefault(key, []).append(position)
            if row.text is None:
                self.answers.setdefault(fingerprint([row.target]), []).append(position)
            if row.category is not None:
                self.categories.setdefault(normalise(row.category), []).append(position)

    def among(self, index: Mapping[K, list[int]], wanted: Collection[K]) -> list[int]:
        """The positions that `index` has for any of `wanted`, ascending."""
        return sorted({position for key in wanted for position in index.get(key, ())})
