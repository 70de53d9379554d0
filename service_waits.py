"""Waiting for a service: with a limit, saying what for, and noticing when nobody is there any more.

watch = Watch(note=log.say, is_alive=backend.is_alive, stop=stop)
output = await wait_for(client.forward(data, "cross_entropy"), "the likelihood of the targets", watch=watch)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from error_handling import (
    AuthenticationError,
    EvalLoopError,
    InterruptedRunError,
    ServiceError,
    ServiceUnavailableError,
)

WAIT_LIMIT_S = 3600.0
WAIT_NOTE_S = 30.0
# After being asked to stop, how long what is in flight may still take.
STOP_GRACE_S = 60.0
# So many looks in a row, `WAIT_NOTE_S` apart, find nobody: the service is gone and not just slow.
LOOKS_BEFORE_GIVING_UP = 3
_SLICE_S = 0.5


@dataclass(frozen=True)
class Watch:
    """What to do while a wait lasts. `note` is told every `WAIT_NOTE_S` seconds what is waited for, so that a queue is
    told apart from a hang; `is_alive` says whether the service still answers; `stop` is set when the run shall end."""

    note: Callable[[str], None] | None = None
    is_alive: Callable[[], bool] | None = None
    stop: asyncio.Event | None = None


async def wait_for(future: Any, what: str, *, limit_s: float = WAIT_LIMIT_S, watch: Watch | None = None) -> Any:
    """Await an SDK future (or any awaitable) for at most `limit_s` seconds.

    SDK errors are raised as `error_handling` classes. A passed limit, and a service that has stopped answering, is a
    `ServiceUnavailableError`; a wait that outlasts `STOP_GRACE_S` after `watch.stop` an `InterruptedRunError`.
    """

    async def result() -> Any:
        return await future

    watch = watch or Watch()
    task = asyncio.ensure_future(result())
    started = looked_at = time.monotonic()
    stopped_at: float | None = None
    silent = 0
    try:
        while not task.done():
            now = time.monotonic()
            if now - started >= limit_s:
                raise ServiceUnavailableError(f"gave up after {limit_s:.0f} s waiting for {what}")
            if watch.stop is not None and watch.stop.is_set():
                stopped_at = now if stopped_at is None else stopped_at
                if now - stopped_at >= STOP_GRACE_S:
                    raise InterruptedRunError(f"interrupted while waiting for {what}")
            if now - looked_at >= WAIT_NOTE_S:
                looked_at = now
                if watch.note is not None:
                    watch.note(f"still waiting for {what} ({now - started:.0f} s)")
                if watch.is_alive is not None:
                    silent = 0 if await asyncio.to_thread(watch.is_alive) else silent + 1
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


def translate_error(err: BaseException, what: str) -> EvalLoopError:
    """An SDK error as one of ours, saying what was being done. Errors of ours are returned unchanged."""
    if isinstance(err, EvalLoopError):
        return err
    import tinker

    if isinstance(err, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return AuthenticationError(f"{what}: the service refused the API key ({err}). Check TINKER_API_KEY.")
    if isinstance(err, tinker.APIConnectionError | asyncio.TimeoutError | ConnectionError):
        return ServiceUnavailableError(f"{what}: the service did not answer ({type(err).__name__}).")
    if isinstance(err, tinker.RequestFailedError):
        # The SDK wraps the service's words in its own bookkeeping, which helps nobody.
        said = err.message.removeprefix("Request failed: ").split(" for self.request_id=", 1)[0]
        return ServiceError(f"{what}: {said}")
    return ServiceError(f"{what}: {type(err).__name__}: {err}")
