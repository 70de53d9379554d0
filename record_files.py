"""Strict reading of JSONL files and JSON arrays, record by record, with the line of each record and of each fault.

    if file_layout(path, str(path), faults) == "lines":
        decoder = LineDecoder()
        for raw in path.open("rb"):
            decoded = decoder.decode(raw, offset)       # None for a blank line; RowFault says what is wrong with it
    else:
        for line, record in array_records(path, str(path), faults): ...

What cannot be used is never repaired, guessed or skipped in silence: it is collected as a `Fault`, so that all faults
of a file can be told in one message. Byte-order mark, CRLF, blank lines and a missing final newline are no faults.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

_JSON_SPACE = " \t\r\n"
_LINE_SUFFIXES = (".jsonl", ".ndjson")
# To tell one object over many lines from rows with a broken first one the whole file is decoded. Beyond this many
# bytes it is taken for rows, so that a fault is told without holding the file in memory.
_SINGLE_OBJECT_LIMIT = 64_000_000
# Deeper rows are refused: Inspect's log holds no sample with about 250 levels, which is told only once it is paid for.
MAX_LEVELS = 100
_TOO_DEEP = f"nested too deeply, more than {MAX_LEVELS} objects or lists in each other"
# orjson reads a whole number that does not fit 64 bits as a float; every float of that size is read again.
_HUGE = 9e18


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason why a line of a file cannot be used. `line` counts from 1."""

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def first_ten(items: Iterable[object]) -> list[str]:
    """The first ten items as text, and a count of those left out."""
    listed = [str(item) for item in items]
    return listed[:10] + ([f"... and {len(listed) - 10} more"] if len(listed) > 10 else [])


class RowFault(ValueError):
    """Why one record cannot be converted; it becomes a `Fault` with its line."""


def kind_of(value: object) -> str:
    """What a JSON value is, in words for a message."""
    if value is None:
        return "null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


def quote(value: object) -> str:
    """A value from a file, quoted, shortened, and with control characters escaped, for a message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


class _StrictDecoder:
    """JSON as RFC 8259 has it: no NaN or Infinity, no repeated keys.

    What is wrong inside a well-formed value is collected in `problems` and not raised, so that the position behind
    the value is known and reading can go on.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_int=self._whole_number
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for index, key in enumerate(keys) if key in keys[:index])
            self.problems.append(f"the key {quote(twice)} appears more than once")
        return value

    def _constant(self, name: str) -> None:
        self.problems.append(f"{name} is not JSON")

    def _whole_number(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # the interpreter has a limit
            self.problems.append(f"holds a whole number of {len(digits)} digits, more than can be read")
            return 0

    def value_at(self, text: str, start: int) -> tuple[Any, int]:
        """(value, position behind it) of the JSON value at `start`; `RowFault` when there is none."""
        self.problems.clear()
        try:
            return self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise RowFault(f"not JSON: {_json_reason(error)}") from error
        except RecursionError as error:
            raise RowFault(_TOO_DEEP) from error

    def whole(self, text: str) -> Any:
        """The one value that `text` holds; `RowFault` when it is none, or more than one."""
        start = len(text) - len(text.lstrip(_JSON_SPACE))
        value, end = self.value_at(text, start)
        if text[end:].strip(_JSON_SPACE):
            raise RowFault(f"not JSON: more text after the value, at column {end + 1}: {quote(text[end : end + 60])}")
        return value


def _json_reason(error: json.JSONDecodeError) -> str:
    behind, at = error.doc[: error.pos].rstrip(_JSON_SPACE), error.doc[error.pos : error.pos + 1]
    if (behind.endswith(",") and at in {"}", "]"}) or re.match(r",\s*[}\]]", error.doc[error.pos : error.pos + 80]):
        return f"trailing comma before column {error.colno + 1}"
    found = quote(error.doc[error.pos : error.pos + 60]) if at else "nothing"
    return f"{error.msg.removesuffix(' at')} at column {error.colno}, found {found}"


def file_layout(path: Path, source: str, faults: list[Fault]) -> Literal["lines", "array", "unusable"]:
    """How the file holds its records, told by content; what makes it unusable as a whole is added to `faults`.

    An array named .jsonl is a fault: programs that read the file line by line would choke on it.
    """
    line, head = _first_line(path)
    reason = _other_format(head)
    if reason is None:
        single = _single_value(path, head)
        if single == "array" and path.suffix.lower() in _LINE_SUFFIXES:
            reason = f"the file is a JSON array, not a row per line; name it {path.stem}.json, or write a row per line"
        elif single == "object":
            reason = "the file is one object over many lines; write a row per line, or an array"
        elif single == "objects":
            reason = "the file has objects that go over many lines; write each on one line, or write an array"
        else:
            return "array" if single == "array" else "lines"
    faults.append(Fault(source, line, reason))
    return "unusable"


_WIDE = "the file is UTF-16 or UTF-32, not UTF-8; save it as UTF-8"
# How files begin that are not text; see https://en.wikipedia.org/wiki/List_of_file_signatures.
_SIGNATURES = {
    codecs.BOM_UTF16_LE: _WIDE,
    codecs.BOM_UTF16_BE: _WIDE,
    codecs.BOM_UTF32_BE: _WIDE,
    b"\x1f\x8b": "the file is compressed (gzip); unpack it",
    b"\x28\xb5\x2f\xfd": "the file is compressed (zstd); unpack it",
    b"BZh": "the file is compressed (bzip2); unpack it",
    b"\xfd7zXZ": "the file is compressed (xz); unpack it",
    b"PK\x03\x04": "the file is a zip archive; unpack it",
    b"PAR1": "the file is Parquet; write its rows as JSONL",
    b"ARROW1": "the file is Arrow; write its rows as JSONL",
    b"version https://git-lfs": "the file is a Git LFS pointer and not the data; fetch it with git lfs pull",
}


def _other_format(head: bytes) -> str | None:
    """What a file is that begins with the line `head` and is no UTF-8 text; None when it may be."""
    for signature, reason in _SIGNATURES.items():
        if head.startswith(signature):
            return reason
    # Every second or further byte of ASCII text is NUL in these encodings, and none is in JSON.
    return _WIDE if head[:2].count(0) == 1 or head[:4].count(0) == 3 else None


def plain_records(lines: list[bytes]) -> tuple[list[dict[str, Any]], list[bytes]] | None:
    """(records, their `canonical_json`) of consecutive lines that all hold plain objects, faster than line by line.

    None when one of them needs a closer look (`LineDecoder`). Numbers are not looked at (`holds_huge`).
    """
    try:
        records = list(map(orjson.loads, lines))
        canonical = list(map(orjson.dumps, records, repeat(None), repeat(orjson.OPT_SORT_KEYS)))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if set(map(type, records)) != {dict} or not all(records):
        return None
    if any(_may_be_deep(raw) and _levels(record) > MAX_LEVELS for raw, record in zip(lines, records, strict=True)):
        return None
    # See `LineDecoder.decode` for what quotes tell.
    if list(map(bytes.count, lines, repeat(b'"'))) != list(map(bytes.count, canonical, repeat(b'"'))):
        return None
    return None if b"\\u0022" in b"".join(lines) else (records, canonical)


class Decoded(NamedTuple):
    """A record, and its `canonical_json`. `plain`: `orjson.loads` of its line gives the record."""

    record: dict[str, Any]
    canonical: bytes
    plain: bool


class LineDecoder:
    """Records from the lines of a JSONL file. Lines end at LF or CRLF only (U+2028 inside a string is text).

    A line is read by orjson where that cannot differ from strict reading, and by the strict decoder otherwise, whose
    reasons are told.
    """

    def __init__(self) -> None:
        self._strict = _StrictDecoder()

    def decode(self, raw: bytes, offset: int) -> Decoded | None:
        """The record of the line at byte `offset` of its file; None for a blank line. `RowFault` says what is wrong."""
        if offset == 0 and raw.startswith(codecs.BOM_UTF8):
            raw, offset = raw.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        try:
            record = orjson.loads(raw)
            deep = _may_be_deep(raw) and _levels(record) > MAX_LEVELS
            if type(record) is dict and record and not deep and not holds_huge(record.values()):
                canonical = orjson.dumps(record, option=orjson.OPT_SORT_KEYS)
                # orjson keeps the last of repeated keys. What it dropped held quotes, so that fewer are left, unless
                # the line writes a quote as an escape without one.
                if raw.count(b'"') == canonical.count(b'"') and b"\\u0022" not in raw:
                    return Decoded(record, canonical, True)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
            pass  # the strict decoder finds out whether this is a fault, and which
        text = _decode(raw, offset)
        if not text.strip(_JSON_SPACE):
            return None
        record = _usable(self._strict.whole(text), self._strict.problems)
        return Decoded(record, canonical_json(record), False)

    def again(self, raw: bytes, offset: int, plain: bool) -> dict[str, Any]:
        """The record of a line that `decode` has read before."""
        if offset == 0:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        return orjson.loads(raw) if plain else self._strict.whole(raw.decode("utf-8"))


def holds_huge(values: Iterable[Any]) -> bool:
    """Whether a float beyond 64-bit whole numbers is among some values of a record, at any depth: it may have been a
    whole number in the file."""
    for value in values:
        kind = type(value)
        if kind is str:
            continue
        if kind is dict:
            if holds_huge(value.values()):
                return True
        elif kind is list:
            if holds_huge(value):
                return True
        elif kind is float and not -_HUGE < value < _HUGE:
            return True
    return False


def canonical_json(record: Mapping[str, Any]) -> bytes:
    """Equal for records equal in every field, whatever the order of their keys.

    `RowFault` for what could not be written to a file again.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, sort_keys=True, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowFault(f"holds half of a surrogate pair (U+{code:04X}), which is not a character") from error
    except RecursionError as error:
        raise RowFault(_TOO_DEEP) from error
    except ValueError as error:  # 1e999 is read as infinity
        raise RowFault("holds a number beyond the range of a float") from error
    if _levels(record) > MAX_LEVELS:
        raise RowFault(_TOO_DEEP)
    try:
        return orjson.dumps(record, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # numbers beyond 64 bits
        return text


def _may_be_deep(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") > MAX_LEVELS


def _levels(value: Any) -> int:
    """How deep objects and lists stand in each other; 1 for one that holds none."""
    levels, inner = 0, [value] if type(value) in (dict, list) else []
    while inner:
        levels += 1
        held = [part for outer in inner for part in (outer.values() if isinstance(outer, dict) else outer)]
        inner = [part for part in held if type(part) in (dict, list)]
    return levels


def _first_line(path: Path) -> tuple[int, bytes]:
    """(number, content) of the first line that is not blank, without byte-order mark; (1, b"") when there is none."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                return number, line
    return 1, b""


def _single_value(path: Path, head: bytes) -> Literal["", "array", "object", "objects"]:
    """Whether the file is one JSON value: an array (also a broken one) or an object over several lines; or several
    objects of which the first goes over several lines; or none of these."""
    opening = head.lstrip()[:1]
    if opening not in (b"[", b"{"):
        return ""
    decoder = _StrictDecoder()
    try:
        decoder.whole(head.decode("utf-8", "replace"))
    except RowFault:
        if opening == b"[":
            return "array"
        if path.stat().st_size > _SINGLE_OBJECT_LIMIT:
            return ""
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
        values, end = 0, _skip_space(text, 0)
        first_ends = end + len(text[end:].partition("\n")[0])
        try:
            while end < len(text):
                end = _skip_space(text, decoder.value_at(text, end)[1])
                values += 1
                if values == 1 and end < first_ends:  # a whole object stands on the first line, and more text beside it
                    return ""
        except RowFault:
            return ""
        return "object" if values == 1 else "objects"
    if opening == b"{":
        return ""
    with path.open("rb") as file:  # `[...]` on one line is an array unless other rows follow
        filled = 0
        for raw in file:
            filled += bool(raw.removeprefix(codecs.BOM_UTF8).strip())
            if filled > 1:
                return ""
    return "array"


def _decode(raw: bytes, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, column = raw[error.start], error.start + 1
        raise RowFault(
            f"not UTF-8: byte 0x{byte:02x} at byte {column} of the line (offset {offset + error.start} of the file);"
            " convert the file to UTF-8"
        ) from error


def _usable(value: Any, problems: list[str]) -> dict[str, Any]:
    if problems:
        raise RowFault("; ".join(dict.fromkeys(problems)))
    if not isinstance(value, dict):
        raise RowFault(f"a row must be an object, this is {kind_of(value)}")
    if not value:
        raise RowFault("the object is empty")
    return value


def array_records(path: Path, source: str, faults: list[Fault]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, record) of every usable object of a JSON array; everything else is added to `faults`.

    The line is the one at which the element starts, counted from 1. The whole file is held in memory.
    """
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = raw.rfind(b"\n", 0, error.start) + 1
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - line_start + 1
        reason = f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {column} of the line; convert the file to UTF-8"
        faults.append(Fault(source, line, reason))
        return
    decoder = _StrictDecoder()
    position, counted, line = _skip_space(text, text.index("[") + 1), 0, 1
    if text[position : position + 1] == "]":
        position += 1
    else:
        while True:
            line += text.count("\n", counted, position)
            counted = position
            try:
                value, end = decoder.value_at(text, position)
            except RowFault as fault:
                cause = fault.__cause__
                at = cause.lineno if isinstance(cause, json.JSONDecodeError) else line
                faults.append(Fault(source, at, f"{fault}; what follows was not read"))
                return
            try:
                yield line, _usable(value, decoder.problems)
            except RowFault as fault:
                faults.append(Fault(source, line, str(fault)))
            position = _skip_space(text, end)
            sign = text[position : position + 1]
            position += 1
            if sign == "]":
                break
            if sign != ",":
                at = text.count("\n", 0, position) + 1
                found = quote(sign) if sign else "the end of the file"
                faults.append(Fault(source, at, f"not JSON: expected ',' or ']' after a row, found {found}"))
                return
            position = _skip_space(text, position)
    position = _skip_space(text, position)
    if position < len(text):
        faults.append(Fault(source, text.count("\n", 0, position) + 1, "not JSON: more text after the array"))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _JSON_SPACE:
        position += 1
    return position
