"""Limits changed while a run is interrupted: the last decision is looked at again, and nothing paid is forgotten."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from mini_run import mini_run, run_folder

import paid_tokens
import preparation
import run_opening
import trainer_with_eval
import training_run
from checkpoint_manager import CheckpointManager
from error_handling import InterruptedRunError
from start_points import StartPoints

CHANGES = {"learning_rate": 1e-5, "steps_per_round": 2, "save_every": 1}


@pytest.fixture(scope="module", autouse=True)
def _local_engine() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        yield


def stopped_before_the_end(folder: Path, **changes: Any) -> Path:
    """A run that was killed after its last decision and before the end was written down."""

    async def finish(self: training_run.TrainingRun) -> dict[str, Any]:
        raise InterruptedRunError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.TrainingRun, "finish", finish)
        with pytest.raises(InterruptedRunError):
            mini_run(folder, **CHANGES, **changes)
    return run_folder(folder)


@pytest.fixture(scope="module")
def in_round_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after the first of round 2's two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    real = StartPoints.save_within

    async def save(self: StartPoints, client: Any, round: int, *, done: int, step: int) -> None:
        await real(self, client, round, done=done, step=step)
        if round == 2:
            raise InterruptedRunError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.StartPoints, "save_within", save)
        with pytest.raises(InterruptedRunError):
            mini_run(folder, **CHANGES, max_rounds=3)
    return run_folder(folder)


def resume(run_dir: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    code = trainer_with_eval.main(["--resume", str(run_dir), *overrides])
    return code, json.loads((run_dir / "summary.json").read_text())


def steps(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == "step"]


def test_a_target_that_was_met_stays_met_as_it_was_under_a_raised_one(tmp_path, capsys):
    run_dir = stopped_before_the_end(tmp_path, eval_threshold=0.0)
    code, summary = resume(run_dir, "eval_threshold=0.95")
    told = capsys.readouterr().out
    assert "the changed settings are left out: it met its target of 0, so there is nothing left to do" in told
    assert (code, summary["threshold"]) == (0, 0.0)
    assert json.loads((run_dir / "config.json").read_text())["eval_threshold"] == 0.0
    assert json.loads((run_dir / "state.json").read_text())["resume_history"][-1]["changes"] == {}
    assert resume(run_dir, "eval_threshold=0.95")[0] == 0
    assert "do not let it go on: it met its target of 0" in capsys.readouterr().out


def test_more_rounds_given_before_the_end_was_written_are_trained(tmp_path):
    run_dir = stopped_before_the_end(tmp_path, max_rounds=1)
    took = json.loads((run_dir / "state.json").read_text())["rounds"][1]["seconds"]
    code, summary = resume(run_dir, "max_rounds=2")
    assert json.loads((run_dir / "state.json").read_text())["rounds"][1]["seconds"] == took
    assert (code, [row["decision"] for row in summary["rounds"]][2:]) == (3, ["target_missed"])
    assert sum(summary["taken_back"]["tokens"].values()) == 0


@pytest.mark.parametrize(
    ("override", "decision"),
    [
        ("max_rounds=1", "target_missed"),
        ("budget.tokens=10", "budget_spent"),
        ("decision.patience=1", "patience_spent"),
        ("eval_threshold=0", "target_met"),
    ],
)
def test_a_limit_lowered_in_the_middle_of_a_round_ends_the_run_and_what_it_took_is_counted(
    in_round_two, tmp_path, capsys, override, decision
):
    run_dir = Path(shutil.copytree(in_round_two, tmp_path / "runs" / in_round_two.name))
    before = steps(run_dir)
    code, summary = resume(run_dir, override)
    assert (code, len(summary["rounds"])) == (0 if decision == "target_met" else 3, 2)
    assert summary["rounds"][-1]["decision"] == decision
    assert len(steps(run_dir)) == len(before) == 3
    assert [row["step"] for row in steps(run_dir) if row.get("superseded")] == [3]
    # Nothing was trained more, and the step of the round that was left is in the totals, by its own.
    assert summary["tokens"]["train"] == sum(row["tokens"] for row in before)
    assert summary["taken_back"]["tokens"]["train"] == before[-1]["tokens"]
    assert (
        f"({sum(summary['taken_back']['tokens'].values()):,} of these for rounds taken back)" in capsys.readouterr().out
    )
    assert "taken back" in (run_dir / "report.html").read_text()
    rows = [json.loads(line) for line in (run_dir / "checkpoints.jsonl").read_text().splitlines()]
    assert {row["name"]: row.get("gone") for row in rows}["round_02_step_000003"] == "deleted"
    assert not list(run_dir.glob("engine/runs/*/weights/round_02*"))


@pytest.mark.parametrize("limit", ["max_rounds=2", "decision.patience=2", "budget.seconds=100000"])
def test_a_limit_that_changes_no_decision_takes_nothing_back(in_round_two, tmp_path, limit):
    run_dir = Path(shutil.copytree(in_round_two, tmp_path / "runs" / in_round_two.name))
    _, summary = resume(run_dir, limit)
    assert len(summary["rounds"]) >= 3
    assert not [row for row in steps(run_dir) if row.get("superseded")]
    assert not list(run_dir.glob("*/*.superseded*"))


def test_of_a_round_that_is_begun_only_the_rest_must_fit_the_budget(in_round_two, tmp_path):
    with CheckpointManager.open(in_round_two, lock=False) as folder:
        whole = sum(paid_tokens.spent(folder).values())
        begun = sum(paid_tokens.paid_tokens(folder, 2).values())
        rows = folder.round_results()
    assert begun > 0
    assert whole == sum(sum(row["tokens"].values()) for row in rows) + begun
    one_more = sum(rows[1]["tokens"].values())
    for limit, rounds in ((whole + one_more - begun - 1, 2), (whole + 2 * one_more - begun - 1, 3)):
        run_dir = Path(shutil.copytree(in_round_two, tmp_path / str(rounds) / in_round_two.name))
        _, summary = resume(run_dir, f"budget.tokens={limit}")
        assert len(summary["rounds"]) == rounds
        assert summary["rounds"][-1]["decision"] == "budget_spent"


def test_a_run_killed_before_its_engine_had_the_starting_adapter_goes_on(in_round_two, tmp_path):
    source = Path(shutil.copytree(in_round_two, tmp_path / "runs" / in_round_two.name))
    rows = [json.loads(line) for line in (source / "checkpoints.jsonl").read_text().splitlines()]
    state = next(row["state_path"] for row in rows if row["name"] == "round_01")
    real = run_opening.create_run_folder

    def create_and_die(*args: Any, **fields: Any) -> CheckpointManager:
        real(*args, **fields).close()
        raise InterruptedRunError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_opening, "create_run_folder", create_and_die)
        with pytest.raises(InterruptedRunError):
            mini_run(tmp_path, **CHANGES, init_from=state, eval_threshold=0.0)
    (run_dir,) = set((tmp_path / "runs").iterdir()) - {source}
    code, summary = resume(run_dir)
    assert (code, summary["final_state"]) == (0, state)


def test_ctrl_c_during_the_checks_of_a_resume_changes_nothing(in_round_two, tmp_path, monkeypatch):
    run_dir = Path(shutil.copytree(in_round_two, tmp_path / "runs" / in_round_two.name))
    before = {name: (run_dir / name).read_bytes() for name in ("config.json", "state.json", "metrics.jsonl")}
    real = preparation.prepare

    def prepare(*args: Any, **fields: Any) -> preparation.Prepared:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **fields)

    monkeypatch.setattr(preparation, "prepare", prepare)
    assert trainer_with_eval.main(["--resume", str(run_dir), "max_rounds=1"]) == 130
    assert {name: (run_dir / name).read_bytes() for name in before} == before
