"""One thread that does the engine's work, in the order the clients meant, and the futures they poll.

The HTTP side submits and returns at once; the work runs here, one job at a time, so that training is reproducible and
no two jobs fight over the cores::

    queue = RequestQueue(run_batch)
    request_id = queue.submit("session:train:0", 3, job)   # runs after requests 1 and 2 of that model
    reply = await queue.wait(request_id, timeout=30)       # None: not finished yet

Requests of one model run in the order of their sequence numbers, whatever order they arrive in; one that has not come
after `HOLE_S` is passed over. Sampling requests for the same weights that wait together are handed to `run_batch` as
one `RunningBatch`, which more of them may join while it runs, until work that came before them waits.
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
from functools import partial
from typing import Any

from queued_request import QueuedRequest, Reply, failed
from request_trace import RequestTrace
from running_batch import RunningBatch
from wire_format import RequestError

logger = logging.getLogger("mock_tinker")

KEEP_RETRIEVED_S = 120.0
KEEP_UNRETRIEVED_S = 3600.0
# Retrieved replies are kept for a client whose answer was lost on the way, the newest so many bytes of them.
KEEP_RETRIEVED_BYTES = 32_000_000
# A client whose request failed before it was sent (the SDK numbers it first) would otherwise hang for ever. Requests
# that are still on their way take milliseconds; after a refusal the SDK repeats them within 30 s.
HOLE_S = 60.0
TOO_LATE = (
    "this request is number {seq} of its model and came more than {seconds:.0f} s after later ones, which were carried "
    "out without it"
)


@dataclass
class _Stream:
    next_seq: int
    held: dict[int, QueuedRequest] = field(default_factory=dict)
    # Since when `held` has waited for `next_seq`.
    blocked_since: float = 0.0
    skipped: list[range] = field(default_factory=list)


class RequestQueue:
    """The engine's thread and its queue. `run_batch(group, batch)` answers the sampling requests of a batch."""

    def __init__(self, run_batch: Callable[[str, RunningBatch], None]) -> None:
        self._run_batch = run_batch
        self.changed = threading.Condition()
        self._requests: dict[str, QueuedRequest] = {}
        self._streams: dict[str, _Stream] = {}
        self._ready: deque[QueuedRequest] = deque()
        self._groups: dict[str, list[QueuedRequest]] = {}
        # When to forget a request's reply, oldest first.
        self._finished: dict[str, float] = {}
        self._retrieved: dict[str, float] = {}
        self._retrieved_bytes = 0
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self.stopping = threading.Event()
        self.trace = RequestTrace()

    def open_stream(self, stream: str) -> None:
        """Expect ordered requests 0, 1, 2, ... of `stream`. Without this its requests run as they arrive."""
        with self.changed:
            self._streams.setdefault(stream, _Stream(next_seq=0))

    def close_stream(self, stream: str) -> None:
        """Forget the order of `stream`; what is still held back runs now (and fails, as its model is gone)."""
        with self.changed:
            closed = self._streams.pop(stream, None)
            for _, request in sorted(closed.held.items()) if closed else ():
                self._make_ready(request)

    def submit(self, stream: str, seq: int | None, job: Callable[[], Reply]) -> str:
        """Queue `job` as number `seq` of `stream`; returns the request's id, for the same pair the same one again."""
        with self.changed:
            ordered = self._streams.get(stream) if seq is not None else None
            request_id = f"{stream}:{seq}" if seq is not None else f"{stream}:{uuid.uuid4().hex}"
            if request_id in self._requests:
                return request_id
            if ordered and seq is not None and seq < ordered.next_seq:
                if not any(seq in numbers for numbers in ordered.skipped):
                    return request_id
                job, ordered = partial(failed, RequestError(TOO_LATE.format(seq=seq, seconds=HOLE_S))), None
            request = QueuedRequest(request_id, time.monotonic(), job=job)
            self._remember(request)
            if ordered is None or seq is None:
                self._make_ready(request)
            else:
                if not ordered.held:
                    ordered.blocked_since = request.arrived
                ordered.held[seq] = request
                self._release(ordered)
        return request_id

    def submit_sample(self, group: str, request_id: str, item: Any) -> str:
        """Queue a sampling request; those of one `group` (the same weights) that wait together run as one batch."""
        with self.changed:
            if request_id not in self._requests:
                request = QueuedRequest(request_id, time.monotonic(), next(self._numbers), item=item)
                self._remember(request)
                self._groups.setdefault(group, []).append(request)
                self.changed.notify()
        return request_id

    def submit_failed(self, stream: str, seq: int | None, error: BaseException) -> str:
        """Queue a request that can only fail, so that it takes its place in the order."""

        def job() -> Reply:
            return failed(error)

        return self.submit(stream, seq, job)

    def post(self, job: Callable[[], Reply]) -> None:
        """Queue work of the engine's own, which no client asks for."""
        with self.changed:
            self._make_ready(QueuedRequest("", time.monotonic(), job=job))

    def cancel(self, request_id: str) -> None:
        """Drop a sampling request that has not been answered; one that runs ends at its next token."""
        with self.changed:
            request = self._requests.get(request_id)
            if request is None or request.item is None:
                return
            for group, waiting in self._groups.items():
                self._groups[group] = [other for other in waiting if other is not request]
            self._finish(request, failed(RequestError("cancelled by the client")))

    async def wait(self, request_id: str, timeout: float) -> Reply | None:
        """The reply, or None when it is not there after `timeout` seconds. Raises `KeyError` for an unknown request."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        with self.changed:
            request = self._requests[request_id]
            # Whoever asks once the queue stops is not woken any more.
            waits = request.reply is None and not self.stopping.is_set()
            if waits:
                request.waiters.append(waiter)
        if waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await event.wait()
            with self.changed, contextlib.suppress(ValueError):
                request.waiters.remove(waiter)
        if request.reply is not None:
            with self.changed:
                if self._finished.pop(request_id, None) is not None:
                    self._retrieved[request_id] = time.monotonic() + KEEP_RETRIEVED_S
                    self._retrieved_bytes += request.reply.size
        return request.reply

    def waiting_in(self, group: str) -> Sequence[QueuedRequest]:
        """The sampling requests of `group` that no batch has taken. To be called with `changed` held."""
        return self._groups.get(group, ())

    def take_from(self, group: str, *, in_turn: bool) -> list[QueuedRequest]:
        """Take them out for a batch, with `in_turn` only those before which nothing waits elsewhere. To be called with
        `changed` held."""
        waiting = self._groups.get(group, [])
        others = [self._ready[0].number] if self._ready else []
        others += [requests[0].number for name, requests in self._groups.items() if requests and name != group]
        taken = [request for request in waiting if not in_turn or all(request.number < other for other in others)]
        if len(taken) == len(waiting):
            self._groups.pop(group, None)
        else:
            self._groups[group] = waiting[len(taken) :]
        now = time.monotonic()
        for request in taken:
            request.started = now
        return taken

    def answer(self, requests: Sequence[QueuedRequest], reply: Reply) -> None:
        """Finish requests that ran, those that have no reply yet."""
        with self.changed:
            ended = time.monotonic()
            for request in requests:
                self.trace.add(request.request_id, request.call, request.arrived, request.started, ended)
                if request.reply is None:
                    self._finish(request, reply)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="tinker-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the job it is on, for which `stopping` is set; pending requests stay unanswered."""
        with self.changed:
            self.stopping.set()
            for request in self._requests.values():
                self._wake(request)
            self.changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None

    @property
    def pending(self) -> int:
        """Requests that have no reply yet."""
        with self.changed:
            return sum(request.reply is None for request in self._requests.values())

    def sweep(self) -> None:
        """Forget replies whose time is over. Happens with every new request; for a server that gets none."""
        with self.changed:
            self._sweep()

    def _remember(self, request: QueuedRequest) -> None:
        self._sweep()
        self._requests[request.request_id] = request

    def _sweep(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._retrieved.items()), None)) is not None:
            if oldest[1] > now and self._retrieved_bytes <= KEEP_RETRIEVED_BYTES:
                break
            del self._retrieved[oldest[0]]
            reply = self._requests.pop(oldest[0]).reply
            self._retrieved_bytes -= reply.size if reply is not None else 0
        while (oldest := next(iter(self._finished.items()), None)) is not None and oldest[1] <= now:
            del self._finished[oldest[0]]
            del self._requests[oldest[0]]

    def _release(self, stream: _Stream) -> None:
        """Make ready what waited for its turn in `stream`, up to the next number that has not come."""
        while (following := stream.held.pop(stream.next_seq, None)) is not None:
            stream.next_seq += 1
            stream.blocked_since = time.monotonic()
            self._make_ready(following)
        self.changed.notify()

    def _pass_over_holes(self) -> float | None:
        """Go on with streams that have waited long enough; the seconds until the next of them has, if any waits."""
        waits = []
        for name, stream in self._streams.items():
            left = stream.blocked_since + HOLE_S - time.monotonic()
            if stream.held and left <= 0:
                missing = range(stream.next_seq, min(stream.held))
                logger.warning("%s: number %d never came; going on with %d", name, missing.start, missing.stop)
                stream.skipped.append(missing)
                stream.next_seq = missing.stop
                self._release(stream)
            if stream.held:
                waits.append(max(left, 0.0))
        return min(waits, default=None)

    def _make_ready(self, request: QueuedRequest) -> None:
        request.number = next(self._numbers)
        self._ready.append(request)
        self.changed.notify()

    def _finish(self, request: QueuedRequest, reply: Reply) -> None:
        request.reply, request.job, request.item = reply, None, None
        if request.request_id in self._requests:
            self._finished[request.request_id] = time.monotonic() + KEEP_UNRETRIEVED_S
        self._wake(request)

    def _wake(self, request: QueuedRequest) -> None:
        for loop, event in request.waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                loop.call_soon_threadsafe(event.set)

    def _take(self) -> QueuedRequest | tuple[str, RunningBatch] | None:
        """The next work: a job's request or a group's batch; None when the thread must end."""
        with self.changed:
            while not self.stopping.is_set():
                hole = self._pass_over_holes()
                group = min(
                    (name for name, waiting in self._groups.items() if waiting),
                    key=lambda name: self._groups[name][0].number,
                    default=None,
                )
                if group is not None and (not self._ready or self._groups[group][0].number < self._ready[0].number):
                    return group, RunningBatch(self, group, self.take_from(group, in_turn=False))
                if self._ready:
                    self._ready[0].started = time.monotonic()
                    return self._ready.popleft()
                self.changed.wait(hole)
        return None

    def _run(self) -> None:
        while (work := self._take()) is not None:
            if isinstance(work, QueuedRequest):
                self._run_job(work)
                continue
            group, batch = work
            try:
                self._run_batch(group, batch)
                batch.fail(RuntimeError("the batch ended without an answer"))
            except Exception as error:  # noqa: BLE001 - whatever it was, it fails these requests and not the thread
                # Stopped in the middle, they stay unanswered: their clients ask the server that takes over.
                if not self.stopping.is_set():
                    batch.fail(error)

    def _run_job(self, request: QueuedRequest) -> None:
        assert request.job is not None, "a request in the queue has its job until it is finished"
        try:
            reply = request.job()
        except Exception as error:  # noqa: BLE001 - whatever it was, it fails this request and not the thread
            reply = failed(error)
        self.answer([request], reply)
