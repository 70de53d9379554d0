"""Training and evaluation files as rows: shapes converted, exact copies removed, files checked against each other.

    data = load_run_data("train.jsonl", pool_file="pool.jsonl", eval_file="eval.jsonl")
    data.train.rows[0].question, data.train.describe(), data.warnings

All faults of all files are told in one `DataError` (the first ten and a count), each as `file:line: reason`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from error_handling import DataError
from overlap import find_overlap, nearest_pair, prompt_key
from record_files import Decoded, Fault, RowFault, array_records, canonical_json, file_layout, first_ten, quote
from row_columns import Array, ColumnBuilder, Columns, first_with_same
from row_formats import SHAPE_NAMES, Purpose
from row_record import Row, RowRules
from row_scan import scan_lines
from row_table import FileVersion, RowPairs, RowTable, shared_ids

# Comparing every training question with every evaluation question to show the nearest pair: beyond this many
# combinations it would delay the start of a run by more than a few seconds.
_NEAREST_PAIR_LIMIT = 20_000_000
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


@dataclass(frozen=True)
class RunData:
    """All files of a run, checked together. `nearest` is the most similar (training or pool row, evaluation row,
    score in [0, 1]) left, for a person to judge; `overlap` is empty unless it was allowed. `test` is the file that
    must not be trained or tuned on."""

    train: LoadedRows
    pool: LoadedRows | None
    evaluation: LoadedRows | None
    overlap: tuple[tuple[Row, Row], ...]
    nearest: tuple[Row, Row, float] | None
    warnings: tuple[str, ...]
    test: LoadedRows | None = None


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


def load_run_data(
    train_file: str | Path,
    *,
    pool_file: str | Path | None = None,
    eval_file: str | Path | None = None,
    test_file: str | Path | None = None,
    category_field: str | None = None,
    train_on_what: str = "last_assistant_turn",
    allow_overlap: bool = False,
) -> RunData:
    """The files of a run, checked on their own and against each other; all faults in one `DataError`.

    Refused beside faulty rows: one file in two places (`refuse_same_file`), an id in both training file and pool, and
    training or pool rows that ask what an evaluation or test row asks (exactly or up to case, spaces and Unicode form).
    `allow_overlap` permits that for evaluation rows.
    """
    faults: list[Fault] = []
    files: list[LoadedRows | None] = []
    places = ((train_file, "train"), (pool_file, "train"), (eval_file, "eval"), (test_file, "eval"))
    for path, purpose in places:
        if path is None:
            files.append(None)
            continue
        loaded, found = read_rows(path, purpose, category_field, train_on_what)  # type: ignore[arg-type]
        files.append(loaded)
        faults += found
    train, pool, evaluation, test = files
    assert train is not None
    names = ("training", "pool", "evaluation", "test")
    refuse_same_file(
        {name: loaded for name, loaded in zip(names, files, strict=True) if loaded}, allow_overlap=allow_overlap
    )
    asked = evaluation.rows if evaluation else ()
    for row, other in shared_ids(train.rows, pool.rows) if pool else ():
        reason = f"the id {quote(other.id)} is also that of {row.where}; a pool needs ids of its own"
        faults.append(Fault(other.source, other.line, reason))
    sources = [train.rows, pool.rows] if pool else [train.rows]
    overlap = find_overlap([row for rows in sources for row in _rows_asking(rows, asked)], asked)
    tested = test.rows if test else ()
    leaks = find_overlap([row for rows in sources for row in _rows_asking(rows, tested)], tested)
    faults += [_overlap_fault(row, item, "test") for row, item in leaks]
    warnings = [warning for loaded in files if loaded for warning in loaded.warnings]
    nearest = None
    if not any(isinstance(rows, RowTable) for rows in sources) and (
        sum(map(len, sources)) * len(asked) <= _NEAREST_PAIR_LIMIT
    ):
        nearest = nearest_pair([row for rows in sources for row in rows], asked)
    elif asked:
        warnings.append("the most similar training and evaluation rows are not shown: too many to compare")
    hint = "\nRemove the rows on one side: what is in the test file is never trained on." if leaks else ""
    if overlap and not allow_overlap:
        faults += [_overlap_fault(row, item) for row, item in overlap]
        if nearest:
            row, item, score = nearest
            hint += f"\nNearest pair apart from these (similarity {score:.2f}): {row.where} {quote(row.question)}"
            hint += f" and {item.where} {quote(item.question)}"
        hint += "\nRemove the rows on one side, or set allow_overlap=true to measure on training data on purpose."
    raise_faults(faults, hint)
    return RunData(train, pool, evaluation, tuple(overlap), nearest, tuple(warnings), test)


def _rows_asking(rows: Sequence[Row], asked: Sequence[Row]) -> Sequence[Row]:
    """The rows that may ask what one of `asked` asks: of a table only those whose keys say so."""
    if isinstance(rows, RowTable):
        return rows.take(rows.rows_asking({prompt_key(item) for item in asked}))
    return rows


def refuse_same_file(files: Mapping[str, LoadedRows], *, allow_overlap: bool) -> None:
    """Raise `DataError` where two files of a run are one, by path, by a link, or by content.

    `files` has the keys "training", "pool", "evaluation" and "test", or some of them, in this order. `allow_overlap`
    permits the evaluation file to be trained on, never the test file.
    """
    told = []
    for (first, one), (second, other) in itertools.combinations(files.items(), 2):
        if allow_overlap and second == "evaluation":
            continue
        if one.path.samefile(other.path):
            told.append(f"the {first} file and the {second} file are one file: {one.path} and {other.path}")
        elif one.digest == other.digest:
            told.append(f"the {first} file {one.path} and the {second} file {other.path} have the same content")
    if told:
        remedy = "Name different files"
        if "test" not in files and "evaluation" in files:
            remedy += ", or set allow_overlap=true to measure on training data on purpose"
        raise DataError("\n".join([*told, f"{remedy}."]))


def _overlap_fault(row: Row, item: Row, kind: str = "evaluation") -> Fault:
    same = any(turn["content"] == item.question for turn in row.messages) or row.text == item.question
    how = "exactly" if same else "up to case, spaces and punctuation"
    return Fault(row.source, row.line, f"asks {how} what {kind} item {quote(item.id)} ({item.where}) asks")


def raise_faults(faults: Sequence[Fault], hint: str = "") -> None:
    """One `DataError` for all faults, the first ten and a count; `hint` follows them."""
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        listed = "\n".join(f"  {line}" for line in first_ten(faults))
        raise DataError(f"the data cannot be used, {count}:\n{listed}{hint}")


def _existing_file(path: str | Path) -> Path:
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise DataError(f"{path}: is a folder, expected a JSONL or JSON file")
    if not file.parent.is_dir():
        raise DataError(f"{path}: not found, and the folder {file.parent} does not exist")
    try:
        names = sorted(entry.name for entry in file.parent.iterdir() if entry.is_file())
    except OSError as error:
        raise DataError(f"{path}: not found, and the folder {file.parent} cannot be listed ({error})") from error
    near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.7)
    if near:
        raise DataError(f"{path}: not found; did you mean {' or '.join(near)}?")
    data_files = [name for name in names if name.endswith((".jsonl", ".json", ".ndjson"))]
    there = f"data files there: {', '.join(first_ten(data_files))}" if data_files else "no data file is there"
    raise DataError(f"{path}: not found; {there}")


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
    warnings += _pair_warnings(conflicts, "the same question with two different answers")
    warnings += _pair_warnings(near_copies, "the same question and answer but for case and spaces")
    loaded = LoadedRows(
        rows, _count_shapes(columns), duplicates, file, version.digest, near_copies, conflicts, tuple(warnings)
    )
    return loaded, faults


def _array_rows(file: Path, rules: RowRules, faults: list[Fault]) -> tuple[Columns, list[Row]]:
    """Columns and rows of a JSON array, or none of an unusable file."""
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
    return builder.columns(), rows


def _id_clashes(columns: Columns, copy_of: Array, rules: RowRules, every: RowTable | Sequence[Row]) -> dict[int, Fault]:
    """A fault for every row whose id is already that of an earlier row, and for each of its copies, by position."""
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
    unnamed = np.flatnonzero(~columns.has_id & (copy_of == np.arange(len(columns))))
    unnamed_lines = columns.line[unnamed]
    for index in (np.flatnonzero(unnamed_lines[1:] == unnamed_lines[:-1]) + 1).tolist():  # in an array on one line
        earlier[int(unnamed[index])] = int(unnamed[np.searchsorted(unnamed_lines, unnamed_lines[index])])
    if not earlier:
        return {}
    clashing = np.flatnonzero(np.isin(copy_of, list(earlier)))
    rows = every.take(clashing) if isinstance(every, RowTable) else [every[at] for at in clashing.tolist()]
    faults = {}
    for position, row in zip(clashing.tolist(), rows, strict=True):
        line = columns.line[earlier[int(copy_of[position])]]
        faults[position] = Fault(rules.source, row.line, f"the id {quote(row.id)} is already that of line {line}")
    return faults


def _compare_answers(
    columns: Columns, rows: Sequence[Row]
) -> tuple[Sequence[tuple[Row, Row]], Sequence[tuple[Row, Row]]]:
    """(near copies, conflicts) among rows whose whole prompt, system turn included, is the same but for case and
    spaces; each row is paired with the first of its question and answer, or else with the first of its question."""
    first_asked = first_with_same(columns.asks)
    # Sums of digests are as good as digests of both: the factor keeps (a, b) and (b, a) apart.
    first_answered = first_with_same(columns.asks + columns.answer * np.uint64(0x9E3779B97F4A7C15))
    position = np.arange(len(columns))
    near = np.flatnonzero(first_answered != position)
    conflicting = np.flatnonzero((first_answered == position) & (first_asked != position))
    return RowPairs(rows, first_answered[near], near), RowPairs(rows, first_asked[conflicting], conflicting)


def _count_shapes(columns: Columns) -> dict[str, int]:
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


def _pair_warnings(pairs: Sequence[tuple[Row, Row]], what: str) -> list[str]:
    told = [f"{first.where} and {second.where}: {what}" for first, second in pairs[:10]]
    return told + ([f"... and {len(pairs) - 10} more: {what}"] if len(pairs) > 10 else [])
