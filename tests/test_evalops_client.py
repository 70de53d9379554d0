"""The EvalOps client and its outbox, against real HTTP servers on loopback that fail in the ways services fail."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mini_run import mini_run

import evalops_client
import trainer_with_eval
from checkpoint_manager import CheckpointManager
from error_handling import ConfigurationError, EvalOpsError
from evalops_client import (
    EvalOpsClient,
    EvalOpsRequestError,
    EvalOpsTimeoutError,
    flush,
    send_kept,
    submit_or_keep,
    submit_round,
    training_results_payload,
    unsent,
)

ROOT = Path(__file__).parent.parent
KEY = "marked-evalops-key"

# What the server does with a request: (status, headers, body) is answered, "drop" closes the connection without a
# word, a number is seconds of silence before it answers 200.
Step = tuple[int, dict[str, str], Any] | str | float
OK: Step = (201, {}, {"id": "run-1", "status": "pending"})


class Service:
    """An HTTP server that plays a script, one step a request, and then its last step for ever."""

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self._stop = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service.play(self)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def play(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append(
            {
                "method": handler.command,
                "path": handler.path,
                "headers": dict(handler.headers),
                "body": json.loads(body) if body else None,
                "time": time.monotonic(),
            }
        )
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if step == "drop":
            handler.close_connection = True
            return
        if isinstance(step, float):
            self._stop.wait(step)
            step = (200, {}, {})
        assert isinstance(step, tuple)
        status, headers, answer = step
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        try:
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            assert self._stop.is_set() or status == 200  # only a client that was kept waiting may have hung up

    def close(self) -> None:
        self._stop.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def keys(self) -> list[str]:
        return [request["headers"]["Idempotency-Key"] for request in self.requests]


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch):
    for name in ("EVALOPS_API_KEY", "EVALOPS_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def serve():
    services: list[Service] = []

    def start(*script: Step) -> Service:
        services.append(Service(*script))
        return services[-1]

    yield start
    for service in services:
        service.close()


def client_of(service: Service, **options: Any) -> EvalOpsClient:
    return EvalOpsClient(
        service.url, KEY, **{"timeout": 5.0, "attempts": 3, "first_wait_s": 0.01, "max_wait_s": 2.0, **options}
    )


Serve = Callable[..., Service]


def test_a_test_run_is_created_with_the_body_and_key_that_the_api_asks_for(serve: Serve):
    service = serve(OK)
    answer = client_of(service).create_test_run(
        "suite-1",
        "my run",
        description="d",
        model="tinker://x",
        metadata={"a": 1},
        tags=["t"],
        visibility="team",
        shared_with_teams=["team-1"],
    )
    assert answer == {"id": "run-1", "status": "pending"}
    (request,) = service.requests
    assert (request["method"], request["path"]) == ("POST", "/api/v1/test-runs/")
    assert request["headers"]["Authorization"] == f"Bearer {KEY}"
    assert request["body"] == {
        "testSuiteId": "suite-1",
        "name": "my run",
        "description": "d",
        "visibility": "team",
        "sharedWithTeams": ["team-1"],
        "config": {"model": "tinker://x", "metadata": {"a": 1}},
        "tags": ["t"],
    }


def test_a_rounds_results_carry_checkpoint_metrics_and_metadata(serve: Serve):
    service = serve(OK)
    client_of(service).submit_training_results("s", 2, "tinker://ckpt", {"score": 0.9}, {"run_id": "r"})
    body = service.requests[0]["body"]
    assert body["config"] == {
        "model": "tinker://ckpt",
        "metadata": {"run_id": "r", "round": 2, "metrics": {"score": 0.9}},
    }
    assert set(body) == {"testSuiteId", "name", "description", "visibility", "sharedWithTeams", "config", "tags"}


def test_key_and_address_come_from_the_environment(serve: Serve, monkeypatch):
    service = serve(OK)
    monkeypatch.setenv("EVALOPS_API_KEY", "key-of-the-environment")
    assert EvalOpsClient().api_url == "https://api.evalops.dev"
    monkeypatch.setenv("EVALOPS_API_URL", service.url + "/")
    EvalOpsClient().get_test_run("a/b c")
    assert service.requests[0]["headers"]["Authorization"] == "Bearer key-of-the-environment"
    assert service.requests[0]["path"] == "/api/v1/test-runs/a%2Fb%20c"


def test_a_netrc_entry_does_not_replace_the_key(serve: Serve, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    service = serve(OK)
    client_of(service).get_test_run("1")
    assert service.requests[0]["headers"]["Authorization"] == f"Bearer {KEY}"


def test_without_a_key_or_with_a_wrong_address_it_refuses_at_once():
    with pytest.raises(ConfigurationError, match="set EVALOPS_API_KEY"):
        EvalOpsClient()
    with pytest.raises(ConfigurationError, match="no http"):
        EvalOpsClient("ftp://x", KEY)
    with pytest.raises(ConfigurationError, match="characters that no HTTP header can carry"):
        EvalOpsClient(None, "key\nwith a line")


@pytest.mark.parametrize(
    "failure",
    [(500, {}, "oops"), (503, {}, {"message": "busy"}), (408, {}, ""), (429, {}, ""), "drop"],
    ids=["500", "503", "408", "429", "dropped"],
)
def test_what_can_pass_is_tried_again_as_the_same_submission(serve: Serve, failure: Step):
    service = serve(failure, OK)
    assert client_of(service).create_test_run("s", "n")["id"] == "run-1"
    assert len(service.requests) == 2
    assert len(set(service.keys())) == 1


def test_two_submissions_have_keys_of_their_own_and_a_given_key_is_kept(serve: Serve):
    service = serve(OK)
    client = client_of(service)
    client.create_test_run("s", "n")
    client.create_test_run("s", "n")
    client.create_test_run("s", "n", idempotency_key="run-1-round-2")
    assert len(set(service.keys())) == 3
    assert service.keys()[2] == "run-1-round-2"


def test_retry_after_is_waited_for(serve: Serve):
    service = serve((429, {"Retry-After": "0.4"}, ""), OK)
    client_of(service).create_test_run("s", "n")
    first, second = (request["time"] for request in service.requests)
    assert second - first >= 0.4


@pytest.mark.parametrize(
    ("status", "remedy"), [(400, "evalops_test_suite_id"), (401, "check EVALOPS_API_KEY"), (404, "EVALOPS_API_URL")]
)
def test_a_clients_mistake_is_told_once_with_status_message_and_remedy(serve: Serve, status: int, remedy: str):
    service = serve((status, {}, {"error": {"message": "not \x1b[31mso"}}))
    with pytest.raises(EvalOpsError, match=rf"answered {status} to POST .*: not \\x1b\[31mso; .*{remedy}") as caught:
        client_of(service).create_test_run("s", "n")
    assert isinstance(caught.value, EvalOpsRequestError)
    assert (caught.value.status, caught.value.transient, caught.value.exit_code) == (status, False, 1)
    assert len(service.requests) == 1


def test_a_service_that_stays_down_ends_in_an_error_after_the_tries(serve: Serve):
    service = serve((502, {}, "<html>bad gateway</html>"))
    with pytest.raises(EvalOpsRequestError, match=r"502 .*bad gateway.*tried 3 times") as caught:
        client_of(service).create_test_run("s", "n")
    assert (caught.value.status, caught.value.transient) == (502, True)
    assert len(service.requests) == 3


def test_a_slow_service_is_given_up_at_the_time_limit(serve: Serve):
    service = serve(30.0)
    with pytest.raises(EvalOpsRequestError, match=r"did not answer in time .*tried 2 times"):
        client_of(service, timeout=0.2, attempts=2).create_test_run("s", "n")


def test_nobody_listening_is_an_error_that_names_the_address(serve: Serve):
    service = Service(OK)
    service.close()
    with pytest.raises(EvalOpsRequestError, match=f"EvalOps at {service.url} could not be reached") as caught:
        client_of(service).get_test_run("1")
    assert caught.value.status is None


def test_a_redirect_and_a_page_are_no_answer(serve: Serve):
    service = serve((302, {"Location": "/elsewhere"}, ""), (200, {}, "<html>log in</html>"), (200, {}, ""))
    with pytest.raises(EvalOpsRequestError, match="answered 302"):
        client_of(service).create_test_run("s", "n")
    with pytest.raises(EvalOpsRequestError, match="something else than a JSON object: '<html>log in"):
        client_of(service).create_test_run("s", "n")
    assert client_of(service).create_test_run("s", "n") == {}


def test_the_key_never_shows(serve: Serve):
    service = serve((401, {}, {"message": f"bad key {KEY}"}))
    client = client_of(service)
    with pytest.raises(EvalOpsError) as caught:
        client.create_test_run("s", "n")
    assert KEY not in repr(client) + str(client) + str(caught.value) + repr(caught.value)
    assert "bad key [hidden]" in str(caught.value)


def test_a_metric_that_is_not_finite_is_refused_before_it_is_sent(serve: Serve):
    service = serve(OK)
    with pytest.raises(ValueError, match=r"metadata\.metrics\.nll is nan"):
        client_of(service).submit_training_results("s", 1, "c", {"nll": float("nan")})
    assert service.requests == []


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "ERROR", "timed_out", "a_state_of_tomorrow"])
def test_waiting_ends_on_any_state_that_is_not_going_on(serve: Serve, state: str):
    active: list[Step] = [(200, {}, {"status": status}) for status in ("pending", "Running", "in_progress")]
    service = serve(*active, (200, {}, {"status": state}))
    assert client_of(service).wait_for_test_run("1", timeout_s=20, poll_s=0.01)["status"] == state
    assert len(service.requests) == 4


def test_waiting_survives_an_outage_and_ends_at_its_time_limit(serve: Serve):
    service = serve((500, {}, "x"), (500, {}, "x"), (200, {}, {"status": "running"}))
    with pytest.raises(EvalOpsTimeoutError, match=r"had not ended after 1 s \(last: status 'running'\)"):
        client_of(service, attempts=2).wait_for_test_run("1", timeout_s=1.0, poll_s=0.05)
    assert len(service.requests) >= 3


def test_waiting_does_not_go_on_when_it_cannot_help(serve: Serve):
    service = serve((404, {}, {"detail": "no such run"}), (200, {}, {"id": "1"}))
    with pytest.raises(EvalOpsRequestError, match="404"):
        client_of(service).wait_for_test_run("1", timeout_s=20)
    with pytest.raises(EvalOpsRequestError, match="without a status"):
        client_of(service).wait_for_test_run("1", timeout_s=20)


def test_a_submission_that_fails_is_kept_and_sent_later_under_the_same_key(serve: Serve, tmp_path):
    outbox = tmp_path / "evalops_outbox.jsonl"
    payload = training_results_payload("s", 1, "ckpt", {"score": 0.5})
    down = serve((503, {}, f"down {KEY}"))
    kept = submit_or_keep(client_of(down), payload, outbox, idempotency_key="r-1")
    assert kept.answer is None
    assert "503" in (kept.error or "")
    submit_or_keep(client_of(down), payload, outbox, idempotency_key="r-1")
    assert [row["payload"] for row in unsent(outbox)] == [payload]
    assert KEY not in outbox.read_text()

    up = serve(OK)
    result = flush(outbox, client_of(up))
    assert (result.sent, result.left, result.errors) == (1, 0, ())
    assert up.keys() == ["r-1"]
    assert up.requests[0]["body"] == payload
    assert unsent(outbox) == []
    assert flush(outbox, client_of(up)).sent == 0


def test_a_round_trained_again_takes_the_place_of_what_was_kept_of_it(serve: Serve, tmp_path, monkeypatch):
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)
    outbox = tmp_path / "outbox.jsonl"
    service = serve((422, {}, "bad"), (422, {}, "bad"), (422, {}, "bad"), OK, OK)

    def submit_score(round: int, score: float) -> str | None:
        payload = training_results_payload("s", round, "ckpt", {"score": score}, {"threshold": score})
        return submit_round(payload, outbox, service.url, f"run-round-{round}")

    assert "422" in (submit_score(1, 0.5) or "")
    assert "422" in (submit_score(1, 0.5) or ""), "after a crash: the same submission"
    assert len(unsent(outbox)) == 1
    assert "422" in (submit_score(1, 0.6) or "")
    assert [row["payload"]["config"]["metadata"]["metrics"]["score"] for row in unsent(outbox)] == [0.6]
    assert submit_score(11, 0.7) is None
    assert not outbox.exists()
    keys = service.keys()
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_a_run_goes_on_whatever_is_wrong_with_address_or_outbox(serve: Serve, tmp_path, monkeypatch):
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)
    outbox = tmp_path / "outbox.jsonl"
    payload = training_results_payload("s", 1, "ckpt", {"score": 0.5})
    assert "no http(s) URL" in (submit_round(payload, outbox, "https://[::1", "r-round-1") or "")
    assert (send_kept(outbox, "https://[::1").left, len(unsent(outbox))) == (1, 1)
    outbox.write_text(f'{{"payload": {{}}}}\n{outbox.read_text()}')
    sent = send_kept(outbox, serve(OK).url)
    assert (sent.sent, sent.left) == (0, 2)
    assert "submission 1 has no idempotency_key" in sent.errors[0]
    assert "submission 1" in (submit_round(payload, outbox, serve(OK).url, "r-round-2") or "")
    assert len(outbox.read_text().splitlines()) == 3, "kept once"


def test_a_submission_that_succeeds_leaves_no_outbox(serve: Serve, tmp_path):
    sent = submit_or_keep(client_of(serve(OK)), {"name": "n"}, tmp_path / "outbox.jsonl")
    assert sent.answer == {"id": "run-1", "status": "pending"}
    assert sent.error is None
    assert list(tmp_path.iterdir()) == []


def test_a_flush_stops_at_an_outage_and_goes_past_a_refusal(serve: Serve, tmp_path):
    outbox = tmp_path / "outbox.jsonl"
    down = client_of(serve((500, {}, "")), attempts=1)
    for number in (1, 2, 3, 4):
        submit_or_keep(down, {"name": str(number)}, outbox, idempotency_key=f"k{number}")
    service = serve((422, {}, "bad"), OK, (500, {}, "down"))
    result = flush(outbox, client_of(service, attempts=1))
    assert (result.sent, result.left) == (1, 3)
    assert ["422" in result.errors[0], "500" in result.errors[1]] == [True, True]
    assert service.keys() == ["k1", "k2", "k3"]
    assert [row["idempotency_key"] for row in unsent(outbox)] == ["k1", "k3", "k4"]
    assert "422" in unsent(outbox)[0]["error"]


def test_flush_on_the_command_line(serve: Serve, tmp_path):
    service = serve(OK)
    with CheckpointManager.create(tmp_path / "runs", {"base_model": "tiny", "evalops_api_url": service.url}) as manager:
        down = client_of(serve((500, {}, "")), attempts=1)
        submit_or_keep(down, {"name": "n"}, manager.outbox_path, idempotency_key="k")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "evalops_client.py", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    named = ("flush", manager.run_id, "--runs-dir", str(tmp_path / "runs"))
    without_key = run(*named)
    assert (without_key.returncode, without_key.stdout) == (2, "")
    assert "EVALOPS_API_KEY" in without_key.stderr
    done = run(*named, EVALOPS_API_KEY=KEY)
    assert (done.returncode, done.stdout) == (0, f"{manager.run_id}: 1 sent, 0 left\n")
    assert service.keys() == ["k"]


def test_flush_reports_what_is_left_and_refuses_a_run_that_is_going_on(serve: Serve, tmp_path, monkeypatch, capsys):
    service = serve((401, {}, {"message": "bad key"}))
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)
    with CheckpointManager.create(tmp_path, {"base_model": "tiny", "evalops_api_url": service.url}) as manager:
        assert evalops_client.main(["flush", str(manager.run_dir)]) == 2
        assert f"held by process {os.getpid()}" in capsys.readouterr().err
        submit_or_keep(client_of(service), {"name": "n"}, manager.outbox_path)
    assert evalops_client.main(["flush", str(manager.run_dir)]) == 1
    output = capsys.readouterr()
    assert "0 sent, 1 left" in output.out
    assert "401" in output.err
    assert evalops_client.main(["flush", "no-such-run", "--runs-dir", str(tmp_path)]) == 2
    assert manager.run_id in capsys.readouterr().err


def submit(client: EvalOpsClient, outbox: Path, number: int) -> evalops_client.Submission:
    payload = training_results_payload("s", number, "ckpt", {"score": 0.5})
    return submit_or_keep(client, payload, outbox, idempotency_key=f"r-{number}")


def test_what_was_kept_goes_first_with_the_next_round_and_an_outage_ends_the_tries(serve: Serve, tmp_path):
    outbox = tmp_path / "outbox.jsonl"
    service = serve("drop", (503, {}, ""), (503, {}, ""), (201, {}, {"id": "1"}), (201, {}, {"id": "2"}))
    client = client_of(service, attempts=1)
    assert "could not be reached" in (submit(client, outbox, 1).error or "")
    assert "503" in (submit(client, outbox, 2).error or "")
    assert [row["idempotency_key"] for row in unsent(outbox)] == ["r-1", "r-2"]
    assert "503" in (submit(client, outbox, 3).error or ""), "the first one still waits, so the others do too"
    assert submit(client, outbox, 4).answer == {"id": "2"}
    assert not outbox.exists()
    assert service.keys() == ["r-1", "r-1", "r-1", "r-1", "r-2", "r-3", "r-4"]


def test_a_submission_is_in_the_outbox_before_it_is_sent(serve: Serve, tmp_path):
    outbox = tmp_path / "outbox.jsonl"
    service = serve(OK)
    held: list[int] = []
    play = service.play

    def look(handler: BaseHTTPRequestHandler) -> None:
        held.append(len(unsent(outbox)))
        play(handler)

    service.play = look  # type: ignore[method-assign]
    assert submit(client_of(service), outbox, 1).error is None
    assert held == [1]
    assert not outbox.exists()


def test_the_answer_that_is_lost_after_it_was_taken_leads_to_one_submission(serve: Serve, tmp_path):
    outbox = tmp_path / "outbox.jsonl"
    service = serve("drop", OK)
    assert submit(client_of(service), outbox, 1).answer == OK[2]
    assert service.keys() == ["r-1", "r-1"]
    assert service.requests[0]["body"] == service.requests[1]["body"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ((401, {}, {"message": "who are you"}), "check EVALOPS_API_KEY"),
        ((200, {}, "<html>log in</html>"), "something else than a JSON object"),
        ((200, {}, "[1]"), "something else than a JSON object"),
        ((302, {"Location": "http://127.0.0.1:9/"}, ""), "answered 302"),
        ((418, {}, ""), "no message"),
        ((200, {"Content-Encoding": "gzip"}, "no gzip"), "failed"),
        (30.0, "did not answer in time"),
    ],
    ids=["wrong key", "page", "list", "redirect", "teapot", "broken encoding", "silence"],
)
def test_whatever_it_answers_a_submission_is_kept_and_nothing_is_raised(serve: Serve, tmp_path, failure, said):
    outbox = tmp_path / "outbox.jsonl"
    kept = submit(client_of(serve(failure), attempts=1, timeout=0.5), outbox, 1)
    assert kept.answer is None
    assert said in (kept.error or "")
    (row,) = unsent(outbox)
    assert said in row["error"]
    up = serve(OK)
    assert flush(outbox, client_of(up)).sent == 1
    assert up.keys() == ["r-1"]


def test_an_answer_that_trickles_in_without_end_is_given_up(tmp_path):
    taken = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    taken.wait(0.02)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        client = EvalOpsClient(f"http://127.0.0.1:{server.server_port}", KEY, timeout=0.5, attempts=1)
        assert "did not answer in time" in (submit(client, tmp_path / "outbox.jsonl", 1).error or "")
    finally:
        taken.set()
        server.shutdown()
        server.server_close()


def test_no_part_of_the_key_is_left_where_an_answer_is_cut(serve: Serve):
    for before in range(evalops_client.LONGEST_QUOTE - len(KEY) - 1, evalops_client.LONGEST_QUOTE + 1):
        service = serve((400, {}, {"message": "x" * before + KEY}))
        with pytest.raises(EvalOpsError) as caught:
            client_of(service).create_test_run("s", "n")
        assert "marked" not in str(caught.value)


def test_waiting_ends_at_its_limit_though_the_service_is_silent_or_asks_for_patience(serve: Serve):
    started = time.monotonic()
    with pytest.raises(EvalOpsTimeoutError, match=r"after 0\.5 s \(last: .*did not answer in time"):
        client_of(serve(30.0), timeout=30.0).wait_for_test_run("1", timeout_s=0.5, poll_s=0.01)
    service = serve((429, {"Retry-After": "600"}, ""))
    with pytest.raises(EvalOpsTimeoutError, match=r"after 0\.5 s \(last: .*429"):
        client_of(service).wait_for_test_run("1", timeout_s=0.5, poll_s=0.01)
    assert len(service.requests) == 1
    assert time.monotonic() - started < 20


def test_a_run_is_not_stopped_by_a_missing_key_or_a_damaged_outbox(tmp_path, monkeypatch):
    outbox = tmp_path / "outbox.jsonl"
    payload = training_results_payload("s", 1, "ckpt", {"score": 0.5})
    assert "EvalOps needs a key" in (evalops_client.submit_round(payload, outbox, None, "r-1") or "")
    assert [row["payload"] for row in unsent(outbox)] == [payload]
    result = evalops_client.send_kept(outbox, None)
    assert (result.sent, result.left) == (0, 1)
    assert "EvalOps needs a key" in result.errors[0]
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)
    outbox.write_text("{broken\n" + outbox.read_text())
    assert "outbox.jsonl:1" in (evalops_client.submit_round(payload, outbox, None, "r-2") or "")
    assert "outbox.jsonl:1" in evalops_client.send_kept(outbox, None).errors[0]
    assert '"r-2-' in outbox.read_text()


def test_a_flush_writes_into_the_summary_what_is_left(serve: Serve, tmp_path, monkeypatch, capsys):
    service = serve(OK)
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)
    with CheckpointManager.create(tmp_path / "runs", {"base_model": "tiny", "evalops_api_url": service.url}) as manager:
        down = client_of(serve((500, {}, "")), attempts=1)
        submit_or_keep(down, {"name": "n"}, manager.outbox_path, idempotency_key="k")
        manager.write_summary({"evalops_unsent": 1, "exit_code": 3})
    assert evalops_client.main(["flush", str(manager.run_dir)]) == 0
    assert json.loads(manager.summary_path.read_text()) == {"evalops_unsent": 0, "exit_code": 3}


def test_a_run_ends_the_same_whatever_evalops_does_and_a_resume_sends_what_is_left(serve: Serve, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")
    monkeypatch.setenv("EVALOPS_API_KEY", KEY)

    def run(folder: Path, service: Service | None) -> tuple[Path, dict[str, Any]]:
        folder.mkdir()
        settings = {"evalops_enabled": True, "evalops_test_suite_id": "s", "evalops_api_url": service and service.url}
        run_dir = mini_run(folder, **(settings if service else {}))
        return run_dir, json.loads((run_dir / "summary.json").read_text())

    _, without = run(tmp_path / "without", None)
    down = serve((401, {}, {"message": "bad key"}))
    run_dir, summary = run(tmp_path / "down", down)
    assert summary["evalops_unsent"] == 2
    assert summary["exit_code"] == without["exit_code"]
    figures = [[(row["score"], row["nll"], row["decision"]) for row in one["rounds"]] for one in (summary, without)]
    assert figures[0] == figures[1]
    keys = [row["idempotency_key"] for row in unsent(run_dir / "evalops_outbox.jsonl")]
    assert [key.rpartition("-")[0] for key in keys] == [f"{summary['run_id']}-round-{number}" for number in (0, 1)]

    down.script, down.requests = [OK], []
    assert trainer_with_eval.main(["--resume", str(run_dir)]) == summary["exit_code"]
    assert down.keys() == keys
    assert json.loads((run_dir / "summary.json").read_text())["evalops_unsent"] == 0
    assert not (run_dir / "evalops_outbox.jsonl").exists()
