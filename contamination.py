"""Training rows that ask what an evaluation item asks: the same, nearly the same, and the most similar that is left.

    found = compare(train_rows, eval_rows)
    found.overlap     # pairs that ask the same (`overlap`): a run refuses them
    found.near        # rows near an item (`near_matches`): they are left out of training, and listed
    found.differing   # pairs with the same user turn that are two tasks by their system turns (`overlap.Asked`)
    found.nearest     # the most similar pair of the rest, for a person to judge

Rows are read once, in order, and not kept: time is linear in them and memory does not grow.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from near_matches import COMMON_COUNT, COMMON_SHARE, SAMPLED_ROWS, Encoded, Match, NearMatcher, told_share
from overlap import Asked, Asks, find_overlap, question_keys, question_text
from text_index import count_words, to_unit_length
from word_table import WordTable, batches, evenly_spaced

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 4096
# Pairs of row and item up to which all are compared for the most similar one.
_ALL_PAIRS = 20_000_000
# Pairs of a block whose similarity is worked out in full.
_LOOKED_AT = 64
ROWS_WORTH_A_PROCESS = 100_000


class Named(Asks, Protocol):
    """A row that can be told to a person."""

    @property
    def id(self) -> str: ...
    @property
    def where(self) -> str: ...


R = TypeVar("R", bound=Named)
S = TypeVar("S", bound=Named)


@dataclass(frozen=True)
class NearMatch:
    """A training row and the evaluation item it holds most of. `score` is the share of the item's word n-grams, in
    [0.8, 1], those of sentences that many items hold left out where `own` is set; `position` counts the training rows
    from 0. `kept` says that the row is trained on all the same."""

    position: int
    row_id: str
    row_where: str
    item_id: str
    item_where: str
    score: float
    own: bool = False
    kept: bool = False

    def to_json(self) -> dict[str, Any]:
        """A row of `near_matches.jsonl`."""
        return {
            "id": self.row_id,
            "where": self.row_where,
            "item": self.item_id,
            "item_where": self.item_where,
            "score": self.score,
            "without_shared_sentences": self.own,
            "kept": self.kept,
        }

    def __str__(self) -> str:
        return f"{self.row_where} holds {told_share(self.score, self.own)} of item {self.item_id!r} ({self.item_where})"


@dataclass(frozen=True)
class Comparison(Generic[R, S]):
    """What `compare` found. `nearest` is (row, item, similarity in [0, 1]) over rows in neither `overlap` nor `near`;
    None when no such row shares a word with an item. `differing` has each row that would be in `overlap` but for its
    system turn and answer, with one such item."""

    overlap: tuple[tuple[R, S], ...]
    near: tuple[NearMatch, ...]
    nearest: tuple[R, S, float] | None
    differing: tuple[tuple[R, S], ...] = ()


def compare(
    rows: Sequence[R],
    items: Sequence[S],
    asking: Iterable[int] | None = None,
    *,
    by_system_turns: bool = True,
) -> Comparison[R, S]:
    """Compare every training row with every evaluation item, in one pass over the rows.

    `asking` are the positions of the rows with a key of an item (`overlap.question_keys`), where these are known.
    `by_system_turns`: whether system turns can make two questions of one user turn (`overlap.Asked`).
    """
    if not rows or not items:
        return Comparison((), (), None)
    asked = tuple(Asked.by(item, by_system_turns=by_system_turns) for item in items)
    by_key = {question.key: number for number, question in reversed(list(enumerate(asked)))}
    if asking is None:
        asking = [position for position, row in enumerate(rows) if not by_key.keys().isdisjoint(question_keys(row))]
    candidates = {position: rows[position] for position in sorted(asking)}
    overlap = find_overlap(list(candidates.values()), items, by_system_turns=by_system_turns)
    partnered = {id(row) for row, _ in overlap}
    same = {position for position, row in candidates.items() if id(row) in partnered}
    differing = [
        (row, items[min(by_key[key] for key in question_keys(row) & by_key.keys())])
        for position, row in candidates.items()
        if position not in same
    ]
    work = _Work(
        tuple(question_text(item) for item in items),
        asked,
        tuple(question_text(row) for row in evenly_spaced(rows, SAMPLED_ROWS)),
        len(rows) * len(items) <= _ALL_PAIRS,
    )
    found, nearest = _scan_all(work, rows, same)
    matches = [
        NearMatch(position, name, where, items[match.item].id, items[match.item].where, match.share, match.own)
        for position, name, where, match in sorted(found)
    ]
    best = None if nearest is None else (rows[nearest[0]], items[nearest[1]], nearest[2])
    return Comparison(tuple(overlap), tuple(matches), best, tuple(differing))


def _scan_all(work: _Work, rows: Sequence[Named], same: Collection[int]) -> _Found:
    """`_scan` over all rows; those of many are shared with a second process, where there is a second processor."""
    middle = len(rows) // 2
    if len(rows) < ROWS_WORTH_A_PROCESS or not sys.executable or _processors() < 2:
        return _scan(work, rows, 0, same)
    later = {position for position in same if position >= middle}
    helper = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert helper.stdin is not None
        with contextlib.suppress(BrokenPipeError), helper.stdin as pipe:  # one that has ended says so by its code
            pickle.dump((work, rows[middle:], middle, later), pipe, protocol=5)
        helper.stdin = None
        ours = _scan(work, rows[:middle], 0, same)
        answer, _ = helper.communicate()
        # A helper that was killed or could not start has compared nothing; its part is then done here.
        theirs = _scan(work, rows[middle:], middle, later) if helper.returncode else pickle.loads(answer)
    finally:
        helper.kill()
        helper.wait()
    nearest = [found for _, found in (ours, theirs) if found is not None]
    return ours[0] + theirs[0], max(nearest, key=lambda found: (found[2], -found[0]), default=None)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nearest_pair(rows: Sequence[R], items: Sequence[S]) -> tuple[R, S, float] | None:
    """The most similar (training row, evaluation row, score) that is neither the same question nor a near match."""
    return compare(rows, items).nearest


@dataclass(frozen=True)
class _Work:
    """What every part of the rows is compared with."""

    items: tuple[str, ...]
    asked: tuple[Asked, ...]
    sample: tuple[str, ...]
    all_pairs: bool


_Found = tuple[list[tuple[int, str, str, Match]], tuple[int, int, float] | None]
"""(position, row id, where, match) of each near match, and (position, item, similarity) of the nearest pair."""


def _scan(work: _Work, rows: Iterable[Named], first: int, same: Collection[int]) -> _Found:
    """Compare the rows, the first of which has the position `first`."""
    near = NearMatcher(work.items, work.sample)
    nearest = _NearestPair(near.words, work.items, all_pairs=work.all_pairs)
    matches = []
    for number, block in enumerate(batches(rows, _BLOCK)):
        encoded = near.encode([question_text(row) for row in block])
        start = first + number * _BLOCK
        found = {}
        for at, held in near.match(encoded).items():
            match = next((match for match in held if not work.asked[match.item].differs(block[at])), None)
            if match is not None and start + at not in same:
                found[at] = match
        matches += [(start + at, block[at].id, block[at].where, match) for at, match in found.items()]
        among = [at for at in range(len(block)) if at not in found and start + at not in same]
        nearest.add(encoded, among, start)
    return matches, nearest.best


class _NearestPair:
    """The pair with the highest TF-IDF cosine of all rows added.

    How rare a word is (idf) is told from the items alone, so that one pass over the rows is enough; a word that no item
    has counts as the rarest. Where rows and items are too many to compare all, pairs are looked for by the words that
    few items have; their similarity then counts every word.
    """

    def __init__(self, words: WordTable, items: Sequence[str], *, all_pairs: bool) -> None:
        import numpy as np
        from scipy.sparse import csr_matrix

        self.best: tuple[int, int, float] | None = None
        rows, numbers, times = count_words(*words.encode(items, grow=False))
        frequencies = np.bincount(numbers, minlength=words.size)
        self._idf = np.log((1 + len(items)) / (1 + frequencies)) + 1
        self._unseen = np.log(1 + len(items)) + 1
        weights = (1 + np.log(times)) * self._idf[numbers]
        to_unit_length(rows, weights)
        shape = (len(items), words.size)
        self._items: Any = csr_matrix((weights, (rows, numbers)), shape=shape)
        limit = max(COMMON_COUNT, COMMON_SHARE * len(items))
        telling = frequencies <= (len(items) if all_pairs else limit)
        # For the number -1 of words that no item has: the last entries.
        self._telling = np.append(telling, False)
        self._square = np.append(self._idf, self._unseen) ** 2
        kept = telling[numbers]
        self._found_by: Any = csr_matrix((weights[kept], (numbers[kept], rows[kept])), shape=shape[::-1])
        self._all_pairs = all_pairs

    def add(self, encoded: Encoded, among: Sequence[int], start: int) -> None:
        """Look at those of some rows that are `among`; `encoded` are their words, `start` the first one's position."""
        import numpy as np

        looked_at = np.asarray(among, dtype=np.int64)
        if not self._all_pairs:
            promise = self._promise(encoded)[looked_at]
            best = np.argsort(-promise, kind="stable")[:_LOOKED_AT]
            looked_at = looked_at[best[promise[best] > 0]]
        if not len(looked_at):
            return
        scores = (self._vectors(_taken(encoded, looked_at)) @ self._items.T).tocoo()
        highest = int(scores.data.argmax()) if scores.nnz else 0
        if scores.nnz and (self.best is None or scores.data[highest] > self.best[2]):
            position = start + int(looked_at[scores.row[highest]])
            self.best = position, int(scores.col[highest]), min(1.0, float(scores.data[highest]))

    def _promise(self, encoded: Encoded) -> np.ndarray:
        """For each row about its highest similarity to an item, by telling words and without the logarithm of tf."""
        import numpy as np
        from scipy.sparse import csr_matrix

        numbers, counts = encoded
        texts = np.repeat(np.arange(len(counts)), counts)
        told = np.flatnonzero(self._telling[numbers])
        parts = self._idf[numbers[told]], (texts[told], numbers[told])
        vectors: Any = csr_matrix(parts, shape=(len(counts), len(self._idf)))
        squares = np.bincount(texts, weights=self._square[numbers], minlength=len(counts))
        product = vectors @ self._found_by
        highest = np.zeros(len(counts))
        shares = np.flatnonzero(np.diff(product.indptr))
        if len(shares):
            highest[shares] = np.maximum.reduceat(product.data, product.indptr[shares])
        return highest / np.sqrt(np.maximum(squares, 1e-12))

    def _vectors(self, encoded: Encoded) -> Any:
        import numpy as np
        from scipy.sparse import csr_matrix

        texts, numbers, times = count_words(encoded[0] + 1, encoded[1])  # one higher, for unknown words are -1
        known = numbers > 0
        weights = (1 + np.log(times[known])) * self._idf[numbers[known] - 1]
        n_rows = len(encoded[1])
        squares = np.bincount(texts[known], weights=weights**2, minlength=n_rows).astype(np.float64)
        squares[texts[~known]] += times[~known] * self._unseen**2
        weights /= np.sqrt(squares[texts[known]])
        return csr_matrix((weights, (texts[known], numbers[known] - 1)), shape=(n_rows, len(self._idf)))


def _taken(encoded: Encoded, texts: np.ndarray) -> Encoded:
    """The words of some of the texts."""
    import numpy as np

    numbers, counts = encoded
    sizes = counts[texts]
    first = (np.cumsum(counts) - counts)[texts] - (np.cumsum(sizes) - sizes)
    return numbers[np.repeat(first, sizes) + np.arange(sizes.sum())], sizes


if __name__ == "__main__":
    pickle.dump(_scan(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer, protocol=5)
