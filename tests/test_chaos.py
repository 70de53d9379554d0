"""A run killed at ten moments, by SIGKILL, and resumed each time ends as one that was never interrupted.

`benchmarks/chaos.py` makes hundreds of such kills, in more kinds of runs.
"""

from __future__ import annotations

import json
import random
import shutil

import pytest

from benchmarks import chaos, killed_runs
from benchmarks.killed_runs import Aim


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> chaos.Reference:
    """An unbroken run of three rounds, of which the second loses what the first won and the third starts over."""
    folder = tmp_path_factory.mktemp("chaos")
    return chaos.reference_run(chaos.write_inputs(folder / "inputs")["goes back"], folder / "reference")


def test_the_unbroken_run_decays_and_goes_back(reference):
    rounds = reference.outcome["summary.json"]["rounds"]
    assert [row["decision"] for row in rounds] == ["baseline", "improved", "rolled_back", "target_missed"]
    assert rounds[3]["learning_rate"] < rounds[2]["learning_rate"] < rounds[1]["learning_rate"]
    assert reference.code == 3


@pytest.mark.timeout(480)
def test_a_run_killed_at_ten_moments_ends_as_if_it_had_not_been(reference, tmp_path):
    chance = random.Random(11)
    kills = []
    while len(kills) < 10:
        result = chaos.killed_run(reference, tmp_path / f"run_{len(kills)}", chance, kills=10 - len(kills))
        assert result["differences"] == [], result["kills"]
        kills += result["kills"]
    hit = {kill["phase"] for kill in kills}
    assert hit >= {"training", "saving", "evaluation", "file replacement"}, kills


@pytest.mark.timeout(480)
def test_a_run_killed_between_gradients_and_step_goes_on_by_the_plain_command_line(reference, tmp_path):
    runs_dir = tmp_path / "runs with spaces"
    # Steps 1 and 2 of the canary, which tries the engine, and the first four of round 1.
    aim = Aim((("replace selection/round_01.jsonl", 1), ("ask optim_step", 4)), None)
    started = killed_runs.one_attempt(["--config", str(reference.config), "--runs-dir", str(runs_dir)], runs_dir, aim)
    run = killed_runs.run_folder(runs_dir)
    assert started.killed
    assert started.at == "ask optim_step"
    asked = [row for row in started.moments if row in ("answered forward_backward", "answered optim_step")]
    assert asked[-1] == "answered forward_backward"
    ended = killed_runs.plain_attempt(["--resume", str(run)], runs_dir)
    assert ended.code == reference.code, ended.output
    assert killed_runs.faults(run, kills=1) == []
    assert killed_runs.differences(reference.outcome, killed_runs.outcome(run)) == []
    history = json.loads((run / "state.json").read_text("utf-8"))["resume_history"]
    assert [row["phase"] for row in history] == ["train"]


def first_line_again(content: bytes) -> bytes:
    return content + content.split(b"\n")[0] + b"\n"


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("metrics.jsonl", lambda content: content.replace(b'"loss": ', b'"loss": 1', 1), "metrics.jsonl: step[0].loss"),
        ("metrics.jsonl", first_line_again, "evaluation of round 0 stands 2 times"),
        ("metrics.jsonl", lambda content: content + b'{"event": "st', "metrics.jsonl is not well-formed"),
        ("samples/round_01.jsonl", first_line_again, "was answered 2 times"),
        ("selection/round_02.jsonl", first_line_again, "selection/round_02.jsonl: 25 rows expected, 26 found"),
        (
            "summary.json",
            lambda content: content.replace(b"rolled_back", b"improved"),
            "summary.json.rounds[2].decision",
        ),
        (
            "engine/*/weights/round_01/optimizer.safetensors",
            lambda content: content[:-1] + b"!",
            "state_path of round 1",
        ),
        (
            "engine/*/sampler_weights/round_03/adapter_model.safetensors",
            lambda content: content[:-1] + b"!",
            "of round 3",
        ),
    ],
)
def test_what_differs_is_told(reference, tmp_path, file, change, told):
    run = tmp_path / reference.run.name
    shutil.copytree(reference.run, run)
    (changed,) = run.glob(file.replace("engine/*", "engine/runs/*"))
    changed.write_bytes(change(changed.read_bytes()))
    wrong = killed_runs.faults(run, kills=0) or killed_runs.differences(reference.outcome, killed_runs.outcome(run))
    assert told in "\n".join(wrong)
