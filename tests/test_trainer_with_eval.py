"""The loop end to end: the real SDK, the real local engine, the small base model really trained."""

from __future__ import annotations

import asyncio
import html
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from mini_run import mini_run, run_folder

import config_schema
import data_loader
import row_files
import tinker_backend
import trainer_with_eval
import training_run
from checkpoint_manager import CheckpointManager
from error_handling import ConfigurationError, TrainingError

ROOT = Path(__file__).resolve().parent.parent
DEMO_DATA = ROOT / "data" / "demo_data.jsonl"

# Twenty invented facts, memorised in a few dozen steps; training and evaluation rows are the same on purpose.
MEMORISE = {
    "base_model": "Qwen/Qwen3-8B",
    "train_file": str(DEMO_DATA),
    "eval_file": str(DEMO_DATA),
    "allow_overlap": True,
    "lora_rank": 8,
    "learning_rate": 6e-3,
    "lr_decay": 0.8,
    "warmup_steps": 2,
    "batch_size": 10,
    "steps_per_round": 20,
    "max_rounds": 4,
    "eval_threshold": 0.9,
    "save_every": 6,
    "seed": 7,
    "evaluation": {"evaluator": "simple", "max_tokens": 12},
    "selection": {"strategy": "none"},
}


@pytest.fixture(autouse=True)
def _local_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_MOCK", "1")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "EVALOPS_API_KEY", "EVALOPS_API_URL"):
        monkeypatch.delenv(name, raising=False)


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**MEMORISE, **changes}))
    return path


def run(folder: Path, *, runs_dir: Path | None = None, **changes: Any) -> tuple[dict[str, Any], Path]:
    """Run the loop in this process; returns the summary and the run folder."""
    runs_dir = runs_dir or folder / "runs"
    config = config_schema.load_and_validate_config(write_config(folder, **changes))
    summary = asyncio.run(trainer_with_eval.run_loop(config, runs_dir=runs_dir, console=False))
    return summary, runs_dir / summary["run_id"]


def resume(run_dir: Path, config: Path | None = None, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    loaded = config_schema.load_and_validate_config(config or run_dir / "config.json", overrides)
    return asyncio.run(trainer_with_eval.run_loop(loaded, resume=str(run_dir), console=False))


def main(*words: str | Path) -> int:
    return trainer_with_eval.main([str(word) for word in words])


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def samples(run_dir: Path, round: int) -> dict[str, dict[str, Any]]:
    lines = (run_dir / "samples" / f"round_{round:02d}.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def adapter_bytes(run_dir: Path, round: int) -> bytes:
    files = sorted(run_dir.glob(f"engine/runs/*/weights/round_{round:02d}/adapter_model.safetensors"))
    assert files, f"no saved adapter of round {round} in {run_dir}"
    return files[-1].read_bytes()


def scores(summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (row["round"], row["score"], row["nll"], row["learning_rate"], row["decision"]) for row in summary["rounds"]
    ]


def test_a_large_file_is_read_and_rendered_as_its_rows_are_chosen(tmp_path, monkeypatch):
    for module, name, value in ((row_files, "HELD_ROWS", 30), (data_loader, "HELD_ROWS", 30)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(data_loader, "CHECKED_ROWS", 5)
    train = tmp_path / "train.jsonl"
    rows = [{"prompt": f"Question {n}", "completion": "long " * (900 if n % 2 else 1)} for n in range(60)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"train_file": str(train), "steps_per_round": 1, "batch_size": 8, "max_rounds": 1, "warmup_steps": None}
    summary, run_dir = run(tmp_path, **changes, evaluation={"evaluator": "simple", "max_tokens": 1})
    assert [row["rows"] for row in summary["rounds"]] == [0, 8]
    chosen = [json.loads(line)["id"] for line in (run_dir / "selection" / "round_01.jsonl").read_text().splitlines()]
    assert len(set(chosen)) == 8
    assert all((int(name.split(":")[1]) - 1) % 2 == 0 for name in chosen)
    warnings = [row["message"] for row in events(run_dir, "warning")]
    assert any("cannot be trained on, so others took their places" in warning for warning in warnings)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        return run(tmp_path_factory.mktemp("memorised"))


@pytest.fixture
def finished_copy(memorised: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """A finished run of its own for a test that changes it."""
    target = tmp_path / "runs" / memorised[1].name
    shutil.copytree(memorised[1], target)
    return target


def test_training_lifts_the_score_from_the_baseline_to_the_target(memorised):
    summary, run_dir = memorised
    assert summary["exit_code"] == 0
    assert summary["baseline_score"] < 0.2
    first, last = summary["rounds"][1], summary["rounds"][-1]
    assert first["score"] < summary["threshold"] <= last["score"]
    assert len(summary["rounds"]) >= 3
    assert summary["best_round"] == last["round"]
    assert last["nll"] < first["nll"] < summary["rounds"][0]["nll"]
    assert json.loads((run_dir / "summary.json").read_text()) == summary


def test_the_run_folder_holds_what_the_documentation_promises(memorised):
    summary, run_dir = memorised
    state = json.loads((run_dir / "state.json").read_text())
    assert state["status"] == "completed"
    assert state["phase"] == "finish"
    assert state["adapter_path"] == summary["final_checkpoint"]
    assert state["step"] == 20 * (len(summary["rounds"]) - 1)
    assert state["best_val"] == min(row["nll"] for row in summary["rounds"])
    for row in summary["rounds"]:
        kept = samples(run_dir, row["round"])
        assert len(kept) == row["n"] == 20
        assert sum(sample["score"] for sample in kept.values()) / 20 == pytest.approx(row["score"])
        assert any(sample["output"] for sample in kept.values())
    chosen = [json.loads(line) for line in (run_dir / "selection" / "round_01.jsonl").read_text().splitlines()]
    assert {row["id"] for row in chosen} <= {f"demo_data:{line}" for line in range(1, 21)}
    assert all(row["why"] for row in chosen)
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert {path.name for path in (run_dir / "plots").iterdir()} >= {"loss.png", "score.png"}


def test_scores_on_training_data_say_so_wherever_they_stand(memorised, capsys):
    summary, run_dir = memorised
    assert summary["scores_are"] == "on training data"
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = [event for event in events if event["event"] == "evaluation"]
    assert len(measured) == len(summary["rounds"])
    assert {event["scores_are"] for event in measured} == {"on training data"}
    page = (run_dir / "report.html").read_text()
    assert "Every score on this page is on training data" in page
    assert "<h2>Rounds (scores on training data)</h2>" in page
    assert main("--resume", run_dir) == 0
    shown = capsys.readouterr().out
    assert "Score on training data by round" in shown
    assert f"with {summary['best_score']:.3f} (on training data)" in shown


def test_every_step_is_logged_once_with_its_learning_rate_and_loss(memorised):
    summary, run_dir = memorised
    steps = events(run_dir, "step")
    assert [row["step"] for row in steps] == list(range(1, 20 * (len(summary["rounds"]) - 1) + 1))
    assert steps[0]["lr"] == pytest.approx(6e-3 / 2)
    assert steps[1]["lr"] == pytest.approx(6e-3)
    assert steps[20]["lr"] < 0.81 * steps[19]["lr"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(row["trained_tokens"] > 0 for row in steps)


def test_checkpoints_name_the_next_step_and_are_read_by_the_cookbook(memorised):
    from tinker_cookbook import checkpoint_utils

    summary, run_dir = memorised
    last = checkpoint_utils.get_last_checkpoint(str(run_dir))
    assert last is not None
    assert last.sampler_path == summary["final_checkpoint"]
    assert last.state_path == summary["final_state"]
    assert last.get("step") == 20 * (len(summary["rounds"]) - 1)
    rows = [json.loads(line) for line in (run_dir / "checkpoints.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows if row["round"] == 1] == [6, 12, 18, 20]


def test_the_best_checkpoint_has_no_end_and_its_lead_is_tested(memorised):
    summary, run_dir = memorised
    assert summary["final_checkpoint"] == summary["rounds"][summary["best_round"]]["checkpoint"]
    with tinker_backend.connect(run_dir / "engine") as backend:
        rest = tinker.RestClient(base_url=backend.base_url, api_key=backend.api_key)
        run_id = summary["final_checkpoint"].removeprefix("tinker://").partition("/")[0]
        found = {c.tinker_path: c.expires_at for c in rest.list_checkpoints(run_id).result().checkpoints}
    # Of the finished rounds neither state nor sampler weights have a life; the states within a round are deleted.
    assert set(found.values()) == {None}
    assert {summary["final_checkpoint"], summary["final_state"]} <= found.keys()
    assert not [path for path in found if "_step_" in path]
    over_baseline = summary["leads"][0]
    assert (over_baseline["earlier"], over_baseline["later"]) == (0, summary["best_round"])
    assert over_baseline["p"] < 0.05
    assert "beyond noise" in over_baseline["text"]
    page = (run_dir / "report.html").read_text("utf-8")
    assert f"against the baseline {over_baseline['difference']:+.3f}" in html.unescape(page)
    assert "The whole interval is above" in page or "The interval reaches below" in page


def test_the_same_seed_gives_the_same_run_to_the_bit(memorised, tmp_path):
    summary, run_dir = memorised
    again, again_dir = run(tmp_path)
    assert scores(again) == scores(summary)
    assert adapter_bytes(again_dir, 1) == adapter_bytes(run_dir, 1)
    assert {key: row["output"] for key, row in samples(again_dir, 1).items()} == {
        key: row["output"] for key, row in samples(run_dir, 1).items()
    }


def test_a_budget_that_round_one_could_pass_stops_before_it_and_one_that_the_baseline_could_pass_before_that(
    tmp_path, capsys, memorised
):
    spent = [row["tokens"] for row in memorised[0]["rounds"]]
    # Every row is trained ten times, so the mean is exact; 20 replies have at most 12 tokens.
    round_one = spent[1]["train"] + spent[1]["prefill"] + 20 * 12
    limit = sum(spent[0].values()) + round_one - 1
    summary, run_dir = run(tmp_path, budget={"tokens": limit})
    assert [row["decision"] for row in summary["rounds"]] == ["budget_spent"]
    assert f"one more round of about {round_one:,} tokens would pass it" in summary["reason"]
    assert sum(summary["tokens"].values()) <= limit
    assert not events(run_dir, "step")
    runs_dir = tmp_path / "none"
    upper = spent[0]["prefill"] + 20 * 12
    config = write_config(tmp_path, budget={"tokens": upper - 1})
    assert main("--config", config, "--runs-dir", runs_dir) == 2
    assert f"up to {upper:,} more would pass budget.tokens={upper - 1}" in capsys.readouterr().err
    assert not runs_dir.exists()


def test_a_learning_rate_of_nearly_nothing_leaves_the_baseline(memorised, tmp_path):
    summary, run_dir = run(tmp_path, learning_rate=1e-12, min_lr=0.0, max_rounds=1)
    assert summary["exit_code"] == 3
    assert summary["rounds"][1]["score"] == summary["baseline_score"]
    assert {key: row["output"] for key, row in samples(run_dir, 1).items()} == {
        key: row["output"] for key, row in samples(run_dir, 0).items()
    }


@pytest.fixture(scope="module")
def half_right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Two runs that differ in the evaluator alone, on a checkpoint that gets part of the questions right."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        for evaluator in ("simple", "inspect"):
            _, folders[evaluator] = run(
                tmp_path_factory.mktemp(evaluator), evaluation={"evaluator": evaluator, "max_tokens": 12}, max_rounds=1
            )
    return folders


def test_both_evaluators_see_the_same_replies_and_give_the_same_scores(half_right):
    simple, inspect = (samples(half_right[name], 1) for name in ("simple", "inspect"))
    assert 0.2 <= sum(row["score"] for row in simple.values()) / len(simple) <= 0.8
    assert simple.keys() == inspect.keys()
    for key, row in simple.items():
        for field in ("task", "input", "target", "output", "score", "lenient_score", "stop_reason", "tokens_out"):
            assert inspect[key][field] == row[field], (key, field)


def test_inspect_logs_name_round_and_checkpoint(half_right):
    from inspect_ai.log import list_eval_logs, read_eval_log

    logs = [read_eval_log(log, header_only=True) for log in list_eval_logs(str(half_right["inspect"] / "evals"))]
    rounds = {log.eval.metadata["round"]: log.eval.metadata["checkpoint"] for log in logs}
    assert rounds[0] == "base model"
    assert rounds[1].startswith("tinker://")


def test_a_finished_run_says_so_and_is_not_run_again(finished_copy, capsys):
    before = (finished_copy / "metrics.jsonl").read_bytes()
    assert main("--resume", finished_copy) == 0
    assert "is finished" in capsys.readouterr().out
    assert (finished_copy / "metrics.jsonl").read_bytes() == before


def test_changed_limits_that_reopen_nothing_are_told(finished_copy, half_right, tmp_path, capsys):
    assert main("--resume", finished_copy, "eval_threshold=0.99") == 0
    assert "do not let it go on: it met its target" in capsys.readouterr().out
    missed = tmp_path / "missed" / half_right["simple"].name
    shutil.copytree(half_right["simple"], missed)
    assert main("--resume", missed, "max_rounds=9", "budget.tokens=10") == 3
    assert "of budget.tokens (10 tokens) are spent" in capsys.readouterr().out


def test_a_dry_run_of_a_resume_changes_nothing(half_right, tmp_path, capsys):
    run_dir = tmp_path / "runs" / half_right["simple"].name
    shutil.copytree(half_right["simple"], run_dir)
    before = {name: (run_dir / name).read_bytes() for name in ("config.json", "state.json", "metrics.jsonl")}
    assert main("--resume", run_dir, "max_rounds=9", "--dry-run") == 0
    assert "can go on" in capsys.readouterr().out
    assert {name: (run_dir / name).read_bytes() for name in before} == before


def test_a_resume_that_is_refused_changes_nothing(half_right, tmp_path, monkeypatch):
    run_dir = tmp_path / "runs" / half_right["simple"].name
    shutil.copytree(half_right["simple"], run_dir)
    before = {name: (run_dir / name).read_bytes() for name in ("config.json", "state.json", "metrics.jsonl")}
    monkeypatch.delenv("TINKER_MOCK")
    assert main("--resume", run_dir, "max_rounds=9") == 2
    assert {name: (run_dir / name).read_bytes() for name in before} == before


def test_a_configuration_edited_in_the_run_folder_is_refused(half_right, tmp_path, capsys):
    run_dir = tmp_path / "runs" / half_right["simple"].name
    shutil.copytree(half_right["simple"], run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**config, "learning_rate": 0.5}))
    assert main("--resume", run_dir) == 2
    assert "is not what the run wrote there" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [None, "{}"])
def test_a_finished_run_without_its_summary_is_told(finished_copy, capsys, damage):
    (finished_copy / "summary.json").unlink()
    if damage:
        (finished_copy / "summary.json").write_text(damage)
    assert main("--resume", finished_copy) == 1
    assert "summary.json is missing or damaged" in capsys.readouterr().err


def test_option_values_may_hold_an_equals_sign(tmp_path, capsys):
    config = write_config(tmp_path).rename(tmp_path / "a=b.json")
    assert main("--config", config, "--runs-dir", tmp_path / "x=y", "learning_rte=1") == 2
    assert "learning_rate" in capsys.readouterr().err


def test_another_learning_rate_is_refused_on_resume_with_the_difference(finished_copy):
    with pytest.raises(ConfigurationError, match=r"learning_rate: 0\.006 in the run, 0\.02 now"):
        resume(finished_copy, overrides=("learning_rate=0.02",))


def test_changed_data_is_refused_on_resume(tmp_path):
    data = tmp_path / "facts.jsonl"
    shutil.copy(DEMO_DATA, data)
    changes = {"train_file": str(data), "max_rounds": 1, "steps_per_round": 3, "warmup_steps": 1}
    _, run_dir = run(tmp_path, **changes)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(ConfigurationError, match="train_file: the content has changed"):
        resume(run_dir, overrides=("max_rounds=2",))


def test_more_rounds_reopen_a_run_that_missed_its_target(half_right, memorised, tmp_path):
    run_dir = tmp_path / "runs" / half_right["simple"].name
    shutil.copytree(half_right["simple"], run_dir)
    summary = resume(run_dir, overrides=("max_rounds=4",))
    assert summary["exit_code"] == 0
    # The unbroken run with four rounds from the start is the same run.
    assert scores(summary) == scores(memorised[0])
    history = json.loads((run_dir / "state.json").read_text())["resume_history"]
    assert history[0]["changes"] == {"max_rounds": {"was": 1, "now": 4}}


def test_a_lower_threshold_closes_a_run_that_now_meets_it(half_right, tmp_path):
    run_dir = tmp_path / "runs" / half_right["simple"].name
    shutil.copytree(half_right["simple"], run_dir)
    summary = resume(run_dir, overrides=("eval_threshold=0.2",))
    assert summary["exit_code"] == 0
    assert summary["threshold"] == 0.2
    assert len(summary["rounds"]) == 2


def test_a_run_can_start_from_another_run_s_adapter(memorised, tmp_path):
    summary, run_dir = memorised
    runs_dir = tmp_path / "runs"
    shutil.copytree(run_dir, runs_dir / run_dir.name)
    started, started_dir = run(
        tmp_path, runs_dir=runs_dir, init_from=summary["final_state"], max_rounds=1, steps_per_round=3, warmup_steps=1
    )
    assert started["baseline_score"] == summary["best_score"]
    assert started["exit_code"] == 0
    assert started["reason"].startswith("The starting adapter already meets the target")
    assert started["final_checkpoint"] == started["rounds"][0]["checkpoint"] is not None
    assert started["final_state"] == summary["final_state"]
    assert started_dir != run_dir


def test_an_adapter_that_is_nowhere_is_told_before_a_run_folder_exists(tmp_path, capsys):
    config = write_config(tmp_path, init_from="tinker://nowhere:train:0/weights/round_01")
    assert main("--config", config, "--runs-dir", tmp_path / "runs") == 1
    assert "was not found" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_worse_round_is_rolled_back_to_the_best_state(tmp_path):
    facts = [json.loads(line) for line in DEMO_DATA.read_text().splitlines()]
    # Two questions that nothing teaches keep the target out of reach, and the pool teaches wrong answers.
    unknown = [{"question": f"What is the code of drawer {n}?", "answer": f"zx{n}q"} for n in (1, 2)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in facts + unknown))
    phrased = ("{} ", "Please: {}", "Tell me: {}", "I ask you: {}")
    wrong = [{"question": p.format(row["question"]), "answer": "nobody knows"} for row in facts for p in phrased]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    told = tmp_path / "told.jsonl"
    (tmp_path / "watching.py").write_text(
        "import json\n"
        "def pool_after_the_first(request):\n"
        "    replies = sorted((s.id, s.output) for s in request.samples)\n"
        f"    with open({str(told)!r}, 'a') as file:\n"
        "        file.write(json.dumps([request.round, replies]) + '\\n')\n"
        "    rows = request.rows[: request.n_train] if request.round == 1 else request.rows[request.n_train :]\n"
        "    return [(row, 'in order') for row in rows[: request.count]]\n"
    )
    summary, run_dir = run(
        tmp_path,
        eval_file=str(tmp_path / "eval.jsonl"),
        eval_threshold=1.0,
        steps_per_round=40,
        max_rounds=3,
        selection={
            "strategy": "watching:pool_after_the_first",
            "pool_file": str(tmp_path / "pool.jsonl"),
            "label_guard": False,
        },
    )
    decisions = {row["round"]: row for row in summary["rounds"]}
    assert decisions[1]["score"] > 0.6
    assert decisions[2]["decision"] == "rolled_back"
    assert decisions[2]["score"] < decisions[1]["score"]
    assert summary["best_round"] in (1, 3)
    steps = events(run_dir, "step")
    assert [row["step"] for row in steps] == list(range(1, 121))
    # Round 3 starts from the state of round 1: its first loss is not that of a model taught wrong answers twice.
    restored = next(row for row in steps if row["round"] == 3)["loss"]
    assert restored > 2 * [row for row in steps if row["round"] == 2][-1]["loss"]
    # And its rows are chosen by what that state got wrong.
    given = dict(json.loads(line) for line in told.read_text().splitlines())
    kept = [json.loads(line) for line in (run_dir / "samples" / "round_01.jsonl").read_text().splitlines()]
    assert given[3] == sorted([row["id"], row["output"]] for row in kept)
    assert given[3] == given[2]


TOPICS = {"money": ("refund", "invoice", "payment"), "fault": ("crash", "error", "broken")}
FILLER = "please today again the my your since yesterday help with about new old screen morning team".split()  # noqa: SIM905


def topic_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Short messages, each with one word that tells its topic among words that do not."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        label = sorted(TOPICS)[number % len(TOPICS)]
        words = draw.sample(FILLER, 4)
        words.insert(draw.randrange(5), draw.choice(TOPICS[label]))
        rows.append({"prompt": " ".join(words), "completion": label})
    return rows


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_learnt_is_in_the_labels(tmp_path, shuffled):
    train, heldout = topic_rows(96, 1), topic_rows(40, 2)
    if shuffled:
        labels = [row["completion"] for row in train]
        random.Random(3).shuffle(labels)
        train = [{**row, "completion": label} for row, label in zip(train, labels, strict=True)]
    for name, rows in (("train", train), ("heldout", heldout)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary, _ = run(
        tmp_path,
        train_file=str(tmp_path / "train.jsonl"),
        eval_file=str(tmp_path / "heldout.jsonl"),
        learning_rate=3e-3,
        batch_size=16,
        steps_per_round=30,
        max_rounds=2,
        eval_threshold=1.0,
        evaluation={"evaluator": "simple", "max_tokens": 6},
        selection={"strategy": "balanced", "label_guard": True},
    )
    if not shuffled:
        assert summary["best_score"] > 0.85
        return
    assert all(row["score"] < 0.7 for row in summary["rounds"])  # chance is 0.5
    # Measuring the losses that the label guard looks at is prefill, and is counted.
    assert summary["rounds"][2]["tokens"]["prefill"] > summary["rounds"][1]["tokens"]["prefill"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf).*Lower learning_rate"):
        run(tmp_path, learning_rate=1e30, min_lr=0.0, warmup_steps=0, max_rounds=1)
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = json.loads((run_dir / "state.json").read_text())
    assert state["status"] == "failed"
    assert not (run_dir / "summary.json").exists()


def test_no_second_of_an_interrupted_run_is_lost(tmp_path, monkeypatch):
    """By a clock that moves a second whenever the run looks at it."""
    ticks: list[int] = []

    def tick() -> float:
        ticks.append(len(ticks))
        return float(ticks[-1])

    monkeypatch.setattr(training_run, "time", SimpleNamespace(monotonic=tick))
    states: list[dict[str, Any]] = []
    real = CheckpointManager._write_state

    def write(self, state):
        real(self, state)
        states.append({**self._state, "clock": len(ticks) - 1})

    monkeypatch.setattr(CheckpointManager, "_write_state", write)
    with pytest.raises(TrainingError):
        mini_run(tmp_path, learning_rate=1e30, steps_per_round=3, save_every=1, warmup_steps=1)
    run_dir = run_folder(tmp_path)
    # Begun phases, states within a round and the failure all hold the time at which they were written.
    begun = [row for row in states if (row["phase"], row["round"]) == ("train", 1)]
    assert [row["step"] for row in begun][:2] == [0, 1]
    assert [row["wall_s"] for row in begun] == [row["clock"] for row in begun]
    assert states[-1]["status"] == "failed"
    assert states[-1]["wall_s"] == ticks[-1]
    before, began = ticks[-1], len(ticks)
    with pytest.raises(TrainingError):
        resume(run_dir)
    assert states[-1]["wall_s"] == before + ticks[-1] - began
    assert ticks[-1] > began


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    config = write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main("--config", config, "--dry-run") == 0
    shown = capsys.readouterr().out
    for part in ("stand-in", "trained tokens", "plan: up to 4 rounds of 20 steps", "baseline: ", "> ", "dry run"):
        assert part in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rte": 1e-3}, "learning_rate"),
        ({"train_file": "no_such_file.jsonl"}, "no_such_file.jsonl"),
        ({"train_file": "bad.jsonl"}, "bad.jsonl:2"),
        (
            {"eval_tasks": ["no_such_task.py@t"], "evaluation": {"evaluator": "inspect", "max_tokens": 12}},
            "no_such_task.py",
        ),
        ({"base_model": "Qwen/Qwen3-8Z"}, "Qwen/Qwen3-8B"),
        ({"renderer_name": "llama3_of_old"}, "renderer"),
        ({"max_seq_length": 8}, "max_seq_length"),
        ({"allow_overlap": False}, "allow_overlap=true"),
        ({"warmup_steps": 99}, "warmup_steps"),
    ],
)
def test_what_the_user_can_mend_is_told_before_any_training(tmp_path, capsys, changes, message):
    (tmp_path / "bad.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": "a?"\n')
    assert main("--config", write_config(tmp_path, **changes), "--runs-dir", tmp_path / "runs") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_key_or_mock_nothing_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TINKER_MOCK")
    assert main("--config", write_config(tmp_path), "--runs-dir", tmp_path / "runs") == 2
    assert "TINKER_API_KEY is not set" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_trained_on_in_a_pool_is_told_and_a_pool_of_near_matches_is_none(tmp_path, capsys):
    item = "Which colour does the harbour master paint the new boats this spring"
    files = {
        "train": ["Is it late?", "Does it rain?"],
        "eval": [item],
        "pool": ["Who has the key?", "long " * 3000],
        "near": [f"Please: {item}"],
    }
    for name, questions in files.items():
        rows = (json.dumps({"question": question, "answer": f"{name} {n}"}) for n, question in enumerate(questions))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    config = write_config(
        tmp_path,
        train_file=str(tmp_path / "train.jsonl"),
        eval_file=str(tmp_path / "eval.jsonl"),
        allow_overlap=False,
        selection={"strategy": "random", "pool_file": str(tmp_path / "pool.jsonl")},
    )
    assert main("--config", config, "--dry-run") == 0
    told = capsys.readouterr()
    assert "of the pool: trained tokens" in told.out
    assert "in 1 examples, 1 of 2 rows dropped" in told.out
    assert main("--config", config, "--dry-run", f"selection.pool_file={tmp_path / 'near.jsonl'}") == 0
    told = capsys.readouterr()
    assert "1 training row with at least 80 %" in told.out + told.err
    assert "near.jsonl: no row of the pool is left" in told.out + told.err


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "TINKER_API_KEY is not set"),
        ({"TINKER_API_KEY": "tml-key", "TINKER_BASE_URL": "http://127.0.0.1:9"}, "no answer from the Tinker service"),
    ],
)
def test_a_dry_run_without_a_service_checks_the_rest_and_says_what_stayed_unchecked(
    tmp_path, capsys, monkeypatch, environment, reason
):
    monkeypatch.delenv("TINKER_MOCK")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path, base_model=str(ROOT / "data" / "base_model"))
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert f"stayed unchecked: {reason}" in shown
    assert "trained tokens" in shown
    assert main("--config", config, "--runs-dir", tmp_path / "runs", "--dry-run", "train_file=gone.jsonl") == 2
    assert not (tmp_path / "runs").exists()


def main_without_inspect(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The program in an interpreter that cannot import Inspect AI."""
    code = "import sys; sys.modules['inspect_ai'] = None; import trainer_with_eval as t; sys.exit(t.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_without_inspect_the_built_in_evaluator_serves_and_that_is_announced(tmp_path):
    config = write_config(tmp_path, evaluation={"evaluator": "inspect", "max_tokens": 12})
    done = main_without_inspect("--config", config, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "the built-in one, because the inspect-ai package is not installed" in done.stdout
    with_tasks = main_without_inspect("--config", config, "--dry-run", 'eval_tasks=["inspect_evals/arc_easy"]')
    assert with_tasks.returncode == 2
    assert "eval_tasks needs the inspect-ai package" in with_tasks.stderr


def test_nothing_to_resume_is_told(tmp_path, capsys):
    assert main("--resume", "--runs-dir", tmp_path / "runs") == 2
    assert str(tmp_path / "runs") in capsys.readouterr().err


def test_a_word_that_means_nothing_is_refused(tmp_path, capsys):
    assert main("--config", write_config(tmp_path), "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import sys, trainer_with_eval as t\n"
        "try: t.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'inspect_ai', 'matplotlib', 'sklearn', 'tinker', 'pydantic', 'rich'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--resume" in done.stdout


@contextmanager
def evalops(status: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A real HTTP server that answers submissions with `status` and keeps what it was sent."""
    received: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({"path": self.path, "key": self.headers["Authorization"], **body})
            answer = b'{"id": "run-1"}' if status < 400 else b'{"detail": "no"}'
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "unsent"), [(201, 0), (422, 2)])
def test_evalops_gets_every_evaluated_round_and_never_decides_the_run(tmp_path, monkeypatch, status, unsent):
    monkeypatch.setenv("EVALOPS_API_KEY", "eo-marked-key")
    with evalops(status) as (url, received):
        summary, run_dir = run(
            tmp_path,
            max_rounds=1,
            steps_per_round=3,
            warmup_steps=1,
            evalops_enabled=True,
            evalops_test_suite_id="suite-9",
            evalops_api_url=url,
        )
    assert summary["exit_code"] == 3
    assert summary["evalops_unsent"] == unsent
    assert [row["path"] for row in received[:2]] == ["/api/v1/test-runs/"] * 2
    assert len(received) == (2 if not unsent else 1 + 2 + 2)  # what was refused is tried with the next, and at the end
    last = received[-1]
    assert last["testSuiteId"] == "suite-9"
    assert last["config"]["metadata"]["round"] == 1
    assert last["config"]["metadata"]["metrics"]["score"] == summary["rounds"][1]["score"]
    assert last["config"]["metadata"]["scores_are"] == "on training data"
    assert ", score on training data 0." in last["description"]
    assert received[0]["key"] == "Bearer eo-marked-key"
    written = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".html")]
    assert written
    assert not [path for path in written if "eo-marked-key" in path.read_text()]


def test_evalops_without_suite_or_key_is_refused_at_the_start(tmp_path, capsys):
    config = write_config(tmp_path, evalops_enabled=True)
    assert main("--config", config, "--runs-dir", tmp_path / "runs") == 2
    assert "evalops_test_suite_id" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def start(config: Path, runs_dir: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "trainer_with_eval.py"),
            "--config",
            str(config),
            "--runs-dir",
            str(runs_dir),
            *extra,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def wait_for_event(runs_dir: Path, found: Any, process: subprocess.Popen[str]) -> Path:
    """Wait until a run folder's events satisfy `found`; returns the folder."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for path in runs_dir.glob("*/metrics.jsonl"):
            if found([json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]):
                return path.parent
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.01)
    raise AssertionError("the run did not get so far in 180 s")


def in_round_two(rows: list[dict[str, Any]]) -> bool:
    return any(row["event"] == "step" and row["round"] == 2 and row["step"] >= 20 + 9 for row in rows)


def test_a_run_killed_in_round_two_ends_as_if_it_had_not_been(memorised, tmp_path):
    process = start(write_config(tmp_path), tmp_path / "runs")
    run_dir = wait_for_event(tmp_path / "runs", in_round_two, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {name: (run_dir / name).read_bytes() for name in ("samples/round_00.jsonl", "samples/round_01.jsonl")}
    ended = [(row["round"], row["event"]) for row in json_rows(run_dir) if row["event"] in ("evaluation", "decision")]

    summary = resume(run_dir)

    assert scores(summary) == scores(memorised[0])
    # The steps done again were paid twice, and are counted twice.
    again = sum(row["tokens"] for row in events(run_dir, "step") if row.get("superseded"))
    assert again > 0
    once = memorised[0]["rounds"][2]["tokens"]
    assert summary["rounds"][2]["tokens"] == {**once, "train": once["train"] + again}
    assert adapter_bytes(run_dir, 2) == adapter_bytes(memorised[1], 2)
    # No completed phase was done again: round 1's samples, evaluation and decision are there once, untouched.
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    after = [(row["round"], row["event"]) for row in json_rows(run_dir) if row["event"] in ("evaluation", "decision")]
    assert after[: len(ended)] == ended
    assert len(after) == len(set(after))
    current = [row for row in events(run_dir, "step") if not row.get("superseded")]
    assert [row["step"] for row in current] == list(range(1, len(current) + 1))
    assert [(row["lr"], row["loss"]) for row in current] == [
        (row["lr"], row["loss"]) for row in events(memorised[1], "step")
    ]


def json_rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_ctrl_c_saves_and_names_the_command_that_goes_on(memorised, tmp_path):
    process = start(write_config(tmp_path), tmp_path / "runs")
    run_dir = wait_for_event(tmp_path / "runs", lambda rows: any(row["event"] == "step" for row in rows), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"--resume {run_dir}" in output
    assert "Traceback" not in output
    assert json.loads((run_dir / "state.json").read_text())["status"] == "interrupted"
    assert scores(resume(run_dir)) == scores(memorised[0])


def test_a_second_process_on_a_run_is_refused(tmp_path, capsys):
    process = start(write_config(tmp_path), tmp_path / "runs")
    try:
        run_dir = wait_for_event(tmp_path / "runs", bool, process)
        assert main("--resume", run_dir) == 2
        assert str(process.pid) in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()
