"""Sessions and training runs on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_records import EngineRecords, NotRecordedError, encode_name, session_of
from error_handling import CheckpointError


@pytest.fixture
def records(tmp_path: Path) -> EngineRecords:
    (tmp_path / "runs").mkdir()
    return EngineRecords(tmp_path)


def test_runs_are_found_by_id_and_by_session(records: EngineRecords) -> None:
    for number, model_id in enumerate(("a:train:0", "a:train:1", "ab:train:0", "a%:train:0")):
        records.add_run(model_id, {"base_model": "m", "created": float(number)})
    assert [run["model_id"] for run in records.runs("a")] == ["a:train:1", "a:train:0"]
    assert [run["model_id"] for run in records.runs("a%")] == ["a%:train:0"]
    assert len(records.runs()) == 4
    assert session_of("a:train:1") == "a"
    with pytest.raises(NotRecordedError, match="no training run"):
        records.find_run("a:train:2")


def test_the_first_finish_of_a_session_stays(records: EngineRecords) -> None:
    records.add_session("s", {"created": 1.0})
    records.finish_session("s", None)
    assert "finish" not in records.find_session("s")
    records.finish_session("s", {"type": "errored"})
    records.finish_session("s", {"type": "success"})
    assert records.find_session("s")["finish"] == {"type": "errored"}
    with pytest.raises(NotRecordedError, match="no session"):
        records.finish_session("t", {"type": "success"})


def test_a_damaged_record_does_not_hide_the_others(records: EngineRecords, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("good", "bad"):
        records.add_session(name, {"created": 1.0})
        records.add_run(f"{name}:train:0", {"created": 1.0})
    (records.root / "sessions" / "bad.json").write_text("{")
    (records.root / "runs" / encode_name("bad:train:0") / "run.json").write_text("[]")
    assert [session["session_id"] for session in records.sessions()] == ["good"]
    assert [run["model_id"] for run in records.runs()] == ["good:train:0"]
    assert caplog.text.count("delete that file") == 2
    with pytest.raises(CheckpointError, match=r"bad\.json: cannot be read"):
        records.find_session("bad")


@pytest.mark.parametrize("name", ["a:b", "..", ".hidden", "é/ü", "CON*?", "a\\b", "a\nb"])
def test_any_id_becomes_one_file_name(name: str, tmp_path: Path) -> None:
    encoded = encode_name(name)
    assert not set(encoded) & set('<>:"|?*\\/\n')
    assert not encoded.startswith(".")
    (tmp_path / encoded).write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == [encoded]


@pytest.mark.parametrize("name", ["", "x" * 221, "é" * 40, "\ud800"])
def test_what_can_be_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        encode_name(name)
