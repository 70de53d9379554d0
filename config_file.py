"""Reads what a person wrote: a JSON configuration file with the line of every key, and `key=value` overrides.

Nothing here knows what the keys mean; `config_schema` does. Faults that leave the rest readable are collected, so that
a person sees all of them at once; a file that is no JSON object ends with `ConfigurationError`::

    written = read_json_object("eval_loop_config.json")
    written.data["learning_rate"], written.lines[("learning_rate",)]
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from error_handling import ConfigurationError

KeyPath = tuple[str | int, ...]
"""Where a value stands: `("evaluation", "max_tokens")`, `("eval_tasks", 0, "task")`."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_LOOSE_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_MAX_LEVELS = 100  # of objects and lists in each other: what writes a configuration can follow these


@dataclass(frozen=True)
class WrittenConfig:
    """A parsed file. `lines` holds the 1-based line of every key; `faults` are ready messages (file:line: reason)."""

    path: Path
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]
    faults: tuple[str, ...]


def read_json_object(path: str | os.PathLike[str]) -> WrittenConfig:
    """Read a UTF-8 JSON file that holds one object; a byte-order mark is no part of it.

    Keys written twice become faults. Raises `ConfigurationError` when the file cannot be read, is not UTF-8 or not
    JSON (with file:line:column), or is no object.
    """
    where = Path(os.path.abspath(path))
    try:
        raw = where.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(f"{where}: there is no such configuration file; check the path") from None
    except (OSError, ValueError) as err:
        raise ConfigurationError(f"{where}: the configuration file cannot be read: {err}") from err
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        raise ConfigurationError(
            f"{where}:{line}: not UTF-8 (byte 0x{raw[err.start]:02x} at offset {err.start}); save the file as UTF-8"
        ) from err
    try:
        data = json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as err:
        raise ConfigurationError(f"{where}:{err.lineno}:{err.colno}: not valid JSON: {err.msg}") from err
    except RecursionError as err:
        raise ConfigurationError(f"{where}: objects or lists are nested too deeply") from err
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{where}: a configuration is one JSON object ({{...}}), this file holds {in_json(data)}"
        )
    lines: dict[KeyPath, int] = {}
    faults = []
    for key, line in _key_lines(text):
        if key in lines:
            faults.append(f"{where}:{line}: {dotted(key)}: written twice, first on line {lines[key]}; keep one")
        lines[key] = line
    return WrittenConfig(where, data, lines, tuple(faults))


def _whole_number(digits: str) -> int | float:
    """The number; infinite, and so refused at its key, when it has more digits than the interpreter reads."""
    try:
        return int(digits)
    except ValueError:
        return math.inf


def _key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Every key of a text known to be valid JSON, with its 1-based line, in the order written."""
    stack: list[list[Any]] = []  # per open bracket: [is an object, the current key or index]
    line, seen_until = 1, 0
    awaiting_key = False
    for match in _TOKEN.finditer(text):
        line += text.count("\n", seen_until, match.start())
        seen_until = match.start()
        token = match.group()
        if token in "{[":
            stack.append([token == "{", 0])
            awaiting_key = token == "{"
        elif token in "}]":
            stack.pop()
            awaiting_key = False
        elif token == ",":
            awaiting_key = stack[-1][0]
            if not awaiting_key:
                stack[-1][1] += 1
        elif awaiting_key:
            stack[-1][1] = json.loads(token)
            awaiting_key = False
            yield tuple(frame[1] for frame in stack), line


def parse_override(argument: str, takes_text: Callable[[str], bool]) -> tuple[str, Any]:
    """`key=value` as (key, value). Raises `ConfigurationError` when it is not of that form.

    A value is read as JSON (null, numbers, true, false, "text", lists, objects), as a list of bare words (`[a,b]`), and
    as plain text otherwise. For a key of which `takes_text(key)` is true everything but `null` and quoted text is
    plain text, so that `evalops_test_suite_id=123` needs no quotes.
    """
    key, equals, text = argument.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise ConfigurationError(f"command line: {argument!r} is not of the form key=value")
    if takes_text(key) and text != "null" and not text.startswith('"'):
        return key, text
    try:
        return key, _parse_value(text)
    except RecursionError as err:
        raise ConfigurationError(f"command line: {dotted((key,))}: nested too deeply") from err
    except ValueError as err:
        raise ConfigurationError(f"command line: {dotted((key,))}: {err}") from err


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as err:
        if text.startswith("[") and text.endswith("]"):
            return [_parse_value(item) for item in _split_items(text[1:-1])]
        if text.startswith(("{", "[", '"')):
            reason = f"not valid JSON: {err.msg} at character {err.pos + 1} of {text}"
            raise ValueError(on_one_line(reason)) from err
    if _LOOSE_NUMBER.fullmatch(text):
        return _whole_number(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    return text


def _split_items(text: str) -> list[str]:
    """Split at the commas that stand outside quotes and brackets."""
    items, depth, quoted, start = [], 0, False, 0
    for position, char in enumerate(text):
        if char == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif not quoted and char in "[{":
            depth += 1
        elif not quoted and char in "]}":
            depth -= 1
        elif char == "," and not quoted and depth == 0:
            items.append(text[start:position].strip())
            start = position + 1
    items.append(text[start:].strip())
    if "" in items:
        raise ValueError(on_one_line(f"an empty item in the list [{text}]"))
    return items


def unusable_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """(path, reason) of each value that no key may have, and of each such key: NaN, infinity, text that cannot be
    stored as UTF-8, objects and lists nested too deeply."""
    if len(path) > _MAX_LEVELS:
        yield path[:2], f"nested too deeply, more than {_MAX_LEVELS} objects or lists in each other"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from unusable_values(key, (*path, key))
            yield from unusable_values(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unusable_values(item, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value}"
    elif isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        yield path, "holds a character that cannot be stored (NUL or half a surrogate pair)"


def dotted(path: KeyPath) -> str:
    """`("eval_tasks", 0, "task")` as a person writes it: `eval_tasks[0].task`, on one line whatever the keys hold."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return on_one_line(text)


def on_one_line(text: str) -> str:
    """`text` with what does not print, line ends among it, as escapes."""
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def in_json(value: Any, limit: int = 60) -> str:
    """The value as it is written in JSON, shortened to about `limit` characters for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[:limit] + "..."
