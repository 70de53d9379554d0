"""Order, identity and batching of the engine's requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import request_queue
import running_batch
from queued_request import Reply
from request_queue import RequestQueue
from running_batch import RunningBatch
from wire_format import RequestError


class Recorder:
    """Runs jobs that note when they ran; `gate` holds the thread until it is opened."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.batches: list[tuple[str, list[Any]]] = []
        self.gate = threading.Event()
        self.queue = RequestQueue(self.run_batch)

    def job(self, name: Any) -> Any:
        def run() -> Reply:
            self.done.append(name)
            return Reply({"name": name})

        return run

    def hold(self) -> Reply:
        assert self.gate.wait(10)
        return Reply({})

    def run_batch(self, group: str, batch: RunningBatch) -> None:
        joined = []
        while batch.is_gathering:
            joined += batch.take()
        self.batches.append((group, [item for _, item in joined]))
        for request_id, item in joined:
            batch.finish(request_id, Reply({"item": item}))


class SteppedBatches:
    """Runs batches in which each request goes on until the test ends it by its item."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._endings: set[Any] = set()
        self.queue = RequestQueue(self.run_batch)
        self.batch: RunningBatch | None = None

    def end(self, item: Any) -> None:
        self._endings.add(item)

    def job(self) -> Reply:
        self.seen.append("job")
        return Reply({"name": "job"})

    def run_batch(self, group: str, batch: RunningBatch) -> None:
        running: dict[str, Any] = {}
        self.batch = batch
        while (joined := batch.take()) or running:
            self.seen += [item for _, item in joined]
            running.update(joined)
            for request_id, item in list(running.items()):
                if item == "broken" and item in self._endings:
                    raise ZeroDivisionError("division by zero")
                if item in self._endings:
                    batch.finish(request_id, Reply({"item": item}))
                if not batch.is_open(request_id):
                    del running[request_id]
            time.sleep(0.001)
        self.seen.append("end")

    async def until_seen(self, *expected: Any) -> None:
        for _ in range(5000):
            if self.seen == list(expected):
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"seen {self.seen}, not {list(expected)}")

    async def until_gathered(self) -> None:
        while self.batch is None or self.batch.is_gathering:
            await asyncio.sleep(0.001)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    recorder.queue.start()
    yield recorder
    recorder.gate.set()
    recorder.queue.stop()


@pytest.fixture
def stepped() -> Iterator[SteppedBatches]:
    stepped = SteppedBatches()
    stepped.queue.start()
    yield stepped
    for item in ("a", "b", "c", "d", "broken"):
        stepped.end(item)
    stepped.queue.stop()


async def test_requests_of_a_model_run_in_their_order_whatever_order_they_arrive_in(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.open_stream("a")
    ids = [queue.submit("a", seq, recorder.job(seq)) for seq in (3, 1, 4, 0, 2)]
    for request_id in ids:
        assert await queue.wait(request_id, 5) is not None
    assert recorder.done == [0, 1, 2, 3, 4]


async def test_a_hole_holds_one_model_back_and_no_other(recorder: Recorder) -> None:
    queue = recorder.queue
    for stream in ("a", "b"):
        queue.open_stream(stream)
        queue.submit(stream, 0, recorder.job(f"{stream}0"))
    late = queue.submit("a", 2, recorder.job("a2"))
    other = queue.submit("b", 1, recorder.job("b1"))
    assert await queue.wait(other, 5) is not None
    assert await queue.wait(late, 0.05) is None
    queue.submit("a", 1, recorder.job("a1"))
    assert await queue.wait(late, 5) is not None
    assert recorder.done == ["a0", "b0", "b1", "a1", "a2"]


async def test_the_same_request_sent_again_runs_once(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.open_stream("a")
    first = queue.submit("a", 0, recorder.job("once"))
    assert queue.submit("a", 0, recorder.job("twice")) == first
    held = queue.submit("a", 2, recorder.job("held"))
    assert queue.submit("a", 2, recorder.job("held again")) == held
    queue.submit("a", 1, recorder.job("next"))
    reply = await queue.wait(held, 5)
    assert queue.submit("a", 0, recorder.job("late")) == first
    assert reply == Reply({"name": "held"})
    assert recorder.done == ["once", "next", "held"]


async def test_errors_fail_one_request_and_tell_whose_fault_it_was(recorder: Recorder) -> None:
    queue = recorder.queue

    def mistake() -> Reply:
        raise RequestError("the rank is 0")

    def bug() -> Reply:
        raise ZeroDivisionError("division by zero")

    replies = [await queue.wait(queue.submit("x", None, job), 5) for job in (mistake, bug, recorder.job("fine"))]
    assert replies[0] == Reply({"error": "the rank is 0", "category": "user"})
    assert replies[1] == Reply({"error": "ZeroDivisionError: division by zero", "category": "server"})
    assert replies[2] == Reply({"name": "fine"})


async def test_sampling_requests_that_wait_together_are_one_batch(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.submit("x", None, recorder.hold)
    ids = [queue.submit_sample("w1", f"s{n}", n) for n in range(5)]
    other = queue.submit_sample("w2", "other", "o")
    recorder.gate.set()
    assert [await queue.wait(request_id, 5) for request_id in ids] == [Reply({"item": n}) for n in range(5)]
    assert await queue.wait(other, 5) == Reply({"item": "o"})
    assert recorder.batches == [("w1", [0, 1, 2, 3, 4]), ("w2", ["o"])]


async def test_a_failing_batch_fails_its_requests_only(recorder: Recorder) -> None:
    def broken(group: str, batch: RunningBatch) -> None:
        raise RequestError("no such model")

    queue = RequestQueue(broken)
    queue.start()
    ids = [queue.submit_sample("w", f"s{n}", n) for n in range(2)]
    for request_id in ids:
        assert await queue.wait(request_id, 5) == Reply({"error": "no such model", "category": "user"})
    assert await queue.wait(queue.submit("x", None, recorder.job("fine")), 5) == Reply({"name": "fine"})
    queue.stop()


async def test_a_late_request_joins_and_whoever_ends_is_answered_at_once(stepped: SteppedBatches) -> None:
    queue = stepped.queue
    first = queue.submit_sample("w", "s0", "a")
    await stepped.until_seen("a")
    await stepped.until_gathered()
    late = queue.submit_sample("w", "s1", "b")
    await stepped.until_seen("a", "b")
    stepped.end("b")
    assert await queue.wait(late, 5) == Reply({"item": "b"})
    assert await queue.wait(first, 0.02) is None
    stepped.end("a")
    assert await queue.wait(first, 5) == Reply({"item": "a"})
    await stepped.until_seen("a", "b", "end")


async def test_nobody_joins_ahead_of_work_that_came_before(stepped: SteppedBatches) -> None:
    queue = stepped.queue
    queue.submit_sample("w", "s0", "a")
    await stepped.until_seen("a")
    await stepped.until_gathered()
    training = queue.submit("model", None, stepped.job)
    late = queue.submit_sample("w", "s1", "b")
    assert await queue.wait(late, 0.05) is None
    assert stepped.seen == ["a"]
    stepped.end("a")
    assert await queue.wait(training, 5) == Reply({"name": "job"})
    await stepped.until_seen("a", "end", "job", "b")
    await stepped.until_gathered()
    other = queue.submit_sample("w2", "s2", "c")
    again = queue.submit_sample("w", "s3", "a")
    assert await queue.wait(again, 0.05) is None
    stepped.end("b")
    stepped.end("c")
    assert await queue.wait(again, 5) == Reply({"item": "a"})
    assert await queue.wait(other, 5) == Reply({"item": "c"})
    await stepped.until_seen("a", "end", "job", "b", "end", "c", "end", "a", "end")


async def test_requests_that_are_sent_together_join_whatever_came_between(
    stepped: SteppedBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_batch, "GATHER_S", 60.0)
    monkeypatch.setattr(running_batch, "HOLD_LIMIT_S", 60.0)
    monkeypatch.setattr(running_batch, "GATHERED_AT_ONCE", 2)
    queue = stepped.queue
    queue.submit_sample("w", "s0", "a")
    await stepped.until_seen("a")
    job = queue.submit("model", None, stepped.job)
    queue.submit_sample("w", "s1", "b")
    await asyncio.sleep(0.02)
    assert stepped.seen == ["a"]
    queue.submit_sample("w", "s2", "c")
    await stepped.until_seen("a", "b", "c")
    monkeypatch.setattr(running_batch, "HOLD_LIMIT_S", 0.0)
    last = queue.submit_sample("w", "s3", "d")
    await stepped.until_seen("a", "b", "c", "d")
    for item in ("a", "b", "c", "d"):
        stepped.end(item)
    assert await queue.wait(last, 5) == Reply({"item": "d"})
    assert await queue.wait(job, 5) == Reply({"name": "job"})
    assert stepped.seen == ["a", "b", "c", "d", "end", "job"]


async def test_a_running_sample_can_be_cancelled(stepped: SteppedBatches) -> None:
    queue = stepped.queue
    ids = [queue.submit_sample("w", f"s{item}", item) for item in ("a", "b")]
    await stepped.until_seen("a", "b")
    queue.cancel(ids[0])
    cancelled = await queue.wait(ids[0], 5)
    assert cancelled is not None
    assert cancelled.body == {"error": "cancelled by the client", "category": "user"}
    stepped.end("b")
    assert await queue.wait(ids[1], 5) == Reply({"item": "b"})
    stepped.end("a")
    await stepped.until_seen("a", "b", "end")
    queue.cancel(ids[1])
    assert await queue.wait(ids[1], 5) == Reply({"item": "b"})


async def test_a_batch_that_breaks_fails_what_is_not_answered_yet(stepped: SteppedBatches) -> None:
    queue = stepped.queue
    ids = [queue.submit_sample("w", f"s{item}", item) for item in ("a", "broken")]
    await stepped.until_seen("a", "broken")
    stepped.end("a")
    assert await queue.wait(ids[0], 5) == Reply({"item": "a"})
    stepped.end("broken")
    reply = await queue.wait(ids[1], 5)
    assert reply == Reply({"error": "ZeroDivisionError: division by zero", "category": "server"})
    assert await queue.wait(queue.submit("model", None, stepped.job), 5) == Reply({"name": "job"})


async def test_a_batch_that_forgets_a_request_fails_it() -> None:
    queue = RequestQueue(lambda group, batch: None)
    queue.start()
    reply = await queue.wait(queue.submit_sample("w", "s0", "a"), 5)
    queue.stop()
    assert reply == Reply({"error": "RuntimeError: the batch ended without an answer", "category": "server"})


async def test_a_waiting_sample_can_be_cancelled(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.submit("x", None, recorder.hold)
    ids = [queue.submit_sample("w", f"s{n}", n) for n in range(2)]
    queue.cancel("s0")
    recorder.gate.set()
    cancelled = await queue.wait(ids[0], 5)
    assert cancelled is not None
    assert isinstance(cancelled.body, dict)
    assert "cancelled" in cancelled.body["error"]
    assert await queue.wait(ids[1], 5) == Reply({"item": 1})
    assert recorder.batches == [("w", [1])]


async def test_retrieved_replies_stay_for_a_retry_and_are_then_let_go(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = recorder.queue
    request_id = queue.submit("x", None, recorder.job("one"))
    assert await queue.wait(request_id, 5) == await queue.wait(request_id, 5)
    late = time.monotonic() + request_queue.KEEP_RETRIEVED_S + 1
    monkeypatch.setattr(request_queue.time, "monotonic", lambda: late)
    queue.submit("x", None, recorder.job("two"))
    with pytest.raises(KeyError):
        await queue.wait(request_id, 0)


async def test_nothing_piles_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "KEEP_RETRIEVED_S", 0.0)
    queue = recorder.queue
    queue.open_stream("a")
    for seq in range(300):
        await queue.wait(queue.submit("a", seq, recorder.job(seq)), 5)
    assert len(recorder.done) == 300
    assert len(queue._requests) < 5
    assert len(queue._finished) < 5
    assert len(queue._retrieved) < 5


async def test_stopping_wakes_who_waits(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.submit("x", None, recorder.hold)
    waiting = queue.submit("x", None, recorder.job("never"))
    poll = asyncio.create_task(queue.wait(waiting, 30))
    await asyncio.sleep(0.02)
    queue.stop(timeout=0.01)
    assert await asyncio.wait_for(poll, 5) is None
    # A client that asks again at once is not left waiting on a queue that ends.
    assert await asyncio.wait_for(queue.wait(waiting, 300), 60) is None
    assert recorder.done == []


async def test_closing_a_stream_lets_go_of_what_it_held(recorder: Recorder) -> None:
    queue = recorder.queue
    queue.open_stream("a")
    held = queue.submit("a", 5, recorder.job("held"))
    queue.close_stream("a")
    assert await queue.wait(held, 5) == Reply({"name": "held"})
