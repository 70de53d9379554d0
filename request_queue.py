"""One thread that does the engine's work, in the order the clients meant, and the futures they poll.

The HTTP side submits and returns at once; the work runs here, one job at a time, so that training is reproducible and
no two jobs fight over the cores::

    queue = RequestQueue(run_batch)
    request_id = queue.submit("session:train:0", 3, job)   # runs after requests 1 and 2 of that model
    reply = await queue.wait(request_id, timeout=30)       # None: not finished yet

Requests of one model run in the order of their sequence numbers, whatever order they arrive in. Sampling requests for
the same weights that wait together are handed to `run_batch` as one list.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from error_handling import CheckpointError, ConfigurationError
from wire_format import RequestError

logger = logging.getLogger("mock_tinker")

# A sampling batch is held back this long after its latest request, at most HOLD_LIMIT_S in all: clients that send
# many requests at once take a few milliseconds to do so.
GATHER_S = 0.008
HOLD_LIMIT_S = 0.4
KEEP_RETRIEVED_S = 120.0
KEEP_UNRETRIEVED_S = 3600.0
USER_ERRORS = (RequestError, CheckpointError, ConfigurationError)


@dataclass(frozen=True)
class Reply:
    """What a finished request answers: JSON (`body` a dict) or protobuf (`body` bytes)."""

    body: dict[str, Any] | bytes


def failed(error: BaseException) -> Reply:
    """The reply that fails one request: the client's mistakes keep their message, bugs say what they are."""
    if isinstance(error, USER_ERRORS):
        return Reply({"error": str(error), "category": "user"})
    logger.error("request failed", exc_info=error)
    return Reply({"error": f"{type(error).__name__}: {error}", "category": "server"})


@dataclass
class _Request:
    request_id: str
    arrived: float
    number: int = 0
    job: Callable[[], Reply] | None = None
    item: Any = None
    reply: Reply | None = None
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)


@dataclass
class _Stream:
    next_seq: int
    held: dict[int, _Request] = field(default_factory=dict)


class RequestQueue:
    """The engine's thread and its queue. `run_batch(group, items)` answers a list of sampling requests, in order."""

    def __init__(self, run_batch: Callable[[str, Sequence[Any]], Sequence[Reply]]) -> None:
        self._run_batch = run_batch
        self._changed = threading.Condition()
        self._requests: dict[str, _Request] = {}
        self._streams: dict[str, _Stream] = {}
        self._ready: deque[_Request] = deque()
        self._groups: dict[str, list[_Request]] = {}
        # (when to forget it, request id), oldest first
        self._finished: deque[tuple[float, str]] = deque()
        self._retrieved: deque[tuple[float, str]] = deque()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self.stopping = threading.Event()

    def open_stream(self, stream: str) -> None:
        """Expect ordered requests 0, 1, 2, ... of `stream`. Without this its requests run as they arrive."""
        with self._changed:
            self._streams.setdefault(stream, _Stream(next_seq=0))

    def close_stream(self, stream: str) -> None:
        """Forget the order of `stream`; what is still held back runs now (and fails, as its model is gone)."""
        with self._changed:
            closed = self._streams.pop(stream, None)
            for _, request in sorted(closed.held.items()) if closed else ():
                self._make_ready(request)

    def submit(self, stream: str, seq: int | None, job: Callable[[], Reply]) -> str:
        """Queue `job` as number `seq` of `stream`; returns the request's id, for the same pair the same one again."""
        with self._changed:
            ordered = self._streams.get(stream) if seq is not None else None
            request_id = f"{stream}:{seq}" if seq is not None else f"{stream}:{uuid.uuid4().hex}"
            if request_id in self._requests or (ordered and seq is not None and seq < ordered.next_seq):
                return request_id
            request = _Request(request_id, time.monotonic(), job=job)
            self._remember(request)
            if ordered is None or seq is None:
                self._make_ready(request)
            else:
                ordered.held[seq] = request
                while (following := ordered.held.pop(ordered.next_seq, None)) is not None:
                    ordered.next_seq += 1
                    self._make_ready(following)
        return request_id

    def submit_sample(self, group: str, request_id: str, item: Any) -> str:
        """Queue a sampling request; those of one `group` (the same weights) that wait together run as one batch."""
        with self._changed:
            if request_id not in self._requests:
                request = _Request(request_id, time.monotonic(), next(self._numbers), item=item)
                self._remember(request)
                self._groups.setdefault(group, []).append(request)
                self._changed.notify()
        return request_id

    def submit_failed(self, stream: str, seq: int | None, error: BaseException) -> str:
        """Queue a request that can only fail, so that it takes its place in the order."""

        def job() -> Reply:
            return failed(error)

        return self.submit(stream, seq, job)

    def cancel(self, request_id: str) -> None:
        """Drop a sampling request that has not started."""
        with self._changed:
            for group, waiting in self._groups.items():
                for request in waiting:
                    if request.request_id == request_id:
                        self._groups[group] = [other for other in waiting if other is not request]
                        self._finish(request, failed(RequestError("cancelled by the client")))
                        return

    async def wait(self, request_id: str, timeout: float) -> Reply | None:
        """The reply, or None when it is not there after `timeout` seconds. Raises `KeyError` for an unknown request."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self._changed:
            request = self._requests[request_id]
            if request.reply is None:
                request.waiters.append(waiter)
        if request.reply is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout)
            with self._changed, contextlib.suppress(ValueError):
                request.waiters.remove(waiter)
        if request.reply is not None:
            with self._changed:
                self._retrieved.append((time.monotonic() + KEEP_RETRIEVED_S, request_id))
        return request.reply

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="tinker-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the job it is on, for which `stopping` is set; pending requests stay unanswered."""
        with self._changed:
            self.stopping.set()
            for request in self._requests.values():
                self._wake(request)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None

    @property
    def pending(self) -> int:
        """Requests that have no reply yet."""
        with self._changed:
            return sum(request.reply is None for request in self._requests.values())

    def _remember(self, request: _Request) -> None:
        self._sweep()
        self._requests[request.request_id] = request

    def _sweep(self) -> None:
        now = time.monotonic()
        while self._retrieved and self._retrieved[0][0] <= now:
            self._requests.pop(self._retrieved.popleft()[1], None)
        while self._finished and (self._finished[0][0] <= now or self._finished[0][1] not in self._requests):
            self._requests.pop(self._finished.popleft()[1], None)

    def _make_ready(self, request: _Request) -> None:
        request.number = next(self._numbers)
        self._ready.append(request)
        self._changed.notify()

    def _finish(self, request: _Request, reply: Reply) -> None:
        request.reply, request.job, request.item = reply, None, None
        self._finished.append((time.monotonic() + KEEP_UNRETRIEVED_S, request.request_id))
        self._wake(request)

    def _wake(self, request: _Request) -> None:
        for loop, event in request.waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                loop.call_soon_threadsafe(event.set)

    def _take(self) -> tuple[str | None, list[_Request]] | None:
        """The next work: (None, [request]) or (group, requests); None when the thread must end."""
        with self._changed:
            while not self.stopping.is_set():
                now = time.monotonic()
                group = min(
                    (name for name, waiting in self._groups.items() if waiting),
                    key=lambda name: self._groups[name][0].number,
                    default=None,
                )
                hold = 0.0
                if group is not None:
                    waiting = self._groups[group]
                    hold = min(waiting[-1].arrived + GATHER_S, waiting[0].arrived + HOLD_LIMIT_S) - now
                    is_first = not self._ready or waiting[0].number < self._ready[0].number
                    if hold <= 0 and is_first:
                        return group, self._groups.pop(group)
                if self._ready:
                    return None, [self._ready.popleft()]
                self._changed.wait(hold if group is not None else None)
        return None

    def _run(self) -> None:
        while (work := self._take()) is not None:
            group, requests = work
            replies: Sequence[Reply]
            try:
                if group is None:
                    job = requests[0].job
                    assert job is not None, "a request in the queue has its job until it is finished"
                    replies = [job()]
                else:
                    replies = self._run_batch(group, [request.item for request in requests])
            except Exception as error:  # noqa: BLE001 - whatever it was, it fails these requests and not the thread
                replies = [failed(error)] * len(requests)
            with self._changed:
                for request, reply in zip(requests, replies, strict=True):
                    self._finish(request, reply)
