"""The timeline of a session's requests."""

from __future__ import annotations

import time

import request_trace
from request_trace import RequestTrace


def test_a_timeline_holds_a_sessions_own_requests_with_a_track_each() -> None:
    trace = RequestTrace()
    now = time.monotonic()
    trace.add("s1:train:0:1", "forward_backward", now, now + 0.5, now + 2.0)
    trace.add("s1:train:0:2", "optim_step", now, now + 2.0, now + 2.25)
    trace.add("s1:sample:0:0", "asample", now + 1, now + 3, now + 4)
    trace.add("s10:train:0:1", "forward_backward", now, now, now)
    timeline = trace.timeline("s1")
    assert timeline is not None
    rows = timeline["traceEvents"]
    tracks = {row["args"]["name"]: row["tid"] for row in rows if row["name"] == "thread_name"}
    assert set(tracks) == {"train:0", "sample:0"}
    ran = [row for row in rows if row["ph"] == "X"]
    assert [(row["name"], row["tid"], row["dur"]) for row in ran] == [
        ("forward_backward", tracks["train:0"], 1_500_000),
        ("optim_step", tracks["train:0"], 250_000),
        ("asample", tracks["sample:0"], 1_000_000),
    ]
    assert abs(ran[0]["ts"] / 1e6 - (time.time() + 0.5)) < 30
    waits = {(row["id"], row["ph"]): row["ts"] for row in rows if row["ph"] in "be"}
    assert waits[1, "e"] - waits[1, "b"] == 2_000_000
    assert trace.timeline("s2") is None


def test_only_the_latest_requests_are_kept() -> None:
    trace = RequestTrace()
    for number in range(request_trace.KEPT + 5):
        trace.add(f"s:train:0:{number}", "optim_step", 0.0, 0.0, 0.0)
    timeline = trace.timeline("s")
    assert timeline is not None
    ran = [row["args"]["request_id"] for row in timeline["traceEvents"] if row["ph"] == "X"]
    assert len(ran) == request_trace.KEPT
    assert ran[0] == "s:train:0:5"
