"""EvalOps API client, and the outbox that keeps what could not be sent.

    client = EvalOpsClient()                                # EVALOPS_API_KEY, EVALOPS_API_URL
    client.submit_training_results("suite-1", 2, "tinker://...", {"score": 0.91})

    python evalops_client.py flush RUN [--runs-dir runs]    # send what is still in a run's outbox

In a training run submissions go through `submit_or_keep`: they are in the outbox before they are sent, and one that
fails stays there, is sent later, and never ends the run. Every submission carries an idempotency key, so that a
repeated one is not counted twice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import durable_files
from error_handling import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    DataError,
    EvalLoopError,
    EvalOpsError,
    TransientError,
    is_transient_status,
    retry_after_seconds,
    retry_transient,
)
from logger import HIDDEN, one_line, redact, utc_now, visible
from service_waits import in_thread, read_body

if TYPE_CHECKING:
    import requests

DEFAULT_API_URL = "https://api.evalops.dev"
TEST_RUNS_PATH = "/api/v1/test-runs/"
LONGEST_ANSWER = 2**20
LONGEST_QUOTE = 300

# A test run in one of these is still going; any other state is an end, also one this version has not heard of.
ACTIVE_STATES = frozenset(
    {"created", "scheduled", "pending", "queued", "waiting", "starting", "started", "running", "processing"}
    | {"in_progress", "in-progress", "inprogress", "retrying", "cancelling", "canceling", "paused"}
)
SUCCEEDED_STATES = frozenset({"completed", "complete", "succeeded", "success", "passed", "done", "finished"})

_REMEDIES = {
    400: "the submission is malformed: check evalops_test_suite_id",
    401: "check EVALOPS_API_KEY",
    403: "this key has no right to that test suite: check EVALOPS_API_KEY and evalops_test_suite_id",
    404: "check evalops_test_suite_id and EVALOPS_API_URL",
    422: "the submission was not understood: check evalops_test_suite_id",
}


class EvalOpsRequestError(EvalOpsError):
    """A request failed. `status`: the HTTP status, None when no answer came; `transient`: it may succeed later, after
    `retry_after` seconds where the server says so."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        transient: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient
        self.retry_after = retry_after


class EvalOpsTimeoutError(EvalOpsError, TimeoutError):
    """A test run did not end within the time limit."""


class EvalOpsClient:
    """Talks to the EvalOps API.

    `api_url` and `api_key` default to EVALOPS_API_URL (or the public service) and EVALOPS_API_KEY; without a key
    `ConfigurationError`. `timeout` is seconds for a try, from the name's resolution to the answer's last byte. What can
    pass (timeouts, dropped connections, 408, 425, 429 with Retry-After, 5xx) is tried up to `attempts` times.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
        *,
        attempts: int = 5,
        first_wait_s: float = 0.5,
        max_wait_s: float = 30.0,
    ) -> None:
        self.api_url = (api_url or os.environ.get("EVALOPS_API_URL") or DEFAULT_API_URL).rstrip("/")
        try:
            parts = urllib.parse.urlsplit(self.api_url)
            is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        except ValueError:  # brackets that hold no IPv6 address
            is_address = False
        if not is_address:
            raise ConfigurationError(
                f"EvalOps API address {redact(self.api_url)!r} is no http(s) URL: set EVALOPS_API_URL"
            )
        self._key = (api_key or os.environ.get("EVALOPS_API_KEY") or "").strip()
        if not self._key:
            raise ConfigurationError(
                "EvalOps needs a key: set EVALOPS_API_KEY, or switch it off with evalops_enabled=false"
            )
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigurationError("EVALOPS_API_KEY holds characters that no HTTP header can carry: copy it again")
        self.timeout = timeout
        self._retries: dict[str, Any] = {
            "attempts": attempts,
            "first_wait_s": first_wait_s,
            "max_wait_s": max_wait_s,
        }
        self._session: requests.Session | None = None

    def __repr__(self) -> str:
        return f"EvalOpsClient(api_url={redact(self.api_url)!r}, api_key={HIDDEN!r})"

    def create_test_run(
        self,
        test_suite_id: str,
        name: str,
        *,
        description: str = "",
        model: str = "",
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        visibility: str = "private",
        shared_with_teams: Sequence[str] = (),
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Create a test run; returns what the server answers. Raises `EvalOpsRequestError`.

        The same `idempotency_key` given again is the same submission to the server; by default each call has its own.
        """
        payload = {
            "testSuiteId": test_suite_id,
            "name": name,
            "description": description,
            "visibility": visibility,
            "sharedWithTeams": list(shared_with_teams),
            "config": {"model": model, "metadata": dict(metadata or {})},
            "tags": list(tags),
        }
        return self.post_test_run(payload, idempotency_key=idempotency_key)

    def post_test_run(self, payload: Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """POST the body of a test run, as `training_results_payload` makes it."""
        return self._request("POST", TEST_RUNS_PATH, payload, idempotency_key or uuid.uuid4().hex)

    def get_test_run(self, test_run_id: str) -> dict[str, Any]:
        """The test run as the server has it. Raises `EvalOpsRequestError`."""
        return self._request("GET", _path_of(test_run_id))

    def wait_for_test_run(self, test_run_id: str, timeout_s: float = 600.0, poll_s: float = 2.0) -> dict[str, Any]:
        """Ask every `poll_s` seconds until the test run has ended, well or badly (see its `status`), and return it.

        Raises `EvalOpsTimeoutError` after `timeout_s` seconds, and `EvalOpsRequestError` at once for an answer that
        waiting would not mend.
        """
        deadline = time.monotonic() + timeout_s
        seen = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            pause = poll_s
            try:
                test_run = self._request("GET", _path_of(test_run_id), timeout=min(self.timeout, left), attempts=1)
            except EvalOpsRequestError as err:
                if not err.transient:
                    raise
                seen, pause = str(err), max(poll_s, err.retry_after or 0.0)
            else:
                status = test_run.get("status")
                if not isinstance(status, str) or not status:
                    raise EvalOpsRequestError(f"EvalOps test run {test_run_id} came without a status", status=200)
                if status.strip().lower() not in ACTIVE_STATES:
                    return test_run
                seen = f"status {status!r}"
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        raise EvalOpsTimeoutError(
            f"EvalOps test run {test_run_id} had not ended after {timeout_s:g} s (last: {seen}); "
            "ask for it again later, or allow more time"
        )

    def submit_training_results(
        self,
        test_suite_id: str,
        round_number: int,
        model_checkpoint: str,
        metrics: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Submit what a round of training came to. Raises `EvalOpsRequestError`."""
        payload = training_results_payload(test_suite_id, round_number, model_checkpoint, metrics, metadata)
        return self.post_test_run(payload, idempotency_key=idempotency_key)

    def _request(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        *,
        timeout: float | None = None,
        attempts: int | None = None,
    ) -> dict[str, Any]:
        body = None if payload is None else durable_files.to_json(payload, name="submission").encode("utf-8")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if idempotency_key:
            headers["Idempotency-Key"] = idempotency_key
        last_status: int | None = None
        retries = {**self._retries, **({} if attempts is None else {"attempts": attempts})}

        def once() -> dict[str, Any]:
            nonlocal last_status
            last_status = None
            response = self._send(method, path, body, headers, timeout or self.timeout)
            last_status = response.status_code
            if is_transient_status(response.status_code):
                raise TransientError(
                    self._failure(method, path, response), retry_after_seconds(response.headers.get("Retry-After"))
                )
            if not 200 <= response.status_code < 300:
                remedy = _REMEDIES.get(response.status_code, "check EVALOPS_API_URL")
                raise EvalOpsRequestError(
                    f"{self._failure(method, path, response)}; {remedy}", status=response.status_code
                )
            return self._answer(method, path, response)

        try:
            return retry_transient(once, **retries)
        except TransientError as err:
            times = "once" if retries["attempts"] == 1 else f"{retries['attempts']} times"
            raise EvalOpsRequestError(
                f"{err} (tried {times}); try again later",
                status=last_status,
                transient=True,
                retry_after=err.retry_after,
            ) from None  # the chain underneath may quote the request

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> requests.Response:
        import requests

        if self._session is None:
            self._session = requests.Session()
            # Given as `auth`, not as a header: requests lets a .netrc entry replace the header.
            self._session.auth = self._authorize
        session = self._session

        def send() -> requests.Response:
            response = session.request(
                method,
                self.api_url + path,
                data=body,
                headers=dict(headers),
                timeout=timeout,
                allow_redirects=False,  # following one turns the POST into a GET
                stream=True,
            )
            read_body(response, time.monotonic() + timeout, LONGEST_ANSWER)
            return response

        try:
            return in_thread(send).result(timeout=timeout)
        except (
            requests.Timeout,
            requests.ConnectionError,
            requests.exceptions.ChunkedEncodingError,
            TimeoutError,
        ) as err:
            self._session = None  # what was given up still uses it
            late = isinstance(err, requests.Timeout | TimeoutError)
            reason = "did not answer in time" if late else "could not be reached"
            raise TransientError(
                f"EvalOps at {redact(self.api_url)} {reason} ({method} {path}: {type(err).__name__})"
            ) from None
        except requests.RequestException as err:
            raise EvalOpsRequestError(
                f"EvalOps request {method} {redact(self.api_url)}{path} failed: {self._safe(str(err))}; "
                "check EVALOPS_API_URL"
            ) from None

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _failure(self, method: str, path: str, response: requests.Response) -> str:
        said = self._safe(_server_message(response.text))[:LONGEST_QUOTE]
        return f"EvalOps answered {response.status_code} to {method} {redact(self.api_url)}{path}: {said}"

    def _answer(self, method: str, path: str, response: requests.Response) -> dict[str, Any]:
        if not response.content.strip():
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EvalOpsRequestError(
                f"EvalOps answered {response.status_code} to {method} {redact(self.api_url)}{path} with something else "
                f"than a JSON object: {self._safe(response.text)[:LONGEST_QUOTE]!r}; check EVALOPS_API_URL",
                status=response.status_code,
            )
        return answer

    def _safe(self, text: str) -> str:
        # Before anything is cut off, so that no part of the key is left.
        for key in (self._key, json.dumps(self._key)[1:-1]):
            text = text.replace(key, HIDDEN)
        return redact(one_line(" ".join(text.split())))


def training_results_payload(
    test_suite_id: str,
    round_number: int,
    model_checkpoint: str,
    metrics: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The body for the results of a round: `metrics` and the round stand in `config.metadata` beside `metadata`, whose
    `scores_are` says what the score is when it is no validation score."""
    score = metrics.get("score")
    scores_are = (metadata or {}).get("scores_are")
    kind = f"score {scores_are}" if scores_are else "validation score"
    said = f", {kind} {score:.3f}" if isinstance(score, int | float) else ""
    return {
        "testSuiteId": test_suite_id,
        "name": f"Training round {round_number}",
        "description": f"Checkpoint after round {round_number} of fine-tuning{said}",
        "visibility": "private",
        "sharedWithTeams": [],
        "config": {
            "model": model_checkpoint,
            "metadata": {**(metadata or {}), "round": round_number, "metrics": dict(metrics)},
        },
        "tags": ["training", f"round-{round_number}"],
    }


@dataclass(frozen=True)
class Submission:
    """What became of one: `answer` of the server, or the `error` for which it was kept in the outbox."""

    answer: Mapping[str, Any] | None
    error: str | None = None


@dataclass(frozen=True)
class FlushResult:
    """How many submissions were sent and how many are left, why those were not taken, and what the server said to those
    that were, by idempotency key."""

    sent: int
    left: int
    errors: tuple[str, ...] = ()
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def submit_or_keep(
    client: EvalOpsClient, payload: Mapping[str, Any], outbox_path: Path | str, *, idempotency_key: str | None = None
) -> Submission:
    """Put `payload` into the outbox and send what is in there, the oldest first; what EvalOps does not take stays, and
    the reason is returned instead of raised.

    Give a key made of run and round, so that a round submitted again after a crash is the same submission. Raises
    only what is no failure of EvalOps: `StorageError`, `UnstorableValueError`, `DataError` for a damaged outbox.
    """
    key = idempotency_key or uuid.uuid4().hex
    keep(payload, outbox_path, idempotency_key=key)
    return _send_kept_one(client, outbox_path, key)


def _send_kept_one(client: EvalOpsClient, outbox_path: Path | str, key: str) -> Submission:
    result = flush(outbox_path, client)
    if key in result.answers:
        return Submission(result.answers[key])
    return Submission(None, result.errors[-1])


def keep(
    payload: Mapping[str, Any], outbox_path: Path | str, *, idempotency_key: str, in_place_of: str | None = None
) -> None:
    """Put a submission into the outbox, unless it is there already; `in_place_of` begins the keys of those that it
    makes wrong, which are taken out."""
    try:
        waiting = unsent(outbox_path)
    except DataError:
        waiting = []  # whoever sends will be told of the damage; nothing is lost meanwhile
    if any(row["idempotency_key"] == idempotency_key for row in waiting):
        return
    row = {"idempotency_key": idempotency_key, "kept_at": utc_now(), "error": "", "payload": dict(payload)}
    valid = [row for row in waiting if in_place_of is None or not row["idempotency_key"].startswith(in_place_of)]
    if len(valid) < len(waiting):
        durable_files.write_jsonl(outbox_path, [*valid, row])
    else:
        durable_files.append_line(outbox_path, row)


def unsent(outbox_path: Path | str) -> list[dict[str, Any]]:
    """The submissions in the outbox, the oldest first: idempotency_key, kept_at, error, payload. Raises `DataError`."""
    rows = durable_files.read_jsonl(outbox_path, missing_ok=True)[0]
    for number, row in enumerate(rows, start=1):
        if not (isinstance(row.get("idempotency_key"), str) and isinstance(row.get("payload"), dict)):
            raise DataError(f"{outbox_path}: submission {number} has no idempotency_key or payload; mend or delete it")
    return rows


def flush(outbox_path: Path | str, client: EvalOpsClient) -> FlushResult:
    """Send what is in the outbox; what is refused again stays in it.

    Stops at the first that fails because EvalOps does not answer, since the rest would fail alike.
    """
    waiting = unsent(outbox_path)
    errors: list[str] = []
    refused: list[dict[str, Any]] = []
    answers: dict[str, Mapping[str, Any]] = {}
    while waiting:
        row, *later = waiting
        try:
            answers[row["idempotency_key"]] = client.post_test_run(
                row["payload"], idempotency_key=row["idempotency_key"]
            )
        except EvalOpsError as err:
            errors.append(str(err))
            row = {**row, "error": redact(str(err))}
            if getattr(err, "transient", False):
                waiting = [row, *later]
                break
            refused.append(row)
        else:
            _write_outbox(outbox_path, [*refused, *later])
        waiting = later
    left = [*refused, *waiting]
    if errors:
        _write_outbox(outbox_path, left)
    return FlushResult(len(answers), len(left), tuple(errors), answers)


def _write_outbox(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        durable_files.write_jsonl(path, rows)
    else:
        Path(path).unlink(missing_ok=True)


def send_kept(outbox_path: Path | str, api_url: str | None, *, attempts: int = 2) -> FlushResult:
    """Send what a run has kept; whatever is in the way becomes an error of the result, and nothing is raised but
    `StorageError`."""
    try:
        waiting = unsent(outbox_path)
        return flush(outbox_path, EvalOpsClient(api_url, attempts=attempts)) if waiting else FlushResult(0, 0)
    except DataError as err:
        with durable_files.storage_errors(Path(outbox_path), "read"):
            kept = sum(bool(line.strip()) for line in Path(outbox_path).read_bytes().splitlines())
        return FlushResult(0, kept, (str(err),))
    except ConfigurationError as err:
        return FlushResult(0, len(waiting), (str(err),))


def submit_round(payload: Mapping[str, Any], outbox_path: Path | str, api_url: str | None, round_id: str) -> str | None:
    """`submit_or_keep` for a run, whose result never depends on it: returns why `payload` was not sent, None when it
    was. A key that is missing by now and a damaged outbox are such reasons too. Raises `StorageError`.

    `round_id` names run and round. A round that is submitted again after a crash is the same submission; one that was
    trained again is another, and takes the place of what was kept of it.
    """
    config = payload["config"]
    told = durable_files.to_json([config["model"], config["metadata"]["metrics"]], name="submission")
    key = f"{round_id}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    try:
        keep(payload, outbox_path, idempotency_key=key, in_place_of=f"{round_id}-")
        return _send_kept_one(EvalOpsClient(api_url), outbox_path, key).error
    except (ConfigurationError, DataError) as err:
        return str(err)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (0 when nothing is left to send)."""
    parser = argparse.ArgumentParser(prog="evalops_client.py", description="Send what a run could not send to EvalOps.")
    commands = parser.add_subparsers(dest="command", required=True)
    flush_parser = commands.add_parser("flush", help="send the submissions kept in a run's outbox")
    flush_parser.add_argument("run", help="run id (or its unique start), or the path of a run folder")
    flush_parser.add_argument("--runs-dir", default="runs", help="folder with the run folders (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        return _flush_run(options.run, Path(options.runs_dir))
    except EvalLoopError as err:
        print(redact(visible(str(err))), file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        print("interrupted; what was not sent is still in the outbox", file=sys.stderr)
        return EXIT_INTERRUPTED


def _flush_run(run: str, runs_dir: Path) -> int:
    from checkpoint_manager import CheckpointManager, resolve_run

    # With the run's lock: a run that is going on sends and keeps submissions itself.
    with CheckpointManager.open(resolve_run(runs_dir, run)) as manager:
        if not unsent(manager.outbox_path):
            print(f"{manager.run_id}: nothing to send")
            return 0
        result = flush(manager.outbox_path, EvalOpsClient(manager.load_config().get("evalops_api_url")))
        manager.note_unsent(result.left)
        print(f"{manager.run_id}: {result.sent} sent, {result.left} left")
    for error in result.errors:
        print(error, file=sys.stderr)
    return EXIT_FAILED if result.left else 0


def _path_of(test_run_id: str) -> str:
    return f"{TEST_RUNS_PATH}{urllib.parse.quote(str(test_run_id), safe='')}"


def _server_message(text: str) -> str:
    """What an error answer says: its message field when it is JSON, else its text."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        for key in ("message", "detail", "error", "title"):
            said = answer.get(key)
            if isinstance(said, dict):
                said = said.get("message")
            if said:
                return str(said)
    return text.strip() or "no message"


if __name__ == "__main__":
    sys.exit(main())
