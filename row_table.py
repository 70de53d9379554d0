"""The rows of a file too large to hold: a `Sequence[Row]` that reads a row from the file when it is asked for.

    table = RowTable(path, rules, columns, FileVersion.of(path))
    table[7], len(table)                        # a row by position
    for row in table: ...                       # streams through the file, about 5 us a row
    table.find("train:12"), table.ids           # by id
    table.rows_asking({prompt_key(item)})       # positions of the rows that answer a question, without reading any

A row is only given when its line still has the bytes that were checked: a file that changes meanwhile is a `DataError`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, overload
from zlib import crc32

import numpy as np

from error_handling import DataError
from overlap import question_text
from record_files import LineDecoder
from row_columns import Array, Columns, as_keys, id_key
from row_record import Row, RowRules

_BLOCK = 16_384  # rows read between two looks at whether the file is still the same


@dataclass(frozen=True)
class FileVersion:
    """Which content a path had: SHA-256, and what the file system says about it."""

    digest: str
    stamp: tuple[int, int, int]

    def holds_for(self, path: Path) -> bool:
        """Whether the path has this content still; read again only when the file system says that it was written to."""
        with path.open("rb") as file:
            stamp = _stamp(file)
        return stamp == self.stamp or FileVersion.of(path).digest == self.digest

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        with path.open("rb") as file:
            stamp = _stamp(file)
            return cls(hashlib.file_digest(file, "sha256").hexdigest(), stamp)


def _stamp(file: BinaryIO) -> tuple[int, int, int]:
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns, state.st_ino


class RowTable(Sequence[Row]):
    """Rows of a JSONL file, in its order. A forward slice is a table over the same file.

    `columns` are those of exactly these rows (`row_columns.Columns`). Reading raises `DataError` when the file was
    changed, moved or removed since it was checked; a file that only has a new date is read again once, to find out.
    """

    def __init__(self, path: Path, rules: RowRules, columns: Columns, version: FileVersion) -> None:
        self.path = path
        self.rules = rules
        self.columns = columns
        self._version = version
        self._decoder = LineDecoder()

    def __reduce__(self) -> tuple[type[RowTable], tuple[Path, RowRules, Columns, FileVersion]]:
        """For another process, which reads the same file."""
        return RowTable, (self.path, self.rules, self.columns, self._version)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            return self.take(chosen) if chosen.step > 0 else list(self.take(chosen[::-1]))[::-1]
        position = range(len(self))[index]
        return next(self._read(position, position + 1, buffering=0))

    def __iter__(self) -> Iterator[Row]:
        return self._read(0, len(self), buffering=1 << 20)

    def take(self, positions: Array | Sequence[int]) -> RowTable:
        """The rows at `positions` (ascending) as a table."""
        chosen = np.asarray(positions, dtype=np.int64)
        return RowTable(self.path, self.rules, self.columns.take(chosen), self._version)

    def without(self, positions: Array | Sequence[int]) -> RowTable:
        """All rows but those at `positions`, as a table."""
        return self.take(np.delete(np.arange(len(self)), np.asarray(positions, dtype=np.int64)))

    def _read(self, start: int, end: int, *, buffering: int) -> Iterator[Row]:
        columns, make, again, offset_now = self.columns, self.rules.row, self._decoder.again, -1
        plain = columns.plain
        with self._opened(buffering) as file:
            for first in range(start, end, _BLOCK):
                block = slice(first, min(first + _BLOCK, end))
                self._check(file)
                for offset, length, line, crc, is_plain in zip(
                    columns.offset[block].tolist(),
                    columns.length[block].tolist(),
                    columns.line[block].tolist(),
                    columns.crc[block].tolist(),
                    plain[block].tolist(),
                    strict=True,
                ):
                    if offset != offset_now:
                        file.seek(offset)
                    raw = file.read(length)
                    offset_now = offset + length
                    if crc32(raw) != crc:
                        raise self._changed(f"line {line} is not what it was")
                    yield make(again(raw, offset, is_plain), line)

    def _opened(self, buffering: int) -> BinaryIO:
        try:
            return self.path.open("rb", buffering=buffering)
        except OSError as error:
            raise self._changed(error.strerror or str(error)) from error

    def _check(self, file: BinaryIO) -> None:
        if _stamp(file) != self._version.stamp:
            found = FileVersion.of(self.path)
            if found.digest != self._version.digest:
                raise self._changed("its content is another one")
            self._version = found

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"{self.rules.source}: changed since it was checked ({how}); rows are read when they are chosen, so leave "
            "the file alone while a run uses it. Put it back as it was, or start a new run."
        )

    # By id

    @property
    def ids(self) -> Iterator[str]:
        """The rows' ids in order. Rows with ids of their own are read for them; the others cost no reading."""
        given = iter(self.take(np.flatnonzero(self.columns.has_id)))
        for line, has_id in zip(self.columns.line.tolist(), self.columns.has_id.tolist(), strict=True):
            yield next(given).id if has_id else self.rules.default_id(line)

    @cached_property
    def _own_ids(self) -> tuple[Array, Array]:
        """(first halves of the digests of given ids, ascending; their positions in `columns.id_rows`)."""
        order = np.argsort(self.columns.ids[:, 0], kind="stable")
        return self.columns.ids[order, 0], order

    def find(self, identity: str) -> int | None:
        """The position of the row with an id; None when there is none."""
        key = id_key(identity)
        halves, order = self._own_ids
        at = int(np.searchsorted(halves, as_keys(key)[0, 0]))
        while at < len(halves) and halves[at] == as_keys(key)[0, 0]:
            if self.columns.ids[order[at]].tobytes() == key:
                return int(self.columns.id_rows[order[at]])
            at += 1
        number = identity.removeprefix(f"{self.rules.stem}:")
        if number.isdecimal() and self.rules.default_id(int(number)) == identity:
            position = int(np.searchsorted(self.columns.line, int(number)))
            if position < len(self) and self.columns.line[position] == int(number):
                return None if self.columns.has_id[position] else position
        return None

    # By what they ask and answer, without reading

    def rows_asking(self, wanted: Collection[bytes]) -> Array:
        """Positions, ascending, of rows with an answer to a question whose `overlap.prompt_key` is in `wanted`."""
        return self.columns.rows_asking(wanted)

    def rows_answering(self, wanted: Collection[bytes]) -> Array:
        """Positions, ascending, of rows whose target has a `row_columns.text_key` in `wanted`."""
        return self.columns.rows_answering(wanted)

    def rows_of_category(self, matches: Callable[[str], bool]) -> Array:
        """Positions, ascending, of rows whose category `matches`; asked once for every category there is."""
        codes = [code for code, name in enumerate(self.columns.categories) if matches(name)]
        return np.flatnonzero(np.isin(self.columns.category, codes))

    @property
    def questions(self) -> Iterator[str]:
        """`overlap.question_text` of every row, in order; streams through the file."""
        return (question_text(row) for row in self)


class RowPairs(Sequence[tuple[Row, Row]]):
    """Pairs of rows of one table, read when they are asked for."""

    def __init__(self, rows: Sequence[Row], first: Array, second: Array) -> None:
        self._rows, self._first, self._second = rows, first, second

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> tuple[Row, Row]: ...
    @overload
    def __getitem__(self, index: slice) -> RowPairs: ...
    def __getitem__(self, index: int | slice) -> tuple[Row, Row] | RowPairs:
        if isinstance(index, slice):
            return RowPairs(self._rows, self._first[index], self._second[index])
        return self._rows[int(self._first[index])], self._rows[int(self._second[index])]


class RowsById:
    """Rows of several sequences by id, read from the file where they are tables."""

    def __init__(self, *sources: Sequence[Row]) -> None:
        self._tables = [source for source in sources if isinstance(source, RowTable)]
        self._held = {row.id: row for source in sources if not isinstance(source, RowTable) for row in source}

    def find(self, identities: Iterable[str]) -> dict[str, Row]:
        """The rows with these ids; ids that no row has are absent."""
        found: dict[str, Row] = {}
        for identity in dict.fromkeys(identities):
            if identity in self._held:
                found[identity] = self._held[identity]
                continue
            for table in self._tables:
                position = table.find(identity)
                if position is not None:
                    found[identity] = table[position]
                    break
        return found


def shared_ids(rows: Sequence[Row], others: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(row, other) with the same id, in the order of `others`."""
    shared = set(_ids(rows)).intersection(_ids(others))
    ours, theirs = RowsById(rows).find(shared), RowsById(others).find(shared)
    return sorted(((ours[identity], theirs[identity]) for identity in shared), key=lambda pair: pair[1].line)


def _ids(rows: Sequence[Row]) -> Iterable[str]:
    return rows.ids if isinstance(rows, RowTable) else (row.id for row in rows)
