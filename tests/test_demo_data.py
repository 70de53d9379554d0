"""The demo data keeps its promises: size, balance, schema, variety, and no near-duplicates anywhere."""

import difflib
import json
import re
import statistics
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parent.parent / "data"
LABELS = ("billing", "refund", "login", "security", "bug", "feature")
INSTRUCTION = f"Label the ticket: {', '.join(LABELS[:-1])} or {LABELS[-1]}."
PER_LABEL = {"train": 42, "eval": 14, "test": 14, "pool": 26}
MAX_TRIGRAM_CONTAINMENT = 0.5
MAX_COSINE = 0.8
MAX_DIFFLIB_RATIO = 0.8


def read_jsonl(name: str) -> list[dict]:
    text = (DATA / name).read_bytes().decode("utf-8", errors="strict")
    return [json.loads(line) for line in text.splitlines()]


def ticket_of(row: dict) -> str:
    """The ticket's own text, without the instruction that all rows share."""
    return row["messages"][1]["content"]


def word_trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def near_duplicates(texts: list[str]) -> list[tuple[str, str, str]]:
    """(measure, text, text) of every pair that reaches one of the three limits."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer().fit_transform(texts)
    cosines = (vectors @ vectors.T).toarray()
    trigrams = [word_trigrams(text) for text in texts]
    found = []
    for i, j in combinations(range(len(texts)), 2):
        shorter = min(len(trigrams[i]), len(trigrams[j]))
        if shorter and len(trigrams[i] & trigrams[j]) / shorter >= MAX_TRIGRAM_CONTAINMENT:
            found.append(("trigrams", texts[i], texts[j]))
        if cosines[i, j] >= MAX_COSINE:
            found.append(("cosine", texts[i], texts[j]))
        # difflib is slow, and texts as alike as its limit demands share words, hence some cosine.
        if cosines[i, j] >= 0.2:
            ratio = difflib.SequenceMatcher(None, texts[i].lower(), texts[j].lower(), autojunk=False).ratio()
            if ratio >= MAX_DIFFLIB_RATIO:
                found.append(("difflib", texts[i], texts[j]))
    return found


@pytest.fixture(scope="module")
def tickets() -> dict[str, list[dict]]:
    return {part: read_jsonl(f"tickets_{part}.jsonl") for part in PER_LABEL}


@pytest.fixture(scope="module")
def all_rows(tickets) -> list[dict]:
    return [row for rows in tickets.values() for row in rows]


@pytest.mark.parametrize("part", PER_LABEL)
def test_each_file_is_balanced_over_the_six_labels(tickets, part):
    counts = Counter(row["category"] for row in tickets[part])
    assert counts == dict.fromkeys(LABELS, PER_LABEL[part])


@pytest.mark.parametrize("part", PER_LABEL)
def test_rows_have_one_prompt_naming_the_labels_and_one_label_as_answer(tickets, part):
    for row in tickets[part]:
        assert set(row) == {"id", "messages", "category"}
        system, user, assistant = row["messages"]
        assert [turn["role"] for turn in (system, user, assistant)] == ["system", "user", "assistant"]
        assert system["content"] == INSTRUCTION, row["id"]
        assert user["content"], row["id"]
        assert assistant["content"] == row["category"], row["id"]
        assert row["category"] in LABELS
        ticket = ticket_of(row)
        assert ticket == ticket.strip(), row["id"]
        assert "\n" not in ticket, row["id"]


def test_ids_are_unique_over_all_files_and_name_their_file(tickets, all_rows):
    assert len({row["id"] for row in all_rows}) == len(all_rows)
    for part, rows in tickets.items():
        assert [row["id"] for row in rows] == [f"{part}-{n:03d}" for n in range(1, len(rows) + 1)]


def test_no_two_tickets_are_near_duplicates_within_or_across_files(all_rows):
    assert near_duplicates([ticket_of(row) for row in all_rows]) == []


def test_the_near_duplicate_check_finds_an_edited_copy(all_rows):
    texts = [ticket_of(row) for row in all_rows[:60]]
    original = max(texts, key=len)
    edited = original.replace("the", "this").rstrip(".?!") + ", please."
    assert edited != original
    found = near_duplicates([*texts, edited])
    assert {measure for measure, _, _ in found} == {"trigrams", "cosine", "difflib"}
    assert {pair for _, *pair_of in found for pair in pair_of} == {original, edited}


@pytest.mark.parametrize("part", PER_LABEL)
def test_tickets_vary_in_length(tickets, part):
    lengths = [len(ticket_of(row).split()) for row in tickets[part]]
    assert min(lengths) >= 5
    assert max(lengths) <= 48
    assert 15 <= statistics.mean(lengths) <= 21
    assert statistics.stdev(lengths) >= 5
    assert min(lengths) <= 8
    assert max(lengths) >= 35


def test_length_does_not_give_the_label_away(all_rows):
    means = [
        statistics.mean(len(ticket_of(row).split()) for row in all_rows if row["category"] == label) for label in LABELS
    ]
    assert max(means) - min(means) < 4


def test_tickets_do_not_start_alike(all_rows):
    openings = Counter(" ".join(ticket_of(row).lower().split()[:3]) for row in all_rows)
    assert openings.most_common(1)[0][1] <= 0.02 * len(all_rows)


@pytest.mark.parametrize(
    ("word", "label"), [("refund", "refund"), ("charged", "refund"), ("invoice", "billing"), ("password", "login")]
)
def test_the_obvious_word_does_not_settle_the_label(all_rows, word, label):
    labels = [row["category"] for row in all_rows if re.search(rf"\b{word}\b", ticket_of(row).lower())]
    assert len(labels) >= 10
    assert any(other != label for other in labels)
    assert labels.count(label) >= 4


def test_non_ascii_text_survives_as_utf8(all_rows):
    assert any(not ticket_of(row).isascii() for row in all_rows)
    assert all("\ufffd" not in ticket_of(row) for row in all_rows)


def test_question_answer_pairs_are_short_distinct_and_about_the_invented_company():
    pairs = read_jsonl("demo_data.jsonl")
    assert len(pairs) == 20
    assert all(set(pair) == {"question", "answer"} for pair in pairs)
    assert len({pair["question"] for pair in pairs}) == 20
    assert len({pair["answer"].lower() for pair in pairs}) == 20
    assert all(1 <= len(pair["answer"].split()) <= 4 for pair in pairs)
    # A question that holds its own answer could be copied instead of remembered.
    assert not [pair for pair in pairs if pair["answer"].lower() in pair["question"].lower()]
