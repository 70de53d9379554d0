"""A request that waits in the engine's queue, and what answers it.

reply = Reply({"path": "tinker://..."})     # or bytes: protobuf
reply = failed(RequestError("..."))         # the client's mistake, or a bug that says what it is
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from durable_files import StorageError
from error_handling import CheckpointError, ConfigurationError
from request_trace import CALL
from wire_format import RequestError

logger = logging.getLogger("mock_tinker")

LONGEST_MESSAGE = 2000
USER_ERRORS = (RequestError, CheckpointError, ConfigurationError)


@dataclass(frozen=True)
class Reply:
    """What a finished request answers: JSON (`body` a dict) or protobuf (`body` bytes)."""

    body: dict[str, Any] | bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, those of JSON not counted."""
        return len(self.body) if isinstance(self.body, bytes) else 0


def failed(error: BaseException) -> Reply:
    """The reply that fails one request: the client's mistakes keep their message, bugs say what they are."""
    if isinstance(error, USER_ERRORS):
        return Reply({"error": message_of(error), "category": "user"})
    if isinstance(error, StorageError):  # no bug: the message says what to do about the disk
        logger.error("request failed: %s", error)
        return Reply({"error": message_of(error), "category": "server"})
    logger.error("request failed", exc_info=error)
    return Reply({"error": f"{type(error).__name__}: {message_of(error)}", "category": "server"})


def message_of(error: BaseException) -> str:
    """What an error says, in a form that JSON can carry: it may quote anything that a client sent."""
    return str(error)[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(eq=False)
class QueuedRequest:
    """A job to run, or an item to put into a batch; times are `time.monotonic()` seconds. `number` is its place in
    the order of arrival, and `waiters` those to tell when `reply` is there."""

    request_id: str
    arrived: float
    number: int = 0
    job: Callable[[], Reply] | None = None
    item: Any = None
    reply: Reply | None = None
    call: str = field(default_factory=CALL.get)
    started: float = 0.0
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)
