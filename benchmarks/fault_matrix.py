"""What a run comes to when the service fails: every kind of fault at every call, as a Markdown table.

    python benchmarks/fault_matrix.py                  # all cells; a few minutes
    python benchmarks/fault_matrix.py optim_step       # those of some calls

Each cell is a whole run (`trainer_with_eval.run_loop` through the real SDK) against a local server with a fault plan.
A run that stops is resumed. At its end it must have the scores, the losses of every step, the learning rates and the
adapter's bytes of a run without faults, and its saved state must have taken as many optimizer steps as were asked for;
a cell that says how a run stops must have stopped so. Exit code 1 when a cell came out otherwise.
`tests/test_service_faults.py` runs a part of the same cells.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KEY = "tml-fault-matrix"
STEPS = 4
SOON = 0.02
ATTEMPTS = 4

CONFIG = {
    "base_model": "Qwen/Qwen3-8B",
    "train_file": "rows.jsonl",
    "eval_file": "rows.jsonl",
    "allow_overlap": True,
    "lora_rank": 4,
    "learning_rate": 5e-3,
    "min_lr": 0.0,
    "warmup_steps": 1,
    "batch_size": 2,
    "steps_per_round": STEPS,
    "save_every": 2,
    "max_rounds": 1,
    "eval_threshold": 1.0,
    "evaluation": {"evaluator": "simple", "max_tokens": 2},
    "selection": {"strategy": "none"},
}

Fault = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A fault at a call. `stops` are what the attempts that stop say, as patterns, each with its exit code; a run that
    is to end at its first attempt has none. `begin` are faults that bring a run to where the call is made at all;
    `restart`: the server is restarted while the fault, a delay, lasts."""

    call: str
    fault: str
    faults: tuple[Fault, ...]
    stops: tuple[tuple[int, str], ...] = ()
    begin: tuple[Fault, ...] = ()
    restart: bool = False

    @property
    def name(self) -> str:
        return f"{self.call}: {self.fault}"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit code and message of each attempt that stopped, the figures at its end, the optimizer steps
    in its last saved state, how often the faults acted, and what every attempt took in seconds."""

    stops: tuple[tuple[int, str], ...]
    figures: Any
    adapter: bytes
    optimizer_steps: int
    triggered: tuple[int, ...]
    seconds: float


def status(code: int, times: int | None = 2, **options: Any) -> Fault:
    return {"kind": "status", "status": code, "retry_after": SOON, "times": times, **options}


REFUSALS: dict[str, Fault] = {
    "429, three times": status(429, 3),
    "503, twice": status(503),
    "500, though carried out": status(500, 1, when="after"),
    "connection dropped": {"kind": "drop"},
    "answer lost": {"kind": "drop", "when": "after"},
    "delayed 0.4 s": {"kind": "delay", "seconds": 0.4},
}
# Every call that a run makes, and how many of that name pass before the fault.
CALLS: dict[str, int] = {
    "get_server_capabilities": 0,
    "training_runs": 0,
    "tokenizer_files": 0,
    "client/config": 0,
    "auth/token": 0,
    "client/dynamic_config": 0,
    "create_session": 0,
    "create_model": 0,
    "get_info": 0,
    "forward_backward": 3,
    "optim_step": 1,
    "save_weights": 0,
    "save_weights_for_sampler": 0,
    "create_sampling_session": 0,
    "samplers": 0,
    "asample": 2,
    "retrieve_future": 5,
    "load_weights": 0,
    "training_runs/checkpoints": 0,
    "sessions/finish": 0,
}
# The third step fails, so that the run is resumed from the state after the second.
INTERRUPTED: Fault = {"call": "optim_step", "kind": "fail", "after": 2}
STEP_FAILED = (1, r"update of step 3: the fault plan lets this optim_step fail")
# The SDK's first sign of life comes after ten seconds.
LONG_STEP: Fault = {"call": "optim_step", "kind": "delay", "seconds": 12, "after": 1}
FAILS = {
    "create_model": r"a new LoRA adapter on Qwen/Qwen3-8B: the fault plan lets this create_model fail",
    "forward_backward": r"gradients of step 3: the fault plan lets this forward_backward fail",
    "optim_step": r"update of step 2: the fault plan lets this optim_step fail",
    "save_weights": r"state after step 2: the fault plan lets this save_weights fail",
    "save_weights_for_sampler": r"weights of round 1: the fault plan lets this save_weights_for_sampler fail",
    "asample": r"1 of 4 samples of eval_file failed.*lets this asample fail",
    "load_weights": r"cannot be restored: .*the fault plan lets this load_weights fail",
}


KNOWS_NOTHING = r"does not know of the request any more; it was probably restarted|there is no (model|session)"
RESTARTED = {
    "forward_backward": (1, f"waiting for the gradients of step 3: .*({KNOWS_NOTHING})"),
    "optim_step": (1, f"waiting for the (gradients|update) of step [12]: .*({KNOWS_NOTHING})"),
    "save_weights": (1, f"waiting for the state after step 2: .*({KNOWS_NOTHING})"),
    "asample": (1, r"samples of eval_file failed"),
    "create_sampling_session": (1, r"samples of eval_file failed"),
}


def cells() -> list[Cell]:
    """The matrix, row by row."""
    found = []
    for call, after in CALLS.items():
        resumes = call == "load_weights"
        begin, stopped = ((INTERRUPTED,), (STEP_FAILED,)) if resumes else ((), ())
        for name, fault in REFUSALS.items():
            found.append(Cell(call, name, ({"call": call, "after": after, **fault},), stopped, begin))
        if call in FAILS:
            found.append(
                Cell(
                    call,
                    "fails",
                    ({"call": call, "kind": "fail", "after": after},),
                    (*stopped, (1, FAILS[call])),
                    begin,
                )
            )
    for call in ("create_session", "optim_step", "asample", "retrieve_future"):
        refused = {"call": call, "after": CALLS[call], **status(401, None)}
        found.append(Cell(call, "key refused from then on", (refused,), ((1, r"refused the API key"),)))
    found += [
        Cell(
            "create_sampling_session",
            "weights expired",
            ({"call": "create_sampling_session", "kind": "expire", "newest": "sampler_weights", "after": 1},),
            ((1, r"has expired"),),
        ),
        Cell(
            "load_weights",
            "state expired",
            ({"call": "load_weights", "kind": "expire", "newest": "weights"},),
            (STEP_FAILED,),
            (INTERRUPTED,),
        ),
    ]
    for name, fault in (("503", status(503, 1)), ("connection dropped", {"kind": "drop"}), ("410", status(410, 1))):
        found.append(Cell("session_heartbeat", name, ({"call": "session_heartbeat", **fault},), (), (LONG_STEP,)))
    for call in ("forward_backward", "optim_step", "save_weights", "asample", "create_sampling_session"):
        held = {"call": call, "kind": "delay", "seconds": 600, "after": CALLS[call]}
        found.append(Cell(call, "server restarted", (held,), (RESTARTED[call],), restart=True))
    return found


class FaultyServer:
    """A local server whose faults are those of a cell, and which can be restarted on its port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = self._new_server(0)
        self.base_url = self._server.start()

    def _new_server(self, port: int) -> Any:
        from mock_tinker import LocalTinkerServer

        return LocalTinkerServer(self._folder, port=port, threads=1, allow_faults=True)

    @property
    def faults(self) -> Any:
        return self._server.faults

    @property
    def store(self) -> Any:
        return self._server.engine.store

    def put(self, faults: Sequence[Fault]) -> None:
        """Set these faults in force in place of the others."""
        from fault_plan import parse_plan

        self.faults.put(parse_plan({"faults": list(faults)}, self.faults.calls))

    def restart_when_triggered(self) -> threading.Thread:
        """Restart the server, without faults, as soon as one of its faults acts."""

        def restart() -> None:
            while not any(fault["triggered"] for fault in self.faults.report()["faults"]):
                time.sleep(0.01)
            port = int(self.base_url.rsplit(":", 1)[1])
            self._server.stop()
            self._server = self._new_server(port)
            self._server.start()

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()


@contextmanager
def faulty_server(folder: Path) -> Iterator[FaultyServer]:
    """A running `FaultyServer` that the environment names as the service to use."""
    server = FaultyServer(folder)
    own = {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": server.base_url, "TINKER_MOCK": "", "TINKER_TELEMETRY": "0"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield server
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_to_the_end(folder: Path, server: FaultyServer, cell: Cell | None) -> Outcome:
    """Run under the cell's faults (None: without any) and resume as long as the run stops."""
    import config_schema
    import trainer_with_eval
    from error_handling import EvalLoopError

    folder.mkdir()
    rows = [{"question": f"The colour of thing {n}?", "answer": ("red", "blue")[n % 2]} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = config_schema.load_and_validate_config(folder / "config.json")
    server.put([*cell.begin, *cell.faults] if cell else [])
    restarting = server.restart_when_triggered() if cell and cell.restart else None
    stops: list[tuple[int, str]] = []
    triggered: list[int] = []
    started = time.monotonic()
    runs = folder / "runs"
    while True:
        resume = "" if runs.exists() and any(runs.iterdir()) else None
        try:
            summary = asyncio.run(
                trainer_with_eval.run_loop(
                    None if resume is not None else config, runs_dir=runs, resume=resume, console=False
                )
            )
            break
        except EvalLoopError as err:
            stops.append((err.exit_code, str(err)))
            if restarting:
                restarting.join(timeout=60)
            if len(stops) == ATTEMPTS or (cell and len(stops) > len(cell.stops)):
                raise
            # A fault that lasts, such as a refused key, is mended before the run is resumed.
            lasting = [fault["times"] is None for fault in server.faults.report()["faults"]]
            if any(lasting):
                triggered = [fault["triggered"] for fault in server.faults.report()["faults"]]
                server.put([])
    triggered = triggered or [fault["triggered"] for fault in server.faults.report()["faults"]]
    run_dir = runs / summary["run_id"]
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").open(encoding="utf-8")]
    steps = [(e["step"], e["lr"], e["loss"]) for e in events if e["event"] == "step" and not e.get("superseded")]
    scores = [(row["round"], row["score"], row["nll"], row["n"], row["errors"]) for row in summary["rounds"]]
    rows_of_state = [json.loads(line) for line in (run_dir / "checkpoints.jsonl").open(encoding="utf-8")]
    saved = server.store.find(rows_of_state[-1]["state_path"])
    return Outcome(
        stops=tuple(stops),
        figures=(summary["exit_code"], scores, steps),
        adapter=(saved.folder / "adapter_model.safetensors").read_bytes(),
        optimizer_steps=saved.info.optimizer_steps,
        triggered=tuple(triggered),
        seconds=time.monotonic() - started,
    )


def differences(cell: Cell, outcome: Outcome, unbroken: Outcome) -> list[str]:
    """What did not come out as the cell says."""
    found = []
    if outcome.figures != unbroken.figures:
        found.append(f"figures differ: {outcome.figures} and without faults {unbroken.figures}")
    if outcome.adapter != unbroken.adapter:
        found.append("the adapter's bytes differ")
    if outcome.optimizer_steps != STEPS:
        found.append(f"the saved state has taken {outcome.optimizer_steps} optimizer steps, not {STEPS}")
    if not cell.restart and not all(outcome.triggered):
        found.append(f"a fault never acted: {outcome.triggered}")
    if len(outcome.stops) != len(cell.stops):
        found.append(f"stopped {len(outcome.stops)} times, not {len(cell.stops)}: {outcome.stops}")
    for (code, message), (expected, pattern) in zip(outcome.stops, cell.stops, strict=False):
        if code != expected or not re.search(pattern, message, re.DOTALL):
            found.append(f"stopped with exit code {code} and {message!r}, not {expected} and /{pattern}/")
    return found


def told(outcome: Outcome) -> str:
    """The outcome of a cell that came out as it should, in words."""
    if not outcome.stops:
        return "ends as without faults"
    said = "; ".join(
        f"exit code {code}, \u201c{message.splitlines()[0][:110]}\u201d" for code, message in outcome.stops
    )
    return f"stops ({said}); resumed, it ends as without faults"


def main(arguments: Sequence[str]) -> int:
    """Run the cells of the calls named (none: all), print the table; 1 when one came out otherwise than it should."""
    from error_handling import EvalLoopError

    chosen = [cell for cell in cells() if not arguments or cell.call in arguments]
    wrong = 0
    print("| call | fault | outcome | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as temp, faulty_server(Path(temp) / "engine") as server:
        unbroken = run_to_the_end(Path(temp) / "unbroken", server, None)
        for number, cell in enumerate(chosen):
            try:
                outcome = run_to_the_end(Path(temp) / str(number), server, cell)
                found = differences(cell, outcome, unbroken)
                text, seconds = told(outcome) if not found else "WRONG: " + "; ".join(found), f"{outcome.seconds:.1f}"
            except EvalLoopError as err:
                found, text, seconds = [str(err)], f"WRONG: does not go on: {err}", "-"
            wrong += bool(found)
            print(f"| {cell.call} | {cell.fault} | {' '.join(text.split())} | {seconds} |", flush=True)
    print(f"\n{len(chosen)} cells, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
