"""A checkpoint's evaluation within a run: what fails, and what a resume asks again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from mini_run import mini_run, run_folder

import chat_sampler
import run_opening
import trainer_with_eval
from checkpoint_evaluation import Traffic
from checkpoint_manager import CheckpointManager
from error_handling import EvaluationError, ServiceError
from evaluation import SampleResult
from logger import read_events


def test_a_task_without_targets_runs_through_and_its_epochs_are_combined_alike_everywhere(tmp_path):
    run_dir = mini_run(
        tmp_path,
        eval_file=None,
        eval_tasks=[str(Path(__file__).parent / "inspect_tasks" / "scored_tasks.py") + "@without_targets"],
        evaluation={"evaluator": "inspect", "max_tokens": 2},
    )
    with CheckpointManager.open(run_dir, lock=False) as folder:
        summary = folder.load_summary()
        assert [row["score"] for row in summary["rounds"]] == [0.5, 0.5]
        assert [row["nll"] for row in summary["rounds"]] == [None, None]
        assert summary["rounds"][1]["categories"] == {}
        record = run_opening.round_record(folder, summary["rounds"][1])
        # The mean of the epochs would be 0.25.
        assert sum(record.sample_scores.values()) / 6 == record.score
        events, _ = read_events(folder.metrics_path)
    told = [event["message"] for event in events if event["event"] == "warning"]
    assert any("whether the adapter has an effect is not checked" in message for message in told)


def test_an_evaluation_with_too_many_failures_ends_the_run_and_a_resume_asks_only_those_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")
    real = chat_sampler.ChatSampler.reply
    asked: list[str] = []

    def answering(failing: set[str]):
        async def reply(self, messages, *, epoch=1):
            question = messages[-1]["content"]
            asked.append(question)
            if question in failing:
                raise ServiceError("HTTP 503")
            return await real(self, messages, epoch=epoch)

        return reply

    lost = {"The colour of thing 3?", "The colour of thing 8?"}
    monkeypatch.setattr(chat_sampler.ChatSampler, "reply", answering(lost))
    with pytest.raises(EvaluationError, match=r"2 of 10 samples of eval_file failed, more than evaluation.max_errors"):
        # A target of 0 is met by the baseline: nothing is trained here.
        mini_run(tmp_path, rows=10, eval_threshold=0.0)
    run_dir = run_folder(tmp_path)
    assert json.loads((run_dir / "state.json").read_text())["status"] == "failed"
    assert len(asked) == 10

    asked.clear()
    monkeypatch.setattr(chat_sampler.ChatSampler, "reply", answering(set()))
    assert trainer_with_eval.main(["--resume", str(run_dir)]) == 0
    assert set(asked) == lost
    (baseline,) = json.loads((run_dir / "summary.json").read_text())["rounds"]
    assert (baseline["n"], baseline["errors"], baseline["answered_score"]) == (10, 0, baseline["score"])


async def test_a_run_that_stops_waits_for_the_scoring_of_a_reply_also_when_another_sample_failed():
    answered = SampleResult("t", "1", 1, "q", "a", "a", 1.0)
    failed = SampleResult("t", "2", 1, "q", "a", "", 0.0, error="HTTP 503")
    traffic = Traffic()
    traffic.keep([failed])
    traffic.move(replies=1)
    settled = asyncio.ensure_future(traffic.settle())
    await asyncio.sleep(0.1)
    assert not settled.done()
    traffic.keep([answered])
    await settled
