import codecs
import hashlib
import json
import sys
from pathlib import Path

import pytest

import base_models
import data_loader
from data_loader import (
    DataLoader,
    Row,
    batch_rows,
    find_overlap,
    load_rows,
    load_run_data,
    make_datum,
    nearest_pair,
    steps_per_epoch,
)
from error_handling import EXIT_USAGE, DataError
from rendering import TokenSequence, get_chat_format

CASES = Path(__file__).parent / "cases"


def write(folder: Path, *records: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def told_lines(error: pytest.ExceptionInfo, name: str) -> list[int]:
    """The lines that a message tells of a file, in order."""
    told = [line.split(f"{name}:")[1].split(":")[0] for line in str(error.value).splitlines() if f"{name}:" in line]
    return [int(number) for number in told]


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# Files


def test_byte_order_mark_is_not_part_of_the_first_key():
    loaded = load_rows(CASES / "01_bom.jsonl", purpose="train")
    assert [row.target for row in loaded.rows] == ["Line 7.", "Two minutes."]


def test_crlf_and_blank_lines_keep_physical_line_numbers():
    loaded = load_rows(CASES / "02_crlf_blank_no_final_newline.jsonl", purpose="train")
    assert [row.line for row in loaded.rows] == [1, 4, 6]
    assert loaded.rows[2].where.endswith("02_crlf_blank_no_final_newline.jsonl:6")
    assert loaded.rows[2].id == "02_crlf_blank_no_final_newline:6"


@pytest.mark.parametrize(
    ("name", "lines", "reasons"),
    [
        ("04_trailing_comma.jsonl", [2], ["trailing comma"]),
        (
            "06_non_object_rows.jsonl",
            [1, 2, 3, 4, 5, 6],
            ["a list", "a text", "a number", "null", "true or false", "is empty"],
        ),
        ("08_not_utf8_cp1252.jsonl", [1], ["not UTF-8: byte 0xe9 at byte 55"]),
        ("11_nan_and_duplicate_keys.jsonl", [1, 2], ["NaN is not JSON", "'messages' appears more than once"]),
        ("13_empty_file.jsonl", [1], ["no rows"]),
        ("21_unknown_roles.jsonl", [1, 2, 3, 4], ["'hummany'", "'User'", "'developer'", "'bot'"]),
        ("22_empty_or_null_assistant.jsonl", [1, 2, 3, 4], ["is empty", "is empty", "is null", "no 'content'"]),
        ("24_nothing_to_learn.jsonl", [1, 2, 5, 6], ["nothing to learn", "nothing to learn", "empty list", "a text"]),
    ],
)
def test_all_faults_of_a_file_are_told_together(name: str, lines: list[int], reasons: list[str]):
    with pytest.raises(DataError) as error:
        load_rows(CASES / name, purpose="train")
    assert told_lines(error, name) == lines
    told = [line for line in str(error.value).splitlines() if name in line]
    assert all(reason in line for reason, line in zip(reasons, told, strict=True))
    assert error.value.exit_code == EXIT_USAGE


def test_unknown_role_is_told_with_the_allowed_ones():
    with pytest.raises(DataError, match="'bot'; allowed are system, user, assistant"):
        load_rows(CASES / "21_unknown_roles.jsonl", purpose="train")


def test_empty_earlier_assistant_turn_is_told_only_when_it_would_be_trained():
    with pytest.raises(DataError) as error:
        load_rows(CASES / "22_empty_or_null_assistant.jsonl", purpose="train", train_on_what="all_assistant_turns")
    assert told_lines(error, "22_empty_or_null_assistant.jsonl") == [1, 2, 3, 4, 5]


def test_assistant_first_is_kept_and_turns_after_the_last_reply_are_left_out(tmp_path):
    lines = (CASES / "24_nothing_to_learn.jsonl").read_text().splitlines()
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(lines[2:4]))
    loaded = load_rows(path, purpose="train")
    assert [(row.prompt, row.target) for row in loaded.rows] == [
        ((), "Assistant speaks first."),
        (({"role": "user", "content": "u"},), "a"),
    ]
    assert [len(row.messages) for row in loaded.rows] == [1, 2]
    assert any("turns after the last assistant turn were left out" in warning for warning in loaded.warnings)
    kept = load_rows(path, purpose="train", train_on_what="all_messages")
    assert len(kept.rows[1].messages) == 3
    assert kept.rows[1].target == "a"


def test_more_than_ten_faults_are_counted(tmp_path):
    path = write(tmp_path, *[{"prompt": str(number)} for number in range(14)])
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train")
    assert told_lines(error, "rows.jsonl") == list(range(1, 11))
    assert "14 faults" in str(error.value)
    assert "and 4 more" in str(error.value)


def test_array_elements_have_the_line_they_start_at(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n  {"prompt": "a",\n   "completion": "b"},\n\n  {"prompt": "c", "completion": "d"}\n]\n')
    assert [(row.line, row.target) for row in load_rows(path, purpose="train").rows] == [(2, "b"), (5, "d")]


def test_faults_in_an_array_are_told_with_their_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"prompt": "a"},\n42,\n{"prompt": NaN, "completion": "x"},\n{"prompt": "c", "completion" "d"}]')
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train")
    assert told_lines(error, "rows.json") == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "content", ['[{"prompt": "a", "completion": "b"}]', '[\n{"prompt": "a",\n"completion": "b"}\n]', "[\n"]
)
def test_array_named_jsonl_is_told(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the file is a JSON array.*name it rows\.json"):
        load_rows(path, purpose="train")


def test_lines_in_a_json_file_are_read_by_content(tmp_path):
    path = write(tmp_path, chat("a", "b"), chat("c", "d"), name="rows.json")
    assert [row.line for row in load_rows(path, purpose="train").rows] == [1, 2]


def test_one_object_over_many_lines_is_told_once(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [chat("a", "b")]}, indent=2))
    with pytest.raises(DataError, match="1 fault") as error:
        load_rows(path, purpose="train")
    assert "one object over many lines" in str(error.value)


def test_utf16_is_told_and_not_decoded(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(codecs.BOM_UTF16_LE + json.dumps(chat("a", "b")).encode("utf-16-le"))
    with pytest.raises(DataError, match="UTF-16"):
        load_rows(path, purpose="train")


def test_not_utf8_in_an_array_names_line_and_byte(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[\n{"prompt": "caf\xe9", "completion": "b"}]')
    with pytest.raises(DataError, match=r"rows\.json:2: not UTF-8: byte 0xe9 at byte 16"):
        load_rows(path, purpose="train")


def test_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps(chat("q", text), ensure_ascii=False) + "\n" + json.dumps(chat("r", "s")), "utf-8")
    loaded = load_rows(path, purpose="train")
    assert [(row.line, row.target) for row in loaded.rows] == [(1, text), (2, "s")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "\\ud800", "completion": "b"}', "half of a surrogate pair (U+D800)"),
        ('{"prompt": "a", "completion": "b", "score": 1e999}', "beyond the range of a float"),
        ('{"prompt": "a", "completion": "b", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"prompt": "a", "completion": "b"} {"prompt": "c", "completion": "d"}', "more text after the value"),
        ('{"prompt": "a", "completion": "b", "meta": {"k": 1, "k": 2}}', "'k' appears more than once"),
        ('{"prompt": "a", "completion": 4}', "'completion' is a number, expected text"),
        ('{"prompt": "a", "chosen": "b"}', "has 'prompt' but not 'completion'"),
        ('{"quest": "a", "reply": "b"}', "its keys are 'quest', 'reply'"),
        ('{"input": "a", "target": "b"}', "shape of evaluation files"),
        ('{"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "x"}]}', "(user) is empty"),
        ('{"prompt": "a", "completion": "b", "id": 1.5}', "'id' is a number"),
        ('{"prompt": "a", "completion": "b", "history": [["q", "r"]]}', "'history' is not supported"),
        ('{"text": "  "}', "nothing to learn"),
    ],
)
def test_what_a_row_cannot_be_is_told(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(chat("good", "row")) + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train")
    assert reason in str(error.value)
    assert told_lines(error, "rows.jsonl") == [2]


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path):
    path = write(tmp_path, {"messages": [{"role": "\x1b[31mred", "content": "x"}]})
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train")
    assert "\x1b" not in str(error.value)
    assert r"\x1b[31mred" in str(error.value)


def test_missing_file_is_told_with_near_names(tmp_path):
    write(tmp_path, chat("a", "b"), name="train.jsonl")
    with pytest.raises(DataError, match=r"trian\.jsonl: not found; did you mean train\.jsonl\?"):
        load_rows(tmp_path / "trian.jsonl", purpose="train")
    with pytest.raises(DataError, match=r"data files there: train\.jsonl"):
        load_rows(tmp_path / "zzz", purpose="train")
    with pytest.raises(DataError, match="is a folder"):
        load_rows(tmp_path, purpose="train")
    with pytest.raises(DataError, match="does not exist"):
        load_rows(tmp_path / "nowhere" / "train.jsonl", purpose="train")


# Shapes


def test_seven_shapes_are_converted_and_counted():
    loaded = load_rows(CASES / "20_mixed_schemas.jsonl", purpose="train")
    assert loaded.shapes == {
        "instruction/input/output": 2,
        "messages": 1,
        "prompt/completion": 1,
        "conversations": 1,
        "question/answer": 1,
        "text": 1,
    }
    assert [row.question for row in loaded.rows] == [
        "Which bus goes to the quay?",
        "Capital of Peru?",
        "Translate to Dutch\n\nbread",
        "Name a prime",
        "Hi",
        "2+2?",
        "A bare text row.",
    ]
    assert [row.target for row in loaded.rows] == ["Line 7.", "Lima", "brood", "7", "Hello", "4", ""]


def test_system_field_becomes_the_system_turn_and_is_told(tmp_path):
    loaded = load_rows(write(tmp_path, {"system": "Be brief.", "question": "q", "answer": "a"}), purpose="train")
    assert loaded.rows[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert "the 'system' field became the system turn" in loaded.warnings[0]


def test_prompt_and_completion_may_be_lists_of_turns(tmp_path):
    record = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "completion": [{"role": "assistant", "content": "a"}],
    }
    row = load_rows(write(tmp_path, record), purpose="train").rows[0]
    assert [turn["role"] for turn in row.messages] == ["system", "user", "assistant"]
    assert (row.question, row.target) == ("u", "a")


def test_a_row_of_two_shapes_is_read_by_the_first_and_told(tmp_path):
    loaded = load_rows(write(tmp_path, {**chat("q", "a"), "prompt": "p", "completion": "c"}), purpose="train")
    assert loaded.rows[0].question == "q"
    assert "fits messages and prompt/completion; read as messages" in loaded.warnings[0]


def test_evaluation_rows_take_input_and_target_with_id_and_category(tmp_path):
    records = [{"id": 7, "input": "q", "target": "t", "category": "c", "level": 2}, chat("r", "s")]
    first, second = load_rows(write(tmp_path, *records), purpose="eval").rows
    assert (first.id, first.question, first.target, first.category, first.metadata) == (
        "7",
        "q",
        "t",
        "c",
        {"level": 2},
    )
    assert (second.id, second.question, second.target, second.category) == ("rows:2", "r", "s", None)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "bare"}, "cannot be scored"),
        ({"input": "q", "target": "?!"}, "punctuation only"),
        ({"messages": [{"role": "assistant", "content": "first"}]}, "no question to ask"),
        ({"input": "q", "target": ""}, "is empty"),
    ],
)
def test_an_evaluation_row_needs_a_question_and_a_target(tmp_path, record, reason):
    with pytest.raises(DataError, match=reason):
        load_rows(write(tmp_path, record), purpose="eval")


def test_category_field_is_taken_and_a_wrong_name_is_told(tmp_path):
    path = write(tmp_path, {"input": "q", "target": "t", "topic": "buses"})
    assert load_rows(path, purpose="eval", category_field="topic").rows[0].category == "buses"
    with pytest.raises(DataError, match="category field 'topik'; further fields of the rows: topic"):
        load_rows(path, purpose="eval", category_field="topik")


def test_repeated_id_is_told_with_both_lines():
    with pytest.raises(DataError, match=r"33_leak_eval\.jsonl:5: the id 'clean' is already that of line 4"):
        load_rows(CASES / "33_leak_eval.jsonl", purpose="eval")


# Copies, conflicts, leaks


def test_every_copy_of_a_faulty_row_is_told(tmp_path):
    path = write(tmp_path, {"messages": []}, chat("a", "b"), {"messages": []})
    with pytest.raises(DataError) as error:
        load_rows(path, purpose="train")
    assert told_lines(error, "rows.jsonl") == [1, 3]


def test_exact_copies_are_removed_and_conflicts_and_near_copies_told():
    loaded = load_rows(CASES / "32_duplicates.jsonl", purpose="train")
    assert [row.line for row in loaded.rows] == [1, 3, 4, 5]
    assert loaded.duplicates == 1
    assert [(a.line, b.line) for a, b in loaded.near_copies] == [(1, 3)]
    assert [(a.line, b.line) for a, b in loaded.conflicts] == [(1, 4)]
    conflict = next(warning for warning in loaded.warnings if "two different answers" in warning)
    assert "jsonl:1 and" in conflict
    assert "jsonl:4: the same question" in conflict


def test_a_copy_is_one_in_every_field_whatever_their_order(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "completion": "b", "n": 1}\n'
        '{"n": 1, "completion": "b", "prompt": "a"}\n'
        '{"prompt": "a", "completion": "b", "n": 2}\n'
    )
    loaded = load_rows(path, purpose="train")
    assert ([row.line for row in loaded.rows], loaded.duplicates) == ([1, 3], 1)


def test_digest_is_that_of_the_bytes():
    path = CASES / "31_nine_rows.jsonl"
    assert load_rows(path, purpose="train").digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_leaks_stop_the_run_and_the_paraphrase_is_shown_with_its_score():
    with pytest.raises(DataError) as error:
        load_run_data(CASES / "33_leak_train.jsonl", eval_file=CASES / "33_leak_eval.jsonl")
    message = str(error.value)
    assert "33_leak_train.jsonl:1: asks exactly what evaluation item 'exact'" in message
    assert "33_leak_train.jsonl:2: asks up to case, spaces and punctuation what evaluation item 'case_space'" in message
    assert "33_leak_eval.jsonl:5: the id 'clean'" in message
    nearest = next(line for line in message.splitlines() if line.startswith("Nearest pair"))
    assert "similarity 0." in nearest
    assert "What time is the final ferry?" in nearest
    assert "When does the last ferry leave?" in nearest


def test_overlap_is_allowed_when_asked_for():
    path = CASES / "31_nine_rows.jsonl"
    data = load_run_data(path, eval_file=path, allow_overlap=True)
    assert len(data.overlap) == 9
    assert data.evaluation is not None
    assert len(data.evaluation.rows) == 9


def test_an_id_of_both_training_file_and_pool_is_told(tmp_path):
    train = write(tmp_path, {**chat("a", "b"), "id": "x"}, name="train.jsonl")
    pool = write(tmp_path, {**chat("c", "d"), "id": "x"}, name="pool.jsonl")
    with pytest.raises(DataError, match=r"pool\.jsonl:1: the id 'x' is also that of .*train\.jsonl:1"):
        load_run_data(train, pool_file=pool)


def row(number: int, question: str, answer: str = "x", source: str = "train", **more) -> Row:
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Row(f"{source}:{number}", turns, None, "messages", source, number, **more)


def test_overlap_sees_case_spaces_unicode_form_and_system_turns():
    train = [row(1, "Ｗhere is the\u00a0caf\u0065\u0301?"), row(2, "Other")]
    asked = [row(1, "where is  the CAFÉ", source="eval"), row(2, "Others", source="eval")]
    assert find_overlap(train, asked) == [(train[0], asked[0])]
    with_system = Row("s", ({"role": "system", "content": "s"}, *asked[0].messages), None, "messages", "eval", 3)
    assert find_overlap(train, [with_system]) == [(train[0], with_system)]


def test_overlap_finds_a_question_answered_inside_a_conversation():
    turns = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        *row(1, "Which bus?").messages,
    )
    train = Row("t", turns, None, "messages", "train", 1)
    asked = [row(1, "which BUS?", source="eval"), row(2, "Hi there", source="eval")]
    assert find_overlap([train], asked) == [(train, asked[0])]


def test_overlap_lists_every_row_of_both_sides_once_without_all_combinations():
    train = [row(number, "same") for number in range(300)]
    asked = [row(number, "Same", source="eval") for number in range(200)]
    pairs = find_overlap(train, asked)
    assert {a.id for a, _ in pairs} == {a.id for a in train}
    assert {b.id for _, b in pairs} == {b.id for b in asked}
    assert len(pairs) == 499


def test_nearest_pair_leaves_out_overlap_and_pairs_without_a_common_word():
    train = [row(1, "Which bus goes to the quay?"), row(2, "What time is the final ferry?")]
    asked = [row(1, "which bus goes to the quay", source="eval"), row(2, "When does the last ferry leave?", source="e")]
    nearest = nearest_pair(train, asked)
    assert nearest is not None
    assert nearest[:2] == (train[1], asked[1])
    assert 0 < nearest[2] < 1
    assert nearest_pair([row(1, "alpha")], [row(1, "beta", source="e")]) is None
    assert nearest_pair([row(1, "???")], [row(1, "!!", source="e")]) is None


# Batches


def test_nine_rows_in_batches_of_four_are_three_steps():
    rows = load_rows(CASES / "31_nine_rows.jsonl", purpose="train").rows
    assert steps_per_epoch(9, 4) == 3
    batches = [batch_rows(rows, batch_size=4, seed=1, round=1, step_in_round=step) for step in range(3)]
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert {row.line for batch in batches for row in batch} == set(range(1, 10))


def test_one_row_is_one_step():
    rows = load_rows(CASES / "30_one_row.jsonl", purpose="train").rows
    assert steps_per_epoch(1, 4) == 1
    assert batch_rows(rows, batch_size=4, seed=1, round=1, step_in_round=0) == list(rows)
    assert batch_rows(rows, batch_size=4, seed=1, round=1, step_in_round=7) == list(rows)


def test_batches_are_a_function_of_seed_round_and_step_and_epochs_differ():
    rows = list(range(40))

    def epoch(seed: int, round: int, number: int) -> list[int]:
        steps = range(number * 4, number * 4 + 4)
        return [r for s in steps for r in batch_rows(rows, batch_size=10, seed=seed, round=round, step_in_round=s)]

    assert epoch(1, 1, 0) == epoch(1, 1, 0)
    assert sorted(epoch(1, 1, 1)) == rows
    orders = {tuple(epoch(*where)) for where in [(1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0)]}
    assert len(orders) == 4
    with pytest.raises(DataError):
        batch_rows([], batch_size=4, seed=1, round=1, step_in_round=0)


# Rendering


class FakeTokenizer:
    """Stands for a real tokenizer: a token is a word, or a chat mark."""

    def __init__(self):
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        tokens = []
        for word in text.split(" "):
            if word not in self.words:
                self.words.append(word)
            tokens.append(self.words.index(word))
        return tokens

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


class FakeFormat:
    """Stands for `rendering.ChatFormat`, which needs a model's files: words as tokens, `<role>` and `<end>` marks."""

    name = "fake"
    fallback_note: str | None = None

    def __init__(self):
        self.stop: list[int] | list[str] = ["<end>"]
        self.tokenizer = FakeTokenizer()
        self.rendered = 0

    def prompt_tokens(self, messages):
        raise NotImplementedError

    def reply_text(self, tokens):
        raise NotImplementedError

    def training_examples(self, messages, train_on_what):
        self.rendered += 1
        last = max(index for index, turn in enumerate(messages) if turn["role"] == "assistant")
        tokens, weights = [], []
        for index, turn in enumerate(messages):
            trained = index == last or (turn["role"] == "assistant" and train_on_what == "all_assistant_turns")
            content = self.tokenizer.encode(turn["content"] + " <end>")
            tokens += self.tokenizer.encode(f"<{turn['role']}>") + content
            weights += [0.0] + [float(trained)] * len(content)
        return [TokenSequence(tuple(tokens), tuple(weights))]

    def text_example(self, text):
        tokens = tuple(self.tokenizer.encode(text))
        return TokenSequence(tokens, (1.0,) * len(tokens))


def test_rendering_is_lazy_and_counts_trained_tokens():
    chat_format = FakeFormat()
    loader = DataLoader(chat_format, max_seq_length=64)
    rows = [row(1, "one two three", "yes"), row(2, "four", "no no")]
    assert chat_format.rendered == 0
    stats = loader.check(rows)
    # <user> one two three <end> <assistant> yes <end>: 8 tokens, 7 targets, 2 trained; the second likewise 7, 6, 3.
    assert (stats.tokens, stats.trained, stats.examples, stats.dropped) == (13, 5, 2, 0)
    assert stats.describe() == "trained tokens 5 of 13 (38.5 %) in 2 examples"
    loader.render(rows[0])
    assert chat_format.rendered == 2


def test_rows_that_share_a_place_are_rendered_each():
    loader = DataLoader(FakeFormat(), max_seq_length=64)  # rows made from samples have no line of their own
    first, second = (Row(name, row(0, "q", name).messages, None, "sample", "task", 0) for name in ("a", "b b"))
    assert [loader.render(made)[0].n_trained for made in (first, second)] == [2, 3]


def test_datum_is_shifted_by_one():
    loader = DataLoader(FakeFormat(), max_seq_length=64)
    (example,) = loader.render(row(1, "a b", "c"))
    whole = loader.sequences(row(1, "a b", "c"))[0].tokens
    assert example.datum.model_input.to_ints() == list(whole[:-1])
    assert list(example.datum.loss_fn_inputs["target_tokens"].data) == list(whole[1:])
    assert list(example.datum.loss_fn_inputs["weights"].data) == [0, 0, 0, 0, 1, 1]
    assert (example.n_tokens, example.n_trained) == (6, 2)


def test_datum_by_hand_equals_the_cookbooks(monkeypatch):
    sequence = TokenSequence((5, 6, 7, 8, 9), (0.0, 0.0, 1.0, 0.0, 1.0))
    with_cookbook = make_datum(sequence)
    monkeypatch.setitem(sys.modules, "tinker_cookbook.supervised.common", None)
    by_hand = make_datum(sequence)
    assert by_hand.model_input.to_ints() == with_cookbook.model_input.to_ints() == [5, 6, 7, 8]
    for name in ("weights", "target_tokens"):
        ours, theirs = by_hand.loss_fn_inputs[name], with_cookbook.loss_fn_inputs[name]
        assert (list(ours.data), ours.dtype, ours.shape) == (list(theirs.data), theirs.dtype, theirs.shape)


def test_text_row_trains_every_token_after_the_first():
    text = Row("t", (), "a bare text row", "text", "train", 1)
    (example,) = DataLoader(FakeFormat(), max_seq_length=64).render(text)
    assert (example.n_tokens, example.n_trained) == (3, 3)


def test_row_longer_than_the_limit_is_dropped_whole_and_counted():
    rows = load_rows(CASES / "26_prompt_longer_than_max_length.jsonl", purpose="train").rows
    loader = DataLoader(FakeFormat(), max_seq_length=512)
    stats = loader.check(rows)
    assert loader.render(rows[0]) == ()
    assert list(loader.dropped) == [rows[0].id]
    assert "longer than max_seq_length 512" in loader.dropped[rows[0].id]
    assert (stats.rows, stats.dropped, stats.examples) == (2, 1, 1)
    assert stats.describe().endswith("1 of 2 rows dropped")
    assert loader.usable(rows) == [rows[1]]
    with pytest.raises(DataError, match="none of 1 rows can be trained on; raise max_seq_length") as error:
        loader.check(rows[:1])
    assert error.value.exit_code == EXIT_USAGE


def test_of_a_large_file_a_seeded_sample_is_checked(monkeypatch):
    monkeypatch.setattr(data_loader, "HELD_ROWS", 30)
    monkeypatch.setattr(data_loader, "CHECKED_ROWS", 20)
    rows = [row(number, f"q{number}", "a") for number in range(60)]

    def check(seed: int) -> list[str]:
        chat_format = FakeFormat()
        stats = DataLoader(chat_format, max_seq_length=64).check(rows, seed=seed)
        assert chat_format.rendered == 20
        assert (stats.rows, stats.of, stats.examples) == (20, 60, 20)
        told = "checked 20 of 60 rows; the others are rendered when they are chosen"
        assert stats.describe() == f"trained tokens 40 of 100 (40.0 %) in 20 examples; {told}"
        return [word for word in chat_format.tokenizer.words if word.startswith("q")]

    assert check(1) == check(1) != check(2)
    loader = DataLoader(FakeFormat(), max_seq_length=64)
    assert loader.usable(rows) is rows


def test_a_large_file_is_only_refused_when_no_row_at_all_can_be_trained_on(monkeypatch):
    monkeypatch.setattr(data_loader, "HELD_ROWS", 10)
    monkeypatch.setattr(data_loader, "CHECKED_ROWS", 3)
    long = [row(number, "word " * 30) for number in range(40)]
    with pytest.raises(DataError, match="none of 40 rows can be trained on"):
        DataLoader(FakeFormat(), max_seq_length=16).check(long)
    stats = DataLoader(FakeFormat(), max_seq_length=16).check([*long, row(41, "short")])
    assert (stats.dropped, stats.examples, stats.describe()[:24]) == (3, 0, "trained tokens 0 of 0 (0")


def test_rendered_rows_are_kept_up_to_a_number_of_tokens(monkeypatch):
    monkeypatch.setattr(data_loader, "KEPT_TOKENS", 15)  # a row costs 6: its 5 target tokens and one more
    chat_format = FakeFormat()
    loader = DataLoader(chat_format, max_seq_length=64)
    first, second, third = (row(number, "q", "a") for number in (1, 2, 3))
    for asked in (first, second, first, third, first, third):
        assert loader.render(asked)[0].n_tokens == 5
    assert chat_format.rendered == 3
    loader.render(second)
    assert chat_format.rendered == 4


def test_a_row_that_the_chat_format_refuses_cannot_be_trained_on(chat_format):
    loader = DataLoader(chat_format, max_seq_length=512)
    first = Row("first", ({"role": "assistant", "content": "I speak first."},), None, "messages", "train", 3)
    assert [loader.can_train(first), loader.can_train(first), loader.can_train(row(1, "q", "a"))] == [
        False,
        False,
        True,
    ]
    assert loader.dropped["first"].startswith("train:3: ")


def test_the_limit_counts_the_tokens_of_the_whole_sequence():
    assert DataLoader(FakeFormat(), max_seq_length=7).render(row(1, "a b", "c"))
    assert not DataLoader(FakeFormat(), max_seq_length=6).render(row(1, "a b", "c"))


def test_row_without_a_trained_token_is_dropped():
    one_word = Row("t", (), "word", "text", "train", 1)  # its only token is predicted from nothing
    loader = DataLoader(FakeFormat(), max_seq_length=64)
    assert loader.render(one_word) == ()
    assert loader.dropped == {"t": "no token of it would be trained"}


def test_mask_preview_marks_what_is_trained_and_escapes_control_characters():
    loader = DataLoader(FakeFormat(), max_seq_length=64)
    preview = loader.mask_preview(row(4, "Is\x1b[2J it?", "Yes sir"))
    assert preview.splitlines() == [
        "train:4: trained tokens 3 of 7",
        r"| <user> Is\x1b[2J it? <end> <assistant>",
        "> Yes sir <end>",
    ]
    coloured = loader.mask_preview(row(4, "Is it?", "Yes"), colour=True)
    assert "\x1b[32m> Yes <end>\x1b[0m" in coloured


# Rendering with the real chat format of the stand-in model


@pytest.fixture(scope="module")
def chat_format():
    folder = Path(__file__).parent.parent / "data" / "base_model"
    return get_chat_format(str(folder), base_models.load_tokenizer(folder), model_folder=folder)


def test_every_shape_trains_its_target_and_the_stop_token_and_nothing_else(chat_format):
    rows = load_rows(CASES / "20_mixed_schemas.jsonl", purpose="train").rows
    loader = DataLoader(chat_format, max_seq_length=512)
    for kept in rows:
        (sequence,) = loader.sequences(kept)
        trained = [token for token, weight in zip(sequence.tokens, sequence.weights, strict=True) if weight]
        text = chat_format.tokenizer.decode(trained)
        if kept.text is None:
            assert text.removesuffix("\n") == kept.target + "<|im_end|>"
        else:
            assert text == kept.text + "<|endoftext|>"
    stats = loader.check(rows)
    assert (stats.examples, stats.dropped) == (7, 0)
    assert 0 < stats.trained < stats.tokens


def test_prompt_longer_than_the_limit_with_real_tokens(chat_format):
    rows = load_rows(CASES / "26_prompt_longer_than_max_length.jsonl", purpose="train").rows
    loader = DataLoader(chat_format, max_seq_length=512)
    assert loader.check(rows).dropped == 1
    with pytest.raises(DataError, match="none of 1 rows can be trained on"):
        loader.check(rows[:1])


def test_rows_that_the_renderer_refuses_are_told_together_with_their_lines(chat_format, tmp_path):
    first = {"messages": [{"role": "assistant", "content": "I speak first."}]}
    path = write(tmp_path, first, chat("q", "a"), {**first, "n": 2})
    with pytest.raises(DataError, match="2 of 3 rows cannot be rendered") as error:
        DataLoader(chat_format, max_seq_length=512).check(load_rows(path, purpose="train").rows)
    assert told_lines(error, "rows.jsonl") == [1, 3]
