"""States that the service has lost: what a resumed run starts from, on the real engine, and that it ends the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mini_run import mini_run, run_folder

import config_schema
import tinker_backend
import trainer_with_eval
import training_run
from checkpoint_manager import CheckpointManager
from error_handling import InterruptedRunError
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


def test_a_deletion_that_fails_is_a_note_and_no_failure(tmp_path, capsys, monkeypatch):
    real = tinker_backend.Backend.delete_checkpoint
    refused: list[str] = []

    async def refuse_once(self: tinker_backend.Backend, path: str) -> None:
        if not refused:
            refused.append(path)
            path = path.replace("/weights/", "/no_such_kind/")
        await real(self, path)

    monkeypatch.setattr(tinker_backend.Backend, "delete_checkpoint", refuse_once)
    run_dir = mini_run(tmp_path, **{**CHANGES, "max_rounds": 1})
    assert refused
    # Tried again with the next one.
    assert on_the_service(run_dir) == {"round_01"}
