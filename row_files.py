"""Training and evaluation files as rows: shapes converted, exact copies removed.

    train = load_rows("train.jsonl", purpose="train")
    train.rows[0].question, train.describe(), train.warnings

All faults of a file are told in one `DataError` (the first ten and a count), each as `file:line: reason`.
"""

from __future__ import annotations

import difflib
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from error_handling import DataError
from record_files import Decoded, Fault, RowFault, array_records, canonical_json, file_layout, first_ten, quote
from row_columns import Array, ColumnBuilder, Columns, answer_keys, first_with_same
from row_formats import SHAPE_NAMES, Purpose
from row_record import Row, RowRules
from row_scan import scan_lines
from row_table import FileVersion, RowPairs, RowTable

# Files of more rows are not held in memory.
HELD_ROWS = 20_000


@dataclass(frozen=True)
class LoadedRows:
    """The rows of a file, in its order, without exact copies: a tuple, or a `RowTable` that reads them from the file
    when they are asked for (JSONL of more than `HELD_ROWS` rows).

    `shapes` counts the kept rows by shape, `duplicates` the copies removed (equal in every field), `digest` is the
    SHA-256 of the file's bytes. `near_copies` are pairs whose question and answer differ in case and spaces only,
    `conflicts` pairs with the same question and two answers; `warnings` tells both, for people.
    """

    rows: Sequence[Row]
    shapes: Mapping[str, int]
    duplicates: int
    path: Path
    digest: str
    near_copies: Sequence[tuple[Row, Row]] = ()
    conflicts: Sequence[tuple[Row, Row]] = ()
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        shapes = ", ".join(f"{name} {count}" for name, count in self.shapes.items())
        word = "copy" if self.duplicates == 1 else "copies"
        copies = f"; {self.duplicates} exact {word} removed" if self.duplicates else ""
        return f"{self.path}: {len(self.rows)} rows ({shapes}){copies}"


def load_rows(
    path: str | Path,
    *,
    purpose: Purpose,
    category_field: str | None = None,
    train_on_what: str = "last_assistant_turn",
) -> LoadedRows:
    """The rows of a JSONL or JSON-array file; `DataError` tells all its faults (the first ten and a count).

    `purpose` is "train" or "eval" (also for test files). A row's category is its `category_field`, or else its
    `category`. A missing file is told with the names that come near.
    """
    loaded, faults = read_rows(path, purpose, category_field, train_on_what)
    raise_faults(faults)
    return loaded


def raise_faults(faults: Sequence[Fault], hint: str = "") -> None:
    """One `DataError` for all faults, the first ten and a count; `hint` follows them."""
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        listed = "\n".join(f"  {line}" for line in first_ten(faults))
        raise DataError(f"the data cannot be used, {count}:\n{listed}{hint}")


def _existing_file(path: str | Path) -> Path:
    file = Path(path)
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(file, str(path)) from None
    except (OSError, ValueError) as error:  # no permission, a link to itself, a NUL in the name
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a folder, expected a JSONL or JSON file")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is a pipe or a device, and rows are read more than once; write them to a file first")
    return file


def _not_found(file: Path, path: str) -> DataError:
    """What to say of a file that is not there, with the names that come near."""
    if file.is_symlink():
        return DataError(f"{path}: is a link to {file.readlink()}, which does not exist")
    if not file.parent.is_dir():
        return DataError(f"{path}: not found, and the folder {file.parent} does not exist")
    try:
        names = sorted(entry.name for entry in file.parent.iterdir() if entry.is_file())
    except OSError as error:
        return DataError(f"{path}: not found, and the folder {file.parent} cannot be listed ({error})")
    near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.7)
    if near:
        return DataError(f"{path}: not found; did you mean {' or '.join(near)}?")
    data_files = [name for name in names if name.endswith((".jsonl", ".json", ".ndjson"))]
    there = f"data files there: {', '.join(first_ten(data_files))}" if data_files else "no data file is there"
    return DataError(f"{path}: not found; {there}")


def read_rows(
    path: str | Path, purpose: Purpose, category_field: str | None, train_on_what: str
) -> tuple[LoadedRows, list[Fault]]:
    """`load_rows`, with the faults handed back, so that those of several files can be told together."""
    file = _existing_file(path)
    rules = RowRules(str(path), file.stem, purpose, category_field, train_on_what)
    faults: list[Fault] = []
    every: RowTable | list[Row]
    try:
        version = FileVersion.of(file)
        if file_layout(file, rules.source, faults) == "lines":
            columns, found = scan_lines(file, rules)
            faults += found
            every = RowTable(file, rules, columns, version)
        else:
            columns, every = _array_rows(file, rules, faults)
        if not version.holds_for(file):
            raise DataError(f"{path}: changed while it was being read; try again when nothing writes to it")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    copy_of = first_with_same(columns.record)
    clashes = _id_clashes(columns, copy_of, rules, every)
    faults = sorted([*faults, *clashes.values()], key=lambda fault: fault.line)
    # A row whose id is taken is no row, and so are its copies: every one of them is told.
    is_first = copy_of == np.arange(len(columns))
    is_first[list(clashes)] = False
    duplicates = len(columns) - int(is_first.sum()) - len(clashes)
    kept = np.flatnonzero(is_first)
    columns = columns.take(kept)
    rows: Sequence[Row]
    if isinstance(every, RowTable):
        table = RowTable(file, rules, columns, version)
        rows = table if len(kept) > HELD_ROWS else tuple(table)
    else:
        rows = tuple(every[position] for position in kept.tolist())
    if not len(columns) and not faults:
        faults.append(Fault(rules.source, 1, "the file holds no rows"))
    if len(columns) and purpose == "eval" and category_field and (columns.category < 0).all():
        known = ", ".join(first_ten(sorted({key for row in rows for key in row.metadata}))) or "none"
        reason = f"no row has the category field {quote(category_field)}; further fields of the rows: {known}"
        faults.append(Fault(rules.source, rows[0].line, reason))
    near_copies, conflicts = _compare_answers(columns, rows)
    warnings = _note_warnings(columns, rules.source)
    warnings += pair_warnings(conflicts, "the same question with two different answers")
    warnings += pair_warnings(near_copies, "the same question and answer but for case and spaces")
    loaded = LoadedRows(
        rows, count_shapes(columns), duplicates, file, version.digest, near_copies, conflicts, tuple(warnings)
    )
    return loaded, faults


def _array_rows(file: Path, rules: RowRules, faults: list[Fault]) -> tuple[Columns, list[Row]]:
    """Columns and rows of a JSON array, or none of an unusable file. Of several rows that begin on one line, those
    without an id of their own count from 1: stem:line.1."""
    builder = ColumnBuilder(rules)
    rows: list[Row] = []
    if not faults:
        for line, record in array_records(file, rules.source, faults):
            try:
                content = builder.add(Decoded(record, canonical_json(record), False), line, 0, b"")
            except RowFault as fault:
                faults.append(Fault(rules.source, line, str(fault)))
                continue
            rows.append(rules.row(record, line, content))
    columns = builder.columns()
    on_line = Counter(row.line for row in rows)
    place: Counter[int] = Counter()
    for position, row in enumerate(rows):
        place[row.line] += 1
        if on_line[row.line] > 1 and not columns.has_id[position]:
            rows[position] = replace(row, id=f"{row.id}.{place[row.line]}")
    return columns, rows


def _id_clashes(columns: Columns, copy_of: Array, rules: RowRules, every: RowTable | Sequence[Row]) -> dict[int, Fault]:
    """A fault for every row whose id is already that of an earlier row, and for each of its copies, by position."""
    earlier = _earlier_named(columns, copy_of) if isinstance(every, RowTable) else _earlier_held(every, copy_of)
    if not earlier:
        return {}
    clashing = np.flatnonzero(np.isin(copy_of, list(earlier)))
    rows = every.take(clashing) if isinstance(every, RowTable) else [every[at] for at in clashing.tolist()]
    faults = {}
    for position, row in zip(clashing.tolist(), rows, strict=True):
        line = columns.line[earlier[int(copy_of[position])]]
        faults[position] = Fault(rules.source, row.line, f"the id {quote(row.id)} is already that of line {line}")
    return faults


def _earlier_held(rows: Sequence[Row], copy_of: Array) -> dict[int, int]:
    """The first row with the same id, by position, of rows that are no copies."""
    first: dict[str, int] = {}
    firsts = np.flatnonzero(copy_of == np.arange(len(copy_of))).tolist()
    return {at: first[rows[at].id] for at in firsts if first.setdefault(rows[at].id, at) != at}


def _earlier_named(columns: Columns, copy_of: Array) -> dict[int, int]:
    """The same for the rows of a JSONL file, by their columns."""
    earlier: dict[int, int] = {}
    named = copy_of[columns.id_rows] == columns.id_rows
    id_rows, first = columns.id_rows[named], first_with_same(columns.ids[named])
    for index in np.flatnonzero(first != np.arange(len(first))).tolist():
        earlier[int(id_rows[index])] = int(id_rows[first[index]])
    if len(columns.places):
        others = np.minimum(np.searchsorted(columns.line, columns.places), len(columns) - 1)
        taken = (columns.line[others] == columns.places) & ~columns.has_id[others]
        for position, other in zip(columns.placed_rows[taken].tolist(), others[taken].tolist(), strict=True):
            earlier[max(position, other)] = min(position, other)
    return earlier


def _compare_answers(
    columns: Columns, rows: Sequence[Row]
) -> tuple[Sequence[tuple[Row, Row]], Sequence[tuple[Row, Row]]]:
    """(near copies, conflicts) among rows whose whole prompt, system turn included, is the same but for case and
    spaces; each row is paired with the first of its question and answer, or else with the first of its question."""
    first_asked = first_with_same(columns.asks)
    first_answered = first_with_same(answer_keys(columns.asks, columns.answer))
    position = np.arange(len(columns))
    near = np.flatnonzero(first_answered != position)
    conflicting = np.flatnonzero((first_answered == position) & (first_asked != position))
    return RowPairs(rows, first_answered[near], near), RowPairs(rows, first_asked[conflicting], conflicting)


def count_shapes(columns: Columns) -> dict[str, int]:
    """Rows by shape, the commonest first."""
    codes, first, counts = np.unique(columns.shape, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    return {SHAPE_NAMES[int(codes[index])]: int(counts[index]) for index in order.tolist()}


def _note_warnings(columns: Columns, source: str) -> list[str]:
    codes, first, counts = np.unique(columns.note_codes, return_index=True, return_counts=True)
    warnings = []
    for index in np.argsort(first).tolist():
        line = columns.line[columns.note_rows[first[index]]]
        warnings.append(f"{counts[index]} rows: {columns.notes[codes[index]]} (first {source}:{line})")
    return warnings


def pair_warnings(pairs: Sequence[tuple[Row, Row]], what: str) -> list[str]:
    """A line for each of the first ten pairs, and a count of the others."""
    told = [f"{first.where} and {second.where}: {what}" for first, second in pairs[:10]]
    return told + ([f"... and {len(pairs) - 10} more: {what}"] if len(pairs) > 10 else [])
