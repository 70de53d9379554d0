"""One writer per run folder: an operating-system lock that dies with its process.

    lock = RunLock(run / "run.lock")
    lock.acquire(command="...")   # RunLockedError names pid and host of the process that holds it
    lock.release()

The file holds who took the lock last; only the operating system's lock says whether it is held now.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from durable_files import storage_errors
from error_handling import RunLockedError

if os.name == "nt":
    import msvcrt
else:
    import fcntl

# Far behind the content, because Windows lets nobody read a locked byte.
_LOCKED_BYTE = 1 << 30
_PATIENCE_S = 0.5
_BUSY = frozenset({errno.EACCES, errno.EAGAIN, errno.EDEADLK})

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """An exclusive lock on the file `path`, between processes and between objects of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True while this object holds the lock."""
        return self._descriptor is not None

    def acquire(self, **about: Any) -> None:
        """Take the lock and write pid, host and `about` into its file.

        Raises `RunLockedError` when another process has it. Waits up to half a second before that: a reader that
        only looks (`is_held`) has the lock for an instant.
        """
        if self.held:
            return
        with storage_errors(self.path, "lock"):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                deadline = time.monotonic() + _PATIENCE_S
                while not _try_lock(descriptor, exclusive=True):
                    if time.monotonic() > deadline:
                        raise RunLockedError(self._refusal())
                    time.sleep(0.02)
                holder = {"pid": os.getpid(), "host": socket.gethostname(), **about}
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, (json.dumps(holder) + "\n").encode("utf-8"))
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Give the lock back; a no-op when it is not held. The file stays: without it two could hold a lock each."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        _unlock(descriptor)
        os.close(descriptor)

    def is_held(self) -> bool:
        """True when this object or a living process has the lock."""
        if self.held:
            return True
        try:
            # Shared locks need no right to write: a report can be made of someone else's run.
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            with storage_errors(self.path, "look at the lock"):
                if not _try_lock(descriptor, exclusive=False):
                    return True
                _unlock(descriptor)
            return False
        finally:
            os.close(descriptor)

    def holder(self) -> Mapping[str, Any]:
        """Who took the lock last: pid, host and what else was said. Empty when that cannot be read."""
        try:
            holder = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _refusal(self) -> str:
        holder = self.holder()
        who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
        return (
            f"{self.path.parent} is held by {who}; wait until it ends or stop it "
            "(the lock goes with its process, no file need be deleted)"
        )

    def _forget(self) -> None:
        # In a forked child: close the copy of the descriptor without unlocking, else a child that outlives the
        # parent keeps the run locked.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _try_lock(descriptor: int, *, exclusive: bool) -> bool:
    try:
        if os.name == "nt":
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in _BUSY:
            return False
        raise
    return True


def _unlock(descriptor: int) -> None:
    if os.name == "nt":
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
