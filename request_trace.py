"""When the local engine's latest requests came in, ran and ended; a session's part of it as a timeline.

    app.add_middleware(CallNames)                # the HTTP side: `CALL` says which call a request was made by
    trace.add(request_id, call, 0.0, 0.2, 0.5)   # the engine's thread, after it ran
    trace.timeline(session_id)                   # Chrome's JSON trace format, which Perfetto opens

Only the last `KEPT` requests of the server are known, so memory stays flat however long it runs.
"""

from __future__ import annotations

import time
from collections import deque
from contextvars import ContextVar
from typing import Any

KEPT = 10_000
CALL: ContextVar[str] = ContextVar("call", default="request")
PROCESS = 1


class CallNames:
    """An ASGI application around another that notes the name of the call being served in `CALL`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            CALL.set(scope["path"].rpartition("/")[2])
        await self._app(scope, receive, send)


class RequestTrace:
    """The times of the latest requests. Any thread may add and read."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, float, float, float]] = deque(maxlen=KEPT)
        # Requests are timed by the monotonic clock; a timeline tells the time of day.
        self._epoch = time.time() - time.monotonic()

    def add(self, request_id: str, call: str, arrived: float, started: float, ended: float) -> None:
        """Note a request that ran; times are `time.monotonic()` seconds."""
        self._events.append((request_id, call, arrived, started, ended))

    def timeline(self, session_id: str) -> dict[str, Any] | None:
        """The session's requests, a track per model and per sampler; None when none of them is known any more."""
        events = [event for event in tuple(self._events) if event[0].startswith(f"{session_id}:")]
        if not events:
            return None
        tracks: dict[str, int] = {}
        rows = [_name_row("process_name", 0, f"session {session_id}")]
        for number, (request_id, call, arrived, started, ended) in enumerate(events):
            track = request_id.rpartition(":")[0].removeprefix(f"{session_id}:")
            if track not in tracks:
                tracks[track] = len(tracks) + 1
                rows.append(_name_row("thread_name", tracks[track], track))
            place = {"pid": PROCESS, "tid": tracks[track], "args": {"request_id": request_id}}
            # Waiting times of a track overlap, which only asynchronous events may.
            waiting = {"name": f"{call} waits", "cat": "queue", "id": number, **place}
            rows.append({**waiting, "ph": "b", "ts": self._microseconds(arrived)})
            rows.append({**waiting, "ph": "e", "ts": self._microseconds(started)})
            duration = round((ended - started) * 1e6)
            start = self._microseconds(started)
            rows.append({"name": call, "cat": "request", "ph": "X", "ts": start, "dur": duration, **place})
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def _microseconds(self, moment: float) -> int:
        return round((moment + self._epoch) * 1e6)


def _name_row(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": track, "args": {"name": name}}
