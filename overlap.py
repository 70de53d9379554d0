"""Same and similar questions: what must not be in training and evaluation at once, and what lies nearest.

`question_keys` gives the fingerprints by which two rows ask the same thing: exact up to case, white space, Unicode
form and surrounding punctuation (`evaluation.normalise`). `find_overlap` compares two sets of rows by hashes, in time
linear in their sizes. `TextIndex` is label-blind TF-IDF over the questions, for nearest neighbours::

    leaks = find_overlap(train_rows, eval_rows)
    row, item, score = nearest_pair(train_rows, eval_rows)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import xxhash

from evaluation import normalise

if TYPE_CHECKING:
    import numpy as np


class Asks(Protocol):
    """The part of a `data_loader.Row` that says what it asks."""

    @property
    def messages(self) -> tuple[dict[str, str], ...]: ...
    @property
    def text(self) -> str | None: ...
    @property
    def prompt(self) -> tuple[dict[str, str], ...]: ...


R = TypeVar("R", bound=Asks)
S = TypeVar("S", bound=Asks)


def fingerprint(parts: Iterable[str]) -> bytes:
    """16 bytes that are equal for texts equal after `normalise` (a text of punctuation only stays as it is)."""
    folded = ((normalise(part) or part.strip()).encode("utf-8", "surrogatepass") + b"\x00" for part in parts)
    return xxhash.xxh3_128_digest(b"".join(folded))


def prompt_key(row: Asks) -> bytes:
    """The key of the whole dialogue before the target, without system turns; of a text row, of its text."""
    if row.text is not None:
        return fingerprint([row.text])
    return _dialogue_key(row.prompt)


def question_keys(row: Asks) -> set[bytes]:
    """Keys of everything a training row has an answer to: each dialogue before an assistant turn, and each user turn
    that is answered. A system turn does not make a question another one, so it is left out."""
    if row.text is not None:
        return {fingerprint([row.text])}
    keys = set()
    for index, turn in enumerate(row.messages):
        if turn["role"] == "assistant":
            keys.add(_dialogue_key(row.messages[:index]))
            if index and row.messages[index - 1]["role"] == "user":
                keys.add(fingerprint([row.messages[index - 1]["content"]]))
    return keys


def _dialogue_key(messages: Sequence[dict[str, str]]) -> bytes:
    turns = [turn for turn in messages if turn["role"] != "system"]
    if len(turns) == 1:
        return fingerprint([turns[0]["content"]])
    return fingerprint([part for turn in turns for part in (turn["role"], turn["content"])])


def question_text(row: Asks) -> str:
    """What a row asks, for similarity: its user turns before the target (a text row's text). Never the answer."""
    if row.text is not None:
        return row.text
    return "\n".join(turn["content"] for turn in row.prompt if turn["role"] == "user")


def find_overlap(rows: Sequence[R], others: Sequence[S]) -> list[tuple[R, S]]:
    """Pairs (training row, evaluation row) that ask the same. Every row of either side that has a partner is listed
    at least once, but not every combination, so that the list stays linear in the number of rows."""
    first_other: dict[bytes, S] = {}
    for other in others:
        first_other.setdefault(prompt_key(other), other)
    pairs = []
    first_row: dict[bytes, R] = {}
    listed: set[int] = set()
    for row in rows:
        partners = {}
        for key in question_keys(row):
            if key in first_other:
                partners[id(first_other[key])] = first_other[key]
                first_row.setdefault(key, row)
        pairs += [(row, partner) for partner in partners.values()]
        listed.update(partners)
    for other in others:
        key = prompt_key(other)
        if key in first_row and id(other) not in listed:
            pairs.append((first_row[key], other))
    return pairs


class TextIndex:
    """TF-IDF vectors (words, logarithmic counts, unit length) of a fixed list of texts.

    Similarities are cosines in [0, 1]; a text without a word is similar to nothing.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        import numpy as np
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.size = len(texts)
        self._matrix: Any = None
        if any(re.search(r"\w", text) for text in texts):  # the vectorizer raises on an empty vocabulary
            self._vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b", dtype=np.float32)
            self._matrix = self._vectorizer.fit_transform(texts)

    def nearest(
        self, query: str, *, limit: int, among: np.ndarray | None = None, levels: np.ndarray | None = None
    ) -> list[tuple[int, float]]:
        """Up to `limit` (position, similarity) with similarity above 0, the most similar first, then by position.

        `among` (booleans) and `levels` (numbers), both of shape (size,), restrict the positions and put those of a
        lower level first.
        """
        import numpy as np

        if self._matrix is None:
            return []
        product = (self._vectorizer.transform([query]) @ self._matrix.T).tocsr()
        positions, scores = product.indices, product.data
        keep = scores > 0 if among is None else (scores > 0) & among[positions]
        positions, scores = positions[keep], scores[keep]
        ranks = (positions, -scores) if levels is None else (positions, -scores, levels[positions])
        order = np.lexsort(ranks)[:limit]
        return list(zip(positions[order].tolist(), scores[order].tolist(), strict=True))

    def similarities(self, queries: Sequence[str]) -> np.ndarray:
        """Array of shape (len(queries), size)."""
        import numpy as np

        if self._matrix is None:
            return np.zeros((len(queries), self.size), dtype=np.float32)
        return (self._vectorizer.transform(queries) @ self._matrix.T).toarray()


def nearest_pair(rows: Sequence[R], others: Sequence[S]) -> tuple[R, S, float] | None:
    """The most similar (training row, evaluation row, score in [0, 1]) that `find_overlap` does not list already.

    It is for a person to judge whether it is a paraphrase. None when no pair shares a word. Meant for some ten
    thousand rows: time and the memory of one block grow with len(rows) * len(others).
    """
    if not rows or not others:
        return None
    index = TextIndex([question_text(row) for row in rows])
    keys = [question_keys(row) for row in rows]
    best: tuple[R, S, float] | None = None
    block = max(1, 5_000_000 // len(rows))
    for start in range(0, len(others), block):
        part = others[start : start + block]
        for other, scores in zip(part, index.similarities([question_text(item) for item in part]), strict=True):
            key = prompt_key(other)
            for position in scores.argsort(kind="stable")[::-1]:
                score = float(scores[position])
                if score <= 0 or (best is not None and score <= best[2]):
                    break
                if key not in keys[position]:
                    best = (rows[position], other, score)
                    break
    return best
