"""Near copies of evaluation items: hand-counted n-grams, templates, scripts, and the files of a run."""

import json
from pathlib import Path

import pytest

import contamination
import row_files
from contamination import compare
from data_loader import find_overlap, load_rows, load_run_data
from error_handling import DataError
from near_matches import NearMatcher, ngram_length
from row_files import Row


def row(number: int, question: str, source: str = "train", **more) -> Row:
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": "x"})
    return Row(f"{source}:{number}", turns, None, "messages", source, number, **more)


def rows(*questions: str, source: str = "train") -> list[Row]:
    return [row(number, question, source) for number, question in enumerate(questions)]


def near(train: list[Row], items: list[Row]) -> dict[str, tuple[str, float]]:
    return {match.row_id: (match.item_id, match.score) for match in compare(train, items).near}


def test_n_is_eight_and_half_the_words_of_short_items():
    assert [ngram_length(words) for words in (3, 6, 8, 15, 16, 200)] == [3, 3, 4, 7, 8, 8]


def test_containment_is_the_share_of_the_item_s_ngrams():
    # 12 words: n = 6, so 7 n-grams. Changing the last word loses 1 of 7 (0.857), the last but one 2 of 7 (0.714).
    item = rows("one two three four five six seven eight nine ten eleven twelve", source="eval")
    train = rows(
        "please answer: one two three four five six seven eight nine ten eleven thirteen, thanks",
        "one two three four five six seven eight nine ten nine twelve",
        "ONE two three, four five six seven eight nine ten eleven twelve and so on",
    )
    assert near(train, item) == {"train:0": ("eval:0", pytest.approx(6 / 7)), "train:2": ("eval:0", 1.0)}
    found = compare(train, item)
    assert found.overlap == ()
    assert found.nearest is not None
    assert found.nearest[0] is train[1]
    assert str(found.near[0]) == "train:0 holds 86% of item 'eval:0' (eval:0)"


def test_equal_questions_are_overlap_and_not_near_matches():
    item = rows("Where does the last ferry leave from?", source="eval")
    found = compare(rows("where does the LAST ferry leave from", "So, where does the last ferry leave from?"), item)
    assert [(a.id, b.id) for a, b in found.overlap] == [("train:0", "eval:0")]
    assert [match.row_id for match in found.near] == ["train:1"]
    assert found.nearest is None


def test_a_template_shared_by_items_or_rows_makes_no_near_match():
    template = "What is the capital city of the country called {}?"
    names = [f"land{number}" for number in range(40)]
    items = [row(n, template.format(name), "eval") for n, name in enumerate(names[:20])]
    train = [row(n, template.format(name)) for n, name in enumerate(names[20:])]
    assert near(train, items) == {}
    # 9 words, n = 4: with one item and few rows of the template, 5 of 6 n-grams are shared and nothing says "common".
    assert len(near(train[:3], items[:1])) == 3
    assert near(train, items[:1]) == {}
    # The item itself within a row of the same template is found all the same.
    copied = row(99, "Quick question: " + template.format("land3"))
    assert near([*train, copied], items) == {"train:99": ("eval:3", 1.0)}
    # A row that only shares the telling end is not most of the item.
    assert near([row(98, "I moved to the country called land3 last year")], items) == {}


def test_a_long_instruction_before_every_question_does_not_count():
    prefix = "Read the following support ticket carefully and answer with exactly one of the six labels given above: "
    items = [row(n, f"{prefix}my invoice number {n} was charged twice", "eval") for n in range(30)]
    train = [row(n, f"{prefix}the app closes when I open chart {n}") for n in range(30)]
    assert near(train, items) == {}


def test_a_question_copied_many_times_is_found_though_its_ngrams_are_common():
    item = rows("How many lamps does the old lighthouse keeper own", source="eval")
    train = rows(*[f"Number {n}. How many lamps does the old lighthouse keeper own today" for n in range(50)])
    assert len(near(train, item)) == 50


def test_system_turns_never_count_and_every_user_turn_does():
    question = "Which workshop mends the clock of the harbour tower?"
    item = rows(question, source="eval")
    system = {"role": "system", "content": question}
    only_system = Row("s", (system, *row(1, "Hello there").messages), None, "messages", "train", 1)
    turns = (*row(1, f"First of all: {question}").messages, *row(2, "Thank you, and where is it?").messages)
    text = Row("t", (), f"A page. {question} Nobody knows.", "text", "train", 3)
    assert near([only_system, Row("m", turns, None, "messages", "train", 2), text], item).keys() == {"m", "t"}
    items = [Row("e", (system, *row(1, "Hello").messages), None, "messages", "eval", 1)]
    assert near(rows(f"So: {question}"), items) == {}


def test_signs_and_scripts_without_spaces():
    assert near(rows("so what is 12 + 7 now"), rows("what is 12 * 7", source="eval")) == {}
    assert near(rows("so what is 12 * 7 now"), rows("what is 12 * 7", source="eval")).keys() == {"train:0"}
    japanese = rows("最後のフェリーは何時に出ますか", source="eval")
    assert near(rows("教えて：最後のフェリーは何時に出ますか", "最初のバスはどこに止まりますか"), japanese).keys() == {
        "train:0"
    }
    assert NearMatcher(["Hi you"]).match_text("Hi you there") == []  # two words are compared as a whole only


def test_the_nearest_pair_is_the_same_whether_all_pairs_are_compared_or_few(monkeypatch):
    # idf over 2 items: a word of one item ln(3/2) + 1 = 1.405, of none ln(3) + 1 = 2.099. Item 0 and row 0 share two
    # words: 2 * 1.405**2 / (sqrt(3) * 1.405 * sqrt(2 * 1.405**2 + 2.099**2)) = 0.559.
    items = rows("last ferry leaves", "red clock", source="eval")
    train = rows("last ferry tomorrow", "a clock stands there", "nothing")
    found = compare(train, items).nearest
    assert found is not None
    assert (found[0].id, found[1].id) == ("train:0", "eval:0")
    assert found[2] == pytest.approx(2 * 1.405**2 / (3**0.5 * 1.405 * (2 * 1.405**2 + 2.0986**2) ** 0.5), abs=1e-3)
    monkeypatch.setattr(contamination, "_ALL_PAIRS", 0)
    monkeypatch.setattr(contamination, "_BLOCK", 2)
    few = compare(train, items).nearest
    assert few is not None
    assert (few[0].id, few[1].id, few[2]) == (found[0].id, found[1].id, pytest.approx(found[2]))


# The files of a run

ITEM = "Which colour does the harbour master paint the new boats this spring"


def write(folder: Path, name: str, *questions: str) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"question": q, "answer": f"a{n}"}) + "\n" for n, q in enumerate(questions)))
    return path


@pytest.mark.parametrize("held", [20_000, 1])
def test_near_matches_are_left_out_of_training_file_and_pool(tmp_path, monkeypatch, held):
    monkeypatch.setattr(row_files, "HELD_ROWS", held)  # 1: rows are read from the file when they are asked for
    train = write(tmp_path, "train.jsonl", "What now?", f"Please: {ITEM}", "Where is the key?", "Who has the boats?")
    pool = write(tmp_path, "pool.jsonl", f"{ITEM}, and why", "Is it late?", "Does it rain?")
    data = load_run_data(train, pool_file=pool, eval_file=write(tmp_path, "eval.jsonl", ITEM, "Why is that?"))
    assert [row.line for row in data.train.rows] == [1, 3, 4]
    assert data.pool is not None
    assert [row.line for row in data.pool.rows] == [2, 3]
    assert list(data.train.shapes.values()) + list(data.pool.shapes.values()) == [3, 2]
    assert [match.to_json() for match in data.near] == [
        {
            "id": "train:2",
            "where": f"{train}:2",
            "item": "eval:1",
            "item_where": f"{tmp_path}/eval.jsonl:1",
            "score": 1.0,
            "without_shared_sentences": False,
            "kept": False,
        },
        {
            "id": "pool:1",
            "where": f"{pool}:1",
            "item": "eval:1",
            "item_where": f"{tmp_path}/eval.jsonl:1",
            "score": 1.0,
            "without_shared_sentences": False,
            "kept": False,
        },
    ]
    assert not data.on_training_data
    assert data.nearest is not None
    assert data.nearest[0].question == "Who has the boats?"


def test_near_matches_stay_when_overlap_is_allowed_and_scores_are_then_on_training_data(tmp_path):
    train = write(tmp_path, "train.jsonl", f"Please: {ITEM}")
    eval_file = write(tmp_path, "eval.jsonl", ITEM)
    data = load_run_data(train, eval_file=eval_file, allow_overlap=True)
    assert (len(data.train.rows), len(data.near), data.overlap, data.on_training_data) == (1, 1, (), True)
    with pytest.raises(DataError, match="every row is nearly an evaluation item, so none is left to train on"):
        load_run_data(train, eval_file=eval_file)


def test_near_matches_of_test_items_are_left_out_even_when_overlap_is_allowed(tmp_path):
    train = write(tmp_path, "train.jsonl", f"Please: {ITEM}", "Who has the boats?")
    other = write(tmp_path, "eval.jsonl", "Why is that?")
    test = write(tmp_path, "test.jsonl", ITEM)
    data = load_run_data(train, eval_file=other, test_file=test, allow_overlap=True)
    assert [row.line for row in data.train.rows] == [2]
    assert not data.on_training_data
    equal = write(tmp_path, "equal.jsonl", ITEM.upper(), "Something else?")
    with pytest.raises(DataError, match=r"equal\.jsonl:1: asks .* what test item 'test:1'"):
        load_run_data(equal, eval_file=other, test_file=test, allow_overlap=True)


def test_many_rows_are_shared_by_two_processes_and_a_lost_one_is_made_up_for(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "HELD_ROWS", 3)
    questions = [f"What about number {n}?" for n in range(9)]
    train = write(tmp_path, "train.jsonl", *questions[:5], f"Please: {ITEM}", "Who has the boats of spring?")
    pool = write(tmp_path, "pool.jsonl", f"{ITEM}, and why", *questions[5:])
    eval_file = write(tmp_path, "eval.jsonl", ITEM)
    alone = load_run_data(train, pool_file=pool, eval_file=eval_file)
    assert [match.row_id for match in alone.near] == ["train:6", "pool:1"]
    monkeypatch.setattr(contamination, "ROWS_WORTH_A_PROCESS", 2)
    monkeypatch.setattr(contamination, "_processors", lambda: 2)
    shared = load_run_data(train, pool_file=pool, eval_file=eval_file)
    monkeypatch.setattr(contamination.sys, "executable", "/bin/false")
    for data in (shared, load_run_data(train, pool_file=pool, eval_file=eval_file)):
        assert (data.near, data.nearest) == (alone.near, alone.nearest)


def test_a_copy_with_typographic_quotes_and_dashes_is_told():
    plain = "The keeper's note said \"don't light the lamp's wick - it's wet\" and we didn't"
    fancy = "The keeper’s note said “don’t light the lamp’s wick — it’s wet” and we didn’t"
    found = compare(rows(fancy, f"Tell me: {fancy}, please"), rows(plain, source="eval"))
    assert [(a.id, b.id) for a, b in found.overlap] == [("train:0", "eval:0")]
    assert [(match.row_id, match.score) for match in found.near] == [("train:1", 1.0)]


def test_overlap_is_by_position_where_rows_are_made_anew_at_each_reading(tmp_path, monkeypatch):
    train = load_rows(write(tmp_path, "train.jsonl", "One?", "Two?", "one"), purpose="train").rows
    path = write(tmp_path, "eval.jsonl", "Two?", "ONE", "two")
    held = find_overlap(train, load_rows(path, purpose="eval").rows)
    assert [(row.line, item.line) for row, item in held] == [(1, 2), (2, 1), (3, 2), (2, 3)]
    monkeypatch.setattr(row_files, "HELD_ROWS", 1)
    table = load_rows(path, purpose="eval").rows
    assert table[0] is not table[0]
    assert find_overlap(train, table) == held


@pytest.mark.parametrize("held", [20_000, 1])
def test_pool_rows_that_copy_a_training_row_are_left_out_and_other_answers_told(tmp_path, monkeypatch, held):
    monkeypatch.setattr(row_files, "HELD_ROWS", held)
    train = write(tmp_path, "train.jsonl", "One?", "Two?", "Three?")
    pool = write(tmp_path, "pool.jsonl", "  ONE?", "Four?", "Two?", "Three?", "Five?")
    data = load_run_data(train, pool_file=pool)
    assert data.pool is not None
    assert [row.line for row in data.pool.rows] == [2, 3, 4, 5]
    assert data.pool.shapes == {"question/answer": 4}
    assert data.warnings == (
        f"{pool}: 1 row has the question and answer of a training row, left out of the pool: {pool}:1 ({train}:1)",
        f"{train}:2 and {pool}:3: the same question with two different answers",
        f"{train}:3 and {pool}:4: the same question with two different answers",
    )
    copies = write(tmp_path, "copies.jsonl", "One?", "two?")
    none_left = load_run_data(train, pool_file=copies).pool
    assert none_left is not None
    assert list(none_left.rows) == []
