"""Sampling requests of one group (the same weights) that run together, and which of the late ones may join them.

    batch = RunningBatch(queue, group, requests)       # on the engine's thread
    while (joined := batch.take()) or running: ...     # between two tokens
    batch.finish(request_id, reply)                    # as soon as it has ended

A batch opens with a moment of gathering: clients that send many requests at once take a while to do so. Requests of
its group that arrive then join it whatever else waits; `take` holds them back until there are enough for a pass over
their prompts. Later ones join only while nothing that came before them waits, so that a batch which always finds new
requests still ends, and whoever waits for another model gets a turn when the rows that run have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from queued_request import QueuedRequest, Reply, failed

# Gathering ends when nobody has come for GATHER_S, at the latest after HOLD_LIMIT_S.
GATHER_S = 0.008
HOLD_LIMIT_S = 0.4
GATHERED_AT_ONCE = 8


class BatchQueue(Protocol):
    """What a batch needs of the queue. The first three are used with `changed` held."""

    changed: threading.Condition
    stopping: threading.Event

    def waiting_in(self, group: str) -> Sequence[QueuedRequest]:
        """The group's requests in the order of their arrival."""
        ...

    def take_from(self, group: str, *, in_turn: bool) -> list[QueuedRequest]:
        """Take them out, with `in_turn` only those before which nothing waits elsewhere."""
        ...

    def answer(self, requests: Sequence[QueuedRequest], reply: Reply) -> None:
        """Finish requests."""
        ...


class RunningBatch:
    """A batch from the queue's side. `first` is the item of the request that it was started for."""

    def __init__(self, queue: BatchQueue, group: str, requests: Sequence[QueuedRequest]) -> None:
        self.first = requests[0].item
        self.is_gathering = True
        self._queue = queue
        self._group = group
        self._joining = [(request, request.item) for request in requests]
        self._open = {request.request_id: request for request in requests}
        self._opened = time.monotonic()
        self._latest = requests[-1].arrived

    def take(self) -> list[tuple[str, Any]]:
        """(request id, item) of the requests that join now. Waits for them while the batch is gathering."""
        joining, self._joining = self._joining, []
        if not joining:
            with self._queue.changed:
                in_turn = not self.is_gathering
                self._gather()
                joining = [(request, request.item) for request in self._queue.take_from(self._group, in_turn=in_turn)]
        self._open.update((request.request_id, request) for request, _ in joining)
        return [(request.request_id, item) for request, item in joining if request.reply is None]

    def _gather(self) -> None:
        while self.is_gathering:
            waiting = self._queue.waiting_in(self._group)
            if waiting:
                self._latest = waiting[-1].arrived
            left = min(self._latest + GATHER_S, self._opened + HOLD_LIMIT_S) - time.monotonic()
            if left <= 0 or self._queue.stopping.is_set():
                self.is_gathering = False
            elif len(waiting) >= GATHERED_AT_ONCE:
                return
            else:
                self._queue.changed.wait(left)

    def is_open(self, request_id: str) -> bool:
        """Whether a request that joined has neither been answered nor cancelled."""
        return request_id in self._open and self._open[request_id].reply is None

    def finish(self, request_id: str, reply: Reply) -> None:
        """Answer a request, at once; nothing happens to one that was cancelled."""
        self._queue.answer([self._open.pop(request_id)], reply)

    def fail(self, error: Exception) -> None:
        """Answer all that is still open."""
        if open_requests := [request for request in self._open.values() if request.reply is None]:
            self._queue.answer(open_requests, failed(error))
