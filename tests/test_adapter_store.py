"""Checkpoints on disk: whole or not at all, listed, expiring, held by one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_store import AdapterSpec, AdapterStore, CheckpointInfo, check_name, parse_path
from error_handling import CheckpointError, RunLockedError

SPEC = AdapterSpec("Qwen/Qwen3-8B", rank=8, seed=1)
MODEL = "5f0c:train:0"


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    opened = AdapterStore(tmp_path / "state")
    opened.open()
    return opened


def make_info(name: str = "one", kind: str = "weights", **changes: object) -> CheckpointInfo:
    info = CheckpointInfo(MODEL, kind, name, SPEC, "f" * 32, step=3, optimizer_steps=3, created=time.time())
    return replace(info, **changes)


def write_text(text: str):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / "adapter.txt").write_text(text)


def test_a_saved_checkpoint_is_found_listed_and_keeps_its_record(store: AdapterStore) -> None:
    saved = store.save(make_info(user_metadata={"a": "b"}), write_text("x"), overwrite=False)
    found = store.find(f"tinker://{MODEL}/weights/one")
    assert (found.folder / "adapter.txt").read_text() == "x"
    assert found.info == saved.info
    assert found.info.size_bytes == 1
    assert [info.path for info in store.list(MODEL)] == [found.info.path]
    assert store.list("other:train:0") == []


def test_file_names_hold_nothing_that_windows_refuses(store: AdapterStore) -> None:
    store.save(make_info('step 10: "best" <*|>'), write_text("x"), overwrite=False)
    for path in (store.root / "runs").rglob("*"):
        assert not set(path.name) & set('<>:"|?*\\')
    assert store.list()[0].name == 'step 10: "best" <*|>'


def test_a_failed_write_leaves_nothing(store: AdapterStore) -> None:
    def write(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        store.save(make_info(), write, overwrite=False)
    assert store.list() == []
    assert list((store.root / "runs").rglob("part")) == []


def test_an_existing_name_is_refused_unless_overwritten(store: AdapterStore) -> None:
    store.save(make_info(), write_text("old"), overwrite=False)
    with pytest.raises(CheckpointError, match="exists already"):
        store.save(make_info(), write_text("new"), overwrite=False)
    before = store.find(make_info().path)
    store.save(make_info(), write_text("new"), overwrite=True)
    assert (before.folder / "adapter.txt").read_text() == "new"
    assert len(store.list()) == 1
    with pytest.raises(CheckpointError, match="replaced"):
        before.check()


@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, moment: str) -> None:
    first = AdapterStore(tmp_path)
    first.open()
    saved = first.save(make_info(), write_text("old"), overwrite=False)
    first.close()
    if moment == "writing":
        leftover = saved.folder.with_name(".tmp-0011")
        leftover.mkdir()
        (leftover / "checkpoint.json").write_text("{")
    else:
        leftover = saved.folder.with_name(".old-0011")
        saved.folder.rename(leftover)
    second = AdapterStore(tmp_path)
    second.open()
    assert not leftover.exists()
    assert (second.find(make_info().path).folder / "adapter.txt").read_text() == "old"
    assert len(second.list()) == 1
    second.close()


def test_records_a_killed_process_was_replacing_leave_nothing(tmp_path: Path) -> None:
    first = AdapterStore(tmp_path)
    first.open()
    saved = first.save(make_info(), write_text("old"), overwrite=False)
    first.close()
    (tmp_path / "sessions").mkdir(exist_ok=True)
    leftovers = [
        folder / ".record.json.0a1b2c3d.tmp"
        for folder in (tmp_path, tmp_path / "sessions", saved.folder, saved.folder.parent.parent)
    ]
    for leftover in leftovers:
        leftover.write_text("{")
    second = AdapterStore(tmp_path)
    second.open()
    assert not any(leftover.exists() for leftover in leftovers)
    assert (second.find(make_info().path).folder / "adapter.txt").read_text() == "old"
    second.close()


def test_a_checkpoint_ends_with_its_life(store: AdapterStore) -> None:
    store.save(make_info("short", expires_at=time.time() - 1), write_text("x"), overwrite=False)
    store.save(make_info("long", expires_at=time.time() + 100), write_text("x"), overwrite=False)
    with pytest.raises(CheckpointError, match="expired"):
        store.find(make_info("short").path)
    assert [info.name for info in store.list()] == ["long"]
    store.update(make_info("long").path, expires_at=time.time() - 1)
    assert store.list() == []


def test_deleting_and_publishing(store: AdapterStore) -> None:
    path = store.save(make_info(), write_text("x"), overwrite=False).info.path
    store.update(path, public=True)
    assert store.find(path).info.public
    store.delete(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.delete(path)


def test_a_missing_checkpoint_names_those_that_are_there(store: AdapterStore) -> None:
    store.save(make_info("here"), write_text("x"), overwrite=False)
    with pytest.raises(CheckpointError, match=r"sampler_weights/gone.*weights/here"):
        store.find(f"tinker://{MODEL}/sampler_weights/gone")


def test_a_damaged_record_is_told_with_its_place(store: AdapterStore) -> None:
    saved = store.save(make_info(), write_text("x"), overwrite=False)
    (saved.folder / "checkpoint.json").write_text(json.dumps({"name": "one"}))
    with pytest.raises(CheckpointError, match=r"checkpoint.json: cannot be read"):
        store.find(saved.info.path)


def test_nameless_checkpoints_are_not_listed_and_end_with_the_server(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    store.open()
    checkpoint = store.save_ephemeral(make_info(kind="sampler_weights"), write_text("x"))
    assert (checkpoint.folder / "adapter.txt").is_file()
    assert store.list() == []
    store.close()
    store.open()
    assert not checkpoint.folder.exists()
    store.close()


def test_a_state_folder_is_held_by_one_process_and_taken_over_from_a_dead_one(tmp_path: Path) -> None:
    code = (
        "import sys, time; from adapter_store import AdapterStore; store = AdapterStore(sys.argv[1]); store.open(); "
        "print('open', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(RunLockedError, match="in use by another process"):
            AdapterStore(tmp_path).open()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    store = AdapterStore(tmp_path)
    store.open()
    store.close()


def test_a_second_server_in_the_same_process_is_refused_too(store: AdapterStore) -> None:
    with pytest.raises(RunLockedError):
        AdapterStore(store.root).open()


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "..", " x", "x" * 151, None, 3])
def test_bad_names_are_refused(name: object) -> None:
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        check_name(name)


@pytest.mark.parametrize(
    "path", ["weights/x", "tinker://a/b", "tinker://a/other/x", "tinker:///weights/x", "http://a/b"]
)
def test_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="is not the path of a checkpoint"):
        parse_path(path)


def test_runs_and_sessions_are_remembered(store: AdapterStore) -> None:
    store.add_run(MODEL, {"base_model": "m", "created": 1.0})
    store.add_run("late:train:1", {"base_model": "m", "created": 2.0})
    store.add_session("s1", {"created": 1.0})
    assert [run["model_id"] for run in store.runs()] == ["late:train:1", MODEL]
    assert store.find_run(MODEL)["base_model"] == "m"
    assert [session["session_id"] for session in store.sessions()] == ["s1"]
    with pytest.raises(CheckpointError, match="no training run"):
        store.find_run("x")


def test_killed_at_any_moment_every_listed_checkpoint_is_whole(tmp_path: Path) -> None:
    code = """
import sys, time
from adapter_store import AdapterSpec, AdapterStore, CheckpointInfo
store = AdapterStore(sys.argv[1])
store.open()
print("open", flush=True)
step = 0
while True:
    step += 1
    info = CheckpointInfo("m:train:0", "weights", f"n{step % 2}", AdapterSpec("b", 8, 1), "f", step, 0, time.time())
    def write(folder):
        for name in ("a", "b"):
            (folder / name).write_text(f"{step} " * 20000)
    store.save(info, write, overwrite=True)
"""
    for number in range(6):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        time.sleep(0.05 + 0.013 * number)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        store = AdapterStore(tmp_path)
        store.open()
        for info in store.list():
            folder = store.find(info.path).folder
            for name in ("a", "b"):
                assert (folder / name).read_text() == f"{info.step} " * 20000
        store.close()
    assert len(store.list()) == 2
