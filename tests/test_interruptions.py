"""Runs that real signals stop in the middle of an evaluation, and output that nobody reads to its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from mini_run import colour_rows, mini_run, write_config
from sdk_clients import KEY

import trainer_with_eval
from error_handling import DamagedFileError, TrainingError
from mock_tinker import LocalTinkerServer

ROOT = Path(__file__).resolve().parent.parent
ROWS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTinkerServer]:
    with LocalTinkerServer(tmp_path_factory.mktemp("server"), threads=1, allow_faults=True) as running:
        yield running


def delay_samples(server: LocalTinkerServer, seconds: float, *, after: int = 0) -> None:
    """Answer sampling requests so much later, once `after` more have come; counting starts anew."""
    fault = {"call": "asample", "kind": "delay", "seconds": seconds, "after": after, "times": None}
    requests.put(f"{server.base_url}/api/v1/faults", json={"faults": [fault]}, timeout=30).raise_for_status()


def asked(server: LocalTinkerServer) -> int:
    """Sampling requests since the last `delay_samples`."""
    assert server.faults is not None
    return int(server.faults.report()["faults"][0]["seen"])


def start(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "trainer_with_eval.py"), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not true():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("evaluator", "signals"), [("simple", (signal.SIGINT, "twice")), ("inspect", (signal.SIGTERM, "kill"))]
)
def test_answered_samples_are_never_asked_again(tmp_path, monkeypatch, server, evaluator, signals):
    first, second = signals
    monkeypatch.delenv("TINKER_MOCK", raising=False)
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    runs = tmp_path / "runs"
    config = write_config(
        tmp_path, colour_rows(ROWS), eval_threshold=0.0, evaluation={"evaluator": evaluator, "max_tokens": 2}
    )

    def answered() -> list[str]:
        return [line for path in runs.glob("*/samples/round_00.jsonl") for line in path.read_text().splitlines()]

    # Asked to stop once: what is under way is let come and kept, and nothing else is asked.
    delay_samples(server, 0.2)
    process = start("--config", config, "--runs-dir", runs)
    wait_until(lambda: asked(server) >= 5, process)
    process.send_signal(first)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 130, told
    (run_dir,) = runs.iterdir()
    assert f"--resume {run_dir}" in told
    assert "Traceback" not in told
    kept = answered()
    assert 5 <= len(kept) == asked(server) < ROWS
    assert json.loads((run_dir / "state.json").read_text())["status"] == "interrupted"

    # Ended at once with requests on their way: their samples are asked again, and only these.
    delay_samples(server, 600, after=10)
    process = start("--resume", run_dir)
    wait_until(lambda: len(answered()) >= len(kept) + 10, process)
    if second == "twice":
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    else:
        process.kill()
    told, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if second == "twice" else -signal.SIGKILL)
    assert answered()[: len(kept)] == kept
    kept = answered()

    delay_samples(server, 0.001, after=10_000)
    assert trainer_with_eval.main(["--resume", str(run_dir)]) == 0
    assert asked(server) == ROWS - len(kept)
    assert answered()[: len(kept)] == kept
    assert len({json.loads(line)["id"] for line in answered()}) == len(answered()) == ROWS


def test_a_reader_that_leaves_ends_no_run(tmp_path):
    config = write_config(tmp_path, colour_rows(4), eval_threshold=0.0)
    process = start("--config", config, "--runs-dir", tmp_path / "runs", TINKER_MOCK="1")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("service:")
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert json.loads((run_dir / "state.json").read_text())["status"] == "completed"


def test_a_disk_that_fills_up_in_a_save_is_told_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    # A limit of the operating system stands for the disk: the optimizer's file is larger, every other file smaller.
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000));"
        "import trainer_with_eval; sys.exit(trainer_with_eval.main(sys.argv[1:]))"
    )
    config = write_config(tmp_path, colour_rows(4), steps_per_round=2)
    runs = ["--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-c", limited, "--config", str(config), *runs],
        cwd=ROOT,
        check=False,
        env={**os.environ, "TINKER_MOCK": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot write" in done.stderr
    assert "weights/round_01: File too large; check that disk" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    resumed = start("--resume", *runs, TINKER_MOCK="1")
    shown, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 3, shown
    assert "Traceback" not in shown


def test_code_of_the_users_that_ends_the_program_is_no_end_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\n\ndef leave(request):\n    sys.exit(0)\n")
    config = write_config(tmp_path, colour_rows(4), selection={"strategy": "leaving:leave"})
    process = start("--config", config, "--runs-dir", tmp_path / "runs", TINKER_MOCK="1")
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 1, shown
    assert "code that the run called ended the program (sys.exit(0))" in shown


def test_with_no_standard_output_at_all_a_run_comes_to_its_end(tmp_path: Path) -> None:
    config = write_config(tmp_path, colour_rows(4), eval_threshold=0.0)
    words = [sys.executable, str(ROOT / "trainer_with_eval.py"), "--config", str(config), "--runs-dir"]
    command = f'exec "$@" "{tmp_path}/runs" >&-'
    done = subprocess.run(
        ["bash", "-c", command, "run", *words],
        check=False,
        env={**os.environ, "TINKER_MOCK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*/summary.json"))


def test_weights_that_are_not_finite_give_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_MOCK", "1")
    with pytest.raises(TrainingError, match=r"round 1: the likelihood of the targets is nan.*lower learning_rate"):
        mini_run(tmp_path, steps_per_round=1, learning_rate=1e30)
    state = json.loads(next(tmp_path.glob("runs/*/state.json")).read_text())
    assert [row["round"] for row in state["rounds"]] == [0]


def test_rows_are_not_chosen_without_all_samples_of_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The items of a task are known from its samples alone: with one of them missing, a row could ask what it asks.
    monkeypatch.setenv("TINKER_MOCK", "1")
    run = mini_run(tmp_path, steps_per_round=1)
    samples = run / "samples" / "round_01.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[1:]))
    with pytest.raises(DamagedFileError, match=r"round_01\.jsonl: holds 3 of the 4 samples of round 1"):
        asyncio.run(
            trainer_with_eval.run_loop(
                trainer_with_eval.load_config(
                    trainer_with_eval.build_parser().parse_args(["--config", str(tmp_path / "config.json")]),
                    ["max_rounds=2"],
                ),
                runs_dir=run.parent,
                resume=str(run),
                console=False,
            )
        )
