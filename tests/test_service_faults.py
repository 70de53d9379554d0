"""Runs whose service fails: they end as without faults, or stop, say what happened, and go on when resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import service_waits
import tinker_backend
from benchmarks import fault_matrix
from benchmarks.fault_matrix import Cell, FaultyServer, Outcome
from error_handling import (
    EXIT_FAILED,
    AuthenticationError,
    ConfigurationError,
    ServiceError,
    ServiceUnavailableError,
)

ROOT = Path(__file__).resolve().parent.parent
CELLS = {cell.name: cell for cell in fault_matrix.cells()}
# One cell or more of every call and of every kind of fault; benchmarks/fault_matrix.py runs all of them.
IN_SUITE = (
    "get_server_capabilities: 429, three times",
    "tokenizer_files: 503, twice",
    "create_session: answer lost",
    "create_model: 500, though carried out",
    "forward_backward: connection dropped",
    "forward_backward: fails",
    "optim_step: answer lost",
    "optim_step: 500, though carried out",
    "optim_step: fails",
    "save_weights: answer lost",
    "save_weights_for_sampler: answer lost",
    "create_sampling_session: connection dropped",
    "create_sampling_session: weights expired",
    "asample: fails",
    "retrieve_future: answer lost",
    "retrieve_future: key refused from then on",
    "load_weights: answer lost",
    "optim_step: server restarted",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with fault_matrix.faulty_server(tmp_path_factory.mktemp("faulty") / "engine") as running:
        yield running


@pytest.fixture(scope="module")
def unbroken(server: FaultyServer, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = fault_matrix.run_to_the_end(tmp_path_factory.mktemp("unbroken") / "run", server, None)
    assert outcome.optimizer_steps == fault_matrix.STEPS
    assert outcome.figures[0] in (0, 3)
    return outcome


@pytest.mark.parametrize("name", IN_SUITE)
def test_a_run_under_faults_ends_as_without_them(
    server: FaultyServer, unbroken: Outcome, tmp_path: Path, name: str
) -> None:
    outcome = fault_matrix.run_to_the_end(tmp_path / "run", server, CELLS[name])
    assert fault_matrix.differences(CELLS[name], outcome, unbroken) == []


def test_the_matrix_covers_every_call_that_a_run_makes(server: FaultyServer, unbroken: Outcome, tmp_path: Path) -> None:
    seen = {name: {"call": name, "kind": "delay", "seconds": 0.001, "after": 10**6} for name in server.faults.calls}
    watched = Cell("all", "watched", tuple(seen.values()))
    fault_matrix.run_to_the_end(tmp_path / "run", server, watched)
    made = {fault["call"] for fault in server.faults.report()["faults"] if fault["seen"]}
    known = {cell.call for cell in CELLS.values()}
    assert made - known <= {"session_heartbeat"}
    assert {"status", "drop", "delay", "fail", "expire"} == {
        fault["kind"] for cell in CELLS.values() for fault in cell.faults
    }


def test_a_wrong_outcome_of_a_cell_is_noticed(unbroken: Outcome) -> None:
    cell = CELLS["optim_step: fails"]
    assert any("stopped 0 times, not 1" in text for text in fault_matrix.differences(cell, unbroken, unbroken))
    other = Outcome(((2, "else"),), ("other",), b"other", 5, (0,), 1.0)
    assert len(fault_matrix.differences(cell, other, unbroken)) == 5


# The first contact


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `answers` says: path below the API's root to (status, content type, body)."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answers: Any = self.server.answers  # type: ignore[attr-defined]
        path = self.path.split("?")[0].removeprefix("/api/v1/")
        status, kind, body = answers.get(path, answers["*"])
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status == 307:
                self.send_header("Location", self.server.target)  # type: ignore[attr-defined]
            if body is None:
                self.end_headers()
                while True:  # an answer that trickles in and never ends
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.02)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        return


@contextlib.contextmanager
def answering(answers: dict[str, tuple[int, str, bytes | None]], target: str = "") -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.target = answers, target  # type: ignore[attr-defined]
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def connect(url: str, key: str = "tml-marked-key") -> None:
    with tinker_backend.connect(env={"TINKER_API_KEY": key, "TINKER_BASE_URL": url}):
        pass


JSON = "application/json"
MODELS = (200, JSON, json.dumps({"supported_models": [{"model_name": "acme/small"}]}).encode())
REFUSED = (401, JSON, b'{"detail": "no such key: tml-marked-key"}')
PAGE = (200, "text/html", b"<html><script>alert(1)</script>Welcome</html>")


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> float:
    assert tinker_backend.CONNECT_LIMIT_S <= 6, "with Python's start it has to be told within 10 seconds"
    monkeypatch.setattr(tinker_backend, "CONNECT_LIMIT_S", 1.0)
    for method in (tinker_backend.Backend._get, tinker_backend.Backend._fetch):
        monkeypatch.setattr(method, "__defaults__", (1.0,))
    return 1.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid", "http://[::1]:9"])
def test_a_service_that_is_not_there_is_told(short_limit: float, url: str) -> None:
    started = time.monotonic()
    with pytest.raises(ServiceUnavailableError, match=r"no answer from the .*TINKER_BASE_URL") as told:
        connect(url)
    assert time.monotonic() - started < 5 * short_limit
    assert told.value.exit_code == EXIT_FAILED


def test_a_service_that_never_answers_or_never_ends_is_told(short_limit: float) -> None:
    started = time.monotonic()
    with silent_listener() as url, pytest.raises(ServiceUnavailableError, match="no answer"):
        connect(url)
    with answering({"*": (200, JSON, None)}) as url, pytest.raises(ServiceUnavailableError, match="no answer"):
        connect(url)
    assert time.monotonic() - started < 10 * short_limit


@pytest.mark.parametrize("answers", [{"*": REFUSED}, {"*": (403, JSON, b"{}")}], ids=["401", "403"])
def test_a_wrong_key_is_told_without_repeating_it(answers: Any) -> None:
    with answering(answers) as url, pytest.raises(AuthenticationError, match="refused the API key") as told:
        connect(url)
    assert "tml-marked-key" not in str(told.value)


def test_a_wrong_key_is_told_at_once_by_a_service_that_names_its_models_to_anybody() -> None:
    with (
        answering({"*": (404, JSON, b"{}"), "get_server_capabilities": MODELS, "training_runs": REFUSED}) as url,
        pytest.raises(AuthenticationError, match="refused the API key"),
    ):
        connect(url)
    with (
        answering({"*": (404, JSON, b"{}"), "get_server_capabilities": MODELS, "client/config": REFUSED}) as url,
        tinker_backend.connect(env={"TINKER_API_KEY": "tml-marked-key", "TINKER_BASE_URL": url}) as backend,
        pytest.raises(AuthenticationError, match=r"a session on the .* refused the API key"),
    ):
        asyncio.run(backend.create_training_client("acme/small", rank=4, seed=1))


def test_another_site_and_a_redirect_are_no_service_and_get_no_key() -> None:
    with answering({"*": PAGE}) as url, pytest.raises(ServiceError, match="not as a Tinker server does"):
        connect(url)
    with (
        answering({"*": MODELS}) as elsewhere,
        answering({"*": (307, JSON, b"")}, target=elsewhere) as url,
        pytest.raises(ServiceError, match="answered HTTP 307"),
    ):
        connect(url)


def test_a_tokenizer_that_could_not_be_had_is_not_replaced_by_another(short_limit: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(tinker_backend, "ENGINE_INFO_LIMIT_S", 1.0)
    busy = (503, JSON, b'{"detail": "busy"}')
    with (
        answering({"*": (404, JSON, b"{}"), "get_server_capabilities": MODELS, "tokenizer_files": busy}) as url,
        tinker_backend.connect(env={"TINKER_API_KEY": "tml-k", "TINKER_BASE_URL": url}) as backend,
        pytest.raises(ServiceUnavailableError, match="HTTP 503 when asked for the tokenizer of acme/small: busy"),
    ):
        backend.get_tokenizer("acme/small")


def test_the_program_tells_a_service_that_never_answers_within_ten_seconds_of_its_connection(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "config.json").write_text(json.dumps(fault_matrix.CONFIG))
    with silent_listener() as url:
        done = subprocess.run(
            [sys.executable, str(ROOT / "trainer_with_eval.py"), "--config", "config.json"],
            cwd=tmp_path,
            env={**os.environ, "TINKER_MOCK": "", "TINKER_API_KEY": "tml-marked-key", "TINKER_BASE_URL": url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == EXIT_FAILED
    assert "error: no answer from the Tinker service at" in done.stderr
    assert "Traceback" not in done.stderr
    assert "tml-marked-key" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


# Waiting


def test_a_queue_is_told_apart_from_a_hang_and_from_a_service_at_work(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_waits, "WAIT_NOTE_S", 0.1)
    notes: list[str] = []
    full = {"status": 408, "queue_state": "paused_capacity", "message": "all machines are taken"}
    env = {"TINKER_API_KEY": fault_matrix.KEY, "TINKER_BASE_URL": server.base_url}

    async def make(backend: tinker_backend.Backend) -> None:
        await backend.create_training_client("Qwen/Qwen3-8B", rank=4, seed=1)

    with tinker_backend.connect(env=env) as backend:
        asyncio.run(backend.service())
        backend.watch = service_waits.Watch(note=notes.append, is_alive=backend.is_alive)
        held = {"call": "retrieve_future", "kind": "delay", "seconds": 0.2, "times": 5}
        server.put([{"call": "retrieve_future", "kind": "status", "times": 5, **full}, held])
        asyncio.run(make(backend))
        queued = [note for note in notes if "in its queue" in note]
        assert queued
        assert "still waiting for a new LoRA adapter on Qwen/Qwen3-8B" in queued[0]
        assert queued[0].endswith("the service has it in its queue (all machines are taken)")
        notes.clear()
        server.put([held])
        asyncio.run(make(backend))
        assert notes
        assert all(note.endswith("the service answers and has not finished it") for note in notes)
        server.put([])


async def test_in_the_queue_a_wait_may_outlast_its_limit_but_not_that_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    word = service_waits.QueueWord()
    monkeypatch.setattr(service_waits, "queue_word", word)
    word.hear("paused_rate_limit", None)
    assert word.reason == "paused rate limit"
    assert await service_waits.wait_for(asyncio.sleep(0.2, "done"), "a step", limit_s=0.05) == "done"
    monkeypatch.setattr(service_waits, "QUEUE_LIMIT_S", 0.1)
    with pytest.raises(ServiceUnavailableError, match="gave up after 0 s waiting for a step"):
        await service_waits.wait_for(asyncio.sleep(30), "a step", limit_s=0.05)
    # The time in the queue is no time at work: a request whose turn has come still has all of its own.
    monkeypatch.setattr(service_waits, "QUEUE_LIMIT_S", 60.0)
    asyncio.get_running_loop().call_later(0.5, word.hear, "active", None)
    assert await service_waits.wait_for(asyncio.sleep(0.7, "done"), "a step", limit_s=0.4) == "done"
    assert word.reason is None
    word.hear("paused_capacity", None)
    watch = service_waits.Watch(queue=None)
    with pytest.raises(ServiceUnavailableError, match="gave up after 0 s waiting for EvalOps"):
        await service_waits.wait_for(asyncio.sleep(30), "EvalOps", limit_s=0.05, watch=watch)


async def test_a_call_that_nobody_waits_for_any_more_ends_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    go_on = threading.Event()
    threads = set(threading.enumerate())

    def fail() -> None:
        go_on.wait(30)
        raise ValueError("a request with its key")

    with pytest.raises(ServiceUnavailableError, match="gave up"):
        await service_waits.wait_for(asyncio.wrap_future(service_waits.in_thread(fail)), "it", limit_s=0.05)
    go_on.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
    assert "key" not in capsys.readouterr().err


async def test_waits_that_share_a_watch_speak_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_waits, "WAIT_NOTE_S", 0.1)
    notes: list[str] = []
    watch = service_waits.Watch(note=notes.append)
    await asyncio.gather(*(service_waits.wait_for(asyncio.sleep(0.35), "a reply", watch=watch) for _ in range(50)))
    assert 1 <= len(notes) <= 10


def test_after_the_connection_is_closed_the_sdk_does_not_go_on_telling_that_the_session_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The SDK's heartbeat outlives a close that could not reach the server, and complains two minutes later.
    server = FaultyServer(tmp_path / "engine")
    env = {"TINKER_API_KEY": fault_matrix.KEY, "TINKER_BASE_URL": server.base_url}
    with caplog.at_level(logging.WARNING), tinker_backend.connect(env=env) as backend:
        holder = asyncio.run(backend.service()).holder
        heartbeat = holder._session_heartbeat_task
        assert heartbeat is not None
        assert not heartbeat.done()
        server.stop()
    deadline = time.monotonic() + 20
    while not heartbeat.done() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert heartbeat.cancelled()


def test_a_wrong_address_of_the_service_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ConfigurationError, match="TINKER_BASE_URL"):
        connect("ftp://127.0.0.1")
