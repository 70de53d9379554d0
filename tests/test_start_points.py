"""States that the service has lost: what a resumed run starts from, on the real engine, and that it ends the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mini_run import mini_run, run_folder
from sdk_clients import KEY

import config_schema
import durable_files
import tinker_backend
import trainer_with_eval
import training_run
from checkpoint_manager import CheckpointManager
from durable_files import StorageError
from error_handling import InterruptedRunError, ServiceError
from mock_tinker import LocalTinkerServer
from start_points import StartPoints

CHANGES = {"steps_per_round": 4, "save_every": 1, "max_rounds": 2}


@pytest.fixture(scope="module", autouse=True)
def _local_engine() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini_run(tmp_path_factory.mktemp("unbroken"), **CHANGES)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was asked to stop after the third step of round 2."""
    folder = tmp_path_factory.mktemp("stopped")
    real = StartPoints.save_within

    async def save(self: StartPoints, client: Any, round: int, *, done: int, step: int) -> None:
        await real(self, client, round, done=done, step=step)
        if (round, done) == (2, 3):
            raise InterruptedRunError("asked to stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.StartPoints, "save_within", save)
        with pytest.raises(InterruptedRunError):
            mini_run(folder, **CHANGES)
    return run_folder(folder)


@pytest.fixture
def resumable(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "runs" / stopped.name))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "checkpoints.jsonl").read_text().splitlines()]


def on_the_service(run_dir: Path) -> set[str]:
    """The names of the training states that the run's engine still has."""
    return {path.name for path in run_dir.glob("engine/runs/*/weights/*")}


def lose(run_dir: Path, *names: str, key: str = "state_path") -> None:
    """Delete checkpoints through the engine's REST API, as a person or the end of a life would."""
    lost = [row[key] for row in rows(run_dir) if row["name"] in names]
    assert len(lost) == len(names)

    async def delete(backend: tinker_backend.Backend) -> None:
        for path in lost:
            await backend.delete_checkpoint(path)

    with tinker_backend.connect(run_dir / "engine") as backend:
        asyncio.run(delete(backend))


def resume(run_dir: Path) -> dict[str, Any]:
    config = config_schema.load_and_validate_config(run_dir / "config.json")
    return asyncio.run(trainer_with_eval.run_loop(config, resume=str(run_dir), console=False))


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def warnings(run_dir: Path) -> str:
    return "\n".join(row["message"] for row in events(run_dir) if row["event"] == "warning")


def assert_ended_alike(run_dir: Path, unbroken: Path) -> None:
    def outcome(folder: Path) -> list[Any]:
        kept = ("round", "score", "nll", "learning_rate", "decision", "steps", "rows")
        return [[row[key] for key in kept] for row in json.loads((folder / "summary.json").read_text())["rounds"]]

    def steps(folder: Path) -> list[Any]:
        current = [row for row in events(folder) if row["event"] == "step" and not row.get("superseded")]
        return [(row["round"], row["step"], row["lr"], row["loss"]) for row in current]

    def told(folder: Path) -> list[Any]:
        names = ("selection", "checkpoint", "evaluation", "decision", "finish")
        return sorted(
            (row["round"], row["event"])
            for row in events(folder)
            if row["event"] in names and not row.get("superseded")
        )

    def weights(folder: Path) -> bytes:
        (last,) = [row for row in rows(folder) if row["round"] == 2 and row["kind"] == "both" and "gone" not in row]
        model, _, name = last["state_path"].removeprefix("tinker://").split("/")
        path = folder / "engine" / "runs" / model.replace(":", "%3A") / "weights" / name
        return (path / "adapter_model.safetensors").read_bytes()

    assert outcome(run_dir) == outcome(unbroken)
    assert steps(run_dir) == steps(unbroken)
    assert told(run_dir) == told(unbroken)
    assert weights(run_dir) == weights(unbroken)


def test_within_a_round_the_two_newest_states_are_kept_and_after_it_none(stopped, unbroken):
    assert on_the_service(stopped) == {"round_01", "round_02_step_000006", "round_02_step_000007"}
    gone = {row["name"]: row.get("gone") for row in rows(stopped)}
    assert gone["round_02_step_000005"] == "deleted"
    assert gone["round_02_step_000006"] is None
    assert on_the_service(unbroken) == {"round_01", "round_02"}


def test_without_a_loss_the_newest_state_serves(resumable, unbroken):
    resume(resumable)
    assert_ended_alike(resumable, unbroken)
    assert not [row for row in events(resumable) if row["event"] == "step" and row.get("superseded")]


def test_a_lost_state_falls_back_to_the_one_before_and_says_so(resumable, unbroken):
    lose(resumable, "round_02_step_000007")
    resume(resumable)
    assert "round_02_step_000007 any more (step 7)" in warnings(resumable)
    again = [row["step"] for row in events(resumable) if row["event"] == "step" and row.get("superseded")]
    assert again == [7]
    assert_ended_alike(resumable, unbroken)


def test_states_past_their_life_fall_back_to_the_start_of_the_round(resumable, unbroken):
    for path in resumable.glob("engine/runs/*/weights/round_02_step_*/checkpoint.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": 1.0}))
    resume(resumable)
    assert warnings(resumable).count("it expired or was deleted") == 2
    again = [row["step"] for row in events(resumable) if row["event"] == "step" and row.get("superseded")]
    assert again == [5, 6, 7]
    assert_ended_alike(resumable, unbroken)


def test_with_every_state_lost_the_run_goes_back_to_a_fresh_adapter(resumable, unbroken):
    lose(resumable, "round_01", "round_02_step_000006", "round_02_step_000007")
    before = (resumable / "samples" / "round_01.jsonl").read_bytes()
    resume(resumable)
    assert "the checkpoint of round 1 is gone, so the run goes back and trains that round again" in warnings(resumable)
    again = [row["step"] for row in events(resumable) if row["event"] == "step" and row.get("superseded")]
    assert again == [1, 2, 3, 4, 5, 6, 7]
    assert (resumable / "samples" / "round_01.superseded.jsonl").read_bytes() == before
    assert_ended_alike(resumable, unbroken)
    state = json.loads((resumable / "state.json").read_text())
    first = state["rounds"][1]
    # What the run did before it went back is no part of the round's time, by which the next one is judged.
    assert first["seconds"] == first["wall_s"] - state["went_back_s"] < first["wall_s"] - state["rounds"][0]["wall_s"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state_path": None}, "has no saved state, passed over"),
        ({"state_path": "tinker://run/sampler_weights/x"}, "holds sampler weights, which have no optimizer"),
    ],
)
def test_a_newest_row_that_training_cannot_use_is_passed_over_with_the_reason(resumable, unbroken, change, reason):
    written = rows(resumable)
    written[-1] = {key: value for key, value in {**written[-1], **change}.items() if value is not None}
    (resumable / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    resume(resumable)
    assert reason in warnings(resumable)
    assert_ended_alike(resumable, unbroken)


def test_lost_weights_of_a_round_being_evaluated_are_saved_again_or_trained_again(unbroken, tmp_path):
    for number, key in enumerate(("sampler_path", "state_path")):
        run_dir = Path(shutil.copytree(unbroken, tmp_path / str(number) / unbroken.name))
        with CheckpointManager.open(run_dir) as folder:
            state = folder.load_state()
            done = {**state["completed"], "2": ["select", "train", "checkpoint"]}
            rounds = [row for row in state["rounds"] if row["round"] < 2]
            folder.update_state(status="interrupted", round=2, phase="evaluate", completed=done, rounds=rounds)
        (run_dir / "samples" / "round_02.jsonl").unlink()
        lose(run_dir, "round_02", key=key)
        resume(run_dir)
        told = "the weights are saved again" if key == "sampler_path" else "the checkpoint of round 2 is gone"
        assert told in warnings(run_dir)
        (run_dir / "checkpoints.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(run_dir)[:-2] + rows(run_dir)[-1:])
        ) if key == "sampler_path" else None
        assert_ended_alike(run_dir, unbroken)


def test_a_deletion_that_fails_is_a_note_and_no_failure(tmp_path, monkeypatch, capsys):
    faults = [{"call": "training_runs/checkpoints", "kind": "status", "status": 403, "times": None}]
    with LocalTinkerServer(tmp_path / "server", threads=1, fault_plan=faults) as server:
        monkeypatch.delenv("TINKER_MOCK")
        monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        run_dir = mini_run(tmp_path, console=True, **{**CHANGES, "max_rounds": 1})
        assert server.faults.report()["faults"][0]["triggered"] >= 2
    assert "is not needed any more and could not be deleted" in capsys.readouterr().out
    assert [row.get("gone") for row in rows(run_dir)] == [None] * 4


def test_a_kill_between_any_event_and_its_phase_s_end_repeats_nothing(unbroken, tmp_path, monkeypatch):
    real = CheckpointManager.phase_done
    left = ["baseline", "select", "checkpoint", "evaluate", "submit", "decide", "finish"]

    def stop_once(self: CheckpointManager, round: int, *phases: str, **fields: Any) -> None:
        if left and left[0] in phases:
            raise InterruptedRunError(f"before {left.pop(0)} is done")
        real(self, round, *phases, **fields)

    monkeypatch.setattr(CheckpointManager, "phase_done", stop_once)
    with pytest.raises(InterruptedRunError):
        mini_run(tmp_path, **CHANGES)
    run_dir = run_folder(tmp_path)
    while left:
        with pytest.raises(InterruptedRunError):
            resume(run_dir)
    resume(run_dir)
    assert_ended_alike(run_dir, unbroken)
    for kept in run_dir.glob("samples/*.jsonl"):
        assert len(kept.read_text().splitlines()) == 4, kept


def test_a_phase_and_its_result_are_one_write(tmp_path, monkeypatch):
    with CheckpointManager.create(tmp_path, {}) as folder:
        written: list[Any] = []
        real = durable_files.write_json
        monkeypatch.setattr(durable_files, "write_json", lambda path, value: (written.append(value), real(path, value)))
        folder.phase_done(1, "submit", "decide", result={"score": 0.5}, step=4)
    assert [(state["completed"], state["rounds"], state["step"]) for state in written] == [
        ({"1": ["submit", "decide"]}, [{"score": 0.5, "round": 1}], 4)
    ]


def test_a_damaged_line_in_the_events_is_an_error_that_names_it(resumable, unbroken, capsys):
    path = resumable / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"event": "st\n', *lines[2:]]))
    assert trainer_with_eval.main(["--resume", str(resumable)]) == 1
    told = capsys.readouterr().err
    assert "metrics.jsonl:3: damaged line in the middle of the file" in told
    assert "delete that line if it can be spared, then go on" in told
    assert f"--resume {resumable}" in told
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*kept[:2], *kept[3:]]))
    assert trainer_with_eval.main(["--resume", str(resumable)]) == 3
    assert_ended_alike(resumable, unbroken)


def test_a_lowered_target_ends_a_run_as_met_by_the_best_round_without_training_more(resumable, unbroken, tmp_path):
    finished = Path(shutil.copytree(unbroken, tmp_path / "finished" / unbroken.name))
    for run_dir in (resumable, finished):
        # The small model gets nothing right in four steps: round 1 is given a score that the others do not reach.
        with CheckpointManager.open(run_dir) as folder:
            folder.save_round_result(1, {"score": 0.5})
        trained = [row for row in events(run_dir) if row["event"] == "step"]
        assert trainer_with_eval.main(["--resume", str(run_dir), "eval_threshold=0.4"]) == 0
        ended = json.loads((run_dir / "summary.json").read_text())
        assert ended["best_round"] == 1
        assert ended["final_checkpoint"] == ended["rounds"][1]["checkpoint"]
        assert ended["reason"].startswith("Round 1 scored 0.500")
        assert len([row for row in events(run_dir) if row["event"] == "step"]) == len(trained)
        history = json.loads((run_dir / "state.json").read_text())["resume_history"]
        assert history[-1]["changes"] == {"eval_threshold": {"was": 1.0, "now": 0.4}}
        assert trainer_with_eval.main(["--resume", str(run_dir)]) == 0


def test_patience_and_budget_that_are_raised_reopen_a_run_that_missed_its_target(tmp_path, capsys):
    run_dir = mini_run(tmp_path, learning_rate=1e-5, max_rounds=2, decision={"patience": 1}, budget={"tokens": 10**9})

    def ended() -> list[str]:
        return [row["decision"] for row in json.loads((run_dir / "summary.json").read_text())["rounds"]]

    assert ended() == ["baseline", "patience_spent"]
    words = ["--resume", str(run_dir)]
    assert trainer_with_eval.main(words) == 3
    assert "is finished: " in capsys.readouterr().out
    spent = sum(json.loads((run_dir / "summary.json").read_text())["tokens"].values())
    assert trainer_with_eval.main([*words, "decision.patience=9", f"budget.tokens={spent}"]) == 3
    assert f"{spent} tokens of budget.tokens" in capsys.readouterr().out
    assert ended() == ["baseline", "patience_spent"]
    assert trainer_with_eval.main([*words, "decision.patience=9", f"budget.tokens={spent + 1}"]) == 3
    assert ended() == ["baseline", "budget_spent"]
    assert trainer_with_eval.main([*words, "budget.tokens=null"]) == 3
    assert ended() == ["baseline", "not_improved", "target_missed"]
    history = json.loads((run_dir / "state.json").read_text())["resume_history"]
    assert [sorted(row["changes"]) for row in history] == [["budget.tokens", "decision.patience"], ["budget.tokens"]]


def test_a_disk_that_refuses_a_checkpoint_ends_the_run_with_the_reason_and_a_resume_goes_on(tmp_path, unbroken, caplog):
    resource = pytest.importorskip("resource")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # What a full disk refuses, this limit refuses: a write of the real file, in the middle.
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
        with pytest.raises(ServiceError, match=r"the state after step 1: cannot write .*File too large; .*then go on"):
            mini_run(tmp_path, **CHANGES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in caplog.text
    run_dir = run_folder(tmp_path)
    assert json.loads((run_dir / "state.json").read_text())["status"] == "failed"
    assert not rows(run_dir) if (run_dir / "checkpoints.jsonl").exists() else True
    resume(run_dir)
    assert_ended_alike(run_dir, unbroken)


def test_a_run_folder_that_vanishes_is_told(tmp_path, monkeypatch):
    real = StartPoints.save_within

    async def move_away(self: StartPoints, *args: Any, **fields: Any) -> None:
        await real(self, *args, **fields)
        if self.folder.run_dir.exists():
            self.folder.run_dir.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(training_run.StartPoints, "save_within", move_away)
    with pytest.raises(StorageError, match=r"cannot .* the folder is gone: put it back, then go on"):
        mini_run(tmp_path, **CHANGES)
    monkeypatch.undo()
    monkeypatch.setenv("TINKER_MOCK", "1")
    assert not list((tmp_path / "runs").iterdir())
    name = json.loads((tmp_path / "elsewhere" / "state.json").read_text())["run_id"]
    back = (tmp_path / "elsewhere").rename(tmp_path / "runs" / name)
    assert resume(back)["exit_code"] == 3


def test_the_seconds_spent_are_written_down_while_the_run_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "KEEP_TIME_S", 0.01)
    kept: list[float] = []
    real = CheckpointManager.update_state

    def update(self: CheckpointManager, **fields: Any) -> None:
        if fields.keys() == {"wall_s"}:
            kept.append(fields["wall_s"])
        real(self, **fields)

    monkeypatch.setattr(CheckpointManager, "update_state", update)
    mini_run(tmp_path, eval_threshold=0.0)
    assert len(kept) > 3
    assert kept == sorted(set(kept))
