"""The whole loop against SkyRL's Tinker server: an unbroken run, and two that are killed and resumed.

    benchmarks/foreign_engine.sh               # makes the engine's environment first, then starts this
    python benchmarks/foreign_engine.py FOLDER # FOLDER/environment holds SkyRL 0.4.0

One run trains two rounds undisturbed. A second is killed (SIGKILL) in the middle of round 2 and resumed. A third is
killed while it evaluates round 1, the engine is killed with it and started again, and the run resumed. All three must
end alike; printed are their scores, their losses and the largest difference. Exit code 1 when they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300
PHASE_LIMIT_S = 1800
# The engine pads every sampling batch to one size, so that it compiles once.
ENGINE = {"max_lora_adapters": 16, "max_lora_rank": 16, "sample_max_num_sequences": 32}
# Twenty invented facts, memorised in two rounds; training and evaluation rows are the same on purpose.
RUN = {
    "train_file": str(ROOT / "data" / "demo_data.jsonl"),
    "eval_file": str(ROOT / "data" / "demo_data.jsonl"),
    "allow_overlap": True,
    "lora_rank": 8,
    "learning_rate": 6e-3,
    "warmup_steps": 2,
    "batch_size": 10,
    "steps_per_round": 20,
    "max_rounds": 2,
    "eval_threshold": 1.0,
    "save_every": 6,
    "seed": 7,
    "evaluation": {"evaluator": "simple", "max_tokens": 12},
    "selection": {"strategy": "none"},
}


class ForeignEngine:
    """SkyRL's server over `folder`, on a free loopback port; its database and checkpoints outlive a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "base_model"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Lay out the base model as the engine wants it, and forget what earlier servers kept."""
        for name in ("base_model", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(ROOT / "data" / "base_model", self.model)
        (self.folder / "state").mkdir()
        path = self.model / "config.json"
        # It reads the older name of the setting, and its CPU kernels have no half precision.
        config = {**json.loads(path.read_text()), "dtype": "float32", "torch_dtype": "float32"}
        path.write_text(json.dumps(config, indent=1))

    def start(self) -> float:
        """Start the server and return the seconds until it answered. It loads the model after that."""
        venv = self.folder / "environment"
        state = self.folder / "state"
        environment = {
            **os.environ,
            "VIRTUAL_ENV": str(venv),
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "HF_HUB_OFFLINE": "1",
        }
        # The engine starts its worker with the `uv run` flags that it finds in its own parent's command.
        command = ["uv", "run", "--no-project", "-m", "skyrl.tinker.api", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--base-model", str(self.model), "--backend", "jax"]
        command += ["--backend-config", json.dumps(ENGINE), "--checkpoints-base", str(state / "checkpoints")]
        command += ["--database-url", f"sqlite:///{state / 'tinker.db'}"]
        started = time.monotonic()
        with (self.folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        wait_until(self._answers, "the engine's first answer", START_LIMIT_S, self._check)
        return time.monotonic() - started

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{self.base_url}/api/v1/healthz", timeout=5) as answer:
                return answer.status == 200
        return False

    def _check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit(f"the engine ended with code {self._process.returncode}; see {self.folder / 'engine.log'}")

    def kill(self) -> None:
        """SIGKILL to the server and its worker."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class LoopRun:
    """One run of `trainer_with_eval.py` as a process, in a runs folder of its own."""

    def __init__(self, name: str, folder: Path, engine: ForeignEngine) -> None:
        self.name = name
        self.folder = folder / "runs" / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        config = self.folder / "config.json"
        config.write_text(json.dumps({"base_model": str(engine.model), **RUN}))
        self._begin = ["--config", str(config), "--runs-dir", str(self.folder)]
        self._environment = {
            **{key: value for key, value in os.environ.items() if key != "TINKER_MOCK"},
            "TINKER_BASE_URL": engine.base_url,
            "TINKER_API_KEY": "tml-foreign-engine",
            "TINKER_TELEMETRY": "0",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False) -> None:
        words = ["--resume", "--runs-dir", str(self.folder)] if resume else self._begin
        with (self.folder / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "trainer_with_eval.py"), *words],
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def finish(self) -> None:
        """Wait for the process; anything but a finished run ends the benchmark."""
        assert self._process is not None
        code = self._process.wait(timeout=PHASE_LIMIT_S)
        if code not in (0, 3):
            log = (self.folder / "output.log").read_text(errors="replace")
            raise SystemExit(f"{self.name}: the loop ended with code {code}:\n{log[-3000:]}")

    def kill_when(self, ready: Callable[[], bool], what: str) -> None:
        """SIGKILL to the loop as soon as `ready`."""
        process = self._process
        assert process is not None

        def check() -> None:
            if process.poll() is not None:
                raise SystemExit(f"{self.name}: the loop ended before {what}; see {self.folder / 'output.log'}")

        wait_until(ready, what, PHASE_LIMIT_S, check)
        process.kill()
        process.wait()

    def _file(self, name: str) -> Path | None:
        return next(iter(self.folder.glob(f"*Z-*/{name}")), None)

    def stands_at(self, phase: str, round: int) -> bool:
        path = self._file("state.json")
        state = json.loads(path.read_text()) if path else {}
        return (state.get("phase"), state.get("round")) == (phase, round)

    def steps(self) -> dict[int, dict[str, Any]]:
        """The last event of each optimizer step: a resumed run does some of them again."""
        path = self._file("metrics.jsonl")
        events = []
        for line in path.read_text().splitlines() if path else []:
            with contextlib.suppress(ValueError):  # the line that the kill tore
                events.append(json.loads(line))
        return {event["step"]: event for event in events if event["event"] == "step"}

    def rounds(self) -> list[dict[str, Any]]:
        path = self._file("summary.json")
        assert path is not None
        rounds: list[dict[str, Any]] = json.loads(path.read_text())["rounds"]
        return rounds

    def restored(self) -> list[str]:
        return [line for line in (self.folder / "output.log").read_text().splitlines() if line.startswith("restoring")]


def wait_until(ready: Callable[[], bool], what: str, limit_s: float, check: Callable[[], None]) -> None:
    """Poll `ready`, raising whatever `check` raises meanwhile; `SystemExit` after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not ready():
        check()
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up after {limit_s:.0f} s waiting for {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    print(f"{what} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"  {time.monotonic() - started:.0f} s", flush=True)


def compare(unbroken: LoopRun, other: LoopRun) -> bool:
    """Print how `other` came out beside `unbroken`; True when both are the same."""
    losses, other_losses = ({step: e["loss"] for step, e in run.steps().items()} for run in (unbroken, other))
    figures, other_figures = ([(row["score"], row["nll"]) for row in run.rounds()] for run in (unbroken, other))
    apart = max(abs(losses[step] - other_losses.get(step, float("nan"))) for step in losses)
    same = losses == other_losses and figures == other_figures
    shown = ", ".join(f"{score:.3f} / {nll:.4f}" for score, nll in other_figures)
    last = other_losses[max(other_losses)]
    print(f"{other.name}: score / nats per target token by round: {shown}; loss of the last step {last:.4f}")
    for line in other.restored():
        print(f"  {line}")
    if other is not unbroken:
        verdict = "exactly as unbroken" if same else "NOT as unbroken"
        print(f"  {verdict}: the {len(losses)} step losses differ by at most {apart:.2g}")
    return same


def tell_pace(run: LoopRun) -> None:
    """Print how long a step took once everything was compiled."""
    ended = [datetime.datetime.fromisoformat(event["time"]) for _, event in sorted(run.steps().items())]
    seconds = [(after - before).total_seconds() for before, after in itertools.pairwise(ended)]
    print(f"{run.name}: a step took {statistics.median(seconds):.2f} s (median of {len(seconds)})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the engine's environment is and everything is kept")
    folder = parser.parse_args().folder.resolve()
    engine = ForeignEngine(folder)
    engine.prepare()
    try:
        print(f"engine started in {engine.start():.0f} s at {engine.base_url}; its log is {folder / 'engine.log'}")
        unbroken, killed, restarted = (LoopRun(name, folder, engine) for name in ("unbroken", "killed", "restarted"))
        with timed("unbroken: two rounds, with whatever the engine compiles on the way"):
            unbroken.start()
            unbroken.finish()
        with timed("killed: the loop is killed in round 2 after step 28 and resumed"):
            killed.start()
            killed.kill_when(lambda: max(killed.steps(), default=0) >= 28, "step 28")
            killed.start(resume=True)
            killed.finish()
        with timed("restarted: loop and engine are killed during the evaluation of round 1, and both start again"):
            restarted.start()
            restarted.kill_when(lambda: restarted.stands_at("evaluate", 1), "the evaluation of round 1")
            engine.kill()
            engine.start()
            restarted.start(resume=True)
            restarted.finish()
    finally:
        engine.kill()
    print()
    tell_pace(unbroken)
    return 0 if all([compare(unbroken, run) for run in (unbroken, killed, restarted)]) else 1


if __name__ == "__main__":
    sys.exit(main())
