"""Training and evaluation files as rows: shapes converted, exact copies removed.

    train = load_rows("train.jsonl", purpose="train")
    train.rows[0].question, train.describe(), train.warnings

All faults of a file are told in one `DataError` (the first ten and a count), each as `file:line: reason`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from error_handling import DataError
from overlap import fingerprint
from record_files import Fault, RowFault, first_ten, kind_of, quote, read_records
from row_formats import Message, Purpose, convert_record

@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file. Either `messages` (ending on an assistant turn, the target) or `text` holds its content.

    `id` is unique in its file; `shape` names the rule that converted it; `line` counts from 1; `metadata` holds the
    record's further fields.
    """

    id: str
    messages: tuple[Message, ...]
    text: str | None
    shape: str
    source: str
    line: int
    category: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _last_reply(self) -> int:
        turns = range(len(self.messages) - 1, -1, -1)
        return next((i for i in turns if self.messages[i]["role"] == "assistant"), len(self.messages))

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns before the final assistant turn; empty for a text row."""
        return self.messages[: self._last_reply]

    @property
    def target(self) -> str:
        """The content of the final assistant turn; a text row has none and gives ''."""
        last = self._last_reply
        return self.messages[last]["content"] if last < len(self.messages) else ""

    @property
    def question(self) -> str:
        """The first user turn (a text row's text); '' when no user speaks."""
        if self.text is not None:
            return self.text
        return next((turn["content"] for turn in self.messages if turn["role"] == "user"), "")

    @property
    def where(self) -> str:
        """file:line"""
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class LoadedRows:
    """The rows of a file, in its order, without exact copies.

    `shapes` counts the kept rows by shape, `duplicates` the copies removed (equal in every field), `digest` is the
    SHA-256 of the file's bytes. `near_copies` are pairs whose question and answer differ in case and spaces only,
    `conflicts` pairs with the same question and two answers; `warnings` tells both, for people.
    """

    rows: tuple[Row, ...]
    shapes: Mapping[str, int]
    duplicates: int
    path: Path
    digest: str
    near_copies: tuple[tuple[Row, Row], ...] = ()
    conflicts: tuple[tuple[Row, Row], ...] = ()
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
    file, source = _existing_file(path), str(path)
    faults: list[Fault] = []
    rows: list[Row] = []
    notes: dict[str, list[str]] = {}
    copies: set[bytes] = set()
    ids: dict[str, Row] = {}
    duplicates = 0
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        for line, record in read_records(file, source, faults):
            try:
                identity = _record_identity(record)
                if identity in copies:
                    duplicates += 1
                    continue
                content = convert_record(record, purpose=purpose, train_on_what=train_on_what)
                used = content.used_keys | {"id", "category"} | ({category_field} if category_field else set())
                row = Row(
                    id=_row_id(record, file.stem, line),
                    messages=content.messages,
                    text=content.text,
                    shape=content.shape,
                    source=source,
                    line=line,
                    category=_category(record, category_field),
                    metadata={key: value for key, value in record.items() if key not in used},
                )
                if row.id in ids:
                    raise RowFault(f"the id {quote(row.id)} is already that of line {ids[row.id].line}")
            except RowFault as fault:
                faults.append(Fault(source, line, str(fault)))
                continue
            copies.add(identity)  # only now: every copy of a faulty row is told
            ids[row.id] = row
            rows.append(row)
            for note in content.notes:
                notes.setdefault(note, []).append(row.where)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not rows and not faults:
        faults.append(Fault(source, 1, "the file holds no rows"))
    if rows and purpose == "eval" and category_field and all(row.category is None for row in rows):
        known = ", ".join(first_ten(sorted({key for row in rows for key in row.metadata}))) or "none"
        reason = f"no row has the category field {quote(category_field)}; further fields of the rows: {known}"
        faults.append(Fault(source, rows[0].line, reason))
    near_copies, conflicts = _compare_answers(rows)
    warnings = [f"{len(lines)} rows: {note} (first {lines[0]})" for note, lines in notes.items()]
    warnings += _pair_warnings(conflicts, "the same question with two different answers")
    warnings += _pair_warnings(near_copies, "the same question and answer but for case and spaces")
    shapes = dict(Counter(row.shape for row in rows).most_common())
    loaded = LoadedRows(
        tuple(rows), shapes, duplicates, file, digest, tuple(near_copies), tuple(conflicts), tuple(warnings)
    )
    return loaded, faults


def _record_identity(record: Mapping[str, Any]) -> bytes:
    """A digest over all fields, whatever their order; refuses what could not be written to a file again."""
    try:
        canonical = json.dumps(record, ensure_ascii=False, sort_keys=True, allow_nan=False)
        return hashlib.blake2b(canonical.encode("utf-8"), digest_size=16).digest()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowFault(f"holds half of a surrogate pair (U+{code:04X}), which is not a character") from error
    except RecursionError as error:
        raise RowFault("nested too deeply") from error
    except ValueError as error:  # 1e999 is read as infinity
        raise RowFault("holds a number beyond the range of a float") from error


def _row_id(record: Mapping[str, Any], stem: str, line: int) -> str:
    given = record.get("id")
    if given is None:
        return f"{stem}:{line}"
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise RowFault(f"'id' is {'empty' if given == '' else kind_of(given)}, expected a text or a whole number")
    return str(given)


def _category(record: Mapping[str, Any], category_field: str | None) -> str | None:
    for key in (category_field, "category"):
        value = record.get(key) if key else None
        if isinstance(value, list | dict):
            raise RowFault(f"the category {key!r} is {kind_of(value)}, expected a text")
        if value is not None and value != "":
            return str(value)
    return None


def _compare_answers(rows: Sequence[Row]) -> tuple[list[tuple[Row, Row]], list[tuple[Row, Row]]]:
    """(near copies, conflicts) among rows whose whole prompt, system turn included, is the same but for case and
    spaces; each row is compared with the first of its question and the first of its answer."""
    by_question: dict[bytes, dict[bytes, Row]] = {}
    near_copies, conflicts = [], []
    for row in rows:
        if row.text is not None:
            question, answer = fingerprint(["text", row.text]), b""
        else:
            question = fingerprint(part for turn in row.prompt for part in (turn["role"], turn["content"]))
            answer = fingerprint([row.target])
            if not row.prompt:  # no question: any two such rows may differ
                question = fingerprint(["no prompt", row.target])
        answers = by_question.setdefault(question, {})
        if answer in answers:
            near_copies.append((answers[answer], row))
        else:
            if answers:
                conflicts.append((next(iter(answers.values())), row))
            answers[answer] = row
    return near_copies, conflicts


def _pair_warnings(pairs: Sequence[tuple[Row, Row]], what: str) -> list[str]:
    return first_ten(f"{first.where} and {second.where}: {what}" for first, second in pairs)
