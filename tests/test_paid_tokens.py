"""Tokens counted from a run folder's records, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import paid_tokens
from checkpoint_manager import CheckpointManager
from evaluation import SampleResult
from logger import StructuredLogger


def sample(identity: str, tokens_in: int, tokens_out: int, error: str | None = None) -> SampleResult:
    return SampleResult("t", identity, 1, "q", "a", "a", 0.0, error=error, tokens_in=tokens_in, tokens_out=tokens_out)


def test_what_was_done_twice_is_counted_twice(tmp_path: Path):
    with CheckpointManager.create(tmp_path, {"base_model": "m"}) as folder:
        log = StructuredLogger(folder.metrics_path, console=False)
        for round, step, tokens in ((1, 1, 100), (1, 2, 110), (2, 3, 1000)):
            log.event("step", round=round, step=step, tokens=tokens, loss=1.0)
        assert log.supersede_after(1) == 2  # steps 2 and 3 were lost in a kill
        log.event("step", round=1, step=2, tokens=110, loss=1.0)
        folder.append_sample(1, sample("1", 30, 5))
        folder.append_sample(1, sample("2", 20, 8, error="cut off"))
        folder.append_sample(1, sample("2", 20, 9))
        paid_tokens.note_forward(folder, 1, 60)
        paid_tokens.note_forward(folder, 1, 60)
        paid_tokens.note_forward(folder, 2, 7)
        assert paid_tokens.paid_tokens(folder, 1) == {"train": 320, "prefill": 120 + 70, "sample": 22}
        assert paid_tokens.paid_tokens(folder, 2) == {"train": 1000, "prefill": 7, "sample": 0}
        assert paid_tokens.paid_tokens(folder, 3) == {"train": 0, "prefill": 0, "sample": 0}
        folder.redo_from(1, "evaluate")
        folder.append_sample(1, sample("1", 30, 1))
        assert paid_tokens.paid_tokens(folder, 1)["sample"] == 23


def test_rounds_that_are_taken_back_stay_paid(tmp_path: Path):
    with CheckpointManager.create(tmp_path, {"base_model": "m"}) as folder:
        log = StructuredLogger(folder.metrics_path, console=False)
        for round in (1, 2, 3):
            log.event("step", round=round, step=round, tokens=100 * round, loss=1.0)
            folder.append_samples(round, [sample("1", 30, 5)])
            if round < 3:
                folder.phase_done(round, "evaluate", result={"tokens": paid_tokens.paid_tokens(folder, round)})
        paid_tokens.note_forward(folder, 4, 7)
        spent = {"train": 600, "prefill": 90 + 7, "sample": 15}
        assert paid_tokens.spent(folder) == spent
        assert paid_tokens.taken_back(folder) == {"train": 300, "prefill": 37, "sample": 5}
        folder.redo_from(1, "train")
        log.supersede_after(0)
        assert folder.round_results() == []
        assert paid_tokens.spent(folder) == paid_tokens.taken_back(folder) == spent
