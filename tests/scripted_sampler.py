"""A scripted stand-in for `chat_sampler.ChatSampler`, where a test needs replies that no model would give on demand.

It stands for the service alone: what asks it, scores it and reports it is the real thing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chat_sampler import Reply

Script = Mapping[str, "str | BaseException"] | Callable[[str, int], "str | BaseException"]


class ScriptedSampler:
    """Replies by the last turn's text: a mapping from it, or a function of it and the epoch; an exception is raised.

    A reply that ends in "…" counts as cut at max_tokens. `asked` holds (last turn, epoch) of every request in order,
    `settings` the (max_tokens, temperature) it was asked with.
    """

    def __init__(self, script: Script, *, max_tokens: int = 32, temperature: float = 0.0, delay_s: float = 0.0) -> None:
        self._script = script
        self._delay_s = delay_s
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.asked: list[tuple[str, int]] = []
        self.messages: list[list[dict[str, str]]] = []
        self.settings: list[tuple[int, float]] = []
        self.in_flight = [0, 0]

    async def reply(self, messages: Sequence[Mapping[str, str]], *, epoch: int = 1) -> Reply:
        question = messages[-1]["content"]
        self.asked.append((question, epoch))
        self.messages.append([dict(message) for message in messages])
        self.settings.append((self.max_tokens, self.temperature))
        self.in_flight[0] += 1
        self.in_flight[1] = max(self.in_flight)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self.in_flight[0] -= 1
        said = self._script(question, epoch) if callable(self._script) else self._script[question]
        if isinstance(said, BaseException):
            raise said
        tokens = tuple(range(len(said.split())))
        return Reply(
            text=said,
            tokens=tokens,
            stop_reason="max_tokens" if said.endswith("…") else "stop",
            tokens_in=sum(len(message["content"].split()) for message in messages),
            tokens_out=len(tokens),
            seconds=0.25,
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
