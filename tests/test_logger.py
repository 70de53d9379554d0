"""Events on disk, what the terminal shows, and that neither leaks a secret."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from durable_files import UnstorableValueError
from logger import StructuredLogger, current_steps, read_events, redact, redact_values, visible

ROOT = Path(__file__).parent.parent


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(tmp_path):
    return StructuredLogger(tmp_path / "metrics.jsonl", stream=io.StringIO())


def said(log: StructuredLogger) -> str:
    stream = log._stream
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_an_event_is_a_line_with_its_time_round_and_step(log):
    log.event("step", round=1, step=7, loss=1.5)
    log.event("run_started", model="tiny")
    events, note = read_events(log.path)
    assert note is None
    assert [(e["event"], e["round"], e["step"]) for e in events] == [("step", 1, 7), ("run_started", None, None)]
    assert list(events[0])[:4] == ["event", "time", "round", "step"]
    assert events[0]["loss"] == 1.5
    assert events[0]["time"].endswith("Z")
    assert "T" in events[0]["time"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_and_no_line(log, value):
    log.event("step", step=1, loss=1.0)
    with pytest.raises(UnstorableValueError, match=r"metrics\.jsonl\.loss is"):
        log.event("step", step=2, loss=value)
    assert len(read_events(log.path)[0]) == 1


def test_torn_and_stale_metrics_resumed_from_step_3(log):
    log.path.write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "loss": 1.2}\n'
        '{"step": 4, "loss": 1.1}\n{"step": 5, "lo'
    )
    events, note = read_events(log.path)
    assert len(events) == 4
    assert note is not None
    assert ":5: dropped a torn last line" in note
    assert log.supersede_after(3) == 1
    assert [e["step"] for e in current_steps(read_events(log.path)[0])] == [1, 2, 3]
    log.event("step", step=4, loss=1.05)
    log.event("step", step=5, loss=1.0)
    steps = current_steps(read_events(log.path)[0])
    assert [(e["step"], e["loss"]) for e in steps] == [(1, 2.0), (2, 1.5), (3, 1.2), (4, 1.05), (5, 1.0)]
    assert log.supersede_after(5) == 0


def test_one_value_a_step_even_when_a_step_was_logged_twice():
    events: list[dict] = [
        {"step": 2, "loss": 3.0},
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.5},
        {"step": 3, "event": "save"},
    ]
    assert [(e["step"], e["loss"]) for e in current_steps(events)] == [(1, 4.0), (2, 2.5)]


def test_secrets_are_masked_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "marked-tinker-key")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "marked-token")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-value")
    text = redact(
        "a marked-tinker-key b marked-token c tml-AbC_123-x d Bearer abcdef.ghi e https://me:pw@host/?api_key=zzz&x=1 "
        "f false-value g tml-renderers>=0.4 h https://ghp_abc123@host/x i X-API-Key: 0a1b2c3d "
        "j Authorization: Token zxcvbn k https://host/a@b"
    )
    assert text == (
        "a [hidden] b [hidden] c [hidden] d Bearer [hidden] e https://[hidden]@host/?api_key=[hidden]&x=1 "
        "f false-value g tml-renderers>=0.4 h https://[hidden]@host/x i X-API-Key: [hidden] "
        "j Authorization: Token [hidden] k https://host/a@b"
    )
    assert redact(text) == text


def test_a_short_value_in_a_key_variable_does_not_garble_messages(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "test")
    assert redact("the test set") == "the test set"


def test_fields_named_like_secrets_are_masked_and_counts_of_tokens_are_not():
    row = {
        "api_key": "x",
        "evalops_api_key": "y",
        "tokens": 5,
        "max_tokens": 16,
        "password": "",
        "in": [{"secret": "z"}],
    }
    assert redact_values(row) == {
        "api_key": "[hidden]",
        "evalops_api_key": "[hidden]",
        "tokens": 5,
        "max_tokens": 16,
        "password": "",
        "in": [{"secret": "[hidden]"}],
    }


def test_no_secret_reaches_the_file_or_the_terminal(log, monkeypatch):
    monkeypatch.setenv("EVALOPS_API_KEY", "marked-evalops-key")
    log.event("failed", message="key marked-evalops-key refused", detail={"headers": ["Bearer marked-evalops-key"]})
    log.say("marked-evalops-key")
    log.warn("marked-evalops-key")
    log.where({"key": "marked-evalops-key"})
    assert "marked" not in log.path.read_text()
    assert "marked" not in said(log)
    assert said(log).count("[hidden]") == 3


def test_text_from_a_model_stays_text(log):
    log.say("[red]x[/red] [/bad] \x1b[2J\x1b]0;title\x07 \x9b1m \u202eabc\rover")
    assert said(log) == "[red]x[/red] [/bad] \\x1b[2J\\x1b]0;title\\x07 \\x9b1m \\u202eabc\\rover\n"
    assert visible("é ü 漢字 😀\n") == "é ü 漢字 😀\n"


def test_long_lines_are_not_broken_in_a_pipe(log):
    command = "python trainer_with_eval.py --resume " + "x" * 300
    log.say(command)
    assert said(log) == command + "\n"


def test_a_warning_is_shown_and_recorded(log):
    log.warn("the server is slow", round=2, step=9)
    assert said(log) == "warning: the server is slow\n"
    event = read_events(log.path)[0][0]
    assert (event["event"], event["message"], event["round"], event["step"]) == ("warning", "the server is slow", 2, 9)


def test_progress_outside_a_terminal_is_a_plain_line_every_tenth(log):
    with log.progress(total=40, description="round 1") as bar:
        for step in range(40):
            bar.advance(lr=1e-4, loss=2.0 - step / 40)
    lines = said(log).splitlines()
    assert len(lines) == 10
    assert lines[0] == "round 1: 4/40, lr 1.00e-04, loss 1.9250"
    assert lines[-1].startswith("round 1: 40/40")
    assert "\x1b" not in said(log)


def test_progress_on_a_terminal_is_a_live_bar_with_rate_and_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with StructuredLogger(None, stream=stream).progress(total=2, description="round [1]") as bar:
        bar.advance(lr=1e-4, loss=1.5)
        bar.advance(lr=9e-5, loss=1.25)
    assert "\x1b[" in stream.getvalue()
    assert "round [1]" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "lr 9.00e-05, loss 1.2500" in stream.getvalue()


def test_the_table_of_rounds_fits_in_80_columns_and_shows_unknown_as_a_dash(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    rounds: list[dict] = [
        {"round": 0, "score": 0.3, "n": 80, "errors": 0, "ci_low": None, "ci_high": None, "nll": None},
        {
            "round": 1,
            "score": 0.9125,
            "ci_low": 0.83,
            "ci_high": 0.957,
            "lenient_score": 0.95,
            "n": 800,
            "errors": 2,
            "nll": 0.2204,
            "learning_rate": 1e-4,
            "steps": 40,
            "decision": "stop",
        },
    ]
    stream = Terminal()
    StructuredLogger(None, stream=stream).rounds_table(rounds)
    plain = stream.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    row = next(line for line in plain.splitlines() if "0.912" in line)
    assert row.split() == ["1", "0.912", "0.830-0.957", "0.950", "800", "2", "0.220", "1.00e-04", "40", "stop"]
    baseline = next(line for line in plain.splitlines() if "baseline" in line)
    assert baseline.split() == ["baseline", "0.300", "-", "-", "80", "0", "-", "-", "-", "-"]


def test_a_silent_logger_still_records(tmp_path, capsys):
    log = StructuredLogger(tmp_path / "m.jsonl", console=False)
    log.say("x")
    log.warn("y")
    log.rounds_table([{"round": 0}])
    with log.progress(3, "r") as bar:
        bar.advance()
    assert bar.done == 1
    assert capsys.readouterr().out == ""
    assert len(read_events(tmp_path / "m.jsonl")[0]) == 1


def test_a_dry_run_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = StructuredLogger(None, console=False)
    log.event("x", step=1)
    log.warn("y")
    assert log.supersede_after(0) == 0
    assert list(tmp_path.iterdir()) == []


def test_importing_costs_no_heavy_package():
    code = (
        "import sys, logger, checkpoint_manager, evalops_client, report\n"
        "heavy = ('rich', 'matplotlib', 'requests', 'jinja2', 'torch', 'tinker', 'tenacity')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
