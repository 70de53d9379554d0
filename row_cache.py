"""Keys and values of a batch whose rows have their own lengths and come and go.

    cache = RowCache()
    cache.reserve(rows=8, columns=128)
    cache.prefill(slice(0, 8), start=0)     # the next pass of the model fills columns from 0 on, for these rows
    cache.decode(lengths, longest=57)       # the next pass adds one column to each of the first len(lengths) rows
    cache.move(7, 2)                        # row 2 has ended: the last row takes its place

Column = position, for each row. Rows in use are the first ones, so that a pass reads one slice without copying.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class RowCache(Cache):
    """A cache in transformers' interface; `room` and `columns` are the rows and columns that memory is held for."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.room = 0
        self.columns = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._window: tuple[slice, int] | None = None
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._row_index = self._lengths
        self._longest = 0

    def reserve(self, rows: int, columns: int) -> None:
        """Hold memory for at least so many rows and columns."""
        if rows <= self.room and columns <= self.columns:
            return
        self.room, self.columns = max(rows, self.room), max(columns, self.columns)
        for index, buffers in enumerate(self._buffers):
            self._buffers[index] = self._resized(buffers[0]), self._resized(buffers[1])

    def shrink(self, rows: int) -> None:
        """Hold memory for no more than the first so many rows."""
        self.room = rows
        self._buffers = [(keys[:rows], values[:rows]) for keys, values in self._buffers]

    def _resized(self, buffer: torch.Tensor) -> torch.Tensor:
        rows, heads, columns, width = buffer.shape
        # Zeros, not whatever was in memory: masked columns are multiplied by 0, which leaves no trace of finite values.
        larger = buffer.new_zeros(self.room, heads, self.columns, width)
        larger[:rows, :, :columns] = buffer
        return larger

    def prefill(self, rows: slice, start: int) -> None:
        """The next pass fills columns from `start` on, for `rows`."""
        self._window = rows, start

    def decode(self, lengths: torch.Tensor, longest: int) -> None:
        """The next pass adds a column to each of the first rows, at int64 `lengths` (rows,) of which `longest` is the
        largest."""
        self._window, self._lengths, self._longest = None, lengths, longest
        if self._row_index.shape != lengths.shape:
            self._row_index = torch.arange(lengths.shape[0], device=lengths.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's layers: keeps the states (rows, heads, tokens, width) and returns all so far."""
        if layer_idx == len(self._buffers):
            self._buffers.append((self._resized(key_states[:0, :, :0]), self._resized(value_states[:0, :, :0])))
        keys, values = self._buffers[layer_idx]
        if self._window is not None:
            rows, start = self._window
            end = start + key_states.shape[2]
            keys[rows, :, start:end] = key_states
            values[rows, :, start:end] = value_states
            return keys[rows, :, :end], values[rows, :, :end]
        keys[self._row_index, :, self._lengths] = key_states[:, :, 0]
        values[self._row_index, :, self._lengths] = value_states[:, :, 0]
        rows, end = slice(0, self._lengths.shape[0]), self._longest + 1
        return keys[rows, :, :end], values[rows, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the next pass."""
        return self._window[1] if self._window is not None else self._longest

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that the next pass sees, and the first of them."""
        return self.get_seq_length() + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        """Asked by transformers."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Asked by transformers."""
        return [False]

    def share(self, source: int, rows: slice, length: int) -> None:
        """Give `rows` the first `length` columns of row `source`."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer[rows, :, :length] = buffer[source, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Put the first `length` columns of row `source` in the place of row `target`."""
        self.share(source, slice(target, target + 1), length)
