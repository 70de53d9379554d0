"""Events of a run as JSON lines, and what the terminal shows.

    log = StructuredLogger(run / "metrics.jsonl")
    log.event("step", round=1, step=7, loss=1.23, lr=9e-5)
    with log.progress(total=20, description="round 1") as bar:
        bar.advance(lr=9e-5, loss=1.23)

Everything written or shown goes through `redact`, and everything shown through `visible`: text that came from data
or from a model can neither leak a key nor steer the terminal.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from durable_files import append_line, read_jsonl, write_jsonl

if TYPE_CHECKING:
    from rich.console import Console

HIDDEN = "[hidden]"

_SECRET_VARIABLE = re.compile(
    r"(API_?KEY|_TOKEN|_SECRET|_PASSWORD|_PASSWD|_ACCESS_KEY|_SECRET_KEY|_CREDENTIALS?)$", re.IGNORECASE
)
# Addresses, which may hold a password.
_ADDRESS_VARIABLE = re.compile(r"(_PROXY|_URL|_URI|_DSN)$", re.IGNORECASE)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:([^/\s]+)@")
_SECRET_FIELD = re.compile(
    r"(^|[_-])(api_?key|secret|secret_?key|password|passwd|access_?key|(access|auth|bearer|refresh)_?token|authorization)$",
    re.IGNORECASE,
)
# A value shorter than this is not masked: replacing "test" or "1" everywhere would garble every message.
_SHORTEST_SECRET = 6
_SECRET_SHAPES = (
    # Keys of the training service; the renderers' package has the same prefix and is no secret.
    (re.compile(r"\btml-(?!renderers\b)[A-Za-z0-9_-]{4,}"), HIDDEN),
    (
        re.compile(r"\b(Bearer|Authorization: (?:Basic|Token))\s+(?!\[hidden\])[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE),
        rf"\1 {HIDDEN}",
    ),
    (
        re.compile(r"\b((?:X-)?Api-?Key[\"']?: ?[\"']?)(?!\[hidden\])[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    # User and password, or a token alone.
    (re.compile(r"(?<=://)[^/\s?#]+(?=@)"), HIDDEN),
    (
        re.compile(r"([?&](?:api_?key|key|token|access_token|secret|password)=)[^&\s\"']+", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
)
# Control characters (C0 without tab and newline, DEL, C1), those that reorder, join or annotate text on the screen or
# are not seen there at all, and lone surrogates, which no stream can encode.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


def redact(text: str) -> str:
    """`text` with every secret masked.

    Secrets are the values of environment variables named like one (`..._API_KEY`, `..._TOKEN`), the passwords in
    addresses that variables hold (`..._PROXY`, `..._URL`), `tml-` keys, bearer tokens, and passwords and keys in URLs.
    """
    return _mask(text, _secrets())


def _mask(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        if value in text:
            text = text.replace(value, HIDDEN)
    for shape, mask in _SECRET_SHAPES:
        text = shape.sub(mask, text)
    return text


def _secrets() -> tuple[str, ...]:
    """The secrets in the environment as it is now, the longest first: one may be part of another."""
    global _secrets_seen  # noqa: PLW0603
    # Reading `os.environ` decodes every name, 80 microseconds for a hundred; what it keeps them in compares in two.
    kept = getattr(os.environ, "_data", None)
    if kept is None or _secrets_seen[0] != kept:
        found: set[str] = set()
        for name, value in os.environ.items():
            found.update(_secrets_in(name, value))
        _secrets_seen = (dict(kept or {}), tuple(sorted(found, key=len, reverse=True)))
    return _secrets_seen[1]


_secrets_seen: tuple[dict[Any, Any] | None, tuple[str, ...]] = (None, ())


def _secrets_in(name: str, value: str) -> set[str]:
    """What is secret in a variable, also as it stands in JSON or is sent as a password."""
    parts: list[str] = []
    if _SECRET_VARIABLE.search(name):
        parts = [value, value.strip(), json.dumps(value)[1:-1]]
    elif _ADDRESS_VARIABLE.search(name):
        parts = _PASSWORD_IN_ADDRESS.findall(value)
        parts += [urllib.parse.unquote(part) for part in parts]
    return {part for part in parts if len(part) >= _SHORTEST_SECRET}


def redact_values(value: Any) -> Any:
    """`redact` on every string inside a JSON-like value; a field that is named like a secret is masked whole."""
    return _mask_values(value, _secrets())


def _mask_values(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _mask(value, secrets)
    if isinstance(value, Mapping):
        return {
            _mask(key, secrets) if isinstance(key, str) else key: (
                HIDDEN if part and isinstance(key, str) and _SECRET_FIELD.search(key) else _mask_values(part, secrets)
            )
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask_values(part, secrets) for part in value]
    return value


def visible(text: str) -> str:
    r"""`text` with control and reordering characters written out (`\x1b`): on a terminal or page they stay text."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    r"""`visible`, and line ends written out too: text from data that stands within a line cannot begin another."""
    return visible(text).replace("\n", "\\n")


def utc_now() -> str:
    """The time now as ISO 8601 in UTC with milliseconds, as events carry it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StructuredLogger:
    """Writes events to a JSONL file and speaks to the terminal.

    `path` None writes no events (a dry run). `console` False shows nothing. `stream` is where the terminal output
    goes, standard output by default; warnings go there too, so that they stand beside what they are about.
    """

    def __init__(self, path: Path | str | None, *, console: bool = True, stream: TextIO | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._shown = console
        self._stream = stream
        self._console: Console | None = None
        self._lock = threading.Lock()

    def event(self, name: str, *, round: int | None = None, step: int | None = None, **fields: Any) -> None:
        """Append one event, on disk when the call returns: `{"event", "time", "round", "step", **fields}`.

        `step` is the count of optimizer steps of the run. Raises `UnstorableValueError` for a float that is not
        finite, `StorageError` when the disk refuses.
        """
        if self.path is None:
            return
        row = {"event": name, "time": utc_now(), "round": round, "step": step, **redact_values(fields)}
        with self._lock:
            append_line(self.path, row)

    def supersede_after(self, step: int) -> int:
        """Mark every event of a later step as superseded: those steps will be done again. Returns how many were marked.

        `step` is the last one that the weights gone back to contain.
        """
        return self.supersede(lambda row: _later(row.get("step"), step))

    def supersede(self, is_stale: Callable[[Mapping[str, Any]], bool]) -> int:
        """Mark the events for which `is_stale` as superseded: what they tell of is done again. Returns how many."""
        if self.path is None:
            return 0
        with self._lock:
            rows, _ = read_jsonl(self.path, missing_ok=True)
            stale = [row for row in rows if not row.get("superseded") and is_stale(row)]
            for row in stale:
                row["superseded"] = True
            if stale:
                write_jsonl(self.path, rows)
        return len(stale)

    def say(self, text: str) -> None:
        """Show a line."""
        self._print(text)

    def warn(self, text: str, *, round: int | None = None, step: int | None = None) -> None:
        """Show a warning and record it as an event."""
        self.event("warning", round=round, step=step, message=text)
        self._print(f"warning: {text}", style="yellow")

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator[Progress]:
        """A bar over `total` steps; on anything but a terminal a plain line about every tenth of the way."""
        if not self._shown:
            yield Progress(total)
        elif self._is_live():
            with _LiveProgress(total, _clean(description), self._rich()) as live:
                yield live
        else:
            yield _PlainProgress(total, description, self.say)

    def rounds_table(self, rounds: Sequence[Mapping[str, Any]], *, scores_are: str | None = None) -> None:
        """Show the table of rounds; each is an item of `summary.rounds` (missing figures show as a dash).

        `scores_are` says what the scores are when they are not validation scores ("on training data").
        """
        if not self._shown:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = f"Score {scores_are} by round" if scores_are else "Validation score by round"
        # No padding: with the ten columns below that is what fits in 80 characters.
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        for heading in ROUND_COLUMNS:
            is_text = heading in {"round", "decision"}
            table.add_column(
                heading,
                justify="left" if is_text else "right",
                no_wrap=heading != "decision",
                overflow="fold",
            )
        for row in rounds:
            table.add_row(*(Text(_clean(cell)) for cell in round_cells(row)))
        self._rich().print(table)

    def where(self, paths: Mapping[str, Path | str]) -> None:
        """Show where everything is: one line per name and path."""
        width = max((len(name) for name in paths), default=0)
        for name, path in paths.items():
            self._print(f"{name:<{width}}  {path}")

    def _print(self, text: str, style: str | None = None) -> None:
        if not self._shown:
            return
        from rich.text import Text

        # A Text is never read as markup, and soft wrapping keeps paths and commands whole when they are copied.
        self._rich().print(Text(redact(visible(text)), style=style or ""), soft_wrap=True)

    def _rich(self) -> Console:
        if self._console is None:
            from rich.console import Console

            stream = self._stream or sys.stdout
            if isinstance(stream, io.TextIOWrapper):
                # A terminal that cannot show a character must not end a run.
                stream.reconfigure(errors="backslashreplace")
            # In a file or a pipe there is no width to keep to; 80 columns would cut the table.
            width = None if stream.isatty() else 160
            self._console = Console(file=stream, highlight=False, width=width, legacy_windows=False)
            self._console.on_broken_pipe = self._lose_reader  # type: ignore[method-assign]
        return self._console

    def _lose_reader(self) -> None:
        """Nobody reads the output any more (`| head -1`): show nothing, and go on with what is paid for."""
        self._shown = False
        assert self._console is not None
        self._console.quiet = True
        # Python flushes the stream once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nowhere, (self._stream or sys.stdout).fileno())
        os.close(nowhere)
        told = "the output was closed; the run goes on and shows nothing"
        with suppress(OSError):
            print(f"note: {told}", file=sys.stderr)
        self.event("warning", message=told)

    def _is_live(self) -> bool:
        console = self._rich()
        return console.is_terminal and not console.is_dumb_terminal


ROUND_COLUMNS = ("round", "score", "95 % interval", "lenient", "n", "errors", "nll", "lr", "steps", "decision")


def round_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one item of `summary.rounds`, in the order of `ROUND_COLUMNS`; a figure that is not known is "-"."""
    low, high = row.get("ci_low"), row.get("ci_high")
    number = row.get("round")
    return (
        "baseline" if number == 0 else str(number),
        _figure(row.get("score"), ".3f"),
        "-" if low is None or high is None else f"{low:.3f}-{high:.3f}",
        _figure(row.get("lenient_score"), ".3f"),
        _figure(row.get("n"), "d"),
        _figure(row.get("errors"), "d"),
        _figure(row.get("nll"), ".3f"),
        _figure(row.get("learning_rate"), ".2e"),
        _figure(row.get("steps"), "d"),
        str(row.get("decision") or "-"),
    )


class Progress:
    """Counts steps done, 0 to `total`; this base shows nothing."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def advance(self, steps: int = 1, *, lr: float | None = None, loss: float | None = None) -> None:
        """`steps` more are done; `lr` and `loss` (per trained token) are those of the last one."""
        self.done += steps
        self._show(_figures(lr, loss))

    def _show(self, figures: str) -> None:
        pass


class _PlainProgress(Progress):
    def __init__(self, total: int, description: str, say: Any) -> None:
        super().__init__(total)
        self._description, self._say, self._tenth = description, say, 0

    def _show(self, figures: str) -> None:
        tenth = 10 * self.done // max(1, self.total)
        if tenth > self._tenth or self.done == self.total:
            self._tenth = tenth
            self._say(f"{self._description}: {self.done}/{self.total}{', ' if figures else ''}{figures}")


class _LiveProgress(Progress):
    def __init__(self, total: int, description: str, console: Console) -> None:
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(total)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(escape(description), total=total, figures="")

    def __enter__(self) -> _LiveProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def _show(self, figures: str) -> None:
        self._bar.update(self._task, completed=self.done, figures=figures)


class SafeFormatter(logging.Formatter):
    """A line of a library's log as `StructuredLogger` would show it: no secret in it, and nothing that steers the
    terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with its traceback if it has one."""
        return redact(visible(super().format(record)))


def show_library_logs() -> None:
    """Show the warnings of libraries on standard error, through `SafeFormatter`. For programs, at their start."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def read_events(path: Path | str) -> tuple[list[dict[str, Any]], str | None]:
    """(events, note) of a `metrics.jsonl`, superseded ones included; `note` tells of a torn last line that was dropped.

    A missing file holds no events. Raises `DataError` with file:line for a line broken in the middle.
    """
    return read_jsonl(path, missing_ok=True)


def current_steps(events: Sequence[Mapping[str, Any]], *, field: str = "loss") -> list[Mapping[str, Any]]:
    """The events that carry `field` for a step, in the order of steps, one a step.

    Superseded ones are dropped, and the last of several wins.
    """
    by_step = {
        event["step"]: event
        for event in events
        if isinstance(event.get("step"), int) and event.get(field) is not None and not event.get("superseded")
    }
    return [by_step[step] for step in sorted(by_step)]


def _later(step: object, than: int) -> bool:
    return isinstance(step, int) and step > than


def _clean(text: str) -> str:
    return redact(visible(text)).replace("\n", " ")


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _figures(lr: float | None, loss: float | None) -> str:
    parts = [f"lr {lr:.2e}"] if lr is not None else []
    return ", ".join([*parts, f"loss {loss:.4f}"] if loss is not None else parts)
