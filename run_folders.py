"""Find run folders: the newest one, or the one a person means.

    run = resolve_run("runs", None)                        # the newest
    run = resolve_run("runs", "20260102T030405Z-0a1b2c")   # by its id, the unique start of one, or a path

A folder is a run when it is named like one and has a `state.json`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from durable_files import fsync_folder, storage_errors
from error_handling import RunNotFoundError

# A folder that is being filled; one so old was left by a process that was killed.
_UNFINISHED = ".unfinished-"
_LEFT_AFTER_S = 3600

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def new_run_id() -> str:
    """An id for a run that starts now: `YYYYMMDDTHHMMSSZ-<6 hex>` in UTC; ids sort in the order of their making."""
    now = datetime.now(UTC)
    # The microsecond fills 20 of the 24 bits, so that two runs of one second sort rightly too.
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond << 4 | secrets.randbelow(16):06x}"


@contextmanager
def new_run_folder(runs_dir: Path | str) -> Iterator[tuple[Path, Path]]:
    """A folder to fill within the block, and the run folder that it becomes, in one rename, at the block's end.

    Killed before that, there is no run; what is left behind is hidden, and removed when a run is made an hour later.
    """
    runs_dir = Path(runs_dir)
    final = runs_dir / new_run_id()
    unfinished = runs_dir / f"{_UNFINISHED}{final.name}"
    with storage_errors(final, "make the run folder"):
        unfinished.mkdir(parents=True)
        for old in runs_dir.glob(f"{_UNFINISHED}*"):
            with suppress(FileNotFoundError):  # another process has made its run of it meanwhile
                if time.time() - old.stat().st_mtime > _LEFT_AFTER_S:
                    shutil.rmtree(old, ignore_errors=True)
        try:
            yield unfinished, final
            fsync_folder(unfinished)
            os.replace(unfinished, final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        fsync_folder(runs_dir)


def list_runs(runs_dir: Path | str) -> list[Path]:
    """The run folders in `runs_dir`, newest first; anything else in there is passed over."""
    runs_dir = Path(runs_dir)
    if not runs_dir.is_dir():
        return []
    with storage_errors(runs_dir, "list"):
        return sorted((path for path in runs_dir.iterdir() if _is_run(path)), key=lambda run: run.name, reverse=True)


def find_latest_run(runs_dir: Path | str) -> Path | None:
    """The newest run folder in `runs_dir` by the time in its name, None when there is none."""
    return next(iter(list_runs(runs_dir)), None)


def resolve_run(runs_dir: Path | str, name: Path | str | None = None) -> Path:
    """The run folder meant: None is the newest, else a run id (or the unique start of one) in `runs_dir`, or a path.

    Raises `RunNotFoundError` that lists the runs there are.
    """
    runs = list_runs(runs_dir)
    if name is None:
        if runs:
            return runs[0]
        raise RunNotFoundError(f"there is no run in {Path(runs_dir)}; start one with --config FILE")
    for path in (Path(runs_dir) / name, Path(name)):
        if (path / "state.json").is_file():
            return path
    matching = [run for run in runs if run.name.startswith(str(name))]
    if len(matching) == 1 and str(name):
        return matching[0]
    reason = f"{len(matching)} runs begin with {str(name)!r}" if len(matching) > 1 else f"there is no run {str(name)!r}"
    raise RunNotFoundError(f"{reason}; {_listing(matching if len(matching) > 1 else runs, Path(runs_dir))}")


def _listing(runs: Sequence[Path], runs_dir: Path) -> str:
    if not runs:
        return f"{runs_dir} holds none"
    more = f" and {len(runs) - 10} older ones" if len(runs) > 10 else ""
    return f"choose one of {runs_dir}: {', '.join(run.name for run in runs[:10])}{more}"


def _is_run(path: Path) -> bool:
    return _RUN_ID.fullmatch(path.name) is not None and (path / "state.json").is_file()
