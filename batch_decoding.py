"""Sampling: many requests decoded as one batch with a key-value cache, which requests join and leave as it runs.

    results = generate(model, requests)            # one SampleResult per request, in order
    serve(model, source, should_stop)              # requests as they arrive, each answered when it has ended

Every sequence has its own random generator and its own place in the cache, so what is sampled does not depend on what
shares the batch (logits move by rounding only, some 1e-6). Requests that arrive join between two tokens, a finished
sequence leaves the batch at once. Prompts that begin alike, as those of an evaluation do, have their common beginning
computed once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from prompt_scoring import PromptScores, TokenModel, pad, score_prompts
from row_cache import RowCache
from sample_format import SampleRequest, SampleResult
from sampled_row import Row, advance, make_rows
from wire_format import RequestError

# A beginning shorter than this that rows have in common is not worth a pass of its own, or copying.
MIN_SHARED_PREFIX = 16
# Room that a sequence is given when it joins a batch; beyond it the cache grows, within the memory budget.
RESERVED_TOKENS = 256
# Prompts of unlike length are split over passes of at least so many tokens where padding would add this much.
PADDING_LIMIT = 1.15
SHORTEST_PASS = 256
# Logprobs of likeliest tokens in one answer: they are held in memory until it is sent.
MAX_TOPK = 1 << 25


class SampleSource(Protocol):
    """Where a batch's requests come from and its results go. A key stands for a request until it is answered.

    While `is_gathering` more requests are about to come, so prompts are computed but no further tokens.
    """

    @property
    def is_gathering(self) -> bool: ...

    def take(self) -> Sequence[tuple[Hashable, SampleRequest]]:
        """Requests to join the batch now, each checked by `check_sample`."""
        ...

    def is_wanted(self, key: Hashable) -> bool:
        """Whether somebody still waits for the answer."""
        ...

    def finish(self, key: Hashable, result: SampleResult) -> None:
        """Answer a request."""
        ...

    def fail(self, key: Hashable, error: Exception) -> None:
        """Answer a request that could not join."""
        ...


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
    if request.target_prompt is not None and (highest := int(request.target_prompt.max())) >= model.vocabulary:
        raise RequestError(
            f"target_prompt_logprobs holds token {highest}; this model's tokens are 0 to {model.vocabulary - 1}"
        )
    room = model.max_context - len(request.prompt)
    longest = room if request.max_tokens is None else min(request.max_tokens, room)
    if request.num_samples * longest * request.topk_sample > MAX_TOPK:
        raise RequestError(
            f"topk_sample_logprobs of {request.topk_sample} for {request.num_samples} samples of up to {longest} "
            f"tokens is more than the {MAX_TOPK} logprobs that one request may return: ask for less at once"
        )


def generate(
    model: TokenModel, requests: Sequence[SampleRequest], should_stop: Callable[[], bool] = lambda: False
) -> list[SampleResult]:
    """Sample every request, checked by `check_sample` before. Raises `RuntimeError` when `should_stop` turns true."""
    source = _ListSource(requests)
    serve(model, source, should_stop)
    return [source.results[key] for key in range(len(requests))]


class _ListSource:
    is_gathering = False

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._left: Sequence[tuple[Hashable, SampleRequest]] = list(enumerate(requests))
        self.results: dict[Hashable, SampleResult] = {}

    def take(self) -> Sequence[tuple[Hashable, SampleRequest]]:
        taken, self._left = self._left, ()
        return taken

    def is_wanted(self, key: Hashable) -> bool:
        return True

    def finish(self, key: Hashable, result: SampleResult) -> None:
        self.results[key] = result

    def fail(self, key: Hashable, error: Exception) -> None:
        raise error


@torch.inference_mode()
def serve(model: TokenModel, source: SampleSource, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Decode what `source` gives, until it gives nothing more and all is answered.

    Raises `RuntimeError` when `should_stop` turns true; what has not been answered then stays so.
    """
    decoder = BatchDecoder(model)
    while True:
        arrived = source.take()
        try:
            decoder.join(arrived)
        except Exception as error:  # noqa: BLE001 - whatever it was, those that are running have no part in it
            for key, _ in arrived:
                source.fail(key, error)
        if decoder.is_idle:
            return
        if should_stop():
            raise RuntimeError("the engine is stopping")
        decoder.drop(source.is_wanted)
        decoder.start()
        if not source.is_gathering:
            decoder.step()
        for key, result in decoder.take_results():
            source.finish(key, result)


@dataclass(eq=False)
class _Sampling:
    """A request in the batch, with its rows. `open_rows` of them have not ended."""

    key: Hashable
    rows: list[Row]
    scores: PromptScores | None
    open_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_rows = sum(row.stop_reason is None for row in self.rows)

    def result(self) -> SampleResult:
        sequences = [row.sequence() for row in self.rows]
        if self.scores is None:
            return SampleResult(sequences)
        scores = self.scores
        return SampleResult(sequences, scores.logprobs, scores.topk, scores.targets, scores.alternatives)


class BatchDecoder:
    """A batch that runs token by token. Used by one thread."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model
        self._cache = RowCache()
        # Row i stands in row i of the cache, all but its newest token.
        self._rows: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._samplings: dict[Row, _Sampling] = {}
        self._ended: list[_Sampling] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to decode and nothing to hand over."""
        return not self._samplings and not self._ended

    def join(self, requests: Sequence[tuple[Hashable, SampleRequest]]) -> None:
        """Take requests in; their rows wait for `start`. On an error none is in."""
        scored = score_prompts(self._model, [request for _, request in requests])
        joined = [
            _Sampling(key, make_rows(self._model, request), scores)
            for (key, request), scores in zip(requests, scored, strict=True)
        ]
        for sampling in joined:
            open_rows = [row for row in sampling.rows if row.stop_reason is None]
            self._samplings.update(dict.fromkeys(open_rows, sampling))
            if not open_rows:
                self._ended.append(sampling)
            elif sampling.scores is not None and open_rows[0].limit == 1:
                # Scoring the prompt has given the logits after it, and no further ones are needed.
                self._advance(open_rows, sampling.scores.last_logits.expand(len(open_rows), -1))
            else:
                self._waiting.extend(open_rows)

    def drop(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Let go of requests whose answer is not wanted any more."""
        running = set(self._samplings.values())
        dropped = {sampling for sampling in running if not is_wanted(sampling.key)}
        if not dropped:
            return
        gone = {row for sampling in dropped for row in sampling.rows}
        for row in gone:
            self._samplings.pop(row, None)
        self._waiting = deque(row for row in self._waiting if row not in gone)
        self._release([index for index, row in enumerate(self._rows) if row in gone])

    def start(self) -> None:
        """Let as many waiting rows in as memory allows, in their order, and give them their first token."""
        budget = self._model.cache_budget_bytes // self._model.cache_bytes_per_token
        columns = self._cache.columns
        admitted: list[Row] = []
        while self._waiting:
            row = self._waiting[0]
            width = max(columns, row.length + min(row.limit - len(row.tokens), RESERVED_TOKENS))
            rows = len(self._rows) + len(admitted) + 1
            if rows > 1 and width * rows > budget:
                break
            columns = width
            admitted.append(self._waiting.popleft())
        if not admitted:
            return
        needed = len(self._rows) + len(admitted)
        if needed > self._cache.room:
            # Twice the room, so that a batch that grows row by row is not copied each time.
            needed = max(needed, min(2 * self._cache.room, budget // columns))
        self._cache.reserve(needed, columns)
        # Of like length side by side, so that a pass has little padding.
        admitted.sort(key=lambda row: row.length)
        first = len(self._rows)
        logits = self._prefill(admitted)
        self._rows.extend(admitted)
        self._advance(admitted, logits)
        self._release([index for index in range(first, len(self._rows)) if self._rows[index].stop_reason is not None])

    def step(self) -> None:
        """Decode one more token of every row that runs."""
        if not self._rows:
            return
        model = self._model
        longest = max(row.length for row in self._rows)
        if longest > self._cache.columns:
            self._grow()
            longest = max(row.length for row in self._rows)
        # The newest token of each row is not in the cache yet: its column is the row's length before it.
        lengths = torch.tensor([row.length - 1 for row in self._rows], device=model.device)
        tokens = torch.tensor([row.tokens[-1] for row in self._rows], device=model.device)
        self._cache.decode(lengths, longest - 1)
        mask = torch.zeros(len(self._rows), longest, device=model.device)
        mask.masked_fill_(torch.arange(longest, device=model.device)[None] > lengths[:, None], -math.inf)
        hidden = model.hidden_states(
            tokens[:, None],
            attention_mask=mask[:, None, None],
            position_ids=lengths[:, None],
            past_key_values=self._cache,
        )
        self._advance(self._rows, model.logits(hidden[:, -1]))
        self._release([index for index, row in enumerate(self._rows) if row.stop_reason is not None])

    def take_results(self) -> list[tuple[Hashable, SampleResult]]:
        """The requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return [(sampling.key, sampling.result()) for sampling in ended]

    def _advance(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        advance(self._model, rows, logits)
        for row in rows:
            if row.stop_reason is not None:
                sampling = self._samplings.pop(row)
                sampling.open_rows -= 1
                if not sampling.open_rows:
                    self._ended.append(sampling)

    def _release(self, gone: Sequence[int]) -> None:
        """Take rows out, by their ascending indices: the last rows move into their places."""
        for index in reversed(gone):
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last
                self._cache.move(len(self._rows), index, last.length - 1)
        if not self._rows:
            self._cache = RowCache()

    def _grow(self) -> None:
        """Let the cache grow; rows that then exceed the memory budget are taken out and continue in their turn."""
        columns = min(self._cache.columns + RESERVED_TOKENS, self._model.max_context)
        fitting = max(1, self._model.cache_budget_bytes // self._model.cache_bytes_per_token // columns)
        if len(self._rows) > fitting:
            self._waiting.extendleft(reversed(self._rows[fitting:]))
            del self._rows[fitting:]
        self._cache.shrink(len(self._rows))
        self._cache.reserve(len(self._rows), columns)

    def _prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """Put the rows' tokens into the cache, behind the rows that run; returns the logits after each row's last
        token, (rows, vocabulary)."""
        tokens = [row.all_tokens() for row in rows]
        first = len(self._rows)
        start = self._share_beginning(tokens)
        lengths = [len(sequence) - start for sequence in tokens]
        hidden = []
        for begin, end in _split_by_length(lengths, self._model.prefill_tokens):
            block = pad([sequence[start:] for sequence in tokens[begin:end]], self._model.device)
            states = self._pass(block, slice(first + begin, first + end), start)
            last = torch.tensor(lengths[begin:end], device=self._model.device) - 1
            hidden.append(states[torch.arange(end - begin, device=self._model.device), last])
        return self._model.logits(torch.cat(hidden))

    def _pass(self, block: torch.Tensor, rows: slice, start: int) -> torch.Tensor:
        self._cache.prefill(rows, start)
        options: dict[str, Any] = {}
        if start:
            columns = torch.arange(start + block.shape[1], device=block.device)
            positions = columns[start:]
            options["attention_mask"] = (columns[None, :] <= positions[:, None])[None, None]
            options["position_ids"] = positions[None].expand(block.shape[0], -1)
        return self._model.hidden_states(block, past_key_values=self._cache, **options)

    def _share_beginning(self, tokens: Sequence[list[int]]) -> int:
        """Fill the columns that the new rows have in common, from a running row as far as one begins alike; returns
        how many. Every row is left at least one token of its own."""
        first = len(self._rows)
        new = slice(first, first + len(tokens))
        common = tokens[0][: min(_common_length(tokens[0], other) for other in tokens)]
        common = common[: min(map(len, tokens)) - 1]
        copied, source = 0, 0
        for index, row in enumerate(self._rows):
            # The newest token of a running row is not in the cache.
            length = min(_common_length(row.all_tokens(), common), row.length - 1)
            if length > copied:
                copied, source = length, index
            if copied == len(common):
                break
        if copied < MIN_SHARED_PREFIX:
            copied = 0
        if len(tokens) > 1 and len(common) - copied >= MIN_SHARED_PREFIX:
            if copied:
                self._cache.share(source, slice(first, first + 1), copied)
            block = torch.tensor([common[copied:]], device=self._model.device)
            self._pass(block, slice(first, first + 1), copied)
            copied, source = len(common), first
        if copied:
            self._cache.share(source, new, copied)
        return copied


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(index for index in range(length) if one[index] != other[index])


def _split_by_length(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Consecutive parts of the ascending `lengths`, as (begin, end), of at most `budget` tokens once padded."""
    parts: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths):
            padded, real = lengths[end] * (end + 1 - begin), sum(lengths[begin : end + 1])
            wasteful = sum(lengths[begin:end]) >= SHORTEST_PASS and padded > PADDING_LIMIT * real
            if padded <= budget and not wasteful:
                continue
        parts.append((begin, end))
        begin = end
    return parts


def cache_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values that one token takes over all layers, in float32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return math.prod((config.num_hidden_layers, heads, head_dim, 2, 4))
