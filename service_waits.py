"""Waiting for a service: with a limit, saying what for, and noticing when nobody is there any more.

watch = Watch(note=log.say, is_alive=backend.is_alive, stop=stop)
output = await wait_for(client.forward(data, "cross_entropy"), "the likelihood of the targets", watch=watch)

A queue is told apart from a hang: while the service says that it keeps requests waiting, notes repeat its reason, and
the wait may last `QUEUE_LIMIT_S`; otherwise they say whether it answers at all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from error_handling import (
    AuthenticationError,
    EvalLoopError,
    InterruptedRunError,
    ServiceError,
    ServiceUnavailableError,
)
from logger import redact, redact_values

if TYPE_CHECKING:
    import requests

T = TypeVar("T")

WAIT_LIMIT_S = 3600.0
# As long as the service says that it has no room yet.
QUEUE_LIMIT_S = 24 * 3600.0
WAIT_NOTE_S = 30.0
# The service repeats what it says of its queue with every answer to a poll, which it holds back for less than this.
QUEUE_WORD_LASTS_S = 90.0
# After being asked to stop, how long what is in flight may still take.
STOP_GRACE_S = 60.0
# So many looks in a row, `WAIT_NOTE_S` apart, find nobody: the service is gone and not just slow.
LOOKS_BEFORE_GIVING_UP = 3
_SLICE_S = 0.5


def read_body(response: requests.Response, deadline: float, longest: int) -> None:
    """Read the body of a streamed answer, which by itself may trickle in or never end, until `deadline` (monotonic
    seconds) and at most `longest` bytes; raises `requests.ReadTimeout` beyond."""
    import requests

    body = bytearray()
    for part in response.iter_content(2**16):
        body += part
        if time.monotonic() > deadline or len(body) > longest:
            response.close()
            raise requests.ReadTimeout("the answer does not end")
    response._content = bytes(body)


@dataclass
class Watch:
    """What to do while a wait lasts. `note` is told what is waited for, every `WAIT_NOTE_S` seconds however many waits
    share the watch; `is_alive` says whether the service still answers; `stop` is set when the run shall end; `queue` is
    what the service says of its queue, None for one that has none."""

    note: Callable[[str], None] | None = None
    is_alive: Callable[[], bool] | None = None
    stop: asyncio.Event | None = None
    queue: QueueWord | None = field(default_factory=lambda: queue_word)
    _noted_at: float = field(default=float("-inf"), repr=False)

    def say(self, text: str) -> None:
        """Pass `text` to `note`, unless another wait has just said something."""
        now = time.monotonic()
        if self.note is not None and now - self._noted_at >= WAIT_NOTE_S / 2:
            self._noted_at = now
            self.note(text)


class QueueWord:
    """What the service last said of its queue, as the SDK hears it: a reason to wait, or that it is at work."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._heard_at = float("-inf")

    def hear(self, state: str, reason: str | None) -> None:
        """Note that requests are in `state` ("active", "paused_capacity", ...), and the service's `reason`."""
        self._reason = None if state in ("active", "unknown") else reason or state.replace("_", " ")
        self._heard_at = time.monotonic()

    @property
    def reason(self) -> str | None:
        """Why requests are kept waiting; None when the service has not said so lately."""
        return self._reason if time.monotonic() - self._heard_at < QUEUE_WORD_LASTS_S else None


queue_word: QueueWord = QueueWord()
"""Of the service that this process talks to; `listen_to_queue` keeps it up to date."""


def listen_to_queue() -> None:
    """Hear what the SDK hears of the service's queue, which it keeps to itself for 15 minutes. Safe to call again."""
    from tinker.lib.public_interfaces.sampling_client import SamplingClient
    from tinker.lib.queue_state_logger import QueueStateLogger

    def listen(observer: type[Any]) -> None:
        told = observer.on_queue_state_change
        if told.__module__ == __name__:
            return

        def hear(self: Any, queue_state: Any, queue_state_reason: str | None) -> None:
            queue_word.hear(queue_state.value, queue_state_reason)
            told(self, queue_state, queue_state_reason)

        observer.on_queue_state_change = hear

    listen(QueueStateLogger)
    listen(SamplingClient)


def in_thread(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `call` in a thread of its own that nobody has to wait for, not even the end of the process.

    For calls whose own time limits leave gaps: a name that is not resolved, an answer that trickles in, an SDK that
    tries again for minutes.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it: its end would be an error then

    def work() -> None:
        try:
            result = call()
        except Exception as err:  # noqa: BLE001 - handed on whole to whoever waits
            future.set_exception(err)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="service-call", daemon=True).start()
    return future


async def wait_for(future: Any, what: str, *, limit_s: float = WAIT_LIMIT_S, watch: Watch | None = None) -> Any:
    """Await an SDK future (or any awaitable) for at most `limit_s` seconds, and `QUEUE_LIMIT_S` in the service's queue.

    SDK errors are raised as `error_handling` classes. A passed limit, and a service that has stopped answering, is a
    `ServiceUnavailableError`; a wait that outlasts `STOP_GRACE_S` after `watch.stop` an `InterruptedRunError`.
    """

    async def result() -> Any:
        return await future

    watch = watch or Watch()
    task = asyncio.ensure_future(result())
    started = looked_at = before = time.monotonic()
    in_queue = 0.0
    stopped_at: float | None = None
    silent = 0
    try:
        while not task.done():
            now = time.monotonic()
            queued = watch.queue.reason if watch.queue is not None else None
            if queued:
                in_queue += now - before
            before = now
            if now - started - in_queue >= limit_s or in_queue >= max(limit_s, QUEUE_LIMIT_S):
                raise ServiceUnavailableError(f"gave up after {now - started:.0f} s waiting for {what}")
            if watch.stop is not None and watch.stop.is_set():
                stopped_at = now if stopped_at is None else stopped_at
                if now - stopped_at >= STOP_GRACE_S:
                    raise InterruptedRunError(f"interrupted while waiting for {what}")
            if now - looked_at >= WAIT_NOTE_S:
                looked_at = now
                alive = None if watch.is_alive is None else await asyncio.wrap_future(in_thread(watch.is_alive))
                silent = silent + 1 if alive is False else 0
                watch.say(f"still waiting for {what} ({now - started:.0f} s){_state(queued, alive)}")
                if silent >= LOOKS_BEFORE_GIVING_UP:
                    raise ServiceUnavailableError(
                        f"the service stopped answering while the run waited for {what} ({now - started:.0f} s)"
                    )
            await asyncio.wait({task}, timeout=min(_SLICE_S, WAIT_NOTE_S, limit_s))
    finally:
        if not task.done():
            task.cancel()
    try:
        return task.result()
    except asyncio.CancelledError:
        raise
    except Exception as err:
        mended = translate_error(err, f"waiting for {what}")
        if mended is err:
            raise
        raise mended from err


def _state(queued: str | None, alive: bool | None) -> str:
    if alive is False:
        return ": the service does not answer"
    if queued:
        return f": the service has it in its queue ({queued})"
    return "" if alive is None else ": the service answers and has not finished it"


def translate_error(err: BaseException, what: str) -> EvalLoopError:
    """An SDK error as one of ours, saying what was being done. Errors of ours are returned unchanged.

    What the service said may quote the request: keys are masked, also in `err` and its causes, of which a traceback
    would tell.
    """
    if isinstance(err, EvalLoopError):
        return err
    for cause in _causes(err):
        cause.args = tuple(redact_values(cause.args))
    import tinker
    from tinker.lib.retryable_exception import RetryableException

    # Some of the SDK's errors are wrapped into a ValueError about its own bookkeeping.
    told = next((cause for cause in _causes(err) if isinstance(cause, tinker.TinkerError)), err)
    if isinstance(told, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return AuthenticationError(f"{what}: the service refused the API key ({told}). Check TINKER_API_KEY.")
    if isinstance(err, RetryableException):
        return ServiceError(f"{what}: the service does not know of the request any more; it was probably restarted")
    if isinstance(told, tinker.APIConnectionError | asyncio.TimeoutError | ConnectionError):
        return ServiceUnavailableError(f"{what}: the service did not answer ({type(told).__name__}).")
    if isinstance(told, tinker.RequestFailedError):
        # The SDK wraps the service's words in its own bookkeeping, which helps nobody.
        said = redact(told.message).removeprefix("Request failed: ").split(" for self.request_id=", 1)[0]
        return ServiceError(f"{what}: {said}")
    return ServiceError(f"{what}: {type(told).__name__}: {told}")


def _causes(err: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = err
    while cause is not None:
        yield cause
        cause = cause.__cause__
