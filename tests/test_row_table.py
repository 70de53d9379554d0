"""Large files: read by several processes, kept in the file, and equal to the same rows held in memory."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import row_files
import row_formats
import row_record
import row_scan
from error_handling import DataError
from overlap import find_overlap, fingerprint, prompt_key, question_keys
from record_files import LineDecoder, plain_records
from row_columns import ColumnBuilder, first_with_same, text_key
from row_files import load_rows
from row_record import RowRules
from row_table import RowsById, RowTable, shared_ids
from run_data import load_run_data


def chat(question: str, answer: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def lines_of(records: list) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


MIXED = [
    chat("What is 1?", "one"),
    chat("what is  1", "One"),  # a near copy of the first
    chat("What is 1?", "two"),  # in conflict with it
    chat("What is 1?", "one"),  # an exact copy
    {"prompt": "Which bus?", "completion": "Line 7", "id": "bus", "category": "travel", "score": 0.5},
    {"completion": "Line 7", "prompt": "Which bus?", "category": "travel", "score": 0.5, "id": "bus"},
    {"system": "Be brief.", "question": 'A "quoted" one \u00e9\u2028?', "answer": "yes", "category": 3},
    {"text": "Only text."},
    {"messages": [{"role": "assistant", "content": "I speak first."}]},
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Which bus?"},
            {"role": "assistant", "content": "Line 8"},
        ],
        "id": 12345678901234567890123,
    },
    {"messages": [{"role": "system", "content": "Be kind."}, *chat("Which bus?", "Line 9")["messages"]]},
    {"messages": [{"role": "system", "content": ""}, *chat("Which bus?", "Line 9")["messages"]]},
    {"messages": [{"role": "system", "content": "Be KIND"}, *chat("which bus", "Line 10")["messages"]], "n": 1},
    *(chat(f"Question {number}", f"Answer {number}") for number in range(40)),
]


@pytest.fixture
def mixed(tmp_path) -> Path:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines_of(MIXED[:20]) + b"\r\n  \n" + lines_of(MIXED[20:]).rstrip())
    return path


def in_parts(path: Path, monkeypatch, **how):
    monkeypatch.setattr(row_scan, "_processors", lambda: 3)
    rules = RowRules(str(path), path.stem, "train")
    return row_scan.scan_lines(path, rules, part_bytes=path.stat().st_size // 3), row_scan.scan_lines(path, rules)


def assert_same_columns(one, other):
    for name in one.__dataclass_fields__:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_a_file_read_in_parts_by_several_processes_gives_the_same_columns_and_faults(mixed, tmp_path, monkeypatch):
    faulty = tmp_path / "faulty.jsonl"
    faulty.write_bytes(mixed.read_bytes() + b'\n{"prompt": "a"}\n{"x": NaN}\n' + lines_of(MIXED) + b'\xe9\n{"a": 1}\n')
    (columns, faults), (whole, expected) = in_parts(faulty, monkeypatch)
    assert_same_columns(columns, whole)
    assert faults == expected
    assert [fault.line for fault in faults] == [56, 57, 111, 112]
    assert columns.line.tolist()[-1] == 110
    assert "offset" in faults[2].reason  # of the file, not of the part


def test_the_part_of_a_helper_that_fails_is_read_here(mixed, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    (columns, faults), (whole, expected) = in_parts(mixed, monkeypatch)
    assert_same_columns(columns, whole)
    assert faults == expected == []


def test_a_table_holds_the_rows_that_a_tuple_would(mixed, monkeypatch):
    held = load_rows(mixed, purpose="train")
    assert isinstance(held.rows, tuple)
    monkeypatch.setattr(row_files, "HELD_ROWS", 10)
    loaded = load_rows(mixed, purpose="train")
    table, rows = loaded.rows, held.rows
    assert isinstance(table, RowTable)
    assert (len(table), loaded.duplicates) == (len(MIXED) - 2, 2)
    assert tuple(table) == rows
    assert [table[3], table[-1], *table[4:6], *table[::-20]] == [rows[3], rows[-1], *rows[4:6], *rows[::-20]]
    with pytest.raises(IndexError):
        table[len(table)]
    assert rows[3].metadata == {"score": 0.5}
    assert list(table.ids) == [row.id for row in rows]
    assert [table.find(row.id) for row in rows] == list(range(len(rows)))
    assert [table.find(name) for name in ("mixed:4", "mixed:5", "mixed:01", "mixed:x", "nobody")] == [None] * 5
    assert [table.without([0, 2])[0], len(table.without([0, 2]))] == [rows[1], len(rows) - 2]
    assert (loaded.shapes, loaded.warnings) == (held.shapes, held.warnings)
    pairs = [[(a.line, b.line) for a, b in pairs] for pairs in (loaded.near_copies, loaded.conflicts)]
    assert pairs == [[(1, 2)], [(1, 3), (11, 13)]]
    assert RowsById(table, rows[:1]).find(["bus", "nobody", "mixed:1"]) == {"bus": rows[3], "mixed:1": rows[0]}
    assert shared_ids(table, rows[3:5]) == list(zip(rows[3:5], rows[3:5], strict=True))


def test_rows_are_found_by_what_they_ask_and_answer_without_reading_them(mixed, monkeypatch):
    monkeypatch.setattr(row_files, "HELD_ROWS", 10)
    table = load_rows(mixed, purpose="train").rows
    assert isinstance(table, RowTable)
    rows = list(table)
    keys = {key for row in rows for key in question_keys(row)}
    for key in keys:
        expected = [at for at, row in enumerate(rows) if key in question_keys(row)]
        assert table.rows_asking({key}).tolist() == expected
    assert table.rows_asking(keys).tolist() == list(range(len(rows)))
    assert table.rows_asking(set()).tolist() == []
    asked = [row for row in rows if row.question in {"Which bus?", "Question 7"}]
    candidates = table.take(table.rows_asking({prompt_key(row) for row in asked}))
    assert find_overlap(candidates, asked) == find_overlap(rows, asked)
    assert text_key("LINE  7.") == fingerprint(["line 7"])
    assert [rows[at].target for at in table.rows_answering({text_key("LINE  7.")})] == ["Line 7"]
    assert [rows[at].category for at in table.rows_of_category(lambda name: name in {"travel", "3"})] == ["travel", "3"]
    assert list(table.questions)[:2] == ["What is 1?", "what is  1"]


def test_equal_halves_of_keys_do_not_make_equal_keys():
    keys = np.array([[5, 1], [5, 2], [4, 1], [5, 1], [5, 2], [4, 1]], dtype=np.uint64)
    assert first_with_same(keys).tolist() == [0, 1, 2, 0, 1, 2]
    assert first_with_same(keys[[0, 2, 3]]).tolist() == [0, 1, 0]
    assert first_with_same(keys[:0]).tolist() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes().replace(b"Answer 30", b"Answer XX")), "content is another"),
        (lambda path: path.write_bytes(path.read_bytes() + lines_of([chat("more", "rows")])), "content is another"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_file_that_changes_under_a_table_is_told_and_gives_no_other_row(mixed, monkeypatch, change, reason):
    monkeypatch.setattr(row_files, "HELD_ROWS", 10)
    table = load_rows(mixed, purpose="train").rows
    change(mixed)
    for read in (lambda: table[0], lambda: list(table)):
        with pytest.raises(DataError, match=rf"mixed\.jsonl: changed since it was checked.*{reason}"):
            read()


def test_a_change_that_the_file_system_does_not_show_is_told_when_its_row_is_read(mixed, monkeypatch):
    monkeypatch.setattr(row_files, "HELD_ROWS", 10)
    table = load_rows(mixed, purpose="train").rows
    state = mixed.stat()
    content = mixed.read_bytes()
    with mixed.open("r+b") as file:
        file.write(content.replace(b"Answer 30", b"Answer XX"))
    os.utime(mixed, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert table[0].target == "one"
    with pytest.raises(DataError, match=r"changed since it was checked \(line 46"):
        list(table)


def test_a_new_date_alone_is_no_change(mixed, monkeypatch):
    monkeypatch.setattr(row_files, "HELD_ROWS", 10)
    table = load_rows(mixed, purpose="train").rows
    os.utime(mixed, (1, 1))
    assert table[0].target == "one"


@pytest.mark.parametrize(
    "line",
    [
        rb'{"prompt": "a\u0022b", "completion": "c", "n": 1}',
        rb'{"prompt": "say \"hi\" \\\"", "completion": "c:\\", "n": 18446744073709551616}',
        b'{"prompt": "a", "completion": "b", "n": [1e30, {"deep": -1e22}], "m": 9.5}',
        b'{"prompt": "a", "completion": "b", "n": 123456789012345678901234567890}',
        b' {"messages" : [ {"content": "q", "role": "user"} , {"role": "assistant", "content": "a"} ] } \r\n',
    ],
)
def test_the_fast_decoder_reads_what_the_standard_library_reads(line):
    decoded = LineDecoder().decode(line, 1)
    assert decoded is not None
    assert repr(decoded.record) == repr(json.loads(line))
    assert LineDecoder().again(line, 1, decoded.plain) == decoded.record
    assert (decoded.plain, plain_records([line])) in [(False, None)] or plain_records([line]) is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a", "prompt": "b", "completion": "c"}',
        rb'{"prompt": "a\u0022\u0022", "prompt": "b", "completion": "c"}',
        b'{"prompt": "a", "completion": "b", "completion" : ""}',
        b'{"messages": [{"role": "user", "content": "q", "content": "r"}, {"role": "assistant", "content": "a"}]}',
    ],
)
def test_a_repeated_key_is_told_however_it_is_written(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of([chat("good", "row")]) + line)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the key '\w+' appears more than once"):
        load_rows(path, purpose="train")


def test_plain_rows_are_converted_as_the_rules_of_their_shape_say(monkeypatch):
    records = [record for record in MIXED if isinstance(record, dict)]
    records += [chat(" ", "x"), chat("q", "\u00a0"), {"prompt": "p", "completion": ""}, chat("q", "a", system="s")]
    records += [chat("q", "a", text="t"), {"messages": [{"role": "user", "content": "q"}]}, {"messages": [3]}]

    def outcomes():
        found = []
        for record in records:
            try:
                found.append(RowRules("f", "f", "train").row(record, 1))
            except ValueError as error:
                found.append(str(error))
        return found

    quick = outcomes()
    monkeypatch.setattr(row_formats, "_plain_conversation", lambda record: None)
    monkeypatch.setattr(row_record, "plain_pair", lambda record: None)
    assert quick == outcomes()
    for record in records:
        pair = row_formats.plain_pair(record)
        if pair is not None:
            row = RowRules("f", "f", "train").row(record, 1)
            assert (row.question, row.target) == (pair.asked, pair.answered)
            assert row.shape == row_formats.SHAPE_NAMES[pair.shape]
            system = [turn["content"] for turn in row.messages if turn["role"] == "system"]
            assert system == ([] if pair.system is None else [pair.system])
    assert sum(row_formats.plain_pair(record) is not None for record in records) == 48


def test_what_is_added_line_by_line_equals_what_is_added_in_blocks():
    lines = [json.dumps(record).encode() for record in MIXED]
    one, other = (ColumnBuilder(RowRules("f", "f", "train")) for _ in range(2))
    assert one.add_lines(lines, 1, 0) == []
    offset = 0
    for number, raw in enumerate(lines, start=1):
        decoded = LineDecoder().decode(raw, offset)
        assert decoded is not None
        other.add(decoded, number, offset, raw)
        offset += len(raw)
    assert_same_columns(one.columns(), other.columns())


# Ids


def test_an_id_that_is_another_rows_place_is_told_for_the_later_one_and_its_copies(tmp_path):
    path = tmp_path / "rows.jsonl"
    records = [chat("a", "b", id="rows:3"), chat("c", "d", id="x"), chat("e", "f"), chat("g", "h", id="x")]
    path.write_bytes(lines_of([*records, records[3], chat("i", "j", id="rows:1")]))
    with pytest.raises(DataError, match="3 faults") as error:
        load_rows(path, purpose="train")
    told = [line.split("rows.jsonl:")[1] for line in str(error.value).splitlines()[1:]]
    assert told == [
        "3: the id 'rows:3' is already that of line 1",
        "4: the id 'x' is already that of line 2",
        "5: the id 'x' is already that of line 2",
    ]


def test_rows_without_ids_on_one_line_of_an_array_are_counted(tmp_path):
    path = tmp_path / "rows.json"
    records = [chat("a", "b"), chat("c", "d", id="x"), chat("e", "f"), chat("a", "b")]
    last = json.dumps(chat("g", "h"))
    path.write_text(f"{json.dumps(records)[:-1]},\n{last}]")
    loaded = load_rows(path, purpose="train")
    assert [row.id for row in loaded.rows] == ["rows:1.1", "x", "rows:1.3", "rows:2"]
    assert (loaded.duplicates, loaded.rows[2].where) == (1, f"{path}:1")
    path.write_text(json.dumps([*records, chat("i", "j", id="rows:1.3"), chat("k", "l", id="x")]))
    with pytest.raises(DataError, match="2 faults") as error:
        load_rows(path, purpose="train")
    assert "rows.json:1: the id 'rows:1.3' is already that of line 1" in str(error.value)


def test_a_table_and_a_pool_that_share_an_id_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "HELD_ROWS", 1)
    train, pool = tmp_path / "train.jsonl", tmp_path / "pool.jsonl"
    train.write_bytes(lines_of([chat("a", "b", id="x"), chat("c", "d")]))
    pool.write_bytes(lines_of([chat("e", "f", id="train:2"), chat("g", "h"), chat("i", "j", id="x")]))
    with pytest.raises(DataError, match="2 faults") as error:
        load_run_data(train, pool_file=pool)
    assert "pool.jsonl:1: the id 'train:2' is also that of" in str(error.value)
    assert "pool.jsonl:3: the id 'x' is also that of" in str(error.value)


# One file in two places


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("train", "pool", "eval", "test")}
    for name, path in paths.items():
        path.write_bytes(lines_of([chat(f"{name} {word}", "x") for word in ("one", "two")]))
    return paths


def copied(path: Path, how: str) -> Path:
    if how == "path":
        return path
    other = path.with_name("other.jsonl")
    {"symlink": os.symlink, "link": os.link, "copy": shutil.copy}[how](path, other)
    return other


@pytest.mark.parametrize("how", ["path", "symlink", "link", "copy"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("train", "eval_file"),
        ("train", "pool_file"),
        ("pool", "eval_file"),
        ("eval", "test_file"),
        ("pool", "test_file"),
    ],
)
def test_one_file_in_two_places_is_refused(files, how, first, second):
    others = {f"{name}_file": path for name, path in files.items() if name != "train"}
    others[second] = copied(files[first], how)
    with pytest.raises(DataError, match="have the same content" if how == "copy" else "are one file"):
        load_run_data(files["train"], **others)


def test_allow_overlap_permits_training_on_the_evaluation_file_and_never_on_the_test_file(files):
    data = load_run_data(files["train"], eval_file=files["train"], test_file=files["test"], allow_overlap=True)
    assert len(data.overlap) == 2
    assert data.test is not None
    with pytest.raises(DataError, match="the training file and the test file are one file"):
        load_run_data(files["train"], eval_file=files["eval"], test_file=files["train"], allow_overlap=True)
    files["test"].write_bytes(lines_of([chat("TRAIN one.", "y"), chat("pool two", "y")]))
    with pytest.raises(DataError, match="2 faults") as error:
        load_run_data(
            files["train"],
            pool_file=files["pool"],
            eval_file=files["eval"],
            test_file=files["test"],
            allow_overlap=True,
        )
    assert "train.jsonl:1: asks up to case, spaces and punctuation what test item 'test:1'" in str(error.value)
    assert "pool.jsonl:2: asks exactly what test item 'test:2'" in str(error.value)
    assert "never trained on" in str(error.value)
