"""The texts most like a query, over up to millions of texts.

    index = TextIndex(question_text(row) for row in rows)
    [near] = index.nearest(["Where is my refund?"], limit=10)      # [(position, similarity), ...], nearest first

Vectors are TF-IDF over lower-cased words: (1 + ln tf) * (ln((1 + n) / (1 + df)) + 1), scaled to unit length, as
scikit-learn's `TfidfVectorizer(sublinear_tf=True)` makes them. They are held as compressed rows in blocks, 8 bytes for
each distinct word of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from word_table import WordTable, batches

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 8192
_QUERIES = 512

Near = list[tuple[int, float]]
"""(position, similarity) of the texts nearest to a query, the nearest first."""


class Neighbours(Protocol):
    """Texts with positions 0.. that can be asked which of them are nearest to others."""

    def nearest(
        self,
        queries: Sequence[str],
        *,
        limit: int,
        among: np.ndarray | None = None,
        levels: np.ndarray | None = None,
    ) -> list[Near]:
        """For each query up to `limit` positions with a similarity above 0, the most similar first, then by position.

        `among` (booleans) and `levels` (whole numbers), an entry for each text, restrict the positions and put those
        of a lower level first.
        """
        ...


class TextIndex:
    """`Neighbours` by the words that texts share. Similarities are cosines in [0, 1]; a text without a word is similar
    to nothing. Rows of the matrix are in the order of `texts`, which are read once and not kept."""

    def __init__(self, texts: Iterable[str]) -> None:
        import numpy as np

        self._table = WordTable("letters")
        self.size = 0
        # (row starts, words, weights) of each block
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for block in batches(texts, _BLOCK):
            numbers, counts = self._table.encode(block)
            self.size += len(block)
            rows, words, times = count_words(numbers, counts)
            starts = np.searchsorted(rows, np.arange(len(block) + 1))
            self._blocks.append((starts, words.astype(np.int32), (1 + np.log(times)).astype(np.float32)))
        n_words = self._table.size
        frequencies = np.zeros(n_words, dtype=np.int64)
        for _, words, _ in self._blocks:
            frequencies += np.bincount(words, minlength=n_words)
        self._idf = (np.log((1 + self.size) / (1 + frequencies)) + 1).astype(np.float32)
        for starts, words, weights in self._blocks:
            np.multiply(weights, self._idf[words], out=weights)
            to_unit_length(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), weights)

    def nearest(
        self,
        queries: Sequence[str],
        *,
        limit: int,
        among: np.ndarray | None = None,
        levels: np.ndarray | None = None,
    ) -> list[Near]:
        """See `Neighbours.nearest`."""
        found: list[Near] = []
        for part in batches(queries, _QUERIES):
            found += best_matches(self._similarities(part), len(part), limit=limit, among=among, levels=levels)
        return found

    def _similarities(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """For each block of texts, the array (queries, texts) of similarities."""
        import numpy as np
        from scipy.sparse import csr_matrix

        numbers, counts = self._table.encode(queries, grow=False)
        rows, words, times = count_words(numbers + 1, counts)  # one higher, for unknown words are -1
        rows, words, times = rows[words > 0], words[words > 0] - 1, times[words > 0]
        weights = (1 + np.log(times)).astype(np.float32) * self._idf[words]
        to_unit_length(rows, weights)
        asked, columns = np.unique(words, return_inverse=True)
        vectors = np.zeros((len(asked), len(queries)), dtype=np.float32)
        vectors[columns, rows] = weights
        column_of = np.full(self._table.size, -1, dtype=np.int32)
        column_of[asked] = np.arange(len(asked), dtype=np.int32)
        for starts, block_words, block_weights in self._blocks:
            columns = column_of[block_words]
            kept = columns >= 0
            kept_starts = np.concatenate(([0], np.cumsum(kept)))[starts]
            shape = (len(starts) - 1, len(asked))
            block: Any = csr_matrix((block_weights[kept], columns[kept], kept_starts), shape=shape)
            yield (block @ vectors).T


def count_words(numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(text, word, times) for each distinct word of each text, ordered by text, then word.

    `numbers` holds the words of all texts (below 2**33), `counts` how many each text has, as `WordTable.encode` gives.
    """
    import numpy as np

    # Texts of a block fit 30 bits beside a word's 33.
    keys = np.repeat(np.arange(len(counts), dtype=np.int64), counts) << 33 | numbers
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    times = np.diff(first, append=len(keys))
    return keys[first] >> 33, keys[first] & (2**33 - 1), times


def to_unit_length(rows: np.ndarray, weights: np.ndarray) -> None:
    """Scale the weights of each row to unit length, in place; `rows` names the row of each weight."""
    import numpy as np

    # Summed row by row, so that equal rows get equal weights, to the last bit.
    squares = np.bincount(rows, weights=weights.astype(np.float64) ** 2)
    weights /= np.sqrt(squares)[rows].astype(np.float32)


def best_matches(
    blocks: Iterable[np.ndarray],
    n_queries: int,
    *,
    limit: int,
    among: np.ndarray | None = None,
    levels: np.ndarray | None = None,
) -> list[Near]:
    """`Neighbours.nearest` from similarities of at most 1, given as arrays (queries, texts) block after block."""
    import numpy as np

    # A level is worth more than any difference of similarities.
    empty = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    best: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [empty] * n_queries
    lowest = np.full(n_queries, -np.inf)
    start = 0
    for scores in blocks:
        end = start + scores.shape[1]
        usable = scores > 0
        if among is not None:
            usable &= among[start:end]
        ranks = scores if levels is None else scores - 2.0 * levels[start:end]
        queries, columns = np.nonzero(usable & (ranks > lowest[:, None]))
        bounds = np.searchsorted(queries, np.arange(n_queries + 1))
        for query in np.unique(queries):
            at = columns[bounds[query] : bounds[query + 1]]
            positions, similar, order_by = (
                np.concatenate(pair)
                for pair in zip(best[query], (at + start, scores[query, at], ranks[query, at]), strict=True)
            )
            order = np.lexsort((positions, -order_by))[:limit]
            best[query] = positions[order], similar[order], order_by[order]
            if len(order) == limit:
                lowest[query] = order_by[order[-1]]
        start = end
    return [list(zip(positions.tolist(), similar.tolist(), strict=True)) for positions, similar, _ in best]
