"""Whole-file replacement, fsynced appends and torn lines."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import durable_files
from durable_files import StorageError, UnstorableValueError
from error_handling import DataError, EvalLoopError

ROOT = Path(__file__).parent.parent


def test_append_never_glues_to_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    durable_files.append_line(path, {"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_lines_appended_together_are_whole_lines_and_none_of_them_is_none(tmp_path):
    path = tmp_path / "samples.jsonl"
    durable_files.append_lines(path, [{"n": 1}, {"n": 2}])
    durable_files.append_lines(path, [])
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    with pytest.raises(UnstorableValueError):
        durable_files.append_lines(path, [{"n": 3}, {"n": float("nan")}])
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'


def test_append_keeps_a_whole_line_that_lost_only_its_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}')
    durable_files.append_line(path, {"step": 2})
    assert durable_files.read_jsonl(path) == ([{"step": 1}, {"step": 2}], None)


@pytest.mark.parametrize("tail", [b'{"text": "caf\xc3', b"\x00\x00\x00\x00", b'{"a": NaN}', b"[1, 2]", b'{"a": 1}}\n'])
def test_a_broken_last_line_is_dropped_with_a_note_and_cut_off_by_repair(tmp_path, tail):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n\n' + tail)
    rows, note = durable_files.read_jsonl(path)
    assert rows == [{"n": 1}]
    assert note is not None
    assert f"{path}:3:" in note
    assert "torn" in (durable_files.repair_jsonl(path) or "")
    assert durable_files.read_jsonl(path) == ([{"n": 1}], None)
    assert durable_files.repair_jsonl(path) is None


def test_a_torn_line_longer_than_a_block_is_cut_off_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n{"text": "' + b"x" * 200_000)
    durable_files.append_line(path, {"n": 2})
    assert durable_files.read_jsonl(path)[0] == [{"n": 1}, {"n": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: damaged line in the middle"):
        durable_files.read_jsonl(path)


def test_text_of_any_kind_comes_back_as_it_was(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"text": "é\u2028\u2029\u0085\n\r\x00 \ud800 \U0001f600", "path": Path("a/b")}
    durable_files.append_line(path, row)
    assert durable_files.read_jsonl(path)[0] == [{**row, "path": str(Path("a/b"))}]
    assert len(path.read_text("utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"loss": float("nan")}, r"m\.json\.loss is nan"),
        ({"a": [1, {"b": float("inf")}]}, r"m\.json\.a\[1\]\.b is inf"),
    ],
)
def test_a_number_that_is_not_finite_is_named_and_nothing_written(tmp_path, value, place):
    path = tmp_path / "m.json"
    durable_files.write_json(path, {"good": 1})
    with pytest.raises(UnstorableValueError, match=place) as caught:
        durable_files.write_json(path, value)
    assert isinstance(caught.value, EvalLoopError)
    assert durable_files.read_json(path) == {"good": 1}


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    durable_files.write_json(path, {"n": 1})

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match=r"cannot write .*state\.json: No space left on device; free some space"):
        durable_files.write_json(path, {"n": 2})
    assert durable_files.read_json(path) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_full_disk_takes_back_the_part_of_a_line_it_had_written(tmp_path):
    # A real limit of the operating system stands for the full disk: bytes up to it are written, then the call fails.
    path = tmp_path / "metrics.jsonl"
    code = (
        "import resource, signal, sys, durable_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = sys.argv[1]\n"
        "durable_files.append_line(path, {'n': 1})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n"
        "    durable_files.append_line(path, {'text': 'x' * 500})\n"
        "except durable_files.StorageError as err:\n"
        "    print(err)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(path) in done.stdout
    assert path.read_bytes() == b'{"n": 1}\n'


def test_threads_that_append_at_once_lose_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"

    def append_twenty(k: int) -> None:
        for i in range(20):
            durable_files.append_line(path, {"k": k, "i": i})

    threads = [threading.Thread(target=append_twenty, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, note = durable_files.read_jsonl(path)
    assert note is None
    assert {(row["k"], row["i"]) for row in rows} == {(k, i) for k in range(4) for i in range(20)}
