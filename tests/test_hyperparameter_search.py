"""`--tune` end to end: real short runs on the local engine, one of them killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import config_schema
import hyperparameter_search
import tinker_backend
import trainer_with_eval
from checkpoint_manager import CheckpointManager
from evaluation import SampleResult
from search_space import TrialResult

ROOT = Path(__file__).resolve().parent.parent

SETTINGS = {
    "base_model": "Qwen/Qwen3-8B",
    "train_file": "facts.jsonl",
    "eval_file": "facts.jsonl",
    "allow_overlap": True,
    "lora_rank": 4,
    "learning_rate": 6e-3,
    "min_lr": 3e-3,
    "batch_size": 3,
    "steps_per_round": 8,
    "save_every": 3,
    "eval_threshold": 0.3,
    "seed": 7,
    "evaluation": {"evaluator": "simple", "max_tokens": 8},
    "selection": {"strategy": "none"},
    "prices": {"Qwen/Qwen3-8B": {"prefill": 1.0, "sample": 1.0, "train": 1.0}},
}


@pytest.fixture(autouse=True)
def _local_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_MOCK", "1")


def write_config(folder: Path, **changes: Any) -> Path:
    facts = (ROOT / "data" / "demo_data.jsonl").read_text().splitlines()[:3]
    (folder / "facts.jsonl").write_text("\n".join(facts) + "\n")
    path = folder / "config.json"
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return path


def main(*words: str | Path) -> int:
    return trainer_with_eval.main([str(word) for word in words])


def trials(search: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (search / "trials.jsonl").read_text().splitlines()]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == name]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A search of two trials that nothing broke."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "test.jsonl").write_text(json.dumps({"id": "kept", "question": "How high is Mt. Zorb?", "answer": "9"}))
    config = config_schema.load_and_validate_config(write_config(folder, heldout={"test_file": "test.jsonl"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        result = asyncio.run(trainer_with_eval.tune(config, trials=2, runs_dir=folder / "runs", console=False))
    return result, Path(result["folder"])


@pytest.fixture
def after_one(searched: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """The search as a kill between its trials leaves it."""
    search = tmp_path / "runs" / searched[1].name
    shutil.copytree(searched[1], search)
    shutil.rmtree(search / trials(search)[1]["run"])
    first = (search / "trials.jsonl").read_text().splitlines()[0]
    (search / "trials.jsonl").write_text(first + "\n")
    return search


def test_two_trials_are_ordinary_runs_that_ask_the_base_model_once(searched):
    result, search = searched
    one, two = trials(search)
    assert [(row["trial"], row["status"]) for row in (one, two)] == [(1, "completed"), (2, "completed")]
    assert (one["learning_rate"], one["rank"]) == (6e-3, 4)
    assert (two["learning_rate"], two["rank"]) != (6e-3, 4)
    assert 1.2e-3 <= two["learning_rate"] <= 3e-2
    assert two["rank"] in (1, 2, 4, 8, 16)
    for row in (one, two):
        summary = json.loads((search / row["run"] / "summary.json").read_text())
        assert summary["rounds"][1]["score"] == row["score"]
        assert summary["tokens"] == row["tokens"]
        assert summary["rounds"][1]["steps"] == 8
        assert (search / row["run"] / "report.html").is_file()
        config = json.loads((search / row["run"] / "config.json").read_text())
        assert (config["lora_rank"], config["learning_rate"]) == (row["rank"], row["learning_rate"])
        assert config["min_lr"] <= config["learning_rate"]
        assert Path(config["heldout"]["test_file"]).name == "test.jsonl"
        asked = [path.read_text() for path in (search / row["run"] / "samples").iterdir()]
        assert asked
        assert not any("Zorb" in text for text in asked)
    assert [row["round"] for row in events(search / one["run"], "evaluation")] == [0, 1]
    assert [row["round"] for row in events(search / two["run"], "evaluation")] == [1]
    asked = [(search / row["run"] / "samples" / "round_00.jsonl").read_text() for row in (one, two)]
    assert [json.loads(line)["output"] for line in asked[0].splitlines()] == [
        json.loads(line)["output"] for line in asked[1].splitlines()
    ]
    assert result["exit_code"] == (0 if result["best"]["score"] >= 0.3 else 3)


def test_what_was_paid_is_what_was_estimated(searched):
    _, search = searched
    estimate = json.loads((search / "search.json").read_text())["estimate"]
    one, two = trials(search)
    # Three rows in eight steps of three: each is trained eight times, so the mean length is exact.
    assert one["tokens"]["train"] == two["tokens"]["train"] == estimate["trial"]["train"]
    assert two["tokens"]["prefill"] == estimate["trial"]["prefill"]
    assert one["tokens"]["prefill"] == estimate["baseline"]["prefill"] + estimate["trial"]["prefill"]
    assert 0 < two["tokens"]["sample"] <= estimate["trial"]["sample"] == 3 * 8


def test_the_table_names_the_best_which_is_a_configuration_to_run(searched, after_one):
    result, search = searched
    text = (search / "table.md").read_text()
    best = result["best"]
    assert f"| **{best['trial']}** | {best['learning_rate']:.4g} | {best['rank']} | {best['score']:.3f} |" in text
    assert "the order of the two may be chance" in text or "ties with" in text or "beyond noise" in text
    assert "Scores are on training data." in text
    config = config_schema.load_and_validate_config(after_one / "best_config.json")
    assert (config.learning_rate, config.lora_rank) == (best["learning_rate"], best["rank"])
    assert (config.eval_threshold, config.max_rounds) == (0.3, 3)


def measured(search: Path, number: int, right: dict[str, list[bool]]) -> TrialResult:
    """A trial as its folder holds it: `right` of every task, in clusters of three; each task weighs the same."""
    with CheckpointManager.create(search, {}, trial=number) as folder:
        for task, answers in right.items():
            folder.append_samples(
                1,
                [
                    SampleResult(task, str(n), 1, "q", "a", "o", float(answer), cluster=f"document {n // 3}")
                    for n, answer in enumerate(answers)
                ],
            )
        score = sum(sum(answers) / len(answers) for answers in right.values()) / len(right)
        tasks = [{"task": task, "score": 0.0, "threshold": None, "ci_low": None, "weight": 1.0} for task in right]
        figures = {"score": score, "ci_low": None, "ci_high": None, "n": 1, "errors": 0, "tasks": tasks}
        folder.save_round_result(1, {**figures, "checkpoint": None})
        nothing = {"train": 0, "prefill": 0, "sample": 0}
        return TrialResult(number, 1e-4, 8, folder.run_id, "completed", score, None, None, 1, nothing, 1.0, "")


def test_two_trials_are_compared_by_cluster_and_by_task_weight(tmp_path):
    second = measured(tmp_path, 1, {"a": [False] * 6, "b": [True] * 3})
    best = measured(tmp_path, 2, {"a": [True] * 6, "b": [True] * 3})
    found = hyperparameter_search.compared(tmp_path, best, second)
    assert found is not None
    # Six of nine samples are right in one trial alone, and their task is half of the score.
    assert (found.n, found.difference) == (9, pytest.approx(0.5))
    # They are two documents: of the four ways to turn these, two are as extreme. Sample by sample it were 2 / 2**6.
    assert found.p == pytest.approx(0.5)
    assert found.ci_low is not None
    assert found.ci_low < 0


def kill_in_the_second_trial(search: Path) -> Path:
    """Go on with a search in another process and kill that in mid-round; returns the run folder it leaves."""
    finished = trials(search)[0]["run"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "trainer_with_eval.py"), "--tune", "2", "--resume", str(search)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    deadline = time.monotonic() + 180
    try:
        while time.monotonic() < deadline:
            for path in search.glob("*/metrics.jsonl"):
                if path.parent.name != finished and path.read_text().count('"event": "step"') >= 4:
                    return path.parent
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            time.sleep(0.01)
        raise AssertionError("the second trial did not get so far in 180 s")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_a_search_killed_in_its_second_trial_ends_as_if_it_had_not_been(searched, after_one, capsys):
    killed = kill_in_the_second_trial(after_one)
    first = after_one / trials(after_one)[0]["run"]
    before = contents(first)
    baseline = (killed / "samples" / "round_00.jsonl").read_bytes()

    code = main("--resume", after_one)

    assert code == searched[0]["exit_code"]
    assert contents(first) == before
    assert (killed / "samples" / "round_00.jsonl").read_bytes() == baseline
    again = sum(row["tokens"] for row in events(killed, "step") if row.get("superseded"))
    rows = trials(after_one)
    assert rows[1]["run"] == killed.name
    for row, whole in zip(rows, trials(searched[1]), strict=True):
        for key in ("trial", "learning_rate", "rank", "status", "score", "ci_low", "ci_high", "n"):
            assert row[key] == whole[key], key
    # Steps that were done again are paid again; nothing else differs.
    paid = trials(searched[1])[1]["tokens"]
    assert rows[1]["tokens"] == {**paid, "train": paid["train"] + again}
    # A finished search says how it came out, and runs nothing.
    capsys.readouterr()
    before = contents(killed)
    assert main("--tune", "2", "--resume", "--runs-dir", after_one.parent) == code
    assert "| base model |" in capsys.readouterr().out
    assert contents(killed) == before


def test_a_limit_of_the_whole_search_stops_it_before_the_trial_that_would_pass_it(after_one, capsys):
    spent = sum(trials(after_one)[0]["tokens"].values())
    assert main("--resume", after_one, f"budget.tokens={spent + 100}") in (0, 3)
    said = capsys.readouterr().out
    assert "Stopped after 1 of 2 trials" in said
    assert f"would pass budget.tokens={spent + 100}" in said
    assert len(trials(after_one)) == 1


def test_another_search_is_refused_on_resume(after_one, capsys):
    before = contents(after_one)
    assert main("--resume", after_one, "seed=8", "--dry-run") == 2
    assert "seed: 7 in the search, 8 now" in capsys.readouterr().err
    rows = (after_one / "trials.jsonl").read_text()
    (after_one / "trials.jsonl").write_text(rows.replace('"rank": 4', '"rank": 3'))
    assert main("--resume", after_one) == 2
    assert "the installed optuna is another" in capsys.readouterr().err
    assert contents(after_one).keys() - before.keys() <= {"search.lock"}


def test_a_dry_run_shows_the_plan_of_the_search_and_leaves_nothing(tmp_path, capsys):
    config = write_config(tmp_path)
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "5", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "search: 5 trials of one round of 8 steps" in said
    assert "learning rate 0.0012 to 0.03" in said
    assert "LoRA rank 1, 2, 4, 8, 16" in said
    assert "estimate of the search (baseline once): " in said
    words = ("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "5", "budget.tokens=300")
    assert main(*words) == 2
    assert "does not hold the baseline and one trial" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_search_trains_no_more_on_the_test_file_than_a_run_does(tmp_path, capsys):
    config = write_config(tmp_path, heldout={"test_file": "test.jsonl"})
    fact = json.loads((tmp_path / "facts.jsonl").read_text().splitlines()[1])
    (tmp_path / "test.jsonl").write_text(json.dumps({**fact, "id": "kept"}) + "\n")
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "2", "--dry-run") == 2
    said = capsys.readouterr().err
    assert "facts.jsonl:2" in said
    assert "what is in the test file is never trained on" in said


def test_a_learning_rate_at_which_training_breaks_down_is_a_failed_trial(tmp_path, capsys):
    config = write_config(tmp_path, learning_rate=1e30, min_lr=0.0, steps_per_round=3)
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "1") == 1
    assert "none of 1 trials came to a score" in capsys.readouterr().err
    (search,) = (tmp_path / "runs").iterdir()
    (row,) = trials(search)
    assert (row["status"], row["score"]) == ("failed", None)
    assert "the loss is" in row["reason"]
    assert row["tokens"]["train"] > 0
    assert not (search / "best_config.json").exists()


def test_learning_rates_that_move_no_weight_are_failed_trials_and_do_not_end_the_search(tmp_path, capsys):
    config = write_config(tmp_path, learning_rate=1e-25, min_lr=0.0, steps_per_round=1)
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "2") == 1
    assert "none of 2 trials came to a score" in capsys.readouterr().err
    (search,) = (tmp_path / "runs").iterdir()
    # The second trial knows what the first one measured before training, and judges by that.
    assert [row["status"] for row in trials(search)] == ["failed", "failed"]
    assert all("the adapter has no effect. All 3 evaluation targets" in row["reason"] for row in trials(search))


def test_a_trial_that_replies_as_the_adapter_it_started_from_is_checked_against_that_adapter(tmp_path):
    with tinker_backend.connect(tmp_path / "runs" / "begun" / "engine") as backend:
        client = asyncio.run(backend.create_training_client(SETTINGS["base_model"], rank=4, seed=1))
        start = client.save_state("start").result().path
    config = write_config(tmp_path, init_from=start, learning_rate=1e-6, min_lr=0.0, steps_per_round=1)
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--tune", "2") == 3
    (search,) = (tmp_path / "runs").glob("tuning-*")
    for row in trials(search):
        assert (row["status"], row["score"] is None) == ("completed", False)
        (warning,) = [e for e in events(search / row["run"], "warning") if "those of the baseline" in e["message"]]
        assert warning["round"] == 1


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_a_number_of_trials_that_is_none_is_refused(tmp_path, capsys, number):
    with pytest.raises(SystemExit) as caught:
        main("--config", write_config(tmp_path), f"--tune={number}")
    assert caught.value.code == 2
    assert "whole number of 1 or more" in capsys.readouterr().err


def test_there_is_no_search_to_resume(tmp_path, capsys):
    assert main("--tune", "2", "--resume", "--runs-dir", tmp_path) == 2
    assert f"there is no search to resume in {tmp_path}" in capsys.readouterr().err
