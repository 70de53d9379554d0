"""Drawing rows: which were taken, which may still be, and in what order those of a group come.

    draw = Draw(levels, max_repeats=1, rng=rng, accepts=lambda position: True)
    draw.fill(128, "random")
    draw.taken                      # [(position, why), ...]

Rows trained on least come first, in random order among equals. `accepts` is asked of a row when its turn comes and not
before, for it may have to be read and rendered; of a row that it turns down the next in line takes the place.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

import numpy as np


class Draw:
    """Rows by position. `levels` says how often each was trained on before; `open` which may be taken."""

    def __init__(
        self, levels: np.ndarray, *, max_repeats: int, rng: random.Random, accepts: Callable[[int], bool]
    ) -> None:
        self.random = rng
        self.max_repeats = max_repeats
        self.levels = levels
        self.open = np.ones(len(levels), dtype=bool)
        self.listed: Counter[int] = Counter()
        self.taken: list[tuple[int, str]] = []
        self._accepts = accepts
        rank = list(range(len(levels)))
        rng.shuffle(rank)
        self.rank = np.array(rank, dtype=np.int64)

    def accepts(self, position: int) -> bool:
        """Whether the row may be taken now; one that is turned down is closed for good."""
        if self.open[position] and not self.listed[position] and not self._accepts(position):
            self.open[position] = False
        return bool(self.open[position])

    def take(self, position: int, why: str) -> None:
        self.taken.append((position, why))
        self.listed[position] += 1

    def queue(self, positions: np.ndarray, *, in_order: bool = False) -> Queue:
        """The open ones among `positions` in the order in which they come; with `in_order` those equally often trained
        on come in the order of the files."""
        return Queue(self, positions, in_order)

    def fill(self, count: int, why: str, *, in_order: bool = False) -> None:
        """Take open rows until there are `count` or the supply is used up."""
        queue = self.queue(np.flatnonzero(self.open), in_order=in_order)
        while len(self.taken) < count and queue.level() is not None:
            if (position := queue.pop()) is not None:
                self.take(position, why)


class Queue:
    """Rows by (times trained on and listed, random rank); a row comes back until it is listed `max_repeats` times."""

    def __init__(self, draw: Draw, positions: np.ndarray, in_order: bool) -> None:
        self._draw = draw
        self._ranks = None if in_order else draw.rank
        positions = positions[draw.open[positions]]
        levels = draw.levels[positions].copy()
        for at in np.flatnonzero(np.isin(positions, list(draw.listed))):
            levels[at] += draw.listed[int(positions[at])]
        free = levels - draw.levels[positions] < draw.max_repeats
        positions, levels = positions[free], levels[free]
        order = np.lexsort((positions if in_order else draw.rank[positions], levels))
        self._positions, self._levels, self._next = positions[order], levels[order], 0
        self._again: list[tuple[int, int, int]] = []

    def level(self) -> int | None:
        """How often the next row was trained on or listed; None when the queue is empty."""
        head = self._head()
        return None if head is None else head[0]

    def pop(self) -> int | None:
        """The next row, which the caller lists at once; None when it was turned down and the next has its turn."""
        head = self._head()
        assert head is not None, "an empty queue has no next row"
        level, rank, position = head
        if self._again and self._again[0] == head:
            heapq.heappop(self._again)
        else:
            self._next += 1
        if not self._draw.accepts(position):
            return None
        if self._draw.listed[position] + 1 < self._draw.max_repeats:
            heapq.heappush(self._again, (level + 1, rank, position))
        return position

    def _head(self) -> tuple[int, int, int] | None:
        fresh = None
        if self._next < len(self._positions):
            position = int(self._positions[self._next])
            rank = position if self._ranks is None else int(self._ranks[position])
            fresh = int(self._levels[self._next]), rank, position
        heads = [head for head in (fresh, self._again[0] if self._again else None) if head is not None]
        return min(heads, default=None)
