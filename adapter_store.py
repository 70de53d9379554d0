"""Checkpoints of the local engine on disk: written whole or not at all, listed, published, given a life, deleted.

A state folder holds one folder per training run, and in it one per checkpoint::

    runs/<model id>/run.json
    runs/<model id>/weights/<name>/           adapter_config.json, adapter_model.safetensors, optimizer.safetensors,
    runs/<model id>/sampler_weights/<name>/   checkpoint.json
    ephemeral/<id>/                           sampler weights without a name; gone when the server starts again

Both kinds are PEFT adapter folders, so `PeftModel.from_pretrained(base, folder)` reads them. A checkpoint is written
into a temporary folder beside its place and renamed: readers see all of it or none. Nothing here reads the tensors.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from durable_files import fsync_folder, read_json, storage_errors, write_json
from error_handling import CheckpointError, RunLockedError

KINDS = {"weights": "training", "sampler_weights": "sampler"}
INFO_FILE = "checkpoint.json"
RUN_FILE = "run.json"
TEMPORARY = ".tmp-"
REPLACED = ".old-"
SCHEME = "tinker://"


@dataclass(frozen=True)
class AdapterSpec:
    """What defines an adapter's shape. `train_unembed` is what the client asked for; it has no effect on a base
    model whose input and output embeddings are one matrix."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class CheckpointInfo:
    """What `checkpoint.json` says. `step` counts the optimizer steps behind the weights; times are Unix seconds;
    `fingerprint` tells the base model's weights apart; `optimizer_steps` is 0 without optimizer state."""

    model_id: str
    kind: str
    name: str
    spec: AdapterSpec
    fingerprint: str
    step: int
    optimizer_steps: int
    created: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    size_bytes: int = 0

    @property
    def path(self) -> str:
        """The `tinker://` path that names it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there: its folder and what it says of itself."""

    folder: Path
    info: CheckpointInfo

    @property
    def key(self) -> str:
        """Tells it from another checkpoint, also from one that replaced it under the same name."""
        return f"{self.folder}@{self.info.created}"

    def check(self) -> None:
        """Raise `CheckpointError` when the folder no longer holds this very checkpoint."""
        if not (self.folder / INFO_FILE).is_file() or _read_info(self.folder).created != self.info.created:
            raise CheckpointError(f"{self.info.path} was deleted or replaced since this client was created")


def parse_path(path: str) -> tuple[str, str, str]:
    """(model id, kind, name) of a `tinker://` path. Raises `CheckpointError`."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise CheckpointError(
            f"{path!r} is not the path of a checkpoint; expected tinker://<model id>/<{'|'.join(KINDS)}>/<name>"
        )
    return parts[0], parts[1], parts[2]


def check_name(name: Any) -> str:
    """`name` when it can name a checkpoint, else `CheckpointError`."""
    if not isinstance(name, str) or not 0 < len(name) <= 150 or "/" in name or name != name.strip() or name[0] == ".":
        raise CheckpointError(
            f"{name!r} cannot name a checkpoint: 1 to 150 characters without '/', not starting with '.', no spaces at "
            "the ends"
        )
    return name


class AdapterStore:
    """The checkpoints under one state folder, which one process holds at a time."""

    def __init__(self, state_dir: Path | str) -> None:
        self.root = Path(state_dir)
        self._lock: Any = None

    def open(self) -> None:
        """Lock the folder and clear away what a killed process left half done.

        Raises `RunLockedError` while a living process holds it, `StorageError` when it cannot be written.
        """
        import filelock

        with storage_errors(self.root, "write to"):
            (self.root / "runs").mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.root / "engine.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout as err:
                raise RunLockedError(
                    f"{self.root}: the engine's state is in use by another process; stop that one, or choose another "
                    "state folder"
                ) from err
            self._lock = lock
            shutil.rmtree(self.root / "ephemeral", ignore_errors=True)
            for leftover in self.root.glob(f"runs/*/*/{REPLACED}*"):
                self._undo_replacement(leftover)
            for leftover in self.root.glob(f"runs/*/*/{TEMPORARY}*"):
                shutil.rmtree(leftover)

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _undo_replacement(self, folder: Path) -> None:
        # Killed between the two renames of an overwrite: the old checkpoint goes back to its place.
        info = _read_info(folder)
        target = self._folder(info.model_id, info.kind, info.name)
        if target.exists():
            _remove(folder)
        else:
            os.replace(folder, target)

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        return self.root / "runs" / _encode(model_id) / kind / _encode(name)

    def add_run(self, model_id: str, run: dict[str, Any]) -> None:
        """Record a training run, so that it is listed after a restart as well."""
        folder = self.root / "runs" / _encode(model_id)
        with storage_errors(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN_FILE, {"model_id": model_id, **run})

    def runs(self) -> list[dict[str, Any]]:
        """Every recorded training run, newest first."""
        found = [read_json(path) for path in self.root.glob(f"runs/*/{RUN_FILE}")]
        return sorted(found, key=lambda run: run.get("created", 0.0), reverse=True)

    def find_run(self, model_id: str) -> dict[str, Any]:
        """The record of one training run. Raises `CheckpointError`."""
        path = self.root / "runs" / _encode(model_id) / RUN_FILE
        if not path.is_file():
            raise CheckpointError(f"there is no training run {model_id!r} in {self.root}")
        return read_json(path)

    def save(self, info: CheckpointInfo, write: Callable[[Path], None], *, overwrite: bool) -> Checkpoint:
        """Make a checkpoint: `write(folder)` fills a temporary folder, which then takes its place in one rename.

        Raises `CheckpointError` when the name is taken and `overwrite` is false, `StorageError` when the disk refuses.
        """
        folder = self._folder(info.model_id, info.kind, check_name(info.name))
        if folder.exists() and not overwrite and not _expired(_read_info(folder)):
            raise CheckpointError(f"{info.path} exists already; choose another name, or save with overwrite=True")
        return self._write(folder, info, write)

    def save_ephemeral(self, info: CheckpointInfo, write: Callable[[Path], None]) -> Checkpoint:
        """Make a checkpoint without a name, which nothing lists and the next start of a server removes."""
        return self._write(self.root / "ephemeral" / secrets.token_hex(8), info, write)

    def remove_ephemeral(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint without a name."""
        with storage_errors(checkpoint.folder, "delete"):
            shutil.rmtree(checkpoint.folder)

    def _write(self, folder: Path, info: CheckpointInfo, write: Callable[[Path], None]) -> Checkpoint:
        token = secrets.token_hex(4)
        temporary = folder.with_name(TEMPORARY + token)
        replaced = folder.with_name(REPLACED + token)
        with storage_errors(folder, "write"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            try:
                write(temporary)
                size = sum(path.stat().st_size for path in temporary.iterdir())
                info = replace(info, size_bytes=size)
                write_json(temporary / INFO_FILE, asdict(info))
                for path in temporary.iterdir():
                    _fsync_file(path)
                fsync_folder(temporary)
                if folder.exists():
                    os.replace(folder, replaced)
                os.replace(temporary, folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            fsync_folder(folder.parent)
            if replaced.exists():
                _remove(replaced)
        return Checkpoint(folder, info)

    def find(self, path: str) -> Checkpoint:
        """The checkpoint at a `tinker://` path. Raises `CheckpointError` when it is not there or its life is over."""
        model_id, kind, name = parse_path(path)
        folder = self._folder(model_id, kind, name)
        if not (folder / INFO_FILE).is_file():
            there = [info.path for info in self.list(model_id)]
            hint = f"this run has {', '.join(there[-8:])}" if there else "this run has none"
            raise CheckpointError(f"there is no checkpoint {path} in {self.root}; {hint}")
        info = _read_info(folder)
        if _expired(info):
            _remove(folder)
            raise CheckpointError(f"the checkpoint {path} has expired and is gone")
        return Checkpoint(folder, info)

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that another state folder holds, under the same path; one that is here already stays."""
        info = checkpoint.info
        folder = self._folder(info.model_id, info.kind, info.name)
        if folder.exists():
            return

        def copy(target: Path) -> None:
            for path in checkpoint.folder.iterdir():
                if path.name != INFO_FILE:
                    shutil.copy(path, target / path.name)

        self._write(folder, info, copy)
        run = checkpoint.folder.parent.parent / RUN_FILE
        if run.is_file() and not (folder.parent.parent / RUN_FILE).exists():
            write_json(folder.parent.parent / RUN_FILE, read_json(run))

    def list(self, model_id: str | None = None) -> list[CheckpointInfo]:
        """Checkpoints of one run, or of all, oldest first. Those whose life is over are removed instead."""
        run = _encode(model_id) if model_id is not None else "*"
        found = []
        for kind in KINDS:
            for path in self.root.glob(f"runs/{_escape(run, model_id)}/{kind}/*/{INFO_FILE}"):
                if path.parent.name.startswith((TEMPORARY, REPLACED)):
                    continue
                info = _read_info(path.parent)
                if _expired(info):
                    _remove(path.parent)
                else:
                    found.append(info)
        return sorted(found, key=lambda info: info.created)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises `CheckpointError` when it is not there."""
        checkpoint = self.find(path)
        with storage_errors(checkpoint.folder, "delete"):
            _remove(checkpoint.folder)

    def update(self, path: str, **changes: Any) -> None:
        """Change fields of a checkpoint's record (`public`, `expires_at`)."""
        checkpoint = self.find(path)
        write_json(checkpoint.folder / INFO_FILE, asdict(replace(checkpoint.info, **changes)))

    def add_session(self, session_id: str, session: dict[str, Any]) -> None:
        """Record a client's session."""
        folder = self.root / "sessions"
        with storage_errors(folder, "write to"):
            folder.mkdir(exist_ok=True)
        write_json(folder / f"{_encode(session_id)}.json", {"session_id": session_id, **session})

    def sessions(self) -> Iterator[dict[str, Any]]:
        """Recorded sessions, newest first."""
        found = [read_json(path) for path in self.root.glob("sessions/*.json")]
        yield from sorted(found, key=lambda session: session.get("created", 0.0), reverse=True)


def _encode(name: str) -> str:
    """`name` as a file name that every system takes ("a:b" becomes "a%3Ab")."""
    return quote(name, safe=" ")


def _escape(run: str, model_id: str | None) -> str:
    # Only "*" of our own may act as a pattern; a quoted name holds no other pattern character.
    return run if model_id is None else run.replace("[", "[[]")


def _remove(folder: Path) -> None:
    # Renamed first, so that a kill half way leaves nothing that looks like a checkpoint.
    doomed = folder.with_name(TEMPORARY + secrets.token_hex(4))
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _expired(info: CheckpointInfo) -> bool:
    return info.expires_at is not None and info.expires_at <= time.time()


def _read_info(folder: Path) -> CheckpointInfo:
    try:
        record = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
        return CheckpointInfo(**{**record, "spec": AdapterSpec(**record["spec"])})
    except (OSError, ValueError, TypeError, KeyError) as err:
        raise CheckpointError(f"{folder / INFO_FILE}: cannot be read ({err}); delete that folder") from err


def _fsync_file(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
