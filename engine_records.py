"""What the local engine remembers of its clients on disk: sessions and training runs, one JSON file each.

    runs/<model id>/run.json      base model, rank, session, metadata; the run's checkpoints lie beside it
    sessions/<session id>.json    when it began, what its client called it, how it ended

    records = EngineRecords(state_dir)
    records.add_session("5f0c...", {"created": time.time(), "display_name": "nightly"})
    records.finish_session("5f0c...", {"type": "success"})

Ids come from clients; `encode_name` makes a file name of any that can be one and refuses the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from durable_files import StorageError, read_json, storage_errors, write_json
from error_handling import CheckpointError, DataError

logger = logging.getLogger("mock_tinker")

RUN_FILE = "run.json"
RUN_MARK = ":train:"
# Bytes of a file name that every system takes, less what the name of a temporary file adds.
LONGEST_NAME = 220


class NotRecordedError(CheckpointError):
    """What was asked for is not in the state folder: no such session, run or checkpoint."""


class EngineRecords:
    """The sessions and training runs recorded under one state folder."""

    def __init__(self, state_dir: Path | str) -> None:
        self.root = Path(state_dir)
        # Reading a record, changing it and writing it back is one step.
        self._changes = threading.RLock()

    def add_run(self, model_id: str, run: dict[str, Any]) -> None:
        """Record a training run, so that it is listed after a restart as well."""
        folder = self._run_folder(model_id)
        with storage_errors(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN_FILE, {"model_id": model_id, **run})

    def runs(self, session_id: str | None = None) -> list[dict[str, Any]]:
        """The recorded training runs, of one session or of all, newest first."""
        prefix = "" if session_id is None else encode_name(session_id + RUN_MARK)
        return _newest_first(_readable(self.root.glob(f"runs/{prefix}*/{RUN_FILE}")))

    def find_run(self, model_id: str) -> dict[str, Any]:
        """The record of one training run. Raises `NotRecordedError`."""
        path = self._run_folder(model_id) / RUN_FILE
        if not path.is_file():
            raise NotRecordedError(f"there is no training run {model_id!r} in {self.root}")
        return _read(path)

    def add_session(self, session_id: str, session: dict[str, Any]) -> None:
        """Record a client's session."""
        path = self._session_file(session_id)
        with storage_errors(path.parent, "write to"):
            path.parent.mkdir(exist_ok=True)
        write_json(path, {"session_id": session_id, **session})

    def sessions(self) -> Iterator[dict[str, Any]]:
        """Recorded sessions, newest first."""
        yield from _newest_first(_readable(self.root.glob("sessions/*.json")))

    def find_session(self, session_id: str) -> dict[str, Any]:
        """The record of one session. Raises `NotRecordedError`."""
        path = self._session_file(session_id)
        if not path.is_file():
            raise NotRecordedError(f"there is no session {session_id!r} in {self.root}")
        return _read(path)

    def finish_session(self, session_id: str, finish: dict[str, Any] | None) -> None:
        """Record how a session ended, as far as is known; a finish that was recorded before stays.

        Raises `NotRecordedError`.
        """
        with self._changes:
            record = self.find_session(session_id)
            if finish and not record.get("finish"):
                write_json(self._session_file(session_id), {**record, "finish": finish})

    def _run_folder(self, model_id: str) -> Path:
        return self.root / "runs" / encode_name(model_id)

    def _session_file(self, session_id: str) -> Path:
        return self.root / "sessions" / f"{encode_name(session_id)}.json"


def session_of(model_id: str) -> str:
    """The session that a training run belongs to."""
    return model_id.rsplit(RUN_MARK, 1)[0]


def encode_name(name: str) -> str:
    """`name` as a file name that every system takes ("a:b" becomes "a%3Ab"), never one that is hidden or a parent.

    Raises `CheckpointError` for what cannot be one: too long, or not text.
    """
    try:
        encoded = quote(name, safe=" ")
    except UnicodeEncodeError as err:
        raise CheckpointError(f"{name!r} holds characters that are no text") from err
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if not encoded or len(encoded) > LONGEST_NAME:
        raise CheckpointError(
            f"{name[:40]!r}... is no name or id here: 1 to {LONGEST_NAME} bytes, of which a character outside "
            "a-z A-Z 0-9 takes three or more"
        )
    return encoded


def _newest_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: record.get("created", 0.0), reverse=True)


def _readable(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    # One damaged file must not hide all the others.
    for path in paths:
        try:
            yield _read(path)
        except CheckpointError as err:
            logger.warning("%s", err)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (DataError, StorageError) as err:
        raise CheckpointError(f"{path}: cannot be read ({err}); delete that file") from err
