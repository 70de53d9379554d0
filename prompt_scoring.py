"""Logprobs of prompt tokens: what a sampling request asks of its prompt beside a continuation.

    scores = score_prompts(model, requests)     # one PromptScores per request, None where nothing was asked

One pass over each prompt gives the logprobs of its own tokens, of the likeliest ones, of ids that the client names, and
draws of alternatives. Position i of a prompt is predicted by the tokens before it, so nothing is known of position 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sample_format import SampleRequest, TopK

# Positions whose logits are held at once.
POSITIONS_CHUNK = 256
# Tells the draws of alternatives from those of the samples of the same seed.
ALTERNATIVES_STREAM = 0x5851F42D4C957F2D


class TokenModel(Protocol):
    """What sampling needs of a model. Hidden states are (rows, tokens, width), logits (rows, vocabulary)."""

    device: torch.device
    vocabulary: int
    max_context: int
    eos_tokens: frozenset[int]
    cache_bytes_per_token: int
    cache_budget_bytes: int
    prefill_tokens: int

    def hidden_states(self, tokens: torch.Tensor, **options: object) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def text(self, tokens: Sequence[int]) -> str: ...


@dataclass
class PromptScores:
    """What was computed of a prompt of L tokens; None for what was not asked.

    `logprobs`: float32 (L,), NaN where nothing was scored. `topk`: (L, k). `targets`: float32 (L - 1, K), 0 in cells
    that named nothing. `alternatives`: (L - 1, k) draws. `last_logits`: (vocabulary,), after the last token.
    """

    logprobs: np.ndarray | None
    topk: TopK | None
    targets: np.ndarray | None
    alternatives: TopK | None
    last_logits: torch.Tensor


def wants_scores(request: SampleRequest) -> bool:
    """Whether `request` asks anything of its prompt."""
    return request.prompt_logprobs or request.target_prompt is not None or request.alternatives_k > 0


def score_prompts(model: TokenModel, requests: Sequence[SampleRequest]) -> list[PromptScores | None]:
    """Score the prompts that asked for it, as many in one pass as memory allows."""
    results: list[PromptScores | None] = [None] * len(requests)
    wanted = [index for index, request in enumerate(requests) if wants_scores(request)]
    for part in split_by_tokens(wanted, lambda index: len(requests[index].prompt), model.prefill_tokens):
        hidden = model.hidden_states(pad([list(requests[index].prompt) for index in part], model.device))
        for place, index in enumerate(part):
            results[index] = _score(model, requests[index], hidden[place, : len(requests[index].prompt)])
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


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Right-padded int64 tensor (rows, longest). With causal attention no real token sees the padding."""
    padded = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for row, tokens in enumerate(sequences):
        padded[row, : len(tokens)] = tokens
    return torch.from_numpy(padded).to(device)


def _score(model: TokenModel, request: SampleRequest, hidden: torch.Tensor) -> PromptScores:
    length = len(request.prompt)
    prompt = torch.tensor(request.prompt, device=hidden.device)
    scores = _empty_scores(request, length, model.logits(hidden[length - 1 :])[0])
    wanted = None
    if request.target_prompt is not None:
        wanted = torch.from_numpy(request.target_prompt).to(hidden.device)
    generator = torch.Generator().manual_seed(_alternatives_seed(request))
    # Targets and alternatives are asked of the whole prompt, its own logprobs perhaps only of an end of it.
    first = 0 if wanted is not None or request.alternatives_k else request.scored_from - 1
    for start in range(first, length - 1, POSITIONS_CHUNK):
        end = min(start + POSITIONS_CHUNK, length - 1)
        logprobs = model.logits(hidden[start:end]).log_softmax(-1)
        own = slice(max(start, request.scored_from - 1) - start, end - start)
        rows = slice(start + own.start + 1, end + 1)
        if scores.logprobs is not None and own.start < own.stop:
            scores.logprobs[rows] = logprobs[own].gather(1, prompt[rows, None])[:, 0].cpu().numpy()
        if scores.topk is not None and own.start < own.stop:
            values, ids = logprobs[own].topk(scores.topk.token_ids.shape[1], dim=-1)
            scores.topk.token_ids[rows], scores.topk.logprobs[rows] = ids.cpu().numpy(), values.cpu().numpy()
        if scores.targets is not None and wanted is not None:
            cells = wanted[start:end]
            values = logprobs.gather(1, cells.clamp_min(0)).masked_fill(cells < 0, 0.0)
            scores.targets[start:end] = values.cpu().numpy()
        if scores.alternatives is not None:
            ids = _draw(logprobs, request, generator)
            scores.alternatives.token_ids[start:end] = ids.cpu().numpy()
            scores.alternatives.logprobs[start:end] = logprobs.gather(1, ids).cpu().numpy()
    return scores


def _empty_scores(request: SampleRequest, length: int, last_logits: torch.Tensor) -> PromptScores:
    logprobs = topk = targets = alternatives = None
    if request.prompt_logprobs:
        logprobs = np.full(length, np.nan, np.float32)
    if request.topk_prompt:
        shape = (length, min(request.topk_prompt, last_logits.shape[0]))
        # What stands at positions that were not scored: the SDK reads it as "nothing".
        topk = TopK(np.zeros(shape, np.int32), np.full(shape, -99999.0, np.float32))
    if request.target_prompt is not None:
        targets = np.zeros(request.target_prompt.shape, np.float32)
    if request.alternatives_k:
        shape = (length - 1, request.alternatives_k)
        alternatives = TopK(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    return PromptScores(logprobs, topk, targets, alternatives, last_logits)


def _alternatives_seed(request: SampleRequest) -> int:
    seed = request.seed if request.seed is not None else secrets.randbits(62)
    return (seed ^ ALTERNATIVES_STREAM) % 2**63


def _draw(logprobs: torch.Tensor, request: SampleRequest, generator: torch.Generator) -> torch.Tensor:
    """`alternatives_k` draws with replacement per position at the request's temperature, int64 (positions, k)."""
    count = request.alternatives_k
    if request.temperature == 0:
        return logprobs.argmax(-1, keepdim=True).expand(-1, count)
    # float64: a cumulative sum over tens of thousands of float32 probabilities loses the small ones
    scaled = logprobs.double()
    # The largest is brought to 0 first: over a temperature near 0 it would become infinite.
    scaled -= scaled.amax(-1, keepdim=True)
    cumulative = (scaled / request.temperature).softmax(-1).cumsum(-1)
    uniform = torch.rand(logprobs.shape[0], count, generator=generator, dtype=torch.float64).to(logprobs.device)
    picked = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return picked.clamp_max(logprobs.shape[1] - 1)
