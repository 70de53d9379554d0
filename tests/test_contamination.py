"""Near copies of evaluation items: hand-counted n-grams, templates, scripts, and the files of a run."""

import json
from pathlib import Path

import pytest

import contamination
import row_files
from contamination import compare
from data_loader import find_overlap, load_rows, load_run_data
from error_handling import DataError
from evaluation import SampleResult
from evaluation_items import EvaluationItems
from near_matches import NearMatcher, ngram_length
from preparation import near_matches_told
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


INSTRUCTION = "Answer with one letter. Question: "


def test_copies_are_found_however_many_they_are():
    # 12 words, n = 6: 7 n-grams. Without the last word 6 of 7 are held, and these are in most rows.
    item = "one two three four five six seven eight nine ten eleven twelve"
    others = [f"Row {n} says something else about {n * n} lamps" for n in range(120)]
    for kept, ending in ((item, ""), (item.removesuffix(" twelve"), ""), (item.removesuffix("twelve"), "ends")):
        copies = [f"Opener{n}, so: {kept}{ending}" for n in range(120)]
        assert len(near(rows(*copies[:60], *others), rows(item, source="eval"))) == 60
        assert len(near(rows(*copies, *others), rows(item, source="eval"))) == 120


def test_copies_with_one_word_changed_anywhere_are_found_and_a_template_with_a_slot_is_none():
    words = [f"w{n}" for n in range(60)]  # n = 8: a word in the middle is in 8 of 53 n-grams
    copies = [" ".join([*words[:n], f"x{n}", *words[n + 1 :]]) for n in range(60)]
    item = rows(" ".join(words), source="eval")
    assert len(near(rows(*copies), item)) == 60
    slot = [" ".join([*words[:30], f"x{n}", *words[31:]]) for n in range(60)]
    assert near(rows(*slot), item) == {}
    # Two slots, the first of which has few different words.
    both = [" ".join([*words[:3], f"x{n % 3}", *words[4:-1], f"y{n}"]) for n in range(60)]
    assert near(rows(*both), item) == {}


def test_a_bare_question_is_near_an_item_that_puts_an_instruction_before_it():
    names = [f"{place} {n}" for n in range(10) for place in ("harbour", "market", "mill")]
    items = [
        row(n, f"{INSTRUCTION}Which lamp of the {name} wall is broken tonight?", "eval") for n, name in enumerate(names)
    ]
    train = rows(
        "Which lamp of the mill 4 wall is broken tonight?",
        f"Tell me something. {INSTRUCTION}Which lamp of the mill 4 wall is broken tonight?",
        f"{INSTRUCTION}Which bell of the old church rings at noon on Sundays?",
        "Which lamp of the mill 77 wall is broken tonight?",
        "Answer with one letter. Question: do I have to?",
    )
    assert near(train, items) == {"train:0": ("eval:14", 1.0), "train:1": ("eval:14", 1.0)}
    first, second = compare(train, items).near
    assert str(first) == "train:0 holds 100% (without sentences that many items hold) of item 'eval:14' (eval:14)"
    assert (first.own, second.own) == (True, False)


def test_an_instruction_with_a_template_after_it_makes_no_near_match():
    lands = ["France", "Spain", "Peru", "Chad", "Mali", "Cuba", "Oman", "the Democratic Republic of the Congo"]
    items = [row(n, f"{INSTRUCTION}What is the capital of {land}?", "eval") for n, land in enumerate(lands)]
    others = ["What is the capital of Norway?", "France is a country", "The Democratic Republic of the Congo is large"]
    assert near(rows(*others), items) == {}
    assert near(rows("So what is the capital of Peru, again?"), items) == {"train:0": ("eval:2", 1.0)}
    # Less than 5 words of its own are no evidence, and neither is an instruction that few items have.
    short = [row(n, f"{INSTRUCTION}Is {land} big?", "eval") for n, land in enumerate(lands[:7])]
    assert near(rows("Is France big, is Spain big, is Peru big?"), short) == {}
    assert near(rows("What is the capital of Spain?"), items[:4]) == {}


def dialogue(name: str, system: str | None, question: str, answer: str) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return Row(name, tuple(turns), None, "messages", name, 1)


def test_a_user_turn_under_another_system_turn_with_another_answer_is_another_question():
    text = "The lamp of the harbour wall is broken tonight"
    items = [dialogue("e-fr", "Translate to French", text, "La lampe du mur du port est cassée ce soir")]
    german = dialogue("de", "Translate to German", text, "Die Lampe der Hafenmauer ist heute Nacht kaputt")
    found = compare([german, dialogue("de-near", "Translate to German", f"Now: {text}", "Die Lampe")], items)
    assert (found.overlap, found.near) == ((), ())
    assert [(a.id, b.id) for a, b in found.differing] == [("de", "e-fr")]
    refused = [
        dialogue("no system turn", None, text, "Die Lampe"),
        dialogue("same system turn", "translate to FRENCH", text, "Une lampe est cassée"),
        dialogue("same answer", "Translate to German", text, items[0].target.upper()),
        dialogue("answer within", "Be polite", text, f"Gladly: {items[0].target}!"),
    ]
    assert [row.id for row, _ in compare(refused, items).overlap] == [row.id for row in refused]
    assert [match.row_id for match in compare([dialogue("n", None, f"Now: {text}", "x")], items).near] == ["n"]
    # Nothing of the kind lets a test item in.
    strict = compare(
        [german, dialogue("near", "Translate to German", f"Now: {text}", "Die")], items, by_system_turns=False
    )
    assert [row.id for row, _ in strict.overlap] == ["de"]
    assert [match.row_id for match in strict.near] == ["near"]
    assert strict.differing == ()
    # Of several items with that user turn, any that is the same question counts.
    items.append(dialogue("e-de", "Translate to German", text, "Die Lampe an der Mauer ist kaputt"))
    assert [(a.id, b.id) for a, b in compare([german], items).overlap] == [("de", "e-de")]
    chosen = EvaluationItems([german], items[:1])
    assert (chosen.asks_same(german), chosen.held_by(german)) == (False, None)
    assert EvaluationItems([german], items).asks_same(german)
    sample = SampleResult("arc", "1", 1, text, "A", "", 0.0)
    assert EvaluationItems([german], [], [sample]).asks_same(german)


@pytest.mark.parametrize("held", [20_000, 1])
def test_two_languages_by_system_turn_are_no_contradiction_no_copies_and_run_without_allow_overlap(
    tmp_path, monkeypatch, held
):
    monkeypatch.setattr(row_files, "HELD_ROWS", held)

    def file(name: str, *pairs: tuple[str, str]) -> Path:
        records = [
            {"messages": list(dialogue("", f"Translate to {language}", ITEM, answer).messages)}
            for language, answer in pairs
        ]
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return tmp_path / name

    train = file("train.jsonl", ("German", "Welche Farbe"), ("Spanish", "De qué color"))
    pool = file("pool.jsonl", ("Italian", "Di che colore"), ("German", "welche  FARBE"))
    eval_file = file("eval.jsonl", ("French", "De quelle couleur"))
    data = load_run_data(train, pool_file=pool, eval_file=eval_file)
    assert data.pool is not None
    assert (len(data.train.rows), [row.line for row in data.pool.rows]) == (2, [1])
    assert (data.near, data.overlap, data.on_training_data) == ((), (), False)
    assert not any("different answers" in warning for warning in data.warnings)
    assert any(warning.startswith("4 rows have the user turn of an evaluation") for warning in data.warnings)


def test_what_overlap_keeps_and_what_a_test_item_takes_out_are_told_apart(tmp_path):
    other = "Who lights the seven lamps of the northern harbour wall at dusk"
    train = write(tmp_path, "train.jsonl", f"Please: {ITEM}", f"Please: {other}", "Is it late?")
    files = {"eval_file": write(tmp_path, "eval.jsonl", ITEM), "test_file": write(tmp_path, "test.jsonl", other)}
    data = load_run_data(train, **files, allow_overlap=True)
    assert [(match.row_id, match.kept) for match in data.near] == [("train:1", True), ("train:2", False)]
    assert data.on_training_data
    left_out, kept = near_matches_told(data.near)
    assert "item's word sequences left out of training" in left_out
    assert (f"{train}:2" in left_out, f"{train}:1" in left_out) == (True, False)
    assert "1 training row with at least 80 % of an evaluation item's word sequences kept, as overlap is" in kept
    assert (f"{train}:1" in kept, f"{train}:2" in kept) == (True, False)
    near = load_run_data(train, **files).near
    assert len(near_matches_told(near)) == 1
    # A row near an item of both files is not trained on, and scores are then on other data.
    files = {"eval_file": files["test_file"], "test_file": write(tmp_path, "both.jsonl", other, "Does it rain?")}
    both = load_run_data(train, **files, allow_overlap=True)
    assert ([match.kept for match in both.near], both.on_training_data) == ([False], False)
