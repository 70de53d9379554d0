"""Training rows that ask what an evaluation item asks: the same, nearly the same, and the most similar that is left.

    found = compare(train_rows, eval_rows)
    found.overlap     # pairs that ask the same (`overlap`): a run refuses them
    found.near        # rows that hold most of an item's text: they are left out of training, and listed
    found.nearest     # the most similar pair of the rest, for a person to judge

A row is *near* an item when it holds at least 80 % of the item's n-grams of words (containment), whatever else it
says. n is 8, as long runs as that are rarely shared by chance, and for an item below 16 words half its words (at least
3), so that a short item has several n-grams too. An item of fewer than 3 words is compared as a whole only.

Questions are often made from a template ("What is the capital of ..."), or begin with one instruction. So a row must
also hold 80 % of those n-grams of the item that are not common; common is what more than 5 and more than 1 % of the
items hold, or of 2,000 rows spread evenly over the training rows. An item of common n-grams alone keeps them all:
otherwise a question copied many times would slip through. System turns never count.

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

from overlap import Asks, find_overlap, prompt_key, question_keys, question_text
from text_index import count_words, to_unit_length
from word_table import WordTable, batches, evenly_spaced

if TYPE_CHECKING:
    import numpy as np

NEAR = 0.8
LONGEST_NGRAM = 8
SHORTEST_NGRAM = 3
COMMON_SHARE = 0.01
COMMON_COUNT = 5
_SAMPLED_ROWS = 2000
_BLOCK = 4096
# Pairs of row and item up to which all are compared for the most similar one.
_ALL_PAIRS = 20_000_000
# Pairs of a block whose similarity is worked out in full.
_LOOKED_AT = 64
ROWS_WORTH_A_PROCESS = 100_000
# Most runs of words are no item's: a table of bits says so without a search, for all but a few.
_FILTER_BITS = 20
_FILTER_SHIFT = 64 - _FILTER_BITS
_BASE = 0xC2B2AE3D27D4EB4F
_MIX = 0x9E3779B97F4A7C15


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
    [0.8, 1]; `position` counts the training rows from 0."""

    position: int
    row_id: str
    row_where: str
    item_id: str
    item_where: str
    score: float

    def to_json(self) -> dict[str, Any]:
        """A row of `near_matches.jsonl`."""
        return {
            "id": self.row_id,
            "where": self.row_where,
            "item": self.item_id,
            "item_where": self.item_where,
            "score": self.score,
        }

    def __str__(self) -> str:
        return f"{self.row_where} holds {self.score:.0%} of item {self.item_id!r} ({self.item_where})"


@dataclass(frozen=True)
class Comparison(Generic[R, S]):
    """What `compare` found. `nearest` is (row, item, similarity in [0, 1]) over rows in neither `overlap` nor `near`;
    None when no such row shares a word with an item."""

    overlap: tuple[tuple[R, S], ...]
    near: tuple[NearMatch, ...]
    nearest: tuple[R, S, float] | None


def compare(rows: Sequence[R], items: Sequence[S], same: Collection[int] | None = None) -> Comparison[R, S]:
    """Compare every training row with every evaluation item, in one pass over the rows.

    `same` are the positions of the rows that ask what an item asks, where these are known already.
    """
    if not rows or not items:
        return Comparison((), (), None)
    keys = {prompt_key(item) for item in items}
    if same is None:
        same = {position for position, row in enumerate(rows) if not keys.isdisjoint(question_keys(row))}
    work = _Work(
        tuple(question_text(item) for item in items),
        tuple(question_text(row) for row in evenly_spaced(rows, _SAMPLED_ROWS)),
        len(rows) * len(items) <= _ALL_PAIRS,
    )
    found, nearest = _scan_all(work, rows, same)
    matches = [
        NearMatch(position, name, where, items[item].id, items[item].where, share)
        for position, name, where, item, share in sorted(found)
    ]
    best = None if nearest is None else (rows[nearest[0]], items[nearest[1]], nearest[2])
    overlap = find_overlap([rows[position] for position in sorted(same)], items)
    return Comparison(tuple(overlap), tuple(matches), best)


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
    sample: tuple[str, ...]
    all_pairs: bool


_Found = tuple[list[tuple[int, str, str, int, float]], tuple[int, int, float] | None]
"""(position, row id, where, item, share) of each near match, and (position, item, similarity) of the nearest pair."""


def _scan(work: _Work, rows: Iterable[Named], first: int, same: Collection[int]) -> _Found:
    """Compare the rows, the first of which has the position `first`."""
    near = NearMatcher(work.items, work.sample)
    nearest = _NearestPair(near.words, work.items, all_pairs=work.all_pairs)
    matches = []
    for number, block in enumerate(batches(rows, _BLOCK)):
        encoded = near.encode([question_text(row) for row in block])
        found = near.match(encoded)
        start = first + number * _BLOCK
        for at, (item, share) in found.items():
            if start + at not in same:
                matches.append((start + at, block[at].id, block[at].where, item, share))
        among = [at for at in range(len(block)) if at not in found and start + at not in same]
        nearest.add(encoded, among, start)
    return matches, nearest.best


Encoded = tuple["np.ndarray", "np.ndarray"]
"""(word numbers of all texts in order, words per text)."""

Windows = tuple["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"]
"""(words of all texts, `_mixed`; where an n-gram may begin; in which text; how many known words follow there)."""


class NearMatcher:
    """Finds the texts that hold most of an item. `sample` are texts of rows by which common n-grams are told."""

    def __init__(self, items: Sequence[str], sample: Iterable[str] = ()) -> None:
        import numpy as np

        self.words = WordTable("symbols")
        numbers, counts = self.words.encode(items)
        mixed, ends = _mixed(numbers), np.cumsum(counts)
        grams: dict[int, dict[int, np.ndarray]] = {}  # by n, by item
        for item, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
            if count >= SHORTEST_NGRAM:
                n = ngram_length(count)
                grams.setdefault(n, {})[item] = np.unique(_hashes(mixed[end - count : end], n))
        sampled = list(sample)
        self._sizes = [_Size(n, by_item) for n, by_item in sorted(grams.items())]
        self._begins = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._begins[_hashes(mixed, SHORTEST_NGRAM) >> _FILTER_SHIFT] = True
        windows = self._windows(*self.encode(sampled))
        for size in self._sizes:
            size.leave_out_common(size.hits(*windows), len(items), len(sampled))

    @classmethod
    def against(cls, items: Sequence[str], rows: Sequence[Asks]) -> NearMatcher:
        """For `items` and training rows, of which a sample is read."""
        return cls(items, [question_text(row) for row in evenly_spaced(rows, _SAMPLED_ROWS)])

    def encode(self, texts: Iterable[str]) -> Encoded:
        """The texts as `match` takes them."""
        return self.words.encode(texts, grow=False)

    def match(self, encoded: Encoded) -> dict[int, tuple[int, float]]:
        """(item, share of its n-grams) by text, for the texts near an item; of several items the one held most."""
        numbers, counts = encoded
        windows = self._windows(numbers, counts)
        found: dict[int, tuple[int, float]] = {}
        for size in self._sizes:
            for text, item in size.candidates(size.hits(*windows)):
                end = int(counts[: text + 1].sum())
                share = size.share(numbers[end - int(counts[text]) : end], item)
                if share >= NEAR and (text not in found or (share, -item) > (found[text][1], -found[text][0])):
                    found[text] = item, share
        return found

    def _windows(self, numbers: np.ndarray, counts: np.ndarray) -> Windows:
        """Where the items' n-grams may begin."""
        import numpy as np

        places = np.arange(len(numbers))
        ends = np.repeat(np.cumsum(counts), counts)
        unknown = np.where(numbers < 0, places, len(numbers))
        runs = np.minimum(np.minimum.accumulate(unknown[::-1])[::-1], ends) - places
        starts = np.flatnonzero(runs >= SHORTEST_NGRAM)
        mixed = _mixed(numbers)
        starts = starts[self._begins[_hashes(mixed, SHORTEST_NGRAM, starts) >> _FILTER_SHIFT]]
        return mixed, starts, np.searchsorted(np.cumsum(counts), starts, side="right"), runs[starts]

    def match_text(self, text: str) -> tuple[int, float] | None:
        """(item, share) for one text; None when it is near no item."""
        return self.match(self.encode([text])).get(0)


def ngram_length(n_words: int) -> int:
    """n for an item of `n_words` words."""
    return min(LONGEST_NGRAM, max(SHORTEST_NGRAM, n_words // 2))


class _Size:
    """The n-grams of the items that are compared by one n."""

    def __init__(self, n: int, by_item: dict[int, np.ndarray]) -> None:
        self.n = n
        self._by_item = by_item
        self._index(by_item)

    def _index(self, by_item: dict[int, np.ndarray]) -> None:
        """Set up the look-up from n-gram to items; `by_item` holds the n-grams that count."""
        import numpy as np

        items = np.repeat(list(by_item), [len(grams) for grams in by_item.values()])
        grams = np.concatenate(list(by_item.values()))
        order = np.lexsort((items, grams))
        self._grams, self._starts = np.unique(grams[order], return_index=True)
        self._holders = items[order]
        self._counts = np.diff(self._starts, append=len(grams))
        self._needed = {item: len(grams) for item, grams in by_item.items()}

    def hits(
        self, mixed: np.ndarray, starts: np.ndarray, texts: np.ndarray, runs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(text, index of n-gram), each pair once, for the items' n-grams in the texts; see `Windows`."""
        import numpy as np

        long = runs >= self.n
        hashes = _hashes(mixed, self.n, starts[long])
        at = np.searchsorted(self._grams, hashes)
        real = at < len(self._grams)
        real[real] = self._grams[at[real]] == hashes[real]
        pairs = np.unique(texts[long][real] * len(self._grams) + at[real])
        return pairs // len(self._grams), pairs % len(self._grams)

    def leave_out_common(self, sampled: tuple[np.ndarray, np.ndarray], n_items: int, n_rows: int) -> None:
        """Take the common n-grams out of the look-up; `sampled` are the hits in a sample of `n_rows` rows."""
        import numpy as np

        in_rows = np.bincount(sampled[1], minlength=len(self._grams))
        common = (self._counts > max(COMMON_COUNT, COMMON_SHARE * n_items)) | (
            in_rows > max(COMMON_COUNT, COMMON_SHARE * n_rows)
        )
        if not common.any():
            return
        common_grams = self._grams[common]
        rare = {item: grams[~np.isin(grams, common_grams)] for item, grams in self._by_item.items()}
        self._index({item: grams if len(grams) else self._by_item[item] for item, grams in rare.items()})

    def candidates(self, hits: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
        """(text, item) where the text holds enough of those n-grams of the item that are not common."""
        import numpy as np

        texts, grams = hits
        counts = self._counts[grams]
        first = np.repeat(self._starts[grams] - (np.cumsum(counts) - counts), counts)
        items = self._holders[first + np.arange(len(first))]
        pairs, held = np.unique(np.repeat(texts, counts) << 32 | items, return_counts=True)
        return [
            (pair >> 32, item)
            for pair, count in zip(pairs.tolist(), held.tolist(), strict=True)
            if count >= NEAR * self._needed[item := pair & (2**32 - 1)]
        ]

    def share(self, numbers: np.ndarray, item: int) -> float:
        """The share of all n-grams of `item` in a text, common ones included."""
        import numpy as np

        grams = self._by_item[item]
        return float(np.isin(grams, _hashes(_mixed(numbers), self.n)).mean())


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Word numbers spread over 64 bits."""
    import numpy as np

    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _hashes(mixed: np.ndarray, n: int, starts: np.ndarray | None = None) -> np.ndarray:
    """64-bit hashes of the n-grams of `_mixed` words that begin at `starts` (None: everywhere)."""
    import numpy as np

    if starts is None:
        starts = np.arange(max(0, len(mixed) - n + 1))
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(_BASE) + mixed[starts + offset]
    hashes ^= hashes >> np.uint64(29)
    return hashes * np.uint64(_MIX)


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
