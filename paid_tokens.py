"""Tokens that a round of a run was paid for, from the records of its folder.

Counted is what was sent and answered, also what a kill made the run do again: the steps of `metrics.jsonl` (superseded
ones are steps whose weights were lost, not whose price was), every row of the round's samples (one that failed and was
asked again is there twice), and the forward passes that the run noted before it sent them. Not known, and so not
counted, are requests in flight at a kill: at most two steps, and the samples that were being asked.
"""

from __future__ import annotations

import durable_files
import run_summary
from checkpoint_manager import CheckpointManager
from evaluation import SampleResult
from logger import read_events

_STATE_KEY = "forward_tokens"


def note_forward(folder: CheckpointManager, round: int, tokens: int) -> None:
    """Keep, before they are sent, that `tokens` more go through a forward pass for `round`: billed as prefill."""
    counted = folder.load_state().get(_STATE_KEY, {})
    folder.update_state(**{_STATE_KEY: {**counted, str(round): forward_tokens(folder, round) + tokens}})


def forward_tokens(folder: CheckpointManager, round: int) -> int:
    """Tokens of forward passes alone (likelihoods, the label guard's losses) that `round` took so far."""
    return int(folder.load_state().get(_STATE_KEY, {}).get(str(round), 0))


def paid_tokens(folder: CheckpointManager, round: int) -> dict[str, int]:
    """What `round` took so far; see `run_summary.token_counts`. Works on a round that is not finished, too."""
    events, _ = read_events(folder.metrics_path)
    asked = []
    path = folder.samples_path(round)
    for file in (*path.parent.glob(f"{path.stem}.superseded*.jsonl"), path):
        rows, _ = durable_files.read_jsonl(file, missing_ok=True)
        asked += [SampleResult.from_row(row) for row in rows]
    return run_summary.token_counts(
        trained=sum(event["tokens"] for event in events if event.get("event") == "step" and event["round"] == round),
        likelihood=forward_tokens(folder, round),
        samples=asked,
    )


def taken_back(folder: CheckpointManager) -> dict[str, int]:
    """What was paid for rounds without a result: taken back, abandoned, or not yet measured."""
    measured = {row["round"] for row in folder.round_results()}
    events, _ = read_events(folder.metrics_path)
    begun = {event["round"] for event in events if event.get("event") == "step"}
    begun |= {int(key) for key in folder.load_state().get(_STATE_KEY, {})}
    samples = (path.name.removeprefix("round_").partition(".")[0] for path in folder.samples_path(0).parent.glob("*"))
    begun |= {int(number) for number in samples if number.isdigit()}
    return run_summary.add_tokens(paid_tokens(folder, round) for round in sorted(begun - measured))


def spent(folder: CheckpointManager) -> dict[str, int]:
    """All that the run was paid for: the rounds that have a result, and what `taken_back` counts."""
    return run_summary.add_tokens([*(row["tokens"] for row in folder.round_results()), taken_back(folder)])
