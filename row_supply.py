"""The rows of several files as one sequence, found by id, question or answer without reading the large ones.

    supply = RowSupply(train.rows, pool.rows)
    supply[7], supply.find("train:12"), supply.asking({prompt_key(item)})

Rows held in memory are looked at; of a `row_table.RowTable` the columns answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np

from error_handling import DataError
from evaluation import normalise
from overlap import fingerprint, question_keys
from record_files import quote
from row_record import Row
from row_table import RowTable

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
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        part = next(number for number, end in enumerate(self._starts[1:]) if position < end)
        return self.parts[part][position - self._starts[part]]

    @cached_property
    def _held_ids(self) -> list[dict[str, int]]:
        """Positions by id, for each part that is held in memory (empty for a table)."""
        return [
            {} if isinstance(part, RowTable) else {row.id: position for position, row in enumerate(part)}
            for part in self.parts
        ]

    def find(self, identity: str) -> int | None:
        """The position of the row with an id; None when there is none."""
        for part, held, start in zip(self.parts, self._held_ids, self._starts, strict=False):
            position = part.find(identity) if isinstance(part, RowTable) else held.get(identity)
            if position is not None:
                return int(start) + position
        return None

    def asking(self, keys: Collection[bytes]) -> Positions:
        """Rows that answer a question whose `overlap.prompt_key` is in `keys`."""
        wanted = frozenset(keys)
        return self._matching(
            lambda table: table.rows_asking(wanted), lambda row: not wanted.isdisjoint(question_keys(row))
        )

    def answering(self, answer: str) -> Positions:
        """Rows whose target is `answer` but for case, white space and surrounding punctuation."""
        key = fingerprint([answer])
        return self._matching(
            lambda table: table.rows_answering({key}),
            lambda row: row.text is None and fingerprint([row.target]) == key,
        )

    def of_category(self, category: str) -> Positions:
        """Rows whose own category is `category`, likewise."""
        wanted = normalise(category)
        return self._matching(
            lambda table: table.rows_of_category(lambda name: normalise(name) == wanted),
            lambda row: row.category is not None and normalise(row.category) == wanted,
        )

    def _matching(self, of_table: Callable[[RowTable], Positions], of_row: Callable[[Row], bool]) -> Positions:
        found = [
            start
            + (
                of_table(part)
                if isinstance(part, RowTable)
                else np.array([position for position, row in enumerate(part) if of_row(row)], dtype=np.int64)
            )
            for part, start in zip(self.parts, self._starts, strict=False)
        ]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def refuse_shared_ids(rows: Sequence[Row]) -> None:
    """Raise `DataError` when an id names two of the rows."""
    twice = [identity for identity, count in Counter(row.id for row in rows).items() if count > 1]
    if twice:
        first, second = [row for row in rows if row.id == twice[0]][:2]
        raise DataError(f"the id {quote(twice[0])} names both {first.where} and {second.where}")
