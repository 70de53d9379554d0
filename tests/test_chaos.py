"""A run killed at ten moments, by SIGKILL, and resumed each time ends as one that was never interrupted.

`benchmarks/chaos.py`, of which this is the small edition, makes hundreds of such kills in more kinds of runs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mini_run import mini_run

from benchmarks import chaos, killed_runs

SEED = 221


@pytest.mark.timeout(900)
def test_runs_killed_at_ten_moments_end_as_if_they_had_not_been(tmp_path):
    folder = tmp_path / "with spaces"
    options = ["--kills", "10", "--seed", str(SEED), "--only", "goes back", "--folder", str(folder)]
    # A process of its own, because a Python process has one fork server.
    done = subprocess.run([sys.executable, chaos.__file__, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    results = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    assert all(result["differences"] == [] for result in results)
    assert results[0]["plain"] == "last"  # the shell's command line ended it
    kills = [kill for result in results for kill in result["kills"] if kill["counted"]]
    assert len(kills) >= 10
    assert {kill["phase"] for kill in kills} >= set(chaos.COUNTED), kills
    # Between the gradients and the optimizer's step.
    assert any(kill["aim"].startswith("ask optim_step") for kill in kills), kills

    unbroken = killed_runs.run_folder(folder / "reference_0")
    assert unbroken is not None
    rounds = json.loads((unbroken / "summary.json").read_text("utf-8"))["rounds"]
    assert [row["decision"] for row in rounds] == ["baseline", "improved", "rolled_back", "target_missed"]
    assert rounds[3]["learning_rate"] < rounds[2]["learning_rate"] < rounds[1]["learning_rate"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        return mini_run(tmp_path_factory.mktemp("unbroken"))


def again(content: bytes) -> bytes:
    """The first line once more, at the end."""
    return content + content.split(b"\n")[0] + b"\n"


def other_end(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("metrics.jsonl", lambda content: content.replace(b'"loss": ', b'"loss": 1'), "metrics.jsonl: step[0].loss"),
        ("metrics.jsonl", again, "evaluation of round 0 stands 2 times"),
        ("metrics.jsonl", lambda content: content + b'{"event": "st', "metrics.jsonl is not well-formed"),
        ("samples/round_01.jsonl", again, "was answered 2 times"),
        ("selection/round_01.jsonl", again, "selection/round_01.jsonl: 2 rows expected, 3 found"),
        ("summary.json", lambda content: content.replace(b"target_missed", b"improved"), "rounds[1].decision"),
        ("engine/runs/*/weights/round_01/optimizer.safetensors", other_end, "state_path of round 1"),
        ("engine/runs/*/sampler_weights/round_01/adapter_model.safetensors", other_end, "sampler_path of round 1"),
    ],
)
def test_what_differs_is_told(unbroken, tmp_path, file, change, told):
    run = tmp_path / unbroken.name
    shutil.copytree(unbroken, run)
    (changed,) = run.glob(file)
    changed.write_bytes(change(changed.read_bytes()))
    wrong = killed_runs.faults(run, kills=0) or killed_runs.differences(
        killed_runs.outcome(unbroken), killed_runs.outcome(run)
    )
    assert told in "\n".join(wrong)


def test_a_temporary_file_that_a_kill_left_is_told(unbroken, tmp_path):
    run = tmp_path / unbroken.name
    shutil.copytree(unbroken, run)
    (run / "samples" / ".round_01.jsonl.0123abcd.tmp").touch()
    assert killed_runs.faults(run, kills=0) == ["samples/.round_01.jsonl.0123abcd.tmp is left over"]
