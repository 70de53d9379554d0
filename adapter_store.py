"""Checkpoints of the local engine on disk: written whole or not at all, listed, published, given a life, deleted.

A state folder holds one folder per training run, and in it one per checkpoint::

    runs/<model id>/weights/<name>/            adapter_config.json, adapter_model.safetensors, optimizer.safetensors,
    runs/<model id>/sampler_weights/<name>/    checkpoint.json
    runs/<model id>/external_weights/<name>/   as sampler_weights; fetched by URL, neither sampled nor trained here
    ephemeral/<id>/                            sampler weights without a name; gone when the server starts again

All kinds are PEFT adapter folders, so `PeftModel.from_pretrained(base, folder)` reads them. A checkpoint is written
into a temporary folder beside its place and renamed: readers see all of it or none. Nothing here reads the tensors.
`engine_records` keeps the runs' and sessions' own records in the same folder.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from durable_files import fsync_folder, read_json, remove_temporaries, storage_errors, write_json
from engine_records import RUN_FILE, EngineRecords, NotRecordedError, encode_name
from error_handling import CheckpointError, RunLockedError

logger = logging.getLogger("mock_tinker")

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
# What a checkpoint of each kind is good for.
USES = {
    "weights": "training continues from it, and it can be sampled",
    "sampler_weights": "it holds weights for sampling only",
    "external_weights": "its files are for download only",
}
TRAINED_KINDS = ("weights",)
SAMPLED_KINDS = ("weights", "sampler_weights")
INFO_FILE = "checkpoint.json"
TEMPORARY = ".tmp-"
REPLACED = ".old-"
SCHEME = "tinker://"
# The SDK puts a name into a URL as it is: these would cut it short, and a deletion would hit another checkpoint.
UNADDRESSABLE = frozenset("/?#%\\")


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


def parse_path(path: Any) -> tuple[str, str, str]:
    """(model id, kind, name) of a `tinker://` path. Raises `CheckpointError`."""
    parts = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
    if len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise CheckpointError(
            f"{path!r:.200} is not the path of a checkpoint; expected tinker://<model id>/<{'|'.join(KINDS)}>/<name>"
        )
    return parts[0], parts[1], parts[2]


def check_name(name: Any) -> str:
    """`name` when it can name a checkpoint, else `CheckpointError`."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 150
        or name != name.strip()
        or name[0] == "."
        or not UNADDRESSABLE.isdisjoint(name)
        or not name.isprintable()
    ):
        raise CheckpointError(
            f"{name!r:.80} cannot name a checkpoint: 1 to 150 printable characters, none of "
            f"{' '.join(sorted(UNADDRESSABLE))} (they mean something else in a URL), not starting with '.', no spaces "
            "at the ends"
        )
    encode_name(name)
    return name


class AdapterStore(EngineRecords):
    """The checkpoints under one state folder, which one process holds at a time. Methods may be called from any
    thread."""

    def __init__(self, state_dir: Path | str) -> None:
        super().__init__(state_dir)
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
            remove_temporaries(self.root, deep=True)

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
            self._remove(folder)
        else:
            os.replace(folder, target)

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        return self._run_folder(model_id) / kind / encode_name(name)

    def save(self, info: CheckpointInfo, write: Callable[[Path], None], *, overwrite: bool) -> Checkpoint:
        """Make a checkpoint: `write(folder)` fills a temporary folder, which then takes its place in one rename.

        Raises `CheckpointError` when the name is taken and `overwrite` is false, `StorageError` when the disk refuses.
        """
        folder = self._folder(info.model_id, info.kind, check_name(info.name))
        there = None if overwrite else self._look(folder)
        if there is not None and not _expired(there):
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
                with self._changes:
                    if folder.exists():
                        os.replace(folder, replaced)
                    try:
                        os.replace(temporary, folder)
                    except OSError:
                        if replaced.exists():
                            os.replace(replaced, folder)
                        raise
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            fsync_folder(folder.parent)
            if replaced.exists():
                self._remove(replaced)
        return Checkpoint(folder, info)

    def find(self, path: Any, kinds: Collection[str] = KINDS) -> Checkpoint:
        """The checkpoint at a `tinker://` path.

        Raises `NotRecordedError` when it is not there or its life is over, `CheckpointError` when it is of none of
        `kinds` or the path is none.
        """
        model_id, kind, name = parse_path(path)
        folder = self._folder(model_id, kind, name)
        info = self._look(folder)
        if info is None:
            there = [info.path for info in self.list(model_id)]
            hint = f"this run has {', '.join(there[-8:])}" if there else "this run has none"
            raise NotRecordedError(f"there is no checkpoint {path} in {self.root}; {hint}")
        if _expired(info):
            self._remove_expired(folder)
            raise NotRecordedError(f"the checkpoint {path} has expired and is gone")
        if kind not in kinds:
            raise CheckpointError(
                f"{path}: {USES[kind]}; what is asked for needs a path with /{'/ or /'.join(kinds)}/ in it"
            )
        return Checkpoint(folder, info)

    def _look(self, folder: Path) -> CheckpointInfo | None:
        # While a checkpoint takes another's place there is for a moment neither.
        with self._changes:
            return _read_info(folder) if (folder / INFO_FILE).is_file() else None

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that another state folder holds, under the same path; one that is here already stays."""
        info = checkpoint.info
        folder = self._folder(info.model_id, info.kind, info.name)
        if folder.exists():
            return
        self._write(folder, info, partial(_share_files, checkpoint.folder))
        run = checkpoint.folder.parent.parent / RUN_FILE
        if run.is_file() and not (folder.parent.parent / RUN_FILE).exists():
            write_json(folder.parent.parent / RUN_FILE, read_json(run))

    def copy(self, source: Checkpoint, model_id: str, expires_at: float | None) -> Checkpoint:
        """Give a checkpoint a second place, under another run; what is there already under that path stays.

        The files are shared, so it costs no space. Raises `CheckpointError` when `source` is gone by now.
        """
        copied = replace(source.info, model_id=model_id, created=time.time(), expires_at=expires_at, public=False)
        folder = self._folder(model_id, copied.kind, copied.name)
        with self._changes:
            if (folder / INFO_FILE).is_file():
                return Checkpoint(folder, _read_info(folder))
            source.check()
            return self._write(folder, copied, partial(_share_files, source.folder))

    def list(self, model_id: str | None = None) -> list[CheckpointInfo]:
        """Checkpoints of one run, or of all, oldest first. Those whose life is over are removed instead."""
        run = "*" if model_id is None else encode_name(model_id)
        found: list[CheckpointInfo] = []
        for folder in self.root.glob(f"runs/{run}"):
            found += self._list(folder)
        return sorted(found, key=lambda info: info.created)

    def _list(self, run: Path) -> tuple[CheckpointInfo, ...]:
        found: list[CheckpointInfo] = []
        # A run at a time: a checkpoint that is being replaced is in the list, and savers hardly wait.
        with self._changes:
            for path in run.glob(f"*/*/{INFO_FILE}"):
                if path.parts[-3] not in KINDS or path.parent.name.startswith((TEMPORARY, REPLACED)):
                    continue
                try:
                    info = self._look(path.parent)
                except CheckpointError as err:
                    # One damaged record must not hide all the others.
                    logger.warning("%s", err)
                    continue
                if info is not None:
                    found.append(info)
        expired = [info for info in found if _expired(info)]
        for info in expired:
            self._remove_expired(self._folder(info.model_id, info.kind, info.name))
        return tuple(info for info in found if info not in expired)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises `NotRecordedError` when it is not there."""
        checkpoint = self.find(path)
        with storage_errors(checkpoint.folder, "delete"):
            self._remove(checkpoint.folder)

    def update(self, path: str, **changes: Any) -> None:
        """Change fields of a checkpoint's record (`public`, `expires_at`)."""
        with self._changes:
            checkpoint = self.find(path)
            write_json(checkpoint.folder / INFO_FILE, asdict(replace(checkpoint.info, **changes)))

    def _remove_expired(self, folder: Path) -> None:
        with self._changes:
            # Another one may have taken its name meanwhile.
            info = self._look(folder)
            if info is not None and _expired(info):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        # Renamed first, so that a kill half way leaves nothing that looks like a checkpoint.
        doomed = folder.with_name(TEMPORARY + secrets.token_hex(4))
        with self._changes:
            if not folder.exists():  # another thread was faster
                return
            os.replace(folder, doomed)
        shutil.rmtree(doomed)


def _share_files(source: Path, target: Path) -> None:
    # The files of a checkpoint are never written to again, so two checkpoints may be one file on the disk.
    for path in checkpoint_files(source):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy(path, target / path.name)


def checkpoint_files(folder: Path) -> list[Path]:
    """The adapter's files in a checkpoint's folder, without the store's own record."""
    return sorted(path for path in folder.iterdir() if path.name != INFO_FILE and not path.name.startswith("."))


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
