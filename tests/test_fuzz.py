"""Whatever a data file, a configuration or an override holds: it is used unchanged, or refused with its place.

FUZZ_EXAMPLES=20000 python -m pytest -n 0 -o timeout=0 tests/test_fuzz.py    # a long search, another each time
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config_file import dotted
from config_schema import TrainingConfig, describe_config, load_and_validate_config
from error_handling import ConfigurationError
from record_files import Fault, file_layout
from row_files import LoadedRows, read_rows
from row_formats import convert_record

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")


def fuzz(usual: int) -> settings:
    """Settings of a property: `usual` examples, the same ones each time, unless a long search is asked for."""
    return settings(
        max_examples=int(EXAMPLES or usual),
        derandomize=EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# Rows

SIGNS = 'ab"\\ \t\n\r\u00e9\u0085\u2028\u2029\u200b\ufeff\u0000\ud83d\ude00\ud800\udc00😀'
TEXT = st.text(st.sampled_from(SIGNS) | st.characters(), max_size=10)
WORDS = st.text(st.sampled_from('abc dé\u2028"\\\n'), min_size=1, max_size=8)
NUMBER = st.one_of(st.integers(), st.integers(2**63 - 2, 2**64 + 2), st.floats(), st.just(-0.0), st.just(10**400))
SCALAR = st.one_of(TEXT, st.none(), st.booleans(), NUMBER)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "developer", "User", "human", "gpt", "", None, 3])
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLE,
        "content": SCALAR,
        "from": ROLE,
        "value": SCALAR,
        "weight": SCALAR,
        "tool_calls": VALUE,
        "name": TEXT,
    },
)
GOOD_TURNS = st.lists(WORDS, min_size=1, max_size=3).map(
    lambda texts: [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate([*texts, "x"])]
)
BESIDE = {"id": SCALAR, "category": SCALAR, "system": SCALAR, "history": VALUE, "meta": VALUE, "text": SCALAR}
RECORD = st.one_of(
    st.fixed_dictionaries({"prompt": WORDS, "completion": WORDS}),
    st.fixed_dictionaries({"messages": GOOD_TURNS}, optional=BESIDE),
    st.fixed_dictionaries({"messages": st.lists(TURN, max_size=3) | VALUE}, optional=BESIDE),
    st.fixed_dictionaries({"conversations": st.lists(TURN, max_size=3) | VALUE}, optional=BESIDE),
    st.fixed_dictionaries({"prompt": VALUE, "completion": VALUE}, optional=BESIDE),
    st.fixed_dictionaries({"instruction": TEXT, "output": TEXT}, optional={"input": SCALAR, **BESIDE}),
    st.fixed_dictionaries({"question": TEXT, "answer": TEXT}, optional=BESIDE),
    st.fixed_dictionaries({"input": WORDS | st.lists(TURN, max_size=2), "target": WORDS}, optional=BESIDE),
    st.dictionaries(st.sampled_from([*BESIDE, "prompt", "target"]), VALUE, max_size=4),
    VALUE,
)
PIECES = st.sampled_from(
    [
        *(bytes([code]) for code in b'\x00\n\r"{}[],:\\ \xff\xc3'),
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xe2\x80\xa8",
        b"\\ud800",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"x":1,"x":2,',
        b"\x1f\x8b",
        b"[" * 2000,
        b"9" * 5000,
    ]
)
CHANGE = st.tuples(st.sampled_from(["flip", "cut", "insert", "end"]), st.floats(0, 1), st.integers(0, 255), PIECES)


def changed(raw: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    for how, where, code, piece in changes:
        at = int(where * len(raw))
        if how == "flip":
            raw = raw[:at] + bytes([code]) + raw[at + 1 :]
        elif how == "cut":
            raw = raw[:at] + raw[at + code % 9 :]
        elif how == "insert":
            raw = raw[:at] + piece + raw[at:]
        else:
            raw = raw[:at]
    return raw


def texts_of(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in texts_of(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts_of(part)]
    return [value] if isinstance(value, str) else []


def record_of(line: bytes) -> Any:
    """The JSON of a line by the standard library alone; ValueError when there is none or a key is repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("repeated key")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(line.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)


def assert_unchanged(loaded: LoadedRows, records: dict[int, Any]) -> None:
    for row in loaded.rows:
        record = records[row.line]
        given = texts_of(record)
        for text in [turn["content"] for turn in row.messages] + ([row.text] if row.text is not None else []):
            joined = record.get("instruction") is not None and f"{record['instruction']}\n\n{record.get('input')}"
            assert text in given or text == joined
        for key, value in row.metadata.items():
            assert repr(value) == repr(record[key])


@fuzz(150)
@given(
    records=st.lists(RECORD, min_size=1, max_size=4),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n \n"]),
    start=st.sampled_from([b"", b"\xef\xbb\xbf", b"\n"]),
    changes=st.just([]) | st.lists(CHANGE, max_size=3),
    purpose=st.sampled_from(["train", "eval"]),
    trained=st.sampled_from(["last_assistant_turn", "all_assistant_turns", "all_messages"]),
)
def test_every_line_is_a_row_a_copy_or_told(tmp_path, *, records, ascii_only, end, start, changes, purpose, trained):
    written = end.join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    raw = changed(start + written.encode("utf-8", "surrogatepass"), changes)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw)
    loaded, faults = read_rows(path, purpose, None, trained)
    assert all(fault.reason and str(fault).isprintable() for fault in faults)
    layout: list[Fault] = []
    if file_layout(path, str(path), layout) == "unusable":
        assert (faults, len(loaded.rows)) == (layout, 0)
        assert len(layout) == 1
        return
    lines = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    filled = {number for number, line in enumerate(lines, start=1) if line.strip(b" \t\r")}
    rows, told = {row.line for row in loaded.rows}, {fault.line for fault in faults}
    assert rows.isdisjoint(told)
    if not filled:
        assert [(fault.line, fault.reason) for fault in faults] == [(1, "the file holds no rows")]
        return
    assert len(told) == len(faults)
    assert rows | told <= filled
    assert len(rows) + loaded.duplicates + len(told) == len(filled)
    assert_unchanged(loaded, {number: record_of(lines[number - 1]) for number in rows})
    for number in filled - told:  # what is no row and not told is a copy of a row
        assert any(record_of(lines[number - 1]) == record_of(lines[row - 1]) for row in rows)
    for number in told:  # and what is told is no plain row
        try:
            record = record_of(lines[number - 1])
            assert isinstance(record, dict)
            convert_record(record, purpose=purpose, train_on_what=trained)
        except (ValueError, RecursionError, AssertionError):
            continue
        reason = next(fault.reason for fault in faults if fault.line == number)
        assert {"id", "category"} & record.keys() or "surrogate" in reason or "float" in reason or not record


@fuzz(60)
@given(
    records=st.lists(RECORD, max_size=4),
    indent=st.sampled_from([None, 1]),
    changes=st.just([]) | st.lists(CHANGE, max_size=2),
    purpose=st.sampled_from(["train", "eval"]),
)
def test_every_element_of_an_array_is_a_row_a_copy_or_told(tmp_path, records, indent, changes, purpose):
    raw = changed(json.dumps(records, indent=indent).encode(), changes)
    path = tmp_path / "rows.json"
    path.write_bytes(raw)
    loaded, faults = read_rows(path, purpose, None, "last_assistant_turn")
    last = raw.count(b"\n") + 1
    assert all(fault.reason and str(fault).isprintable() and 1 <= fault.line <= last for fault in faults)
    assert loaded.rows or faults
    if not changes:
        expected = len(records) if records else 1
        assert len(loaded.rows) + loaded.duplicates + len(faults) == expected
    given_texts = set(texts_of(json.loads(raw))) if not changes else None
    for row in loaded.rows if given_texts is not None else ():
        shown = [turn["content"] for turn in row.messages]
        assert row.shape == "instruction/input/output" or set(shown) <= given_texts


# Configurations

MINIMAL: dict[str, Any] = {"base_model": "Qwen/Qwen3-8B", "train_file": "train.jsonl", "eval_file": "eval.jsonl"}
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**320) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DOTTED = [key for key, *_ in describe_config()]
KEY = st.sampled_from([*DOTTED, *TrainingConfig.model_fields]) | TEXT
GROUP = st.sampled_from(["evaluation", "decision", "selection", "budget", "heldout", "prices"])
GROUP_KEY = st.sampled_from([key.partition(".")[2] for key in DOTTED if "." in key]) | TEXT
TASK = st.fixed_dictionaries(
    {},
    optional={
        "task": st.sampled_from(["a/b", "f.py@t", ""]) | JSON_VALUE,
        "args": JSON_VALUE,
        "weight": JSON_VALUE,
        "threshold": JSON_VALUE,
        "scorer": JSON_VALUE,
        "x": JSON_VALUE,
    },
)
CONFIG = st.tuples(
    st.dictionaries(KEY, JSON_VALUE, max_size=4),
    st.dictionaries(GROUP, st.dictionaries(GROUP_KEY, JSON_VALUE, max_size=3), max_size=2),
    st.just({}) | st.fixed_dictionaries({"eval_tasks": st.lists(TASK | JSON_VALUE, max_size=2)}),
).map(lambda parts: {**MINIMAL, **parts[0], **parts[1], **parts[2]})


def load_or_refuse(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> str | TrainingConfig:
    """The configuration, which loads again as an equal one, or what was told; another exception fails the test."""
    try:
        config = load_and_validate_config(path, overrides)
    except ConfigurationError as err:
        told = str(err)
        assert all(line.isprintable() and line for line in told.split("\n"))
        return told
    again = path.with_name("again.json")
    again.write_text(json.dumps(config.to_json_dict()), encoding="utf-8")
    assert load_and_validate_config(again) == config
    return config


@fuzz(150)
@given(data=CONFIG)
def test_any_configuration_is_loaded_or_refused(tmp_path, data):
    path = tmp_path / "conf.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    outcome = load_or_refuse(path)
    if isinstance(outcome, str):
        assert all(line.startswith(f"{path}") for line in outcome.split("\n"))
    else:
        assert outcome.base_model == data["base_model"]


@fuzz(150)
@given(key=st.sampled_from(DOTTED) | TEXT.filter(lambda key: key not in TrainingConfig.model_fields), value=JSON_VALUE)
def test_a_refusal_names_the_key(tmp_path, key, value):
    group, dot, inner = key.partition(".")
    changes = {group: {inner: value}} if dot and key in DOTTED else {key: value}
    path = tmp_path / "conf.json"
    path.write_text(json.dumps({**MINIMAL, **changes}), encoding="utf-8")
    outcome = load_or_refuse(path)
    if key not in DOTTED:
        assert isinstance(outcome, str)
    if isinstance(outcome, str):
        assert (inner if key in DOTTED and dot else dotted((key,))) in outcome


@fuzz(150)
@given(
    overrides=st.lists(
        st.tuples(KEY, JSON_VALUE.map(json.dumps) | TEXT | st.text('[]{},":\\ nul1e.-', max_size=8)), max_size=4
    )
)
def test_any_overrides_are_applied_or_refused(tmp_path, overrides):
    path = tmp_path / "conf.json"
    path.write_text(json.dumps(MINIMAL), encoding="utf-8")
    outcome = load_or_refuse(path, [f"{key}={value}" for key, value in overrides])
    assert isinstance(outcome, str) or outcome.eval_file is not None or outcome.eval_tasks


@fuzz(150)
@given(data=CONFIG, changes=st.lists(CHANGE, min_size=1, max_size=3), indent=st.sampled_from([None, 1]))
def test_any_bytes_are_loaded_or_refused(tmp_path, data, changes, indent):
    path = tmp_path / "conf.json"
    path.write_bytes(changed(json.dumps(data, indent=indent).encode(), changes))
    outcome = load_or_refuse(path)
    assert not isinstance(outcome, str) or outcome.startswith(str(path))
