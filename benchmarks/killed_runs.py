"""Runs of the loop in processes of their own that SIGKILL ends at a chosen moment, and what each run must hold.

    reference = one_attempt(["--config", "c.json", "--runs-dir", "a"], Path("a"))
    killed = one_attempt(["--config", "c.json", "--runs-dir", "b"], Path("b"), Aim((("ask optim_step", 3),)))
    one_attempt(["--resume", str(run_folder(Path("b")))], Path("b"))
    differences(outcome(run_folder(Path("a"))), outcome(run_folder(Path("b"))))

A process is forked from one that has imported everything, and runs the command line's `main`. It passes *moments*,
which are written down and can be aimed at:

    ask CALL, answered CALL      a request reached the embedded engine, and its answer was sent
    write FILE, append FILE      a file of the run folder is about to be opened for that
    replace FILE                 a temporary file or folder is about to be renamed to this one
    sync FOLDER                  a folder is about to be opened to be made durable, after a rename or a new file in it

What it runs is the program as it is: moments are seen by an audit hook and around the server's application.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "trainer_with_eval.py"
LONGEST_S = 900.0
"""A run that takes longer is taken to hang."""

# What the program imports on its way; the rest follows from these.
PRELOADED = [
    "training_run",
    "local_model",
    "engine_routes",
    "uvicorn",
    "tinker",
    "transformers",
    "inspect_eval",
    "inspect_ai",
    "hyperparameter_search",
    "matplotlib.pyplot",
    "report",
    "benchmarks.killed_runs",
]

# Random parts of names, which differ from run to run.
_RANDOM = (
    (re.compile(r"\.[0-9a-f]{8}\.tmp$"), ".tmp"),
    (re.compile(r"\.(tmp|old)-[0-9a-f]{8}"), r".\1"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "ID"),
)


@dataclasses.dataclass(frozen=True)
class Aim:
    """When a process is killed: `path` are patterns of moments with counts, passed one after the other; `delay` seconds
    after the last of them (after the start, when `path` is empty). None: at that moment itself."""

    path: tuple[tuple[str, int], ...] = ()
    delay: float | None = 0.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How a process ended: `code` as the shell has it (-9: killed), the moments it passed, seconds it ran, its output.

    `at` is the moment of the kill, where that was exact.
    """

    code: int
    moments: tuple[str, ...]
    seconds: float
    output: str
    at: str | None = None

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def start_fork_server() -> None:
    """Have the process that imports everything do so now, which takes many seconds once."""
    process = preload().Process(target=int)
    process.start()
    process.join()


def preload() -> Any:
    """The context whose processes are forked from one that has imported everything."""
    os.environ.update(TINKER_MOCK="1", TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "EVALOPS_API_KEY", "EVALOPS_API_URL"):
        os.environ.pop(name, None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def one_attempt(words: Sequence[str], runs_dir: Path, aim: Aim | None = None) -> Attempt:
    """Run the program with the command line `words`, which works in `runs_dir`, until it ends or `aim` is met."""
    context = preload()
    log, printed = _log(runs_dir), _printed(runs_dir)
    log.write_bytes(b"")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(list(words), runs_dir, aim, theirs), daemon=True)
    started = time.monotonic()
    process.start()
    theirs.close()
    try:
        if aim is not None and aim.delay is not None and _reached(ours):
            time.sleep(aim.delay)
            process.kill()
        process.join(LONGEST_S)
        if process.is_alive():
            raise RuntimeError(f"{' '.join(words)} did not end in {LONGEST_S:.0f} s; see {printed}")
    finally:
        process.kill()
        process.join()
        ours.close()
    moments = tuple(log.read_text("utf-8").split("\n")[:-1])
    exact = aim is not None and aim.delay is None and process.exitcode == -signal.SIGKILL
    return Attempt(
        process.exitcode,
        moments,
        time.monotonic() - started,
        printed.read_text("utf-8", errors="replace"),
        moments[-1] if exact else None,
    )


def plain_attempt(words: Sequence[str], runs_dir: Path, delay: float | None = None) -> Attempt:
    """The same as the shell does it, in a fresh interpreter; killed `delay` seconds after it took the run up."""
    preload()
    states = {path: path.read_bytes() for path in runs_dir.glob("[!.]*/state.json")}
    printed = _printed(runs_dir)
    started = time.monotonic()
    with printed.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words], cwd=runs_dir.parent, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        if delay is not None:
            while process.poll() is None and time.monotonic() < started + LONGEST_S:
                if any(path.read_bytes() != states.get(path) for path in runs_dir.glob("[!.]*/state.json")):
                    time.sleep(delay)
                    process.kill()
                    break
                time.sleep(0.01)
        code = process.wait(LONGEST_S)
    finally:
        process.kill()
        process.wait()
    return Attempt(code, (), time.monotonic() - started, printed.read_text("utf-8", errors="replace"))


def run_folder(runs_dir: Path) -> Path | None:
    """The one run folder in `runs_dir`; None before there is one."""
    return next((path.parent for path in runs_dir.glob("[!.]*/state.json")), None)


def _log(runs_dir: Path) -> Path:
    return runs_dir.with_name(f"{runs_dir.name}.moments")


def _printed(runs_dir: Path) -> Path:
    return runs_dir.with_name(f"{runs_dir.name}.out")


def _reached(pipe: Any) -> bool:
    try:
        return pipe.poll(LONGEST_S) and bool(pipe.recv_bytes())
    except EOFError:
        return False


# What follows runs in the process that is killed.


def _work(words: list[str], runs_dir: Path, aim: Aim | None, pipe: Any) -> None:
    output = os.open(_printed(runs_dir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(runs_dir.parent)
    sys.argv = [str(PROGRAM), *words]
    _Moments(runs_dir, aim, os.open(_log(runs_dir), os.O_WRONLY | os.O_APPEND), pipe).watch()
    import trainer_with_eval

    code = trainer_with_eval.main(words)
    pipe.close()
    sys.stdout.flush()
    sys.exit(code)


class _Moments:
    """Writes down the moments that a process passes, and ends it at the one that `aim` names."""

    def __init__(self, runs_dir: Path, aim: Aim | None, log: int, pipe: Any) -> None:
        self._prefix = f"{runs_dir}{os.sep}"
        self._left = [pattern for pattern, count in aim.path for _ in range(count)] if aim else []
        self._aim = aim
        self._log = log
        self._pipe = pipe
        self._lock = threading.RLock()

    def watch(self) -> None:
        sys.addaudithook(self._audit)
        self._watch_requests()
        if self._aim is not None and not self._left:
            self._arrive()

    def _watch_requests(self) -> None:
        from fastapi import FastAPI

        serve = FastAPI.__call__

        async def announced(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
            call = scope.get("path", "").removeprefix("/api/v1/")
            if scope["type"] != "http" or call in ("retrieve_future", "session_heartbeat"):
                return await serve(app, scope, receive, send)
            self._pass(f"ask {call}")
            await serve(app, scope, receive, send)
            self._pass(f"answered {call}")

        FastAPI.__call__ = announced  # type: ignore[method-assign, assignment]

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = details
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._pass_file("append" if flags & os.O_APPEND else "write", path)
            elif mode is None:
                self._pass_file("sync", path)
        elif event == "os.rename":
            self._pass_file("replace", details[1])

    def _pass_file(self, what: str, path: Any) -> None:
        if isinstance(path, int | bytes):
            return
        name = os.path.abspath(path)
        if name.startswith(self._prefix):
            name = "/".join(Path(name.removeprefix(self._prefix)).parts[1:])
            for pattern, plain in _RANDOM:
                name = pattern.sub(plain, name)
            self._pass(f"{what} {name}")

    def _pass(self, moment: str) -> None:
        with self._lock:
            os.write(self._log, f"{moment}\n".encode())
            if self._left and fnmatch.fnmatchcase(moment, self._left[0]):
                self._left.pop(0)
                if not self._left:
                    self._arrive()

    def _arrive(self) -> None:
        assert self._aim is not None
        if self._aim.delay is None:
            os.kill(os.getpid(), signal.SIGKILL)
        self._pipe.send_bytes(b"here")


# What a run holds.

# What differs between two runs that do the same: times, names, and what was paid for once more.
VOLATILE = frozenset(
    {"run_id", "pid", "host", "time", "at", "started_at", "updated_at", "stopped_at", "wall_s", "seconds"}
    | {"tokens", "forward_tokens", "cost", "logs", "command", "log_path", "resume_history", "config_digest"}
)


def outcome(run: Path) -> dict[str, Any]:
    """Everything in a finished run's folder that must not depend on whether the run was interrupted, by name."""
    state = _json(run / "state.json")
    found: dict[str, Any] = {
        "state.json": _lasting(state),
        "summary.json": _lasting(_json(run / "summary.json")),
        "config.json": (run / "config.json").read_text("utf-8"),
    }
    events = [row for row in _jsonl(run / "metrics.jsonl") if not row.get("superseded")]
    for name in ("step", "selection", "checkpoint", "evaluation", "decision", "finish"):
        found[f"metrics.jsonl: {name}"] = [_lasting(row) for row in events if row["event"] == name]
    for folder in ("selection", "likelihood", "scores", "samples"):
        for path in sorted((run / folder).glob("*.jsonl")):
            rows = sorted((_lasting(row) for row in _jsonl(path)), key=lambda row: str(row.get("id", "")))
            found[f"{folder}/{path.name}"] = rows if folder == "samples" else [_lasting(row) for row in _jsonl(path)]
    ended = {row["round"]: row for row in _jsonl(run / "checkpoints.jsonl") if row.get("sampler_path")}
    for round, row in sorted(ended.items()):
        found[f"checkpoint of round {round}"] = _lasting(row)
        for kind in ("state_path", "sampler_path"):
            for path in sorted(engine_folder(run, row[kind]).iterdir()):
                if path.name != "checkpoint.json":
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    found[f"{kind} of round {round}: {path.name}"] = digest
    return found


def engine_folder(run: Path, path: str) -> Path:
    """Where the embedded engine keeps the checkpoint that a `tinker://` path names."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    return run / "engine" / "runs" / model_id.replace(":", "%3A") / kind / name


def differences(expected: dict[str, Any], found: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two outcomes, a line each."""
    lines = []
    for key in sorted({*expected, *found}):
        was, now = expected.get(key), found.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differences(was, now, f"{prefix}{key}.")
        elif isinstance(was, list) and isinstance(now, list) and was != now:
            if len(was) != len(now):
                lines.append(f"{prefix}{key}: {len(was)} rows expected, {len(now)} found")
                continue
            pairs = zip(was, now, strict=False)
            number, pair = next(((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None))
            if pair and all(isinstance(one, dict) for one in pair):
                lines += differences(*pair, f"{prefix}{key}[{number}].")
            elif pair:
                lines.append(f"{prefix}{key}[{number}]: {pair[0]!r:.200} expected, {pair[1]!r:.200} found")
        elif was != now:
            lines.append(f"{prefix}{key}: {was!r:.200} expected, {now!r:.200} found")
    return lines


def faults(run: Path, kills: int) -> list[str]:
    """What is wrong in the folder of a run that was killed `kills` times and then finished, a line each."""
    found = []
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run)
        try:
            if path.suffix == ".json":
                _json(path)
            elif path.suffix == ".jsonl":
                _jsonl(path)
        except ValueError as err:
            found.append(f"{name} is not well-formed: {err}")
    if found:
        return found
    found += [f"{path.relative_to(run)} is left over" for path in sorted(half_done(run))]
    rows = [row for row in _jsonl(run / "metrics.jsonl") if not row.get("superseded")]
    for event in ("step", "selection", "checkpoint", "evaluation", "decision", "finish"):
        key = "step" if event == "step" else "round"
        times = Counter(row[key] for row in rows if row["event"] == event)
        found += [f"{event} of {key} {n} stands {count} times" for n, count in times.items() if count > 1]
    for path in sorted(run.glob("samples/round_[0-9][0-9].jsonl")):
        asked = Counter((row["task"], row["id"], row["epoch"]) for row in _jsonl(path))
        found += [f"{path.name}: {key} was answered {count} times" for key, count in asked.items() if count > 1]
    again = sum(row["event"] == "step" and bool(row.get("superseded")) for row in _jsonl(run / "metrics.jsonl"))
    most = kills * (_json(run / "config.json")["save_every"] + 1)
    if again > most:
        found.append(f"{again} steps were done again after {kills} kills; at most {most} should be")
    for row in {row["name"]: row for row in _jsonl(run / "checkpoints.jsonl")}.values():
        found += [
            f"checkpoint {row['name']}: {row[kind]} is not there"
            for kind in ("state_path", "sampler_path")
            if row.get(kind) and row["kind"] == "both" and not engine_folder(run, row[kind]).is_dir()
        ]
    with contextlib.suppress(FileNotFoundError):
        if not (run / "report.html").stat().st_size:
            found.append("report.html is empty")
    return found


def answered(run: Path) -> int:
    """Samples with an answer in the run folder, each once."""
    rows = [(path.name, row) for path in run.glob("samples/round_[0-9][0-9].jsonl") for row in _jsonl(path, torn=True)]
    return len({(name, row["task"], row["id"], row["epoch"]) for name, row in rows if row["error"] is None})


def has_trained(run: Path) -> bool:
    """Whether a step of round 1 was finished."""
    return any(row["event"] == "step" for row in _jsonl(run / "metrics.jsonl", torn=True))


def half_done(run: Path) -> set[Path]:
    """Temporary files and folders that are there now."""
    return {path for pattern in (".*.tmp", ".tmp-*", ".old-*") for path in run.rglob(pattern)}


def traces(run: Path) -> set[Path]:
    """What kills left: temporary files and folders, and states in the engine that the run did not get to write down."""
    recorded = {engine_folder(run, row["state_path"]) for row in _jsonl(run / "checkpoints.jsonl", torn=True)}
    saved = {path.parent for path in run.glob("engine/runs/*/weights/[!.]*/checkpoint.json")}
    return half_done(run) | (saved - recorded)


def phase_of_kill(run: Path, at: str | None, left: set[Path]) -> str:
    """What a kill hit: training, saving, evaluation, file replacement or between phases.

    `at` is the moment of an exact kill; `left` are its own `traces`.
    """
    moment = at or ""
    if fnmatch.fnmatchcase(moment, "* engine/*weights*") or re.match(r"\w+ (save_weights|checkpoints\.jsonl)", moment):
        return "saving"
    if re.match(r"(replace|sync) |write .*\.tmp$", moment):
        return "file replacement"
    if any("weights" in path.parent.name for path in left):
        return "saving"
    if left:
        return "file replacement"
    named = {"train": "training", "checkpoint": "saving", "evaluate": "evaluation", "baseline": "evaluation"}
    return named.get(_json(run / "state.json")["phase"], "between phases")


def _lasting(value: Any) -> Any:
    """`value` without what differs between runs that do the same; `tinker://` paths by kind and name."""
    if isinstance(value, dict):
        return {key: _lasting(part) for key, part in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_lasting(part) for part in value]
    if isinstance(value, str):
        return re.sub(r"tinker://[^/\s]+/", "tinker://RUN/", value)
    return value


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _jsonl(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    if lines.pop() and not torn:
        raise ValueError("its last line has no end")
    return [json.loads(line) for line in lines]
