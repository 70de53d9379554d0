"""The demo's script, as a person with a key runs it, against a stand-alone engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEY = "tml-marked-demo-key"


@pytest.fixture
def engine_url(tmp_path: Path) -> Iterator[str]:
    """A stand-alone engine in a process of its own that demands `KEY`."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "mock_tinker.py"), "--port", "0", "--state-dir", str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MOCK_TINKER_API_KEY": KEY},
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address is not None
        yield address.group()
    finally:
        process.kill()
        process.communicate()


def run_demo(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "EVALOPS_"))}
    return subprocess.run(
        [str(ROOT / "run_demo.sh"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**env, "DEMO_PYTHON": sys.executable, **environment},
    )


def test_with_a_key_the_demo_runs_its_plan_on_the_service(engine_url, tmp_path):
    done = run_demo(tmp_path, "max_rounds=1", "steps_per_round=2", TINKER_API_KEY=KEY, TINKER_BASE_URL=engine_url)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Its plan:" in done.stdout
    assert f"server at {engine_url}" in done.stdout
    assert "plan: up to 1 round of 2 steps" in done.stdout
    assert KEY not in done.stdout + done.stderr
    (summary_file,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(summary_file.read_text())
    assert summary["model"] == "Qwen/Qwen3-8B"
    assert [row["n"] for row in summary["rounds"]] == [84, 84]
    assert not (summary_file.parent / "engine").exists()
    kept = [path for path in summary_file.parent.rglob("*") if path.suffix in (".json", ".jsonl", ".html")]
    assert not [path for path in kept if KEY in path.read_text()]


def test_a_wrong_key_is_told_and_nothing_is_left(engine_url, tmp_path):
    done = run_demo(tmp_path, TINKER_API_KEY="tml-wrong", TINKER_BASE_URL=engine_url)
    assert done.returncode == 1
    assert "refused the API key" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_arguments_go_on_to_the_trainer(tmp_path):
    done = run_demo(tmp_path, "--resume", TINKER_MOCK="1")
    assert done.returncode == 2
    assert "runs" in done.stderr
    assert "--resume" in run_demo(tmp_path, "--help").stdout
