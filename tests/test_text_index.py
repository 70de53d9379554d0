"""Nearest texts: equal to scikit-learn's TF-IDF, and to its own definition with levels and restrictions."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

import text_index
import word_table
from embedding_index import EmbeddingIndex, load_embedder
from error_handling import ConfigurationError, SelectionError
from text_index import TextIndex
from word_table import WordTable, evenly_spaced

WORDS = ["alpha", "beta", "Gamma", "don't", "foo/bar", "ÜBER", "Σας", "東京", "a_b", "42", "--", "naïve", "x"]


def corpus(size: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 9))) for _ in range(size)]


def by_scikit(texts: list[str], queries: list[str]) -> np.ndarray:
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    matrix = vectorizer.fit_transform(texts)
    return (vectorizer.transform(queries) @ matrix.T).toarray()


def test_similarities_and_ranking_are_those_of_scikit_learn_over_several_blocks(monkeypatch):
    monkeypatch.setattr(text_index, "_BLOCK", 64)
    texts = corpus(300)
    queries = [*corpus(6, seed=2), "words of no text, alpha alpha", "unknown", ""]
    expected = by_scikit(texts, queries)
    for query, near in enumerate(TextIndex(texts).nearest(queries, limit=300)):
        positions = [position for position, _ in near]
        assert [score for _, score in near] == pytest.approx(expected[query, positions], abs=1e-6)
        assert sorted(positions) == np.flatnonzero(expected[query] > 1e-9).tolist()
        scores = [score for _, score in near]
        assert scores == sorted(scores, reverse=True)


def test_limit_restriction_and_levels_choose_among_equals_by_position(monkeypatch):
    monkeypatch.setattr(text_index, "_BLOCK", 2)
    texts = ["red apple", "red pear", "red apple", "blue sky", "red apple"]
    index = TextIndex(texts)
    assert [position for position, _ in index.nearest(["red apple"], limit=3)[0]] == [0, 2, 4]
    among = np.array([False, True, True, True, True])
    assert [position for position, _ in index.nearest(["red apple"], limit=2, among=among)[0]] == [2, 4]
    levels = np.array([1, 0, 1, 0, 0])
    found = index.nearest(["red apple"], limit=4, levels=levels)[0]
    assert [position for position, _ in found] == [4, 1, 0, 2]
    assert found[0][1] == pytest.approx(1.0)


def test_texts_without_a_word_are_similar_to_nothing():
    assert TextIndex(["", "?!"]).nearest(["?!", "word"], limit=5) == [[], []]
    assert TextIndex([]).nearest(["word"], limit=5) == [[]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=5))
def test_words_are_those_of_the_pattern_whatever_the_text(texts):
    import re

    table = WordTable("letters")
    numbers, counts = table.encode(texts)
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    assert counts.tolist() == [len(found) for found in words]
    flat = [word for found in words for word in found]
    known = {}
    assert numbers.tolist() == [known.setdefault(word, number) for word, number in zip(flat, numbers, strict=True)]
    assert len(set(known.values())) == len(known) == table.size


def test_the_table_grows_and_tells_unknown_words():
    table = WordTable()
    numbers, _ = table.encode([f"word{number}" for number in range(9000)])
    assert sorted(numbers.tolist()) == list(range(9000))
    again, counts = table.encode(["word17 word8999 nothing"], grow=False)
    assert again.tolist() == [numbers[17], numbers[8999], -1]
    assert counts.tolist() == [3]
    assert table.size == 9000


def test_signs_and_unspaced_scripts_are_words_of_their_own():
    hashes, counts = word_table.word_hashes(["7 + 2", "7+2", "7 * 2", "駅はどこ", "don't"], "symbols")
    assert counts.tolist() == [3, 3, 3, 4, 2]
    first, second, third = hashes[:3], hashes[3:6], hashes[6:9]
    assert (first == second).all()
    assert (first == third).tolist() == [True, False, True]


def test_typographic_punctuation_parts_words_as_its_plain_form_does():
    for fancy, plain in (
        ("“Don’t — wait…” it said", '"Don\'t - wait..." it said'),
        ("« 5 − 3 » is two–ish", "5 - 3 is two-ish"),
    ):
        one, two = (word_table.word_hashes([text], "symbols")[0].tolist() for text in (fancy, plain))
        assert one == two
    assert word_table.word_hashes(["5 € × _"], "symbols")[1].tolist() == [4]


def test_evenly_spaced():
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 4) == [0, 1, 2]


# Embeddings


def test_the_small_model_embeds_texts_to_unit_vectors_whatever_is_batched_with_them():
    embed = load_embedder("data/base_model")
    texts = ["Where is my parcel?", "a", "", "The workshop of Brindlewick stands in Harrow Quay. " * 40]
    together = embed(texts)
    assert together.shape == (4, 192)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1)
    assert embed([texts[0]])[0] == pytest.approx(together[0], abs=1e-5)
    index = EmbeddingIndex(texts, embed)
    assert index.nearest(["Where is my parcel?"], limit=1)[0][0] == (0, pytest.approx(1, abs=1e-5))


def test_an_embedding_function_is_taken_by_its_import_path(tmp_path):
    (tmp_path / "letters_of.py").write_text(
        "def embed(texts):\n    return [[text.count('a'), text.count('e')] for text in texts]\n"
        "def ragged(texts):\n    return [[1.0]]\n"
        "def fails(texts):\n    raise KeyError('weights')\n"
        "def tires(texts):\n    return [[len(text), 1 / (len(texts) - 3)] for text in texts]\n"
    )
    index = EmbeddingIndex(["aaa", "eee", "ae", "zz"], load_embedder(f"{tmp_path}/letters_of.py:embed"))
    assert index.nearest(["a"], limit=4)[0] == [(0, pytest.approx(1)), (2, pytest.approx(0.5**0.5))]
    with pytest.raises(SelectionError, match=r"embedding_model: .*:tires failed on 3 texts: ZeroDivisionError: div"):
        EmbeddingIndex(["a", "b", "c"], load_embedder(f"{tmp_path}/letters_of.py:tires"))
    for name, message in (
        ("letters_of.py:ragged", r"2 texts gave an array of shape \(1, 1\), expected \(2, width\)"),
        ("letters_of.py:fails", "fails failed on two texts: KeyError: 'weights'"),
        ("no_such_folder", r"selection\.embedding_model: cannot load no_such_folder, which is no folder here"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_embedder(f"{tmp_path}/{name}" if ":" in name else name)
