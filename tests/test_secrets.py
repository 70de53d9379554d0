"""A whole run with marked keys leaves them nowhere, and text from data and models steers neither terminal nor page."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import read_eval_log
from mini_run import MODEL, colour_rows, write_config

import evalops_client
import trainer_with_eval
from logger import redact, visible
from mock_tinker import LocalTinkerServer

ROOT = Path(__file__).resolve().parent.parent
TINKER_KEY = "tml-tinkermarked42"
SECRETS = {
    "TINKER_API_KEY": TINKER_KEY,
    "EVALOPS_API_KEY": 'evalops"marked42\\key',
    "HF_TOKEN": "hf_marked42hub",
    "HTTPS_PROXY": "http://proxy:pass%40marked42@127.0.0.1:9",
    "HTTP_PROXY": "http://proxy:pass%40marked42@127.0.0.1:9",
}
MARK = b"marked42"


@pytest.fixture
def evalops() -> Iterator[Any]:
    """An EvalOps that refuses every submission and quotes the whole request, key and all."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            said = json.dumps({"message": f"bad request: {self.headers} {body[:50]}"}).encode()
            self.server.requests.append(self.headers["Authorization"])  # type: ignore[attr-defined]
            self.send_response(422)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class CommandLines(threading.Thread):
    """Collects the arguments of every process of this machine while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[bytes] = set()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes())
                except OSError:
                    continue  # it has just ended


def test_no_key_is_left_by_a_whole_run_with_all_that_can_go_wrong(
    tmp_path: Path, evalops: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        tmp_path,
        colour_rows(4),
        steps_per_round=2,
        evaluation={"evaluator": "inspect", "max_tokens": 2},
        prices={MODEL: {"prefill": 0.1, "sample": 0.2, "train": 0.3}},
        evalops_enabled=True,
        evalops_test_suite_id="suite",
        evalops_api_url=f"http://127.0.0.1:{evalops.server_address[1]}",
    )
    quoting = f"refused: Authorization: Bearer {TINKER_KEY}, X-API-Key: {TINKER_KEY}"
    faults: list[dict[str, Any]] = [
        {"call": "asample", "kind": "fail", "message": quoting, "times": 4},
        {"call": "optim_step", "kind": "fail", "message": quoting},
    ]
    commands = CommandLines()
    commands.start()
    with LocalTinkerServer(tmp_path / "engine", threads=1, api_key=TINKER_KEY, fault_plan=faults) as server:
        own = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TINKER_MOCK": "", "TINKER_BASE_URL": server.base_url}
        for name, value in {**SECRETS, **own}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        # The samples of the evaluation fail; the key is wrong; a step fails; the run ends.
        codes = [trainer_with_eval.main(["--config", str(config)])]
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrongmarked42")
        codes.append(trainer_with_eval.main(["--resume"]))
        monkeypatch.setenv("TINKER_API_KEY", TINKER_KEY)
        codes += [trainer_with_eval.main(["--resume"]) for _ in range(2)]
        (run_dir,) = (tmp_path / "runs").iterdir()
        codes.append(evalops_client.main(["flush", run_dir.name]))
    commands.stopped.set()
    commands.join()
    for path in run_dir.rglob("*.eval"):
        (tmp_path / f"unpacked-{path.stem}.json").write_text(read_eval_log(str(path)).model_dump_json())
    text = "".join(capfd.readouterr())
    assert codes == [1, 1, 1, 3, 1], text
    assert "refused the API key" in text
    assert text.count("refused: Authorization: Bearer [hidden]") >= 2
    assert "EvalOps did not take round 1: EvalOps answered 422" in text
    assert set(evalops.requests) == {f"Bearer {SECRETS['EVALOPS_API_KEY']}"}
    assert json.loads((run_dir / "summary.json").read_text())["evalops_unsent"] == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(tmp_path / "engine")]
    names = {path.name for path in files}
    assert {"config.json", "state.json", "metrics.jsonl", "summary.json", "report.html"} <= names
    assert {"evalops_outbox.jsonl", "round_00.jsonl"} <= names
    assert any(name.startswith("unpacked-") for name in names)
    assert [path for path in files if MARK in path.read_bytes()] == []
    assert MARK.decode() not in text
    assert any(b"pytest" in line for line in commands.seen)
    assert not [line for line in commands.seen if MARK in line]
    assert "Traceback" not in text


def test_a_key_set_later_and_one_in_an_address_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redact("a latersecret42 b") == "a latersecret42 b"
    monkeypatch.setenv("SOME_API_KEY", "latersecret42")
    assert redact("a latersecret42 b") == "a [hidden] b"
    monkeypatch.setenv("SOME_API_KEY", "another42secret")
    assert redact("latersecret42 another42secret") == "latersecret42 [hidden]"
    monkeypatch.delenv("SOME_API_KEY")
    assert redact("another42secret") == "another42secret"
    monkeypatch.setenv("HTTPS_PROXY", "http://me:p%40ss%2Fword42@proxy:3128")
    assert redact("proxy said p%40ss%2Fword42 and p@ss/word42") == "proxy said [hidden] and [hidden]"
    assert redact("via http://me:p%40ss@proxy:3128/x") == "via http://[hidden]@proxy:3128/x"
    assert redact("Authorization: Basic bWU6cGFzcw== x") == "Authorization: Basic [hidden] x"
    assert redact("tinker://a:train:0/weights/x at 7 @ y") == "tinker://a:train:0/weights/x at 7 @ y"


# Text from data and models

EVIL = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[1;1H",
    "c1": "\x9b31m\x90q\x9c",
    "bidi": "\u202eesrever\u2066\u061c\u200f",
    "back": "over\b\b\b\rwritten",
    "hidden": "a\u200bb\U000e0041\ufeff",
    "brackets": "[red]x[/red] [/bad]",
    "braces": "{{ 7 * 7 }}{% raw %}",
}
FORBIDDEN = re.compile(r"[\x00-\x06\x0b\x0c\x0e-\x1a\x7f-\x9f\u061c\u200b\u200f\u202a-\u202e\u2066-\u2069\U000e0041]")
# What rich itself writes to a terminal: colours, and moving about for its bars.
OWN_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[(\?25[lh]|2K|1A)")


def on_a_terminal(command: list[str], folder: Path) -> str:
    """What a program writes to a terminal that it is alone with."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TINKER_MOCK": "1", "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break  # Linux's way to say that the other side is closed
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(timeout=60) == 3, shown.decode(errors="replace")
    return shown.decode()


def test_evil_text_stays_text_on_the_terminal_in_logs_and_on_the_page(tmp_path: Path) -> None:
    evil = " ".join(EVIL.values())
    forged = f"{evil}\nerror: x"
    rows = [
        {"id": f"{n}{evil}", "question": f"{n} {forged}", "answer": f"{n} {forged}", "kind": f"{n % 2} {forged}"}
        for n in range(4)
    ]
    asked = {"evaluator": "simple", "max_tokens": 2, "category_field": "kind"}
    config = write_config(tmp_path, rows, steps_per_round=2, evaluation=asked)
    shown = on_a_terminal([sys.executable, str(ROOT / "trainer_with_eval.py"), "--config", str(config)], tmp_path)
    assert "weakest: " in shown
    assert "\\x1b]0;owned\\x07" in shown, "the evil text is shown"
    assert "[red]x[/red]" in shown
    plain = OWN_ESCAPES.sub("", shown)
    assert FORBIDDEN.findall(plain) == []
    assert "\b" not in plain
    assert "\x1b" not in plain
    assert not re.search(r"^error: x", plain, re.MULTILINE)
    (run_dir,) = (tmp_path / "runs").iterdir()
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "{{ 7 * 7 }}" in page
    assert FORBIDDEN.findall(page) == []
    assert "\x1b" not in page
    for path in run_dir.rglob("*.jsonl"):
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", path.read_bytes()), path


@pytest.mark.parametrize("name", EVIL)
def test_what_is_made_visible_can_be_shown_anywhere(name: str) -> None:
    shown = visible(EVIL[name])
    assert not FORBIDDEN.search(shown)
    assert visible(shown) == shown


def test_a_lone_surrogate_can_be_shown() -> None:
    assert visible("file \udcff \ud83d") == "file \\udcff \\ud83d"
    assert visible("é ü 漢字 😀 👩‍👩‍👧 नमस्ते می‌خواهم\n\t") == "é ü 漢字 😀 👩‍👩‍👧 नमस्ते می‌خواهم\n\t"


def test_a_stream_that_knows_few_characters_ends_no_run(tmp_path: Path) -> None:
    program = (
        "from logger import StructuredLogger\n"
        "log = StructuredLogger(None)\n"
        "log.say('caf\\u00e9 \\u6f22 \\ud800')\n"
        "log.rounds_table([{'round': 0, 'score': 0.5}])\n"
        "with log.progress(2, '\\u00fc') as bar: bar.advance()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9 \\u6f22 \\ud800" in done.stdout


def test_masking_costs_nothing_that_grows_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3000):
        monkeypatch.setenv(f"VARIABLE_{number}", "value" * 5)
    redact("first")
    started = time.process_time()
    for _ in range(1000):
        redact("a short text")
    # Reading 3,000 variables for each text takes seconds.
    assert time.process_time() - started < 1.0
