"""Sampling: many requests decoded as one batch with a key-value cache.

    results = generate(model, requests, should_stop=lambda: False)   # one SampleResult per request, in order

Every sequence has its own random generator and its own place in the cache, so what is sampled does not depend on what
shares the batch (logits move by rounding only, some 1e-6). A finished sequence leaves the batch at once. Prompts that
begin alike, as those of an evaluation do, have their common beginning computed once.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache

from wire_format import RequestError, SampledSequence, SampleRequest, SampleResult, TopK

# A shared beginning shorter than this is not worth a pass of its own.
MIN_SHARED_PREFIX = 16
# Room that a sequence is given when it joins a batch; beyond it the cache grows, within the memory budget.
RESERVED_TOKENS = 256


class TokenModel(Protocol):
    """What sampling needs of a model. Hidden states are (rows, tokens, width), logits (rows, vocabulary)."""

    device: torch.device
    vocabulary: int
    max_context: int
    eos_tokens: frozenset[int]
    cache_bytes_per_token: int
    cache_budget_bytes: int
    prefill_tokens: int

    def hidden_states(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def text(self, tokens: Sequence[int]) -> str: ...


@dataclass
class _Row:
    """One sequence being sampled. `limit` is the number of tokens it may still grow to."""

    request: SampleRequest
    limit: int
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    first_logits: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def all_tokens(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


class RowCache(Cache):
    """Keys and values of a batch in which every row has its own length: column = position, for each row.

    `prefill` writes a block of columns for some rows, `decode` writes one column per row, each at that row's end.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.layers: list[Any] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rows = rows
        self.capacity = capacity
        self._window: tuple[slice, int] | None = None
        self._lengths: torch.Tensor | None = None
        self._row_index: torch.Tensor | None = None
        self._longest = 0

    def prefill(self, rows: slice, start: int) -> None:
        """The next pass fills columns from `start` on, for `rows`."""
        self._window, self._lengths = (rows, start), None

    def decode(self, lengths: torch.Tensor, longest: int) -> None:
        """The next pass adds one column to every row, at its own length."""
        self._window, self._lengths, self._longest = None, lengths, longest
        self._row_index = torch.arange(lengths.shape[0], device=lengths.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            _, heads, _, _ = key_states.shape
            for buffers, states in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(states.new_zeros(self.rows, heads, self.capacity, states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._window is not None:
            rows, start = self._window
            end = start + key_states.shape[2]
            keys[rows, :, start:end] = key_states
            values[rows, :, start:end] = value_states
            return keys[rows, :, :end], values[rows, :, :end]
        assert self._lengths is not None, "prefill() or decode() comes before a pass"
        keys[self._row_index, :, self._lengths] = key_states[:, :, 0]
        values[self._row_index, :, self._lengths] = value_states[:, :, 0]
        return keys[:, :, : self._longest + 1], values[:, :, : self._longest + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window[1] if self._window is not None else self._longest

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def share(self, prefix: RowCache, length: int) -> None:
        """Give every row the first `length` columns of the one row in `prefix`."""
        for mine, theirs in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for states in theirs:
                buffer = states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])
                buffer[:, :, :length] = states[:, :, :length]
                mine.append(buffer)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row but these."""
        self.rows = rows.shape[0]
        for buffers in (self.keys, self.values):
            for index, buffer in enumerate(buffers):
                buffers[index] = buffer[rows]

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` columns."""
        for buffers in (self.keys, self.values):
            for index, buffer in enumerate(buffers):
                buffers[index] = torch.nn.functional.pad(buffer, (0, 0, 0, capacity - self.capacity))
        self.capacity = capacity


def check_sample(model: TokenModel, request: SampleRequest) -> None:
    """Raise `RequestError` when `model` cannot serve `request`."""
    if len(request.prompt) > model.max_context:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens, the model's context holds {model.max_context}: shorten it"
        )
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= model.vocabulary:
        raise RequestError(
            f"the prompt holds token {low if low < 0 else high}; this model's tokens are 0 to {model.vocabulary - 1} "
            "(was the prompt made with another model's tokenizer?)"
        )


@torch.inference_mode()
def generate(
    model: TokenModel, requests: Sequence[SampleRequest], should_stop: Callable[[], bool] = lambda: False
) -> list[SampleResult]:
    """Sample every request, checked by `check_sample` before. Raises `RuntimeError` when `should_stop` turns true."""
    rows = [_make_rows(model, request) for request in requests]
    scored = _score_prompts(model, requests, rows)
    waiting = deque(row for request_rows in rows for row in request_rows if row.stop_reason is None)
    while waiting:
        _run_batch(model, waiting, should_stop)
    results = []
    for request_rows, (prompt_logprobs, topk_prompt) in zip(rows, scored, strict=True):
        sequences = []
        for row in request_rows:
            assert row.stop_reason is not None, "a row leaves the queue only when it has ended"
            topk = TopK(*(np.stack(part) for part in zip(*row.topk, strict=True))) if row.topk else None
            sequences.append(SampledSequence(row.tokens, row.logprobs, row.stop_reason, topk))
        results.append(SampleResult(sequences, prompt_logprobs, topk_prompt))
    return results


def _make_rows(model: TokenModel, request: SampleRequest) -> list[_Row]:
    room = model.max_context - len(request.prompt)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    seed = request.seed if request.seed is not None else secrets.randbits(62)
    rows = []
    for index in range(request.num_samples):
        generator = None
        if request.temperature > 0:
            # Distinct samples of one request need distinct streams; an odd constant keeps (seed, index) pairs apart.
            generator = torch.Generator().manual_seed((seed + index * 0x9E3779B97F4A7C15) % 2**63)
        row = _Row(request, limit, generator)
        if limit == 0:
            row.stop_reason = "length"
        rows.append(row)
    return rows


def _score_prompts(
    model: TokenModel, requests: Sequence[SampleRequest], rows: Sequence[list[_Row]]
) -> list[tuple[np.ndarray | None, TopK | None]]:
    """Logprobs of the prompts that asked for them; their last logits are kept, which a one-token request lives on."""
    results: list[tuple[np.ndarray | None, TopK | None]] = [(None, None)] * len(requests)
    wanted = [index for index, request in enumerate(requests) if request.prompt_logprobs]
    for part in split_by_tokens(wanted, lambda index: len(requests[index].prompt), model.prefill_tokens):
        hidden = model.hidden_states(_pad([list(requests[index].prompt) for index in part], model.device))
        for place, index in enumerate(part):
            request = requests[index]
            prompt = torch.tensor(request.prompt, device=model.device)
            scores = np.full(len(prompt), np.nan, dtype=np.float32)
            topk = None
            if request.topk_prompt:
                shape = (len(prompt), request.topk_prompt)
                topk = TopK(np.zeros(shape, np.int32), np.full(shape, -99999.0, np.float32))
            for start in range(request.scored_from - 1, len(prompt) - 1, 256):
                end = min(start + 256, len(prompt) - 1)
                logprobs = model.logits(hidden[place, start:end]).log_softmax(-1)
                picked = logprobs.gather(1, prompt[start + 1 : end + 1, None])[:, 0]
                scores[start + 1 : end + 1] = picked.cpu().numpy()
                if topk is not None:
                    values, ids = logprobs.topk(min(request.topk_prompt, model.vocabulary), dim=-1)
                    topk.token_ids[start + 1 : end + 1, : ids.shape[1]] = ids.cpu().numpy()
                    topk.logprobs[start + 1 : end + 1, : ids.shape[1]] = values.cpu().numpy()
            results[index] = (scores, topk)
            last = model.logits(hidden[place, len(prompt) - 1 : len(prompt)])[0]
            for row in rows[index]:
                row.first_logits = last
    return results


def split_by_tokens(items: Sequence[int], length: Callable[[int], int], budget: int) -> list[list[int]]:
    """`items` in groups of like length whose padded size stays within `budget` tokens (one item at least)."""
    groups: list[list[int]] = []
    for item in sorted(items, key=length, reverse=True):
        if groups and (len(groups[-1]) + 1) * length(groups[-1][0]) <= budget:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _pad(sequences: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Right-padded int64 tensor (rows, longest). With causal attention no real token sees the padding."""
    padded = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for row, tokens in enumerate(sequences):
        padded[row, : len(tokens)] = tokens
    return torch.from_numpy(padded).to(device)


def _run_batch(model: TokenModel, waiting: deque[_Row], should_stop: Callable[[], bool]) -> None:
    """Take a batch from `waiting` and decode it to its end. Rows that outgrow the memory go back to `waiting`."""
    rows = _admit(model, waiting)
    ready = [row for row in rows if row.first_logits is not None and row.limit == 1]
    if ready:
        _advance(model, ready, torch.stack([row.first_logits for row in ready if row.first_logits is not None]))
        rows = [row for row in rows if row.stop_reason is None]
        if not rows:
            return
    capacity = max(row.length + min(row.limit - len(row.tokens), RESERVED_TOKENS) for row in rows)
    cache = RowCache(len(rows), capacity)
    logits = _prefill(model, cache, rows)
    while True:
        _advance(model, rows, logits)
        keep = [index for index, row in enumerate(rows) if row.stop_reason is None]
        if not keep:
            return
        if should_stop():
            raise RuntimeError("the engine is stopping")
        if len(keep) < len(rows):
            rows = [rows[index] for index in keep]
            cache.keep(torch.tensor(keep, device=model.device))
        longest = max(row.length for row in rows)
        if longest > cache.capacity:
            rows = _make_room(model, cache, rows, waiting)
            longest = max(row.length for row in rows)
        # The newest token of each row is not in the cache yet: its column is the row's length before it.
        lengths = torch.tensor([row.length - 1 for row in rows], device=model.device)
        cache.decode(lengths, longest - 1)
        mask = torch.arange(longest, device=model.device)[None, :] <= lengths[:, None]
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=model.device)
        hidden = model.hidden_states(
            tokens, attention_mask=mask[:, None, None, :], position_ids=lengths[:, None], past_key_values=cache
        )
        logits = model.logits(hidden[:, -1])


def _admit(model: TokenModel, waiting: deque[_Row]) -> list[_Row]:
    budget = model.cache_budget_bytes // model.cache_bytes_per_token
    rows: list[_Row] = []
    widest = 0
    while waiting:
        row = waiting[0]
        width = max(widest, row.length + min(row.limit - len(row.tokens), RESERVED_TOKENS))
        if rows and width * (len(rows) + 1) > budget:
            break
        widest = width
        rows.append(waiting.popleft())
    return rows


def _make_room(model: TokenModel, cache: RowCache, rows: list[_Row], waiting: deque[_Row]) -> list[_Row]:
    """Let the cache grow; rows that then exceed the memory budget are taken out and continue in a later batch."""
    capacity = min(cache.capacity + RESERVED_TOKENS, model.max_context)
    fitting = max(1, model.cache_budget_bytes // model.cache_bytes_per_token // capacity)
    if len(rows) > fitting:
        waiting.extendleft(reversed(rows[fitting:]))
        rows = rows[:fitting]
        cache.keep(torch.arange(fitting, device=model.device))
    cache.grow(capacity)
    return rows


def _prefill(model: TokenModel, cache: RowCache, rows: Sequence[_Row]) -> torch.Tensor:
    """Put the rows' tokens into `cache`; returns the logits after each row's last token, (rows, vocabulary)."""
    tokens = [row.all_tokens() for row in rows]
    shared = _shared_prefix(tokens) if len(rows) > 1 else 0
    if shared >= MIN_SHARED_PREFIX:
        prefix = RowCache(1, shared)
        prefix.prefill(slice(0, 1), 0)
        model.hidden_states(torch.tensor([tokens[0][:shared]], device=model.device), past_key_values=prefix)
        cache.share(prefix, shared)
    else:
        shared = 0
    logits: torch.Tensor | None = None
    start = 0
    while start < len(rows):
        # Consecutive rows, so that they are one slice of the cache; the budget bounds the padded size.
        end, width = start, 0
        while end < len(rows):
            widened = max(width, len(tokens[end]) - shared)
            if end > start and widened * (end + 1 - start) > model.prefill_tokens:
                break
            width, end = widened, end + 1
        block = _pad([tokens[index][shared:] for index in range(start, end)], model.device)
        cache.prefill(slice(start, end), shared)
        options: dict[str, Any] = {}
        if shared:
            columns = torch.arange(shared + width, device=model.device)
            positions = torch.arange(shared, shared + width, device=model.device)
            options["attention_mask"] = (columns[None, :] <= positions[:, None])[None, None]
            options["position_ids"] = positions[None].expand(end - start, -1)
        hidden = model.hidden_states(block, past_key_values=cache, **options)
        last = torch.tensor([len(tokens[index]) - shared - 1 for index in range(start, end)], device=model.device)
        part = model.logits(hidden[torch.arange(end - start, device=model.device), last])
        if logits is None:
            logits = part.new_empty(len(rows), part.shape[1])
        logits[start:end] = part
        start = end
    assert logits is not None, "a batch has at least one row"
    return logits


def _shared_prefix(tokens: Sequence[list[int]]) -> int:
    """Length of the common beginning, leaving every row at least one token of its own."""
    first, last = min(tokens), max(tokens)
    length = min(map(len, tokens)) - 1
    for index in range(min(length, len(first), len(last))):
        if first[index] != last[index]:
            return index
    return max(0, length)


def _advance(model: TokenModel, rows: Sequence[_Row], logits: torch.Tensor) -> None:
    """Choose the next token of every row from `logits` (rows, vocabulary) and see which rows end with it."""
    logits = logits.float()
    normaliser = logits.logsumexp(-1)
    chosen = _choose(rows, logits)
    logprobs = (logits.gather(1, chosen[:, None])[:, 0] - normaliser).tolist()
    for index, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
        row.tokens.append(token)
        row.logprobs.append(logprobs[index])
        row.first_logits = None
        if row.request.topk_sample:
            values, ids = (logits[index] - normaliser[index]).topk(min(row.request.topk_sample, model.vocabulary))
            row.topk.append((ids.cpu().numpy().astype(np.int32), values.cpu().numpy()))
        if _stops(model, row):
            row.stop_reason = "stop"
        elif len(row.tokens) >= row.limit:
            row.stop_reason = "length"


def _choose(rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
    """Token ids (rows,). Rows with filters and rows without go separate ways, so that neither changes the other."""
    chosen = logits.argmax(-1)
    plain = [i for i, row in enumerate(rows) if row.generator and row.request.top_p >= 1 and row.request.top_k < 0]
    filtered = [i for i, row in enumerate(rows) if row.generator and i not in set(plain)]
    for indices in (plain, filtered):
        if not indices:
            continue
        where = torch.tensor(indices, device=logits.device)
        temperature = torch.tensor([rows[i].request.temperature for i in indices], device=logits.device)
        # float64: a cumulative sum over tens of thousands of float32 probabilities loses the small ones
        probabilities = (logits[where].double() / temperature[:, None]).softmax(-1)
        order = None
        if indices is filtered:
            probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = probabilities.cumsum(-1) - probabilities
            top_p = torch.tensor([rows[i].request.top_p for i in indices], device=logits.device)
            top_k = torch.tensor([rows[i].request.top_k for i in indices], device=logits.device)
            rank = torch.arange(probabilities.shape[1], device=logits.device)
            dropped = (before >= top_p[:, None]) | ((top_k[:, None] > 0) & (rank[None, :] >= top_k[:, None]))
            dropped[:, 0] = False
            probabilities = probabilities.masked_fill(dropped, 0.0)
        cumulative = probabilities.cumsum(-1)
        draws = [torch.rand((), generator=rows[i].generator, dtype=torch.float64).item() for i in indices]
        threshold = torch.tensor(draws, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
        picked = torch.searchsorted(cumulative, threshold[:, None], right=True).clamp_max(logits.shape[1] - 1)
        if order is not None:
            picked = order.gather(1, picked)
        chosen[where] = picked[:, 0]
    return chosen


def _stops(model: TokenModel, row: _Row) -> bool:
    request = row.request
    token = row.tokens[-1]
    if token in request.stop_tokens or (request.stops_at_eos and token in model.eos_tokens):
        return True
    if not request.stop_strings:
        return False
    # A token holds at least one byte, so the string that the newest token completes lies within this many tokens.
    longest = max(len(text.encode()) for text in request.stop_strings)
    tail = model.text(row.tokens[-(longest + 4) :])
    return any(text in tail for text in request.stop_strings)


def cache_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values that one token takes over all layers, in float32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return math.prod((config.num_hidden_layers, heads, head_dim, 2, 4))
