"""Files that survive a crash: whole-file replacement, fsynced appends, JSONL whose last line may be torn.

    write_json(run / "state.json", state)          # readers see the old file or the new one, never a part
    append_line(run / "metrics.jsonl", event)      # a whole line, on disk when the call returns
    rows, note = read_jsonl(run / "metrics.jsonl") # `note` says that a torn last line was dropped

Every failure of the disk becomes a `StorageError` that names the path; what was on disk before stays whole.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from error_handling import DamagedFileError, EvalLoopError

TEMPORARY_SUFFIX = ".tmp"

# Two threads appending at once: the second would take the first one's unfinished line for a torn one.
_appending = threading.Lock()

# Line separators other than "\n" that are legal inside JSON strings but split a line for many readers.
_LOOSE_SEPARATORS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\u0085": "\\u0085"}

_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EACCES: "give this user write permission there",
    errno.EPERM: "give this user write permission there",
    errno.EROFS: "that disk is mounted read-only: make it writable",
    errno.ENOENT: "the folder is gone: put it back",
    errno.ENOTDIR: "a part of that path is a file: name a folder",
    errno.ENAMETOOLONG: "choose a shorter path",
}


class StorageError(EvalLoopError, OSError):
    """A file could not be read or written; the message names the path and what to do."""

    def __str__(self) -> str:  # OSError would print only its errno form
        return str(self.args[0]) if self.args else ""


class UnstorableValueError(EvalLoopError, ValueError):
    """A value has no JSON form (a float that is not finite, an object); the message names where it stands."""


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError inside the block into a `StorageError`: "cannot <doing> <path>: <reason>; <remedy>"."""
    try:
        yield
    except StorageError:
        raise
    except OSError as err:
        remedy = _REMEDIES.get(err.errno or 0, "check that disk")
        raise StorageError(
            f"cannot {doing} {path}: {err.strerror or err}; {remedy}, then go on (earlier content is untouched)"
        ) from err


def to_json(value: Any, *, indent: int | None = None, name: str = "value") -> str:
    """`value` as strict JSON: no NaN or infinity; paths become strings.

    Raises `UnstorableValueError` naming the place of what has no JSON form, as `name.key[0]`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_plain)
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate: only its escape survives UTF-8, and it reads back as it was
        text = json.dumps(value, allow_nan=False, indent=indent, default=_plain)
    except (ValueError, TypeError) as err:
        raise UnstorableValueError(_find_unstorable(value, name) or f"{name}: {err}") from err
    for separator, escape in _LOOSE_SEPARATORS.items():
        text = text.replace(separator, escape)
    return text


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Replace `path` by `content` (text as UTF-8): temp file beside it, fsync, `os.replace`, fsync of the folder.

    Killed at any moment, `path` holds its old content or the new one. Raises `StorageError`.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    with storage_errors(path, "write"):
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise
        fsync_folder(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """`write_atomic` of `value` as indented JSON."""
    write_atomic(path, to_json(value, indent=2, name=Path(path).name) + "\n")


def write_jsonl(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """`write_atomic` of `rows`, one JSON object a line."""
    name = Path(path).name
    write_atomic(path, "".join(to_json(row, name=f"{name}:{n}") + "\n" for n, row in enumerate(rows, 1)))


def read_json(path: Path | str) -> dict[str, Any]:
    """The JSON object in `path`. Raises `StorageError` (unreadable) or `DamagedFileError` (no JSON object)."""
    path = Path(path)
    with storage_errors(path, "read"):
        data = path.read_bytes()
    try:
        return _parse_object(data)
    except ValueError as err:
        raise DamagedFileError(f"{path}: damaged, {err}; restore it from a copy or start a new run") from err


def append_line(path: Path | str, row: Mapping[str, Any]) -> None:
    """`append_lines` of one row."""
    append_lines(path, [row])


def append_lines(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append `rows` as JSON lines and fsync once. A torn last line left by a crash is cut off first, never glued to.

    When the disk refuses, the part already written is taken back and `StorageError` raised.
    """
    path = Path(path)
    lines = "".join(to_json(row, name=path.name) + "\n" for row in rows).encode("utf-8")
    with storage_errors(path, "append to"), _appending:
        is_new = not path.exists()
        with open(path, "a+b", buffering=0) as file:
            _repair_tail(file)
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, lines)
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # what cannot be taken back is recognised as torn next time
                    file.truncate(end)
                raise
        if is_new:
            fsync_folder(path.parent)


def repair_jsonl(path: Path | str) -> str | None:
    """Cut a torn last line off `path`, so that plain readers can read it; returns a note of what was dropped."""
    path = Path(path)
    if not path.exists():
        return None
    with storage_errors(path, "repair"), open(path, "r+b", buffering=0) as file:
        dropped = _repair_tail(file)
    return f"{path}: dropped a torn last line ({dropped} bytes), left by a crash" if dropped else None


def read_jsonl(path: Path | str, *, missing_ok: bool = False) -> tuple[list[dict[str, Any]], str | None]:
    """(rows, note) of a JSONL file of objects. `note` is None, or says that a torn last line was dropped.

    A missing file gives no rows with `missing_ok`. Raises `DamagedFileError` with file:line for a broken line that is
    not the last, `StorageError` when the file cannot be read.
    """
    path = Path(path)
    if missing_ok and not path.exists():
        return [], None
    with storage_errors(path, "read"):
        lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(_parse_object(line))
        except ValueError as err:
            if number != last:
                raise DamagedFileError(
                    f"{path}:{number + 1}: damaged line in the middle of the file, {err}; restore the file from a "
                    "copy, or delete that line if it can be spared, then go on"
                ) from err
            return rows, f"{path}:{number + 1}: dropped a torn last line, left by a crash"
    return rows, None


def remove_temporaries(folder: Path | str, *, deep: bool = False) -> None:
    """Delete what `write_atomic` left in `folder`, and with `deep` in all folders below, when its process was killed.

    Only the folder's one writer may.
    """
    folder = Path(folder)
    pattern = f".*{TEMPORARY_SUFFIX}"
    with storage_errors(folder, "clean up"):
        for path in list(folder.rglob(pattern) if deep else folder.glob(pattern)):
            path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new file in `folder` durable; a no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file: Any, data: bytes) -> None:
    # An unbuffered write may be short: at a full disk it stores what fits before the next call fails.
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _repair_tail(file: Any) -> int:
    """Leave `file` (opened unbuffered for reading and writing) ending in a whole line; returns the bytes cut off."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return 0
    start, tail = _last_line(file, end)
    try:
        if tail.strip():
            _parse_object(tail)
    except ValueError:
        file.truncate(start)
        return end - start
    if not tail.endswith(b"\n"):  # the object is whole (a part of one never parses): only its newline was lost
        file.seek(0, os.SEEK_END)
        _write_all(file, b"\n")
    return 0


def _last_line(file: BinaryIO, end: int) -> tuple[int, bytes]:
    """(offset, content with its newline) of the last line that is not blank, together with blank lines after it."""
    tail, start, step = b"", end, 2048  # most lines are short, and this is read before every append
    while start > 0:
        step = min(step, start)
        start = file.seek(start - step)
        tail = file.read(step) + tail
        cut = tail.rstrip().rfind(b"\n")
        if cut >= 0:
            return start + cut + 1, tail[cut + 1 :]
        step = max(65536, step)
    return 0, tail


def _parse_object(line: bytes) -> dict[str, Any]:
    value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _find_unstorable(value: Any, where: str) -> str | None:
    """A message naming the first part of `value` that has no JSON form."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}: only finite numbers are stored; find out where it came from"
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str | int | float | bool | None):
                return f"{where}: a key of type {type(key).__name__} has no JSON form"
            found = _find_unstorable(part, f"{where}.{key}")
            if found:
                return found
        return None
    if isinstance(value, list | tuple):
        return next((found for n, part in enumerate(value) if (found := _find_unstorable(part, f"{where}[{n}]"))), None)
    if value is None or isinstance(value, str | int | float | Path):
        return None
    return f"{where}: {type(value).__name__} has no JSON form"
