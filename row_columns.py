"""What is kept of every row of a file, in arrays: where it stands, what it asks, and by which rules it is equal to
another one. About 100 bytes a row, whatever the row's length.

    builder = ColumnBuilder(rules)
    faults = builder.add_lines(lines, line=1, offset=0)      # [(7, "no assistant turn, ..."), ...]
    columns = builder.columns()
    first_with_same(columns.record)                                  # exact copies: the first row of each kind

Keys are digests of 16 bytes, held as pairs of 64-bit numbers.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from evaluation import normalise
from record_files import Decoded, LineDecoder, RowFault, holds_huge, plain_records
from row_formats import SHAPE_NAMES, RowContent, plain_pair
from row_record import Row, RowRules, given_id

Array = np.ndarray[Any, Any]

_SHAPE_CODES = {name: code for code, name in enumerate(SHAPE_NAMES)}
_NO_ANSWER = bytes(16)
_PLAIN, _GIVEN_ID, _ONE_KEY = 1, 2, 4


@dataclass(frozen=True)
class Columns:
    """Arrays of one entry a row, in the order of the file, and lists of what only some rows have.

    `offset` and `length` (bytes) say where the row's line stands, `crc` is its CRC-32. Two rows have the same `record`
    when they are equal in every field, the same `asks` when their prompts (system turn included) are equal but for
    case and spaces, the same `answer` when their targets are. `category` is a position in `categories`, -1 for none.
    `key_rows` and `keys` are the pairs of a row and what it has an answer to (`overlap.question_keys`), `id_rows` and
    `ids` those of a row and its own id; `placed_rows` have own ids that look like those of the rows at `places`.
    """

    offset: Array
    length: Array
    line: Array
    crc: Array
    flags: Array
    shape: Array
    category: Array
    record: Array
    asks: Array
    answer: Array
    key_rows: Array
    keys: Array
    id_rows: Array
    ids: Array
    placed_rows: Array
    places: Array
    categories: tuple[str, ...]
    note_rows: Array
    note_codes: Array
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.line)

    @property
    def plain(self) -> Array:
        """Whether `orjson.loads` of the line gives the record."""
        return (self.flags & _PLAIN) != 0

    @property
    def has_id(self) -> Array:
        """Whether the row has an id of its own."""
        return (self.flags & _GIVEN_ID) != 0

    def rows_asking(self, wanted: Collection[bytes]) -> Array:
        """Rows, ascending, that have an answer to one of the questions with the keys `wanted`."""
        one_key = np.flatnonzero((self.flags & _ONE_KEY) != 0)
        found = np.concatenate(
            [one_key[_members(self.asks[one_key], wanted)], self.key_rows[_members(self.keys, wanted)]]
        )
        return np.unique(found)

    def rows_answering(self, wanted: Collection[bytes]) -> Array:
        """Rows, ascending, whose target has one of the keys `wanted` (`text_key`)."""
        return np.flatnonzero(_members(self.answer, wanted))

    def take(self, rows: Array) -> Columns:
        """The columns of some rows (ascending positions)."""
        place = np.full(len(self), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        changed: dict[str, Any] = {name: getattr(self, name)[rows] for name in _BY_ROW}
        for name, of in _BY_PAIR.items():
            moved = place[getattr(self, name)]
            changed[name], changed[of] = moved[moved >= 0], getattr(self, of)[moved >= 0]
        return Columns(**changed, categories=self.categories, notes=self.notes)


_NUMBERS: tuple[tuple[str, Any], ...] = (
    ("offset", np.int64),
    ("length", np.int64),
    ("line", np.int64),
    ("crc", np.uint32),
    ("flags", np.uint8),
    ("shape", np.uint8),
    ("category", np.int32),
)
_DIGESTS = ("record", "asks", "answer")
_BY_PAIR = {"key_rows": "keys", "id_rows": "ids", "placed_rows": "places", "note_rows": "note_codes"}
_BY_ROW = (*(name for name, _ in _NUMBERS), *_DIGESTS)


def text_key(text: str) -> bytes:
    """16 bytes that are equal for texts equal after `evaluation.normalise`; `overlap.fingerprint([text])`."""
    return xxh3_128_digest(_folded(text))


def id_key(identity: str) -> bytes:
    """The key of an id in `Columns.ids`; no two ids are the same up to anything."""
    return xxh3_128_digest(identity.encode("utf-8", "surrogatepass"))


def _folded(text: str) -> bytes:
    return (normalise(text) or text.strip()).encode("utf-8", "surrogatepass") + b"\x00"


_folded_system = lru_cache(maxsize=64)(_folded)  # one system turn often opens every conversation of a file


class ColumnBuilder:
    """Columns of rows that come one after the other."""

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        self._decoder = LineDecoder()
        self._numbers, self._digests, self._rows = array("q"), bytearray(), 0  # _NUMBERS and _DIGESTS of each row
        self._key_rows, self._keys = array("q"), bytearray()
        self._id_rows, self._ids = array("q"), bytearray()
        self._note_rows, self._note_codes = array("q"), array("i")
        self._categories: dict[str, int] = {}
        self._notes: dict[str, int] = {}
        self._placed_rows, self._places = array("q"), array("q")
        self._place_in = re.compile(re.escape(rules.stem) + r":([1-9][0-9]{0,17})").fullmatch
        self._has_category = {"category"} | ({rules.category_field} if rules.category_field else set())

    def add_lines(self, lines: list[bytes], line: int, offset: int) -> list[tuple[int, str]]:
        """Add the rows of consecutive lines of a JSONL file, given the first one's number and byte offset.

        Returns (line, reason) for those that are no row. Lines of one question and answer, as most files have them,
        take a third of the time of others.
        """
        faults: list[tuple[int, str]] = []
        plain = plain_records(lines)
        for at, raw in enumerate(lines):
            try:
                if plain is None:
                    decoded = self._decoder.decode(raw, offset)
                    if decoded is not None:
                        self.add(decoded, line, offset, raw)
                else:
                    self._add_plain(plain[0][at], plain[1][at], line, offset, raw)
            except RowFault as fault:
                faults.append((line, str(fault)))
            line += 1
            offset += len(raw)
        return faults

    def _add_plain(self, record: dict[str, Any], canonical: bytes, line: int, offset: int, raw: bytes) -> None:
        pair = plain_pair(record) if self._rules.purpose == "train" else None
        if pair is None or len(record) > pair.used:
            decoded = self._decoder.decode(raw, offset) if holds_huge(record.values()) else None
            if decoded is not None or pair is None:
                self.add(decoded or Decoded(record, canonical, True), line, offset, raw)
                return
        flags, code = _PLAIN, -1
        if len(record) > pair.used:
            own, code = self._beside(record)
            flags |= own
        folded = _folded(pair.asked)
        asks = xxh3_128_digest(folded)
        if pair.system is None:
            flags |= _ONE_KEY
        else:
            self._key_rows.append(self._rows)
            self._keys += asks
            asks = xxh3_128_digest(b"system\x00" + _folded_system(pair.system) + b"user\x00" + folded)
        self._numbers.extend((offset, len(raw), line, crc32(raw), flags, pair.shape, code))
        self._digests += xxh3_128_digest(canonical) + asks + text_key(pair.answered)
        self._rows += 1

    def add(self, decoded: Decoded, line: int, offset: int, raw: bytes) -> RowContent:
        """Add the row that a record becomes; `RowFault`, and nothing added, when it is none."""
        record = decoded.record
        content = self._rules.content(record)
        flags, code = self._beside(record)
        asks, answer, keys = _question_keys(content)
        if keys == {asks}:
            flags |= _ONE_KEY
        else:
            self._key_rows.extend([self._rows] * len(keys))
            self._keys += b"".join(sorted(keys))
        if decoded.plain:
            flags |= _PLAIN
        for note in content.notes:
            self._note_rows.append(self._rows)
            self._note_codes.append(self._notes.setdefault(note, len(self._notes)))
        shape = _SHAPE_CODES[content.shape]
        self._numbers.extend((offset, len(raw), line, crc32(raw), flags, shape, code))
        self._digests += xxh3_128_digest(decoded.canonical) + asks + answer
        self._rows += 1
        return content

    def _beside(self, record: Mapping[str, Any]) -> tuple[int, int]:
        """(flags, code of the category) of what a record has beside its content."""
        identity = given_id(record) if "id" in record else None
        category = None if self._has_category.isdisjoint(record) else self._rules.category(record)
        if identity is not None:
            self._id_rows.append(self._rows)
            self._ids += id_key(identity)
            if place := self._place_in(identity):
                self._placed_rows.append(self._rows)
                self._places.append(int(place[1]))
        code = -1 if category is None else self._categories.setdefault(category, len(self._categories))
        return 0 if identity is None else _GIVEN_ID, code

    def columns(self) -> Columns:
        numbers = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(_NUMBERS))
        digests = as_keys(bytes(self._digests)).reshape(-1, len(_DIGESTS), 2)
        by_row: dict[str, Any] = {name: numbers[:, at].astype(kind) for at, (name, kind) in enumerate(_NUMBERS)}
        by_row |= {name: digests[:, at].copy() for at, name in enumerate(_DIGESTS)}
        return Columns(
            **by_row,
            key_rows=np.array(self._key_rows, dtype=np.int64),
            keys=as_keys(bytes(self._keys)),
            id_rows=np.array(self._id_rows, dtype=np.int64),
            ids=as_keys(bytes(self._ids)),
            placed_rows=np.array(self._placed_rows, dtype=np.int64),
            places=np.array(self._places, dtype=np.int64),
            categories=tuple(self._categories),
            note_rows=np.array(self._note_rows, dtype=np.int64),
            note_codes=np.array(self._note_codes, dtype=np.int32),
            notes=tuple(self._notes),
        )


def _question_keys(content: RowContent | Row) -> tuple[bytes, bytes, set[bytes]]:
    """(asks, answer, keys of everything it has an answer to) of a row; see `Columns` and `overlap.question_keys`."""
    if content.text is not None:
        folded = _folded(content.text)
        return xxh3_128_digest(b"text\x00" + folded), _NO_ANSWER, {xxh3_128_digest(folded)}
    keys: set[bytes] = set()
    prompt, dialogue = xxh3_128(), xxh3_128()
    asks = answer = _NO_ANSWER
    spoken: list[bytes] = []
    before = b""
    for index, turn in enumerate(content.messages):
        role = turn["role"]
        folded = _folded_system(turn["content"]) if role == "system" else _folded(turn["content"])
        if role == "assistant":
            keys.add(xxh3_128_digest(spoken[0]) if len(spoken) == 1 else dialogue.digest())
            if before:
                keys.add(xxh3_128_digest(before))
            if not index:  # no question: any two such rows may differ
                asks = xxh3_128_digest(b"no prompt\x00" + folded)
            else:
                asks = xxh3_128_digest(before) if index == 1 and before else prompt.digest()
            answer = xxh3_128_digest(folded)
        before = folded if role == "user" else b""
        part = role.encode() + b"\x00" + folded
        prompt.update(part)
        if role != "system":
            dialogue.update(part)
            spoken.append(folded)
    return asks, answer, keys


def answer_keys(asks: Array, answer: Array) -> Array:
    """Keys of question and answer together, from `Columns.asks` and `Columns.answer`."""
    # Sums of digests are as good as digests of both: the factor keeps (a, b) and (b, a) apart.
    return asks + answer * np.uint64(0x9E3779B97F4A7C15)


def asked_and_answered(rows: Iterable[Row]) -> tuple[Array, Array]:
    """(`Columns.asks`, `Columns.answer`) of rows that are held in memory."""
    keys = [_question_keys(row) for row in rows]
    return as_keys(b"".join(asks for asks, _, _ in keys)), as_keys(b"".join(answer for _, answer, _ in keys))


def as_keys(data: bytes) -> Array:
    """Digests one after the other as an array of shape (number, 2)."""
    return np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)


def _members(keys: Array, wanted: Collection[bytes]) -> Array:
    """Which keys are among `wanted`, as booleans."""
    found = np.isin(keys[:, 0], as_keys(b"".join(wanted))[:, 0])
    for row in np.flatnonzero(found):  # few: all but chance hits are wanted
        found[row] = keys[row].tobytes() in wanted
    return found


def first_with_same(keys: Array) -> Array:
    """For each row the position of the first one with the same key; `keys` has the shape (rows, 2)."""
    halves = np.ascontiguousarray(keys[:, 0])
    order = np.argsort(halves)
    ordered = halves[order]
    same = ordered[1:] == ordered[:-1]
    at = np.flatnonzero(same)
    if (keys[order[at], 1] != keys[order[at + 1], 1]).any():  # by chance one half is equal and the other is not
        order = np.lexsort((keys[:, 1], halves))
        same = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
        at = np.flatnonzero(same)
    first = np.arange(len(keys))
    grouped = np.union1d(at, at + 1)  # rows that are not the only one with their key, in the order of keys
    if len(grouped):
        opens = np.concatenate([[True], ~same])[grouped]
        first[order[grouped]] = np.minimum.reduceat(order[grouped], np.flatnonzero(opens))[np.cumsum(opens) - 1]
    return first


def joined(parts: Sequence[Columns]) -> Columns:
    """The columns of a file that was read in parts, in order. Lines must already count from the file's start."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    together: dict[str, Any] = {}
    for name in (*_BY_ROW, "keys", "ids", "places"):
        together[name] = np.concatenate([getattr(part, name) for part in parts])
    for name in _BY_PAIR:
        moved = [getattr(part, name) + start for part, start in zip(parts, starts, strict=False)]
        together[name] = np.concatenate(moved)
    for name, codes in (("categories", "category"), ("notes", "note_codes")):
        known: dict[str, int] = {}
        moved = []
        for part in parts:
            code_of = [known.setdefault(text, len(known)) for text in getattr(part, name)]
            moved.append(np.array([*code_of, -1], dtype=np.int32)[getattr(part, codes)])
        together[name], together[codes] = tuple(known), np.concatenate(moved)
    assert together.keys() == {field.name for field in fields(Columns)}
    return Columns(**together)
