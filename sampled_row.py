"""A sequence being sampled: its next token is chosen, and then either it goes on or it has ended.

    rows = make_rows(model, request)              # one for each sample that the request asks for
    advance(model, rows, logits)                  # logits (rows, vocabulary) after the newest token of each
    ended = [row for row in rows if row.stop_reason is not None]

Every row has a random generator of its own, so what is drawn depends on the request's seed and on nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from prompt_scoring import TokenModel
from sample_format import SampledSequence, SampleRequest, TopK


@dataclass(eq=False)
class Row:
    """One sequence being sampled. `limit` is the number of tokens it may grow to, `end_tokens` those that end it."""

    request: SampleRequest
    limit: int
    end_tokens: frozenset[int]
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and those sampled."""
        return len(self.request.prompt) + len(self.tokens)

    def all_tokens(self) -> list[int]:
        """The prompt and what was sampled after it."""
        return [*self.request.prompt, *self.tokens]

    def sequence(self) -> SampledSequence:
        """The row as a result, once it has ended."""
        assert self.stop_reason is not None, "only a row that has ended is a result"
        topk = TopK(*(np.stack(part) for part in zip(*self.topk, strict=True))) if self.topk else None
        return SampledSequence(self.tokens, self.logprobs, self.stop_reason, topk)


def make_rows(model: TokenModel, request: SampleRequest) -> list[Row]:
    """The request's sequences. One for which the context has no room has ended already."""
    room = model.max_context - len(request.prompt)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    seed = request.seed if request.seed is not None else secrets.randbits(62)
    end_tokens = request.stop_tokens | (model.eos_tokens if request.stops_at_eos else frozenset())
    rows = []
    for index in range(request.num_samples):
        generator = None
        if request.temperature > 0:
            # Distinct samples of one request need distinct streams; an odd constant keeps (seed, index) pairs apart.
            generator = torch.Generator().manual_seed((seed + index * 0x9E3779B97F4A7C15) % 2**63)
        rows.append(Row(request, limit, end_tokens, generator, stop_reason=None if limit else "length"))
    return rows


def advance(model: TokenModel, rows: Sequence[Row], logits: torch.Tensor) -> None:
    """Choose the next token of every row from `logits` (rows, vocabulary) and see which rows end with it."""
    logits = logits.float()
    largest, best = logits.max(-1)
    normaliser = (logits - largest[:, None]).exp_().sum(-1).log_() + largest
    chosen = _choose(rows, logits, best)
    logprobs = (logits.gather(1, chosen[:, None])[:, 0] - normaliser).tolist()
    for index, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
        row.tokens.append(token)
        row.logprobs.append(logprobs[index])
        if row.request.topk_sample:
            values, ids = (logits[index] - normaliser[index]).topk(min(row.request.topk_sample, model.vocabulary))
            row.topk.append((ids.cpu().numpy().astype(np.int32), values.cpu().numpy()))
        if token in row.end_tokens or (row.request.stop_strings and _ends_with_a_stop(model, row)):
            row.stop_reason = "stop"
        elif len(row.tokens) >= row.limit:
            row.stop_reason = "length"


def _choose(rows: Sequence[Row], logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Token ids (rows,): `best` where the temperature is 0. Rows with filters and rows without go separate ways, so
    that neither changes the other."""
    drawn = [index for index, row in enumerate(rows) if row.generator is not None]
    if not drawn:
        return best
    chosen = best.clone()
    plain = [index for index in drawn if rows[index].request.top_p >= 1 and rows[index].request.top_k < 0]
    filtered = sorted(set(drawn) - set(plain))
    for indices in (plain, filtered):
        if not indices:
            continue
        where = torch.tensor(indices, device=logits.device)
        temperature = torch.tensor(
            [rows[i].request.temperature for i in indices], dtype=torch.float64, device=logits.device
        )
        # float64: a cumulative sum over tens of thousands of float32 probabilities loses the small ones
        scaled = logits[where].double()
        # The largest is brought to 0 first: over a temperature near 0 it would become infinite.
        scaled -= scaled.amax(-1, keepdim=True)
        probabilities = (scaled / temperature[:, None]).softmax(-1)
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


def _ends_with_a_stop(model: TokenModel, row: Row) -> bool:
    strings = row.request.stop_strings
    # A token holds at least one byte, so the string that the newest token completes lies within this many tokens.
    longest = max(len(text.encode()) for text in strings)
    tail = model.text(row.tokens[-(longest + 4) :])
    return any(text in tail for text in strings)
