"""The run folder: lock, state, checkpoints, samples, selections, and where to go on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import durable_files
from checkpoint_manager import CheckpointManager, check_training_path, find_latest_run, list_runs, resolve_run
from durable_files import StorageError
from error_handling import CheckpointError, DataError, RunLockedError, RunNotFoundError
from evaluation import SampleResult
from run_folders import new_run_folder

ROOT = Path(__file__).parent.parent
CONFIG = {"base_model": "tiny", "train_file": "data/train.jsonl", "max_steps": 30, "save_every": 5}
STATE = "tinker://r:train:0/weights/"
SAMPLER = "tinker://r:train:0/sampler_weights/"

HOLD = """
import sys, time
from checkpoint_manager import CheckpointManager
if sys.argv[1] == "create":
    manager = CheckpointManager.create(sys.argv[2], {"base_model": "tiny"})
else:
    manager = CheckpointManager.open(sys.argv[2])
print(manager.run_dir, flush=True)
if "fork" in sys.argv:
    import os
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
time.sleep(60)
"""


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager.create(tmp_path / "runs", CONFIG, command="python trainer_with_eval.py") as made:
        yield made


def start_holder(*arguments: object) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def add(manager: CheckpointManager, name: str, round: int, step: int, **fields):
    paths = {"state_path": STATE + name, "sampler_path": SAMPLER + name}
    return manager.add_checkpoint(name, batch=step, round=round, step=step, **{**paths, **fields})


def sample(id: str, score: float = 1.0, **fields) -> SampleResult:
    return SampleResult(
        task="t", id=id, epoch=1, input="question", target="answer", output="reply", score=score, **fields
    )


def make_run(runs: Path, name: str) -> Path:
    (runs / name).mkdir(parents=True)
    (runs / name / "state.json").write_text('{"status": "completed"}')
    return runs / name


def test_a_new_run_folder_says_where_it_stands(manager):
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", manager.run_id)
    state = json.loads((manager.run_dir / "state.json").read_text())
    wanted = (
        "run_id status phase round step pid command model adapter_path data_dir log_path total_iters save_every "
        "hparams started_at updated_at best_val resume_history"
    )
    assert set(wanted.split()) <= set(state)
    assert (state["run_id"], state["status"], state["phase"]) == (manager.run_id, "running", "baseline")
    assert (state["pid"], state["model"], state["save_every"]) == (os.getpid(), "tiny", 5)
    assert manager.load_config() == CONFIG


def test_no_secret_reaches_config_or_state(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALOPS_API_KEY", "marked-secret-value")
    config = {**CONFIG, "api_key": "short", "notify": "https://me:pass@host/x?token=abc", "note": "marked-secret-value"}
    with CheckpointManager.create(tmp_path, config, command="run tml-0123456789") as manager:
        manager.write_summary({"reason": "Bearer marked-secret-value"})
        text = "".join(path.read_text() for path in manager.run_dir.iterdir())
    assert not re.search(r"marked-secret|tml-0123|me:pass|token=abc|short", text)
    assert '"max_steps": 30' in text


def test_the_second_process_is_refused_with_pid_and_host(tmp_path):
    holder, run = start_holder("create", tmp_path)
    try:
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on {re.escape(socket.gethostname())}") as err:
            CheckpointManager.open(run)
        assert err.value.exit_code == 2
        assert CheckpointManager.open(run, lock=False).load_state()["status"] == "running"
    finally:
        holder.kill()
        holder.wait()


def test_the_lock_dies_with_its_process_and_the_run_reads_as_interrupted(tmp_path):
    holder, run = start_holder("create", tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert json.loads((run / "state.json").read_text())["status"] == "running"
    assert CheckpointManager.open(run, lock=False).load_state()["status"] == "interrupted"
    with CheckpointManager.open(run) as manager:
        assert manager.load_state()["status"] == "interrupted"
        manager.record_resume(command="--resume", from_checkpoint="a")
        state = manager.load_state()
    assert (state["status"], state["pid"], state["command"]) == ("running", os.getpid(), "--resume")
    assert [(row["phase"], row["round"], row["from_checkpoint"]) for row in state["resume_history"]] == [
        ("baseline", 0, "a")
    ]


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    holder, run = start_holder("create", tmp_path, "fork")
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with CheckpointManager.open(run) as manager:
            assert manager.load_state()["status"] == "interrupted"
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_the_lock_holds_within_a_process_too_and_close_gives_it_back(manager):
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        CheckpointManager.open(manager.run_dir)
    manager.close()
    CheckpointManager.open(manager.run_dir).close()


def test_someone_who_only_looks_at_the_lock_does_not_make_a_run_refuse_to_start(manager):
    fcntl = pytest.importorskip("fcntl")
    manager.close()
    with open(manager.run_dir / "run.lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        looks_away = threading.Timer(0.1, lambda: fcntl.flock(looked_at, fcntl.LOCK_UN))
        looks_away.start()
        with CheckpointManager.open(manager.run_dir) as opened:
            assert opened.load_state()["run_id"] == manager.run_id
        looks_away.join()


def test_a_run_opened_for_reading_refuses_to_write(manager):
    reader = CheckpointManager.open(manager.run_dir, lock=False)
    with pytest.raises(RunLockedError, match="reading only"):
        reader.update_state(step=1)
    with pytest.raises(RunLockedError, match="reading only"):
        reader.append_sample(1, sample("a"))
    assert not (manager.run_dir / "samples").exists()


def test_completed_phases_and_results_survive_a_kill(tmp_path):
    holder, run = start_holder("create", tmp_path)
    holder.kill()
    holder.wait()
    with CheckpointManager.open(run) as manager:
        manager.phase_done(0, "baseline")
        manager.start_phase(1, "select")
        manager.phase_done(1, "select", step=4)
        manager.save_round_result(1, {"score": 0.5, "n": 80})
        manager.save_round_result(0, {"score": 0.25})
        manager.save_round_result(1, {"decision": "next"})
    with CheckpointManager.open(run) as manager:
        assert manager.is_done(0, "baseline")
        assert manager.is_done(1, "select")
        assert not manager.is_done(1, "train")
        assert not manager.is_done(0, "select")
        assert manager.load_state()["step"] == 4
        assert manager.round_results() == [
            {"score": 0.25, "round": 0},
            {"score": 0.5, "n": 80, "decision": "next", "round": 1},
        ]


def test_an_unknown_phase_or_status_is_refused(manager):
    with pytest.raises(ValueError, match="'trian' is not one of baseline, select, train"):
        manager.is_done(1, "trian")
    with pytest.raises(ValueError, match="'done' is not one of running"):
        manager.update_state(status="done")
    assert manager.load_state()["status"] == "running"


def test_redo_takes_back_a_phase_and_everything_after_it(manager):
    for number in (1, 2):
        manager.write_selection(number, [{"id": f"row{number}"}])
        for phase in ("select", "train", "checkpoint", "evaluate", "decide"):
            manager.phase_done(number, phase)
        manager.append_sample(number, sample("a"))
        manager.save_round_result(number, {"score": 0.5})
    manager.redo_from(1, "train")
    assert manager.is_done(1, "select")
    assert not manager.is_done(1, "train")
    assert not manager.is_done(2, "select")
    assert manager.load_selection(1) == [{"id": "row1"}]
    assert manager.load_selection(2) is None
    assert manager.load_samples(1) == []
    assert manager.round_results() == []
    assert (manager.run_dir / "samples" / "round_01.superseded.jsonl").exists()


def test_redoing_only_the_decision_keeps_the_score_paid_for(manager):
    manager.append_sample(1, sample("a"))
    manager.save_round_result(1, {"score": 0.5})
    manager.phase_done(1, "decide")
    manager.write_summary({"status": "completed"})
    manager.redo_from(1, "decide")
    assert not manager.is_done(1, "decide")
    # A report of the reopened run must not tell of the end that was taken back.
    assert manager.load_summary() is None
    assert (manager.run_dir / "summary.superseded.json").exists()
    assert manager.round_results() == [{"score": 0.5, "round": 1}]
    assert [s.id for s in manager.load_samples(1)] == ["a"]


def test_checkpoints_are_read_by_tinker_cookbook(manager):
    checkpoint_utils = pytest.importorskip("tinker_cookbook.checkpoint_utils")
    add(manager, "r1", 1, 10)
    add(manager, "s15", 2, 15, kind="state", sampler_path=None, final=False)
    last = checkpoint_utils.get_last_checkpoint(str(manager.run_dir))
    assert (last.name, last.batch, last.state_path) == ("s15", 15, STATE + "s15")
    assert last.extra == {"round": 2, "step": 15, "kind": "state"}
    assert checkpoint_utils.get_last_checkpoint(str(manager.run_dir), required_key="sampler_path").name == "r1"


def test_opening_repairs_a_torn_checkpoint_row_so_that_plain_readers_can_go_on(manager):
    checkpoint_utils = pytest.importorskip("tinker_cookbook.checkpoint_utils")
    add(manager, "r1", 1, 10)
    manager.close()
    with open(manager.checkpoints_path, "a") as file:
        file.write('{"name": "r2", "ba')
    with CheckpointManager.open(manager.run_dir) as again:
        assert any("torn last line" in note for note in again.notes)
        assert checkpoint_utils.get_last_checkpoint(str(manager.run_dir)).name == "r1"
        assert [c.name for c in again.checkpoints()] == ["r1"]


def test_the_newest_row_without_a_state_falls_back_to_the_one_before_and_says_so(manager):
    manager.checkpoints_path.write_text(
        '{"name": "000003", "batch": 3, "round": 1, "state_path": "tinker://r:train:0/weights/000003", '
        '"loss_ema": 1.5}\n'
        '{"name": "000006", "batch": 6, "round": 1, "sampler_path": "tinker://r:train:0/sampler_weights/000006"}'
    )
    (latest,) = manager.resume_points(1)
    assert (latest.name, latest.batch, latest.extra) == ("000003", 3, {"loss_ema": 1.5})
    assert [note for note in manager.notes if "'000006' has no saved state" in note]
    manager.resume_points(1)
    assert len(manager.notes) == 1


def test_a_row_that_was_meant_for_sampling_only_is_passed_over_without_a_note(manager):
    add(manager, "r1", 1, 10)
    manager.add_checkpoint("s", batch=12, round=1, step=12, sampler_path=SAMPLER + "s", kind="sampler")
    assert [c.name for c in manager.resume_points(1)] == ["r1"]
    assert manager.notes == []


def test_a_checkpoint_that_is_gone_is_passed_over_and_its_row_kept(manager):
    add(manager, "r1", 1, 10)
    add(manager, "s15", 2, 15, kind="state", sampler_path=None)
    lost = add(manager, "r2", 2, 20)
    manager.mark_gone([lost], "lost")
    assert [c.name for c in manager.resume_points(2)] == ["s15"]
    assert manager.checkpoint_of_round(2) is None
    assert [(c.name, c.gone) for c in manager.checkpoints()] == [("r1", None), ("s15", None), ("r2", "lost")]
    add(manager, "r2", 2, 20, state_path=STATE + "again")
    assert manager.checkpoint_of_round(2).state_path == STATE + "again"
    assert manager.notes == []


def test_checkpoints_are_found_by_round(manager):
    add(manager, "r1", 1, 10)
    add(manager, "s15", 2, 15, kind="state", sampler_path=None)
    assert [c.name for c in manager.resume_points(2)] == ["s15"]
    assert manager.checkpoint_of_round(2) is None
    add(manager, "r2", 2, 20, expires_at="2026-01-01")
    assert manager.checkpoint_of_round(2).extra == {"expires_at": "2026-01-01"}
    assert manager.checkpoint_of_round(1).name == "r1"
    assert manager.resume_points(3) == []


def test_sampler_weights_are_refused_for_training_with_the_reason(manager):
    with pytest.raises(CheckpointError, match="no optimizer"):
        add(manager, "r1", 1, 10, state_path=SAMPLER + "r1")
    with pytest.raises(CheckpointError, match="no sampler_path"):
        add(manager, "r1", 1, 10, sampler_path=None)
    with pytest.raises(CheckpointError, match="no saved state"):
        check_training_path("/some/folder")
    assert check_training_path(STATE + "x") == STATE + "x"
    assert not manager.checkpoints_path.exists()


def test_samples_come_back_the_last_row_of_a_key_winning(manager, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-marked-key-1")
    manager.append_sample(1, sample("a", 0.0, error="429 for key tml-marked-key-1"))
    manager.append_sample(1, sample("b", category="billing", metadata={"x": [1]}))
    manager.append_sample(1, sample("a", 1.0, stop_reason="stop"))
    assert {(s.id, s.score) for s in manager.load_samples(1)} == {("a", 1.0), ("b", 1.0)}
    assert next(s for s in manager.load_samples(1) if s.id == "b").metadata == {"x": [1]}
    assert manager.load_samples(2) == []
    assert manager.samples_path(1).name == "round_01.jsonl"
    assert "marked-key" not in manager.samples_path(1).read_text()


def test_a_sample_torn_by_a_crash_is_asked_again_and_the_others_are_not(manager):
    manager.append_sample(1, sample("a"))
    manager.append_sample(1, sample("b"))
    manager.close()
    path = manager.samples_path(1)
    path.write_bytes(path.read_bytes()[:-20])
    with CheckpointManager.open(manager.run_dir) as again:
        assert [s.id for s in again.load_samples(1)] == ["a"]
        again.append_sample(1, sample("b"))
        assert [s.id for s in again.load_samples(1)] == ["a", "b"]
        assert len(path.read_text().splitlines()) == 2


def test_a_selection_is_written_once(manager):
    rows = [{"id": "r1", "weight": 1.0, "why": "random"}, {"id": "r2", "weight": 1.0, "why": "random"}]
    assert manager.load_selection(1) is None
    manager.write_selection(1, rows)
    manager.write_selection(1, rows)
    assert manager.load_selection(1) == rows
    with pytest.raises(CheckpointError, match="already chosen"):
        manager.write_selection(1, rows[:1])
    assert manager.load_selection(1) == rows
    manager.write_selection(2, [])
    assert manager.load_selection(2) == []


@pytest.mark.parametrize("folder", ["", "samples", "selection", "likelihood", "scores", "plots"])
def test_what_a_killed_replacement_left_behind_is_cleared(manager, folder):
    manager.close()
    leftover = manager.run_dir / folder / ".state.json.0a1b2c3d.tmp"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_text("{")
    CheckpointManager.open(manager.run_dir).close()
    assert not leftover.exists()


def test_a_damaged_state_is_an_error_that_names_the_file(manager):
    manager.close()
    (manager.run_dir / "state.json").write_text('{"status": ')
    with pytest.raises(DataError, match=r"state\.json: damaged"):
        CheckpointManager.open(manager.run_dir)
    (manager.run_dir / "state.json").write_text('{"status": "completed"}')
    CheckpointManager.open(manager.run_dir).close()


def test_a_vanished_run_folder_is_an_error_that_names_the_path(manager, tmp_path):
    manager.run_dir.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match=r"state\.json: No such file or directory; the folder is gone"):
        manager.update_state(step=1)
    with pytest.raises(StorageError, match=r"cannot make .*samples: No such file"):
        manager.append_sample(1, sample("a"))
    assert not manager.run_dir.exists()


def test_a_runs_folder_that_cannot_be_made_names_the_path(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match=str(tmp_path / "runs")) as caught:
        CheckpointManager.create(tmp_path / "runs", CONFIG)
    assert caught.value.exit_code == 1


def test_a_summary_with_a_number_that_is_not_finite_is_refused(manager):
    assert manager.load_summary() is None
    with pytest.raises(ValueError, match=r"rounds\[0\]\.nll is nan"):
        manager.write_summary({"rounds": [{"nll": float("nan")}]})
    manager.write_summary({"status": "completed"})
    assert manager.load_summary() == {"status": "completed"}


def test_the_newest_run_is_found_by_its_name_among_foreign_folders(tmp_path):
    new = make_run(tmp_path, "20260102T000000Z-000000")
    old = make_run(tmp_path, "20260101T235959Z-ffffff")
    os.utime(old, (time.time() + 1000,) * 2)
    make_run(tmp_path, "20990101T000000Z-not-ours")
    (tmp_path / "20990101T000000Z-aaaaaa").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert list_runs(tmp_path) == [new, old]
    assert find_latest_run(tmp_path) == new
    assert find_latest_run(tmp_path / "absent") is None


def test_runs_made_in_one_second_sort_in_the_order_of_their_making(tmp_path):
    made = []
    for _ in range(5):
        with CheckpointManager.create(tmp_path, CONFIG) as manager:
            made.append(manager.run_dir)
    assert list_runs(tmp_path) == made[::-1]


def test_a_run_is_named_by_id_beginning_or_path(tmp_path, monkeypatch):
    runs = tmp_path / "läufe mit leerzeichen"
    first, second = make_run(runs, "20260101T000000Z-aaaaaa"), make_run(runs, "20260102T000000Z-bbbbbb")
    assert resolve_run(runs) == second
    assert resolve_run(runs, first.name) == first
    assert resolve_run(runs, "20260101") == first
    monkeypatch.chdir(tmp_path)
    assert resolve_run("elsewhere", Path(runs.name) / first.name) == Path(runs.name) / first.name
    with pytest.raises(RunNotFoundError, match=f"2 runs begin with '2026'.*{second.name}, {first.name}"):
        resolve_run(runs, "2026")
    with pytest.raises(RunNotFoundError, match=f"there is no run 'x'; choose one of .*{second.name}"):
        resolve_run(runs, "x")
    with pytest.raises(RunNotFoundError, match="there is no run in"):
        resolve_run(tmp_path / "empty")


def test_every_file_name_of_a_run_survives_windows(manager):
    add(manager, "r1", 1, 10)
    manager.append_sample(12, sample('a<b>:"c"|?*'))
    manager.write_selection(1, [])
    names = [path.name for path in manager.run_dir.rglob("*")]
    assert "round_12.jsonl" in names
    assert not [name for name in names if re.search(r'[<>:"\\|?*]|[. ]$', name)]


def test_a_torn_last_line_of_any_rows_is_dropped_with_a_note_and_never_glued_to(manager):
    manager.append_sample(1, sample("a"))
    manager.write_selection(1, [{"id": "r1"}, {"id": "r2"}])
    manager.write_likelihood(1, [{"id": "a", "logprobs": [-1.0]}])
    manager.write_sample_scores(1, {("t", "a"): 0.5})
    add(manager, "r1", 1, 10)
    for name in ("metrics.jsonl", "evalops_outbox.jsonl"):
        (manager.run_dir / name).write_text('{"n": 1}\n')
    manager.close()
    written = sorted(manager.run_dir.rglob("*.jsonl"))
    assert len(written) == 7
    for path in written:
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"torn": "in the mid')
    with CheckpointManager.open(manager.run_dir) as again:
        assert len([note for note in again.notes if "dropped a torn last line" in note]) == 7
        for path in written:
            durable_files.append_line(path, {"next": 1})
            assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_run_folder_appears_whole_or_not_at_all(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from run_folders import new_run_folder\n"
        "with new_run_folder(sys.argv[1]) as (unfinished, final):\n"
        "    (unfinished / 'config.json').write_text('{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=False)
    (left,) = tmp_path.iterdir()
    assert list_runs(tmp_path) == []
    os.utime(left, (0, 0))
    with CheckpointManager.create(tmp_path, CONFIG, near_matches=[{"id": "train:1"}]) as made:
        assert [path.name for path in tmp_path.iterdir()] == [made.run_id]
        assert find_latest_run(tmp_path) == made.run_dir
        assert made.load_near_matches() == [{"id": "train:1"}]


def test_a_folder_in_the_making_that_becomes_a_run_meanwhile_is_no_failure(tmp_path):
    # Listed and not there any more, as when another process renames its own at that moment.
    (tmp_path / ".unfinished-20260102T030405Z-0a1b2c").symlink_to(tmp_path / "gone")
    with new_run_folder(tmp_path) as (_, final):
        pass
    assert final.is_dir()
