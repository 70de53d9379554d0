"""Data files of every bad kind: each fault told with its line, and nothing guessed, repaired or passed over."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import json
import lzma
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_run import MODEL, mini_run

import config_schema
import trainer_with_eval
from error_handling import EXIT_USAGE, DataError
from record_files import MAX_LEVELS
from row_files import load_rows
from row_formats import is_blank
from run_data import load_run_data

ROWS = [
    {"prompt": "Where is the café?", "completion": "At the quay."},
    {"prompt": "And the bus?", "completion": "Left."},
]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
LINE = json.dumps(ROWS[1])


def told(path: Path, purpose: str = "train") -> list[str]:
    """What a refusal says of the lines of a file: `line: reason` each."""
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train" if purpose == "train" else "eval")
    assert error.value.exit_code == EXIT_USAGE
    first, *lines = str(error.value).split("\n")
    assert first.startswith("the data cannot be used")
    return [line.strip().removeprefix(f"{path}:") for line in lines]


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rows.jsonl", TEXT)
    return buffer.getvalue()


WIDE = "1: the file is UTF-16 or UTF-32, not UTF-8; save it as UTF-8"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (TEXT.encode("utf-16"), WIDE),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), WIDE),
        (TEXT.encode("utf-16-le"), WIDE),
        (TEXT.encode("utf-16-be"), WIDE),
        (TEXT.encode("utf-32"), WIDE),
        (codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"), WIDE),
        (TEXT.encode("utf-32-le"), WIDE),
        (TEXT.encode("utf-32-be"), WIDE),
        (gzip.compress(TEXT.encode(), mtime=0), "1: the file is compressed (gzip); unpack it"),
        (bz2.compress(TEXT.encode()), "1: the file is compressed (bzip2); unpack it"),
        (lzma.compress(TEXT.encode()), "1: the file is compressed (xz); unpack it"),
        (b"\x28\xb5\x2f\xfd\x04\x00rest", "1: the file is compressed (zstd); unpack it"),
        (zipped(), "1: the file is a zip archive; unpack it"),
        (b"PAR1\x15\x04\x15\x20" + bytes(40), "1: the file is Parquet; write its rows as JSONL"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "1: the file is a Git LFS pointer"),
        (b"\n\n" + json.dumps(ROWS[0], indent=2).encode(), "3: the file is one object over many lines"),
        ("\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), "1: the file has objects that go over many"),
        (b"\n" + json.dumps(ROWS, indent=2).encode(), "2: the file is a JSON array, not a row per line"),
    ],
)
@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_a_file_that_is_no_jsonl_is_told_once_as_what_it_is(tmp_path, content, reason, purpose):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    (only,) = told(path, purpose)
    assert only.startswith(reason)


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        (TEXT.encode("latin-1"), ["1: not UTF-8: byte 0xe9 at byte 29 of the line (offset 28 of the file); convert"]),
        (TEXT.encode() + b"\0" * 300, ["3: not JSON: Expecting value at column 1, found '\\x00\\x00"]),
        (
            b'{"prompt": "a\0b", "completion": "c"}',
            ["1: not JSON: Invalid control character at column 14, found '\\x00b"],
        ),
        (
            b'{"prompt": "a\tb", "completion": "c"}',
            ["1: not JSON: Invalid control character at column 14, found '\\tb"],
        ),
        (
            b"prompt,completion\na,b\n",
            ["1: not JSON: Expecting value at column 1, found 'prompt,c", "2: not JSON: Exp"],
        ),
        (b"- prompt: a\n", ["1: not JSON: Expecting value at column 1, found '- prompt: a"]),
        (b"{'prompt': 'a'}\n", ["1: not JSON: Expecting property name enclosed in double quotes at column 2, found"]),
        ((LINE + "\r" + LINE).encode(), ["1: not JSON: more text after the value, at column 50: '\\r{"]),
        ((LINE + LINE).encode(), ["1: not JSON: more text after the value, at column 50: '{"]),
        ((LINE + "\u2028" + LINE).encode(), ["1: not JSON: more text after the value, at column 50: '\\u2028{"]),
        ((LINE + "\n\ufeff" + LINE).encode(), ["2: not JSON: Expecting value at column 1, found '\\ufeff{"]),
        ((LINE + "\n\u00a0\n").encode(), ["2: not JSON: Expecting value at column 1, found '\\xa0\\n'"]),
        (LINE.encode() + b"\n" + LINE.encode()[:-5], ["2: not JSON: Unterminated string starting at column"]),
        (b'{"prompt": "a\xed\xa0\x80", "completion": "c"}', ["1: not UTF-8: byte 0xed at byte 14"]),
        (b'{"prompt": "a\xc0\xaf", "completion": "c"}', ["1: not UTF-8: byte 0xc0 at byte 14"]),
        (b'{"prompt": "a", "completion": "\\udfff"}', ["1: holds half of a surrogate pair (U+DFFF)"]),
        (b'{"prompt": "a", "completion": "b", "\\ud800": 1}', ["1: holds half of a surrogate pair (U+D800)"]),
        (b'{"prompt": "a", "completion": "b", "n": [-Infinity]}', ["1: -Infinity is not JSON"]),
        (b'{"prompt": "a", "completion": "b", "n": -1e999}', ["1: holds a number beyond the range of a float"]),
        (
            b'{"prompt": "a", "completion": "b", "n": ' + b"9" * 5000 + b"}",
            ["1: holds a whole number of 5000 digits, more than can be read"],
        ),
        (b'{"prompt": "a", "completion": "b", "x": [[{"": 1, "": 2}]]}', ["1: the key '' appears more than once"]),
        (b'{"prompt": "a", "completion": "b", "x": ' + b"[" * MAX_LEVELS + b"]" * MAX_LEVELS + b"}", ["1: nested too"]),
        (b'{"prompt": "a", "completion": "b", "x": ' + b"[" * 10**6, ["1: nested too deeply"]),
        (b" \n\t\r\n", ["1: the file holds no rows"]),
        (codecs.BOM_UTF8, ["1: the file holds no rows"]),
    ],
)
def test_a_faulty_line_is_told_with_what_stands_there(tmp_path, content, reasons):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    lines = told(path)
    assert len(lines) == len(reasons)
    assert [line[: len(reason)] for line, reason in zip(lines, reasons, strict=True)] == reasons
    assert all(line.isprintable() and len(line) < 300 for line in lines)


@pytest.mark.parametrize(
    "text",
    ["one\u2028two\u2029three\x85four", "\u0000", "\U0001f600", "a\u200bb", "  ", "\r\n", "é e\u0301 \ufb01"],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_text_comes_out_as_it_stands_in_the_file(tmp_path, text, ascii_only):
    text = f"x{text}y"
    path = tmp_path / "rows.jsonl"
    record = {"prompt": text, "completion": text, "note": text, text: -0.0, "n": 2**70}
    path.write_text(json.dumps(record, ensure_ascii=ascii_only), encoding="utf-8", newline="")
    (row,) = load_rows(path, purpose="train").rows
    assert [turn["content"] for turn in row.messages] == [text, text]
    assert row.metadata["note"] == text
    assert repr(row.metadata[text]) == "-0.0"
    assert row.metadata["n"] == 2**70


def test_one_enormous_line_is_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = "word é " * 1_000_000
    path.write_text(json.dumps({"prompt": text, "completion": "y"}) + "\n" + TEXT, encoding="utf-8")
    rows = load_rows(path, purpose="train").rows
    assert [row.line for row in rows] == [1, 2, 3]
    assert rows[0].question == text


def test_an_array_is_told_with_the_lines_of_its_elements(tmp_path):
    path = tmp_path / "rows.json"
    deep = '{"prompt": "a", "completion": "b", "x": ' + "[" * 300 + "]" * 300 + "}"
    digits = '{"prompt": "a", "completion": "b", "x": ' + "9" * 5000 + "}"
    path.write_text(f'[\n{LINE},\n{deep},\n{digits},\n[1],\n{{"prompt": "\\ud800", "completion": "b"}}\n]')
    reasons = ["3: nested too deeply", "4: holds a whole number of 5000", "5: a row must be an object", "6: holds half"]
    assert [line[: len(reason)] for line, reason in zip(told(path), reasons, strict=True)] == reasons


@pytest.mark.parametrize("purpose", ["train", "eval"])
@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": None}], "'content' is null"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "text"}]}], "is a list"),
        ([{"role": "user", "content": {"text": "q"}}, {"role": "assistant", "content": "a"}], "is an object"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{}]}], "calls tools"),
        (
            [{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}],
            "'tool'",
        ),
        ([{"role": "user", "content": "q"}, {"role": "ASSISTANT", "content": "a"}], "'ASSISTANT'; allowed are"),
        ([{"role": ["user"], "content": "q"}, {"role": "assistant", "content": "a"}], "the role ['user']"),
        ([{"content": "q"}, {"role": "assistant", "content": "a"}], "has no 'role'"),
        ([["user", "q"], ["assistant", "a"]], "is a list, expected an object"),
        ([{"role": "user", "content": "\u200b\ufeff"}, {"role": "assistant", "content": "a"}], "(user) is empty"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_told(tmp_path, turns, reason, purpose):
    path = tmp_path / "rows.jsonl"
    path.write_text(LINE + "\n" + json.dumps({"messages": turns}))
    (only,) = told(path, purpose)
    assert only.startswith("2: ")
    assert reason in only


@pytest.mark.parametrize("answer", ["", " ", "\n\t", "\u00a0\u3000", "\u200b", "\ufeff", "\u2060\u200d \u00ad", "\0"])
@pytest.mark.parametrize("keys", [("prompt", "completion"), ("question", "answer"), ("instruction", "output")])
def test_an_answer_of_which_nothing_is_seen_is_empty(tmp_path, answer, keys):
    path = tmp_path / "rows.jsonl"
    path.write_text(LINE + "\n" + json.dumps({keys[0]: "q", keys[1]: answer}))
    assert told(path) == ["2: turn 2 (assistant) is empty, there is nothing to learn from it"]
    assert len(told(path, "eval")) == 1
    assert is_blank(answer)
    assert not is_blank(answer + "." + answer)


def test_rows_as_deep_as_allowed_go_through_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")
    deep: Any = "x"
    for _ in range(MAX_LEVELS - 1):
        deep = [deep]
    path = tmp_path / "deep.jsonl"
    path.write_text(json.dumps({"question": "The colour of the sea?", "answer": "blue", "note": deep}))
    run = mini_run(tmp_path, eval_file=str(path), evaluation={"evaluator": "inspect", "max_tokens": 2})
    (sample,) = map(json.loads, (run / "samples" / "round_01.jsonl").read_text().splitlines())
    assert sample["metadata"]["note"] == deep


# Places


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """As a user who may not read what others keep to themselves."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_no_readable_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere.jsonl")
    for name, reason in {
        "pipe.jsonl": "is a pipe or a device",
        "/dev/null": "is a pipe or a device",
        "loop.jsonl": "cannot be read",
        "gone.jsonl": "is a link to nowhere.jsonl, which does not exist",
        "n" * 300 + ".jsonl": "cannot be read",
        "nul\0.jsonl": "cannot be read",
        "": "is a folder",
        "/proc/self/mem": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=reason):
            load_rows(tmp_path / name, purpose="train")


def test_a_file_that_may_not_be_read_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(TEXT)
    path.chmod(0)
    with without_rights(), pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(Permission denied\)"):
        load_rows(path, purpose="train")


def test_files_that_cannot_be_opened_are_told_with_the_faults_of_the_others(tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text(LINE + "\n{}\n")
    with pytest.raises(DataError) as error:
        load_run_data(train, pool_file=tmp_path / "pool.jsonl", eval_file=tmp_path)
    shown = str(error.value)
    assert "train.jsonl:2: the object is empty" in shown
    assert "pool.jsonl: not found" in shown
    assert f"{tmp_path}: is a folder" in shown


# The command line


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the program with some training and evaluation rows; returns (exit code, what was shown)."""
    monkeypatch.setenv("TINKER_MOCK", "1")

    def _command(train: bytes, asked: bytes, *words: str, **changes: Any) -> tuple[int, str]:
        (tmp_path / "train.jsonl").write_bytes(train)
        (tmp_path / "eval.jsonl").write_bytes(asked)
        config = {"base_model": MODEL, "train_file": "train.jsonl", "eval_file": "eval.jsonl", **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        runs = str(tmp_path / "runs")
        code = trainer_with_eval.main(["--config", str(tmp_path / "config.json"), "--runs-dir", runs, *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return _command


def test_all_faults_of_all_files_are_told_before_anything_is_done(command, tmp_path):
    faulty = b"".join(b'{"prompt": "%d"}\n' % number for number in range(13))
    code, shown = command(faulty, LINE.encode() + b"\n{}\n")
    assert (code, (tmp_path / "runs").exists()) == (EXIT_USAGE, False)
    assert "the data cannot be used, 14 faults:" in shown
    places = [line.split("jsonl:")[1].split(":")[0] for line in shown.splitlines() if ".jsonl:" in line]
    assert places == [str(line) for line in range(1, 11)]
    assert "... and 4 more" in shown


def test_targets_that_no_reply_can_reach_are_told_before_the_run(command, tmp_path):
    asked = [
        {"input": f"Say it {n}", "target": "yes" if n % 2 else f"It is {n} and many more words"} for n in range(24)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in asked).encode()
    settings = {"evaluator": "simple", "max_tokens": 4}
    code, shown = command(TEXT.encode(), lines, "--dry-run", evaluation=settings)
    assert code == 0
    (first,) = [line for line in shown.splitlines() if "longer than evaluation.max_tokens=4" in line]
    assert first.startswith("warning: 12 evaluation targets longer than")
    listed = shown[shown.index(first) :].splitlines()[1:12]
    assert [line.split("eval.jsonl:")[1].split(":")[0] for line in listed[:10]] == [str(n) for n in range(1, 20, 2)]
    assert listed[10].strip() == "... and 2 more"
    enough = int(first.rpartition("evaluation.max_tokens=")[2].split()[0])
    code, shown = command(TEXT.encode(), lines, "--dry-run", evaluation={**settings, "max_tokens": enough})
    assert (code, "longer than evaluation.max_tokens" in shown) == (0, False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"\\ud800": 1}', r"config.json:1: \ud800: holds a character that cannot be stored"),
        (b'{"a\\nb": 1}', r"config.json:1: a\nb: unknown key"),
        (b'{"eval_tasks": ["\\u001b[2J", "\\u001b[2J"]}', r"eval_tasks[1]: \x1b[2J is named twice"),
    ],
)
def test_a_configuration_s_odd_keys_and_values_are_told_on_one_line(tmp_path, content, reason):
    path = tmp_path / "config.json"
    good = b'{"base_model": "m", "train_file": "t", "eval_file": "e", '
    path.write_bytes(good + content[1:])
    with pytest.raises(config_schema.ConfigurationError) as error:
        config_schema.load_and_validate_config(path)
    (line,) = str(error.value).split("\n")
    assert reason in line
    assert line.isprintable()


def test_a_category_field_that_no_evaluation_row_has_is_refused_though_there_is_a_category(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"question": "q", "answer": "a", "category": "x"}\n')
    with pytest.raises(DataError, match=r"eval\.jsonl:1: no row has the category field 'kind'; further .*: category"):
        load_rows(path, purpose="eval", category_field="kind")
    assert load_rows(path, purpose="train", category_field="kind").rows[0].category == "x"
    assert load_rows(path, purpose="eval").rows[0].category == "x"
