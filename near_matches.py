"""Which texts hold most of an evaluation item, word for word.

    matcher = NearMatcher.against([question_text(item) for item in items], train_rows)
    matcher.match_text("Tell me: ...")        # (item, share of its n-grams), None for a text near no item

A row is *near* an item when it holds at least 80 % of the item's n-grams of words (containment), whatever else it
says. n is 8, as long runs as that are rarely shared by chance, and for an item below 16 words half its words (at least
3), so that a short item has several n-grams too. An item of fewer than 3 words is compared as a whole only.

Questions are often made from a template ("What is the capital of ..."), or begin with one instruction. So a row must
also hold 80 % of those n-grams of the item that are not common; common is what more than 5 and more than 1 % of the
items hold, or of 2,000 rows spread evenly over the training rows. An item of common n-grams alone keeps them all:
otherwise a question copied many times would slip through. System turns never count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from overlap import Asks, question_text
from word_table import WordTable, evenly_spaced

if TYPE_CHECKING:
    import numpy as np

NEAR = 0.8
LONGEST_NGRAM = 8
SHORTEST_NGRAM = 3
COMMON_SHARE = 0.01
COMMON_COUNT = 5
SAMPLED_ROWS = 2000
# Most runs of words are no item's: a table of bits says so without a search, for all but a few.
_FILTER_BITS = 20
_FILTER_SHIFT = 64 - _FILTER_BITS
_BASE = 0xC2B2AE3D27D4EB4F
_MIX = 0x9E3779B97F4A7C15

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
        return cls(items, [question_text(row) for row in evenly_spaced(rows, SAMPLED_ROWS)])

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
