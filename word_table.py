"""Texts as numbers of their words, without a Python object for each word.

    table = WordTable()
    numbers, counts = table.encode(["a b a", "b"])      # [0, 1, 0, 1], [3, 1]
    table.encode(["a c"], grow=False)                   # [0, -1], [2]

The texts are joined to one run of UTF-8 bytes in which numpy finds the words and works out 64-bit hashes of them: some
microseconds a text where a list of words would take tens. Words count as equal when their hashes are; among a million
different words the chance that any two are confused is 3 in a hundred million.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

from evaluation import plain_punctuation

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

Words = Literal["letters", "symbols"]
"""What a word is. `letters`: a run of letters, digits and underscores, in lower case, as in scikit-learn's vectorizers.
`symbols`: that in Unicode form NFKC with plain quotes and dashes (`evaluation.plain_punctuation`), and beside it each
sign that is no punctuation (so that 2 + 3 and 2 * 3 differ) and each character of a script without spaces between words
(Chinese, Japanese, Thai)."""

_TEXTS_AT_ONCE = 1024
_LETTERS = re.compile(r"\w+")
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_SIGNS = "#$%&*+/<=>@\\^|~"
_SYMBOLS = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[{re.escape(_SIGNS)}]|[^\w\s\x00-\x7f]")
_BASE = 0x9E3779B97F4A7C15 | 1
_MIX = 0xD6E8FEB86659FD93


class WordTable:
    """Numbers words from 0 on as they come, by an open-addressed table of their hashes."""

    def __init__(self, words: Words = "letters") -> None:
        import numpy as np

        self.size = 0
        self._words = words
        self._keys = np.zeros(1 << 12, dtype=np.uint64)  # 0: a free place
        self._numbers = np.zeros(1 << 12, dtype=np.int64)

    def encode(self, texts: Iterable[str], *, grow: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of all words in order, words per text), both int64; with `grow` False unknown words are -1."""
        import numpy as np

        parts = [
            (self.numbers(hashes, grow=grow), counts)
            for batch in batches(texts, _TEXTS_AT_ONCE)
            for hashes, counts in [word_hashes(batch, self._words)]
        ]
        empty = np.zeros(0, dtype=np.int64)
        numbers, counts = zip(*parts, strict=True) if parts else ((empty,), (empty,))
        return np.concatenate(numbers), np.concatenate(counts)

    def numbers(self, hashes: np.ndarray, *, grow: bool = True) -> np.ndarray:
        """The words' numbers, int64; -1 for unknown ones unless the table may grow."""
        import numpy as np

        if grow:
            self._reserve(len(hashes))
        mask = np.uint64(len(self._keys) - 1)
        found = np.full(len(hashes), -1, dtype=np.int64)
        left = np.arange(len(hashes))
        places = (hashes & mask).astype(np.int64)
        while len(left):
            here, wanted = self._keys[places], hashes[left]
            if grow and (free := here == 0).any():
                self._keys[places[free]] = wanted[free]  # of several words one wins, the others look further
                taken = np.unique(places[free])
                self._numbers[taken] = np.arange(self.size, self.size + len(taken))
                self.size += len(taken)
                here = self._keys[places]
            match = here == wanted
            found[left[match]] = self._numbers[places[match]]
            further = ~match if grow else ~match & (here != 0)
            left, places = left[further], (places[further] + 1) & int(mask)
        return found

    def _reserve(self, more: int) -> None:
        """Keep the table at most half full after `more` new words."""
        import numpy as np

        room = len(self._keys)
        if 2 * (self.size + more) <= room:
            return
        while 2 * (self.size + more) > room:
            room *= 2
        used = np.flatnonzero(self._keys)
        keys, numbers = self._keys[used], self._numbers[used]
        self._keys, self._numbers = np.zeros(room, dtype=np.uint64), np.zeros(room, dtype=np.int64)
        places, left = (keys & np.uint64(room - 1)).astype(np.int64), np.arange(len(keys))
        while len(left):
            free = self._keys[places] == 0
            self._keys[places[free]] = keys[left[free]]
            settled = self._keys[places] == keys[left]
            self._numbers[places[settled]] = numbers[left[settled]]
            left, places = left[~settled], (places[~settled] + 1) & (room - 1)


def word_hashes(texts: Sequence[str], words: Words = "letters") -> tuple[np.ndarray, np.ndarray]:
    """(64-bit hashes of all words in order, words per text)."""
    import numpy as np

    pieces = [(text if text.isascii() else _spelled_out(text, words)).encode("utf-8", "replace") for text in texts]
    joined = np.frombuffer(b"\n".join([*pieces, b""]).lower(), dtype=np.uint8)
    kinds = _kinds(words)[joined]
    in_word, alone = kinds == 1, kinds == 2
    begin, end = np.zeros(len(joined) + 1, dtype=bool), np.zeros(len(joined) + 1, dtype=bool)
    begin[:-1] = in_word | alone
    begin[1:-1] &= ~in_word[:-1] | alone[1:]
    end[1:] = in_word | alone
    end[1:-1] &= ~in_word[1:] | alone[:-1]
    # Words do not overlap, so the k-th begin and the k-th end are those of one word.
    begins, ends = np.flatnonzero(begin), np.flatnonzero(end)
    powers, inverses = _powers(len(joined) + 1)
    # The hash of a word is the sum of byte * BASE**place, with places counted from the word's begin, modulo 2**64.
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(joined * powers[: len(joined)], dtype=np.uint64)))
    hashes = (sums[ends] - sums[begins]) * inverses[begins]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_MIX)
    hashes ^= hashes >> np.uint64(29)
    hashes[hashes == 0] = 1
    stops = np.cumsum([len(piece) + 1 for piece in pieces], dtype=np.int64)
    counts = np.diff(np.searchsorted(begins, stops), prepend=0)
    return hashes, counts.astype(np.int64)


def _spelled_out(text: str, words: Words) -> str:
    """The words of a text that is not all ASCII, with a blank between them."""
    if words == "letters":
        return " ".join(_LETTERS.findall(text.lower()))
    found = _SYMBOLS.findall(plain_punctuation(unicodedata.normalize("NFKC", text)).lower())
    return " ".join(word for word in found if len(word) > 1 or word.isascii() or not _is_punctuation(word))


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PC"  # C: control characters, as are marks of writing direction


_kinds_made: dict[str, np.ndarray] = {}


def _kinds(words: Words) -> np.ndarray:
    """For each byte: 0 between words, 1 in a word, 2 a word of its own. Bytes of characters beyond ASCII are in words,
    for `_spelled_out` has set the others apart."""
    import numpy as np

    if words not in _kinds_made:
        kinds = np.zeros(256, dtype=np.uint8)
        kinds[[byte for byte in range(256) if byte >= 128 or re.match(r"\w", chr(byte))]] = 1
        if words == "symbols":
            kinds[[ord(sign) for sign in _SIGNS]] = 2
        _kinds_made[words] = kinds
    return _kinds_made[words]


_powers_made: list[np.ndarray] = []


def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `size` powers of the base and of its inverse modulo 2**64."""
    import numpy as np

    if not _powers_made or len(_powers_made[0]) < size:
        _powers_made[:] = []
        for base in (_BASE, pow(_BASE, -1, 2**64)):
            factors = np.full(max(size, 1 << 16), base, dtype=np.uint64)
            factors[0] = 1
            _powers_made.append(np.cumprod(factors, dtype=np.uint64))
    return _powers_made[0], _powers_made[1]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of up to `size` items, in order; never more than one list is held."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def evenly_spaced(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, spread evenly, the first among them, and always the same ones."""
    if len(items) <= limit:
        return list(items)
    return [items[position * len(items) // limit] for position in range(limit)]
