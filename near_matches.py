"""Which texts hold most of an evaluation item, word for word.

    matcher = NearMatcher.against([question_text(item) for item in items], train_rows)
    matcher.match_text("Tell me: ...")        # [Match(item, share, own)], the item held most first

A text is *near* an item when it holds at least 80 % of the item's n-grams of words (containment), whatever else it
says. n is 8, as long runs as that are rarely shared by chance, and for an item below 16 words half its words (at least
3), so that a short item has several n-grams too. An item of fewer than 3 words is compared as a whole only. System
turns never count.

**Instructions.** Sentences (up to a full stop, colon, line end and the like) that more than 5 and more than 1 % of the
items hold are no item's own: an instruction, examples before every question. What an item has beside these, without
pieces of fewer than 3 words, is compared by itself as well (`Match.own`), if it has at least 3 n-grams (5 words), so
that the bare question is found too.

**Templates** ("What is the capital of ...") are shared by questions that differ. So a text must also hold 80 % of those
n-grams of the item that are not common. Common is what more than 5 and more than 1 % of the items hold, or of 2,000
rows spread evenly over the training rows; an item of common n-grams alone keeps them all. Rows that are copies of the
item make nothing common, however many they are. A copy is a row that is near the item and none of a template's. What
tells a template's: it has another word than the item in a place where such rows have more than 5 different words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from overlap import Asks, question_text, without_markup
from word_table import WordTable, evenly_spaced, word_hashes

if TYPE_CHECKING:
    import numpy as np

NEAR = 0.8
LONGEST_NGRAM = 8
SHORTEST_NGRAM = 3
COMMON_SHARE = 0.01
COMMON_COUNT = 5
SAMPLED_ROWS = 2000
FEWEST_OWN_NGRAMS = 3
_SENTENCE_END = re.compile(r"[.!?:;]+(?=\s|$)|[。！？：；]|\n")
# Most runs of words are no item's: a table of bits says so without a search, for all but a few.
_FILTER_BITS = 20
_FILTER_SHIFT = 64 - _FILTER_BITS
_BASE = 0xC2B2AE3D27D4EB4F
_MIX = 0x9E3779B97F4A7C15

Encoded = tuple["np.ndarray", "np.ndarray"]
"""(word numbers of all texts in order, words per text)."""

Windows = tuple["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"]
"""(words of all texts, `_mixed`; where an n-gram may begin; in which text; how many known words follow there)."""


class Match(NamedTuple):
    """An item that a text is near, by its number, and the share of n-grams held, in [0.8, 1]: of the item's, or, where
    `own` is set, of those it has without the sentences that many items hold."""

    item: int
    share: float
    own: bool = False


class NearMatcher:
    """Finds the texts that hold most of an item. `sample` are texts of rows by which common n-grams are told."""

    def __init__(self, items: Sequence[str], sample: Iterable[str] = ()) -> None:
        import numpy as np

        self.words = WordTable("symbols")
        items = [without_markup(item) for item in items]
        numbers, counts = self.words.encode(items)
        whole = dict(enumerate(np.split(numbers, np.cumsum(counts)[:-1]) if items else ()))
        own = _own_words(self.words, items)
        self._sizes = [*_sizes(whole, own=False), *_sizes(own, own=True)]
        self._begins = np.zeros(1 << _FILTER_BITS, dtype=bool)
        for of_item in (numbers, *own.values()):
            self._begins[_hashes(_mixed(of_item), SHORTEST_NGRAM) >> _FILTER_SHIFT] = True
        sampled = [without_markup(text) for text in sample]
        encoded = self.encode(sampled)
        windows = self._windows(*encoded)
        for size in self._sizes:
            size.leave_out(size.counts > max(COMMON_COUNT, COMMON_SHARE * len(items)))
            size.leave_out(
                size.rows_beside_copies(sampled, encoded, windows) > max(COMMON_COUNT, COMMON_SHARE * len(sampled))
            )

    @classmethod
    def against(cls, items: Sequence[str], rows: Sequence[Asks]) -> NearMatcher:
        """For `items` and training rows, of which a sample is read."""
        return cls(items, [question_text(row) for row in evenly_spaced(rows, SAMPLED_ROWS)])

    def encode(self, texts: Iterable[str]) -> Encoded:
        """The texts as `match` takes them."""
        return self.words.encode(map(without_markup, texts), grow=False)

    def match(self, encoded: Encoded) -> dict[int, list[Match]]:
        """The items that texts are near, by text, for those that are near any; the one held most comes first."""
        windows = self._windows(*encoded)
        found: dict[int, dict[int, Match]] = {}
        for size in self._sizes:
            for text, item, share in size.near(encoded, windows):
                found.setdefault(text, {}).setdefault(item, Match(item, share, size.own))  # the whole item comes first
        return {
            text: sorted(matches.values(), key=lambda match: (-match.share, match.own, match.item))
            for text, matches in found.items()
        }

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

    def match_text(self, text: str) -> list[Match]:
        """The items that one text is near, the one held most first."""
        return self.match(self.encode([text])).get(0, [])


def told_share(share: float, own: bool) -> str:
    """`Match.share` in words that go before "of" and the item."""
    return f"{share:.0%}{' (without sentences that many items hold)' if own else ''}"


def ngram_length(n_words: int) -> int:
    """n for an item of `n_words` words."""
    return min(LONGEST_NGRAM, max(SHORTEST_NGRAM, n_words // 2))


def _own_words(words: WordTable, items: Sequence[str]) -> dict[int, np.ndarray]:
    """By item the numbers of the words it has without the sentences that many items hold. Only for items with such
    sentences, and with enough words beside these."""
    import numpy as np

    sentences = [_SENTENCE_END.split(item) for item in items]
    numbers, counts = words.encode([sentence for of_item in sentences for sentence in of_item])
    pieces = iter(np.split(numbers, np.cumsum(counts)[:-1]) if len(items) else ())
    by_item = [[next(pieces) for _ in of_item] for of_item in sentences]
    holders = Counter(key for of_item in by_item for key in {piece.tobytes() for piece in of_item if len(piece)})
    limit = max(COMMON_COUNT, COMMON_SHARE * len(items))
    own: dict[int, np.ndarray] = {}
    for item, of_item in enumerate(by_item):
        rest = [piece for piece in of_item if holders[piece.tobytes()] <= limit]
        if len(rest) < len(of_item):
            kept = [piece for piece in rest if len(piece) >= SHORTEST_NGRAM]
            together = np.concatenate([*kept, np.zeros(0, dtype=np.int64)])
            if len(together) - ngram_length(len(together)) + 1 >= FEWEST_OWN_NGRAMS:
                own[item] = together
    return own


def _sizes(texts: Mapping[int, np.ndarray], *, own: bool) -> list[_Size]:
    """The texts of items (word numbers) by the n they are compared by."""
    by_n: dict[int, dict[int, np.ndarray]] = {}
    for item, numbers in texts.items():
        if len(numbers) >= SHORTEST_NGRAM:
            n = ngram_length(len(numbers))
            by_n.setdefault(n, {})[item] = _hashes(_mixed(numbers), n)
    return [_Size(n, grams, own) for n, grams in sorted(by_n.items())]


class _Size:
    """The n-grams of the items that are compared by one n. `postings` are pairs of an n-gram and an item that holds it;
    those of an n-gram stand together."""

    def __init__(self, n: int, in_order: dict[int, np.ndarray], own: bool) -> None:
        import numpy as np

        self.n = n
        self.own = own
        self._in_order = in_order
        self._by_item = {item: np.unique(grams) for item, grams in in_order.items()}
        items = np.repeat(list(self._by_item), [len(grams) for grams in self._by_item.values()])
        self._index(items, np.concatenate(list(self._by_item.values())))

    def _index(self, items: np.ndarray, grams: np.ndarray) -> None:
        """Set up the look-up from n-gram to items, for postings that count."""
        import numpy as np

        order = np.lexsort((items, grams))
        self._grams, self._starts = np.unique(grams[order], return_index=True)
        self._holders = items[order]
        self._counts = np.diff(self._starts, append=len(grams))
        self._needed = np.bincount(items)

    @property
    def counts(self) -> np.ndarray:
        """For each posting, how many items hold its n-gram."""
        import numpy as np

        return np.repeat(self._counts, self._counts)

    def leave_out(self, common: np.ndarray) -> None:
        """Take the `common` postings (booleans) out of the look-up, but for items that have no others."""
        import numpy as np

        if common.any():
            rest = np.bincount(self._holders, weights=~common)
            kept = ~common | (rest == 0)[self._holders]
            self._index(self._holders[kept], np.repeat(self._grams, self._counts)[kept])

    def rows_beside_copies(self, rows: Sequence[str], encoded: Encoded, windows: Windows) -> np.ndarray:
        """For each posting, how many of the rows hold its n-gram and are no copies of its item."""
        import numpy as np

        gaps = {
            (text, item): self._gaps(rows[text], _words_of(encoded, text), item)
            for text, item, _ in self.near(encoded, windows)
        }
        words_at: dict[tuple[int, int], set[int]] = {}  # by item and place in it
        for (_, item), filled in gaps.items():
            for place, word in filled:
                words_at.setdefault((item, place), set()).add(word)
        slots = {place for place, words in words_at.items() if len(words) > COMMON_COUNT}
        copies = [
            text << 32 | item
            for (text, item), filled in gaps.items()
            if not any((item, place) in slots for place, _ in filled)
        ]
        texts, postings = self._postings(windows)
        beside = ~np.isin(texts << 32 | self._holders[postings], np.array(copies, dtype=np.int64))
        return np.bincount(postings[beside], minlength=len(self._holders))

    def _gaps(self, row: str, numbers: np.ndarray, item: int) -> list[tuple[int, int]]:
        """(place of a word in the item, hash of the word that stands there in a row) at each run of n-grams that the
        row lacks, but for those where the row begins or ends."""
        import numpy as np

        wanted, held = self._in_order[item], _hashes(_mixed(numbers), self.n)
        there = np.isin(wanted, held)
        if there.all():
            return []
        hashes, _ = word_hashes([row], "symbols")
        gaps = []
        for first in np.flatnonzero(~there & np.append(True, there[:-1])).tolist():
            if first:  # the word after the n-gram before it
                place, at = first + self.n - 1, int(np.argmax(held == wanted[first - 1])) + self.n
            else:  # the word before the first one held
                begin = int(np.argmax(there))
                place, at = begin - 1, int(np.argmax(held == wanted[begin])) - 1
            if 0 <= at < len(hashes):
                gaps.append((place, int(hashes[at])))
        return gaps

    def _postings(self, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
        """(text, posting), each pair once, for the items' n-grams in the texts."""
        import numpy as np

        mixed, starts, texts, runs = windows
        long = runs >= self.n
        hashes = _hashes(mixed, self.n, starts[long])
        at = np.searchsorted(self._grams, hashes)
        real = at < len(self._grams)
        real[real] = self._grams[at[real]] == hashes[real]
        pairs = np.unique(texts[long][real] * len(self._grams) + at[real])
        texts, grams = pairs // len(self._grams), pairs % len(self._grams)
        counts = self._counts[grams]
        first = np.repeat(self._starts[grams] - (np.cumsum(counts) - counts), counts)
        return np.repeat(texts, counts), first + np.arange(len(first))

    def near(self, encoded: Encoded, windows: Windows) -> Iterator[tuple[int, int, float]]:
        """(text, item, share of its n-grams) for texts that are near an item."""
        import numpy as np

        texts, postings = self._postings(windows)
        pairs, held = np.unique(texts << 32 | self._holders[postings], return_counts=True)
        for pair in pairs[held >= NEAR * self._needed[pairs & (2**32 - 1)]].tolist():
            text, item = pair >> 32, pair & (2**32 - 1)
            grams = self._by_item[item]  # common ones included
            share = float(np.isin(grams, _hashes(_mixed(_words_of(encoded, text)), self.n)).mean())
            if share >= NEAR:
                yield text, item, share


def _words_of(encoded: Encoded, text: int) -> np.ndarray:
    numbers, counts = encoded
    end = int(counts[: text + 1].sum())
    return numbers[end - int(counts[text]) : end]


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
