"""Asking one checkpoint: messages in, the scored text out.

    sampler = ChatSampler(sampling_client, chat_format, max_tokens=64)
    reply = await sampler.reply([{"role": "user", "content": "What is two plus two?"}])

Evaluators, prediction and judging all ask through it, so that the same messages get the same reply everywhere.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service_waits import WAIT_LIMIT_S, Watch, wait_for

if TYPE_CHECKING:
    import tinker

    from rendering import ChatFormat


@dataclass(frozen=True)
class Reply:
    """A model's reply. `text` is what is scored; `stop_reason` is "stop" or "max_tokens"; `seconds` is wall clock."""

    text: str
    tokens: tuple[int, ...]
    stop_reason: str
    tokens_in: int
    tokens_out: int
    seconds: float
    logprobs: tuple[float, ...] | None = None


class ChatSampler:
    """Asks one checkpoint, through one chat format and one set of sampling settings.

    At temperature 0 decoding is greedy; above it each conversation has a seed of its own, derived from `seed`, its
    tokens and `epoch`, so that a repeated evaluation repeats its replies.
    """

    def __init__(
        self,
        sampling_client: tinker.SamplingClient,
        chat_format: ChatFormat,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        limit_s: float = WAIT_LIMIT_S,
        watch: Watch | None = None,
    ) -> None:
        self._client = sampling_client
        self.chat_format = chat_format
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self._limit_s = limit_s
        self._watch = watch

    async def reply(self, messages: Sequence[Mapping[str, str]], *, epoch: int = 1) -> Reply:
        """The model's next turn after `messages`. Raises as `wait_for` does."""
        import tinker

        prompt = self.chat_format.prompt_tokens(messages)
        seed = None
        if self.temperature > 0:
            digest = hashlib.sha256(json.dumps([self.seed, epoch, prompt]).encode()).digest()
            seed = int.from_bytes(digest[:4], "big") >> 1
        params = tinker.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
            stop=self.chat_format.stop,
        )
        started = time.monotonic()
        response = await wait_for(
            self._client.sample(tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params),
            "a sampled reply",
            limit_s=self._limit_s,
            watch=self._watch,
        )
        seconds = time.monotonic() - started
        sequence = response.sequences[0]
        tokens = tuple(int(token) for token in sequence.tokens)
        text, _ = self.chat_format.reply_text(list(tokens))
        logprobs = tuple(float(value) for value in sequence.logprobs) if sequence.logprobs is not None else None
        return Reply(
            text=text,
            tokens=tokens,
            stop_reason="max_tokens" if sequence.stop_reason == "length" else "stop",
            tokens_in=len(prompt),
            tokens_out=len(tokens),
            seconds=seconds,
            logprobs=logprobs,
        )
