"""Beginning a run and taking one up again: what may have changed since, and what a finished run says.

A new run folder is made only after every check has passed. A run that is resumed must be the run it was: the same
configuration but for limits, the same data, the same kind of service.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import config_schema
import durable_files
import round_decision
import run_summary
from checkpoint_manager import CheckpointManager
from error_handling import ConfigurationError
from logger import StructuredLogger, redact_values, utc_now
from preparation import Prepared

# Changing these makes no finished step or score wrong; they may reopen a run that stopped below its target.
HARMLESS = ("max_rounds", "eval_threshold", "decision.patience", "budget.tokens", "budget.money", "budget.seconds")
HARMLESS_GROUPS = ("prices.",)


def show_plan(prepared: Prepared, screen: StructuredLogger) -> None:
    """What will be done, with one example and its loss mask (`>` marks what is trained)."""
    for line in prepared.lines:
        screen.say(line)
    for warning in prepared.warnings:
        screen.warn(warning)
    screen.say(prepared.mask_preview)


def create_run_folder(prepared: Prepared, runs_dir: Path | str, command: str) -> CheckpointManager:
    """Make and lock the folder of a new run."""
    config = prepared.config
    return CheckpointManager.create(
        runs_dir,
        config.to_json_dict(),
        command=command,
        hparams={
            "learning_rate": prepared.learning_rate,
            # Kept as it was at the start: with more rounds allowed later, a default warm-up would come out longer.
            "warmup_steps": config.resolved_warmup_steps,
            "lora_rank": config.lora_rank,
            "batch_size": config.batch_size,
            "seed": config.seed,
        },
        service=prepared.service,
        evaluator=prepared.evaluator,
        data_digests=prepared.data_digests,
    )


def reopen(
    folder: CheckpointManager, asked: config_schema.TrainingConfig | None
) -> tuple[config_schema.TrainingConfig | None, dict[str, Any]]:
    """(the configuration to go on with, the changes from the run's own), or (None, {}) when the run is finished.

    Raises `ConfigurationError` listing every difference that would make the run another one. A run that stopped below
    its target is reopened when a changed limit would have let it go on.
    """
    own = config_schema.load_and_validate_config(folder.config_path)
    config = asked or own
    changes = differences(own.to_json_dict(), redact_values(config.to_json_dict()))
    harmful = {key: pair for key, pair in changes.items() if not _harmless(key)}
    if harmful:
        listed = "\n".join(f"  {key}: {was!r} in the run, {now!r} now" for key, (was, now) in sorted(harmful.items()))
        raise ConfigurationError(
            f"the configuration is not that of run {folder.run_id}:\n{listed}\n"
            f"Resume with the run's own (leave --config out), or start a new run. These may change: "
            f"{', '.join(HARMLESS)}, prices."
        )
    if folder.load_state()["status"] == "completed":
        last = folder.round_results()[-1]
        if not changes or not would_go_on(folder, config, last):
            return None, {}
        folder.redo_from(last["round"], "decide", status="interrupted")
    if changes:
        durable_files.write_json(folder.config_path, redact_values(config.to_json_dict()))
    return config, {key: {"was": was, "now": now} for key, (was, now) in changes.items()}


def would_go_on(folder: CheckpointManager, config: config_schema.TrainingConfig, last: Mapping[str, Any]) -> bool:
    """True when a run that missed its target would be decided differently under `config`."""
    if last["decision"] == "target_met":
        return False
    records = [round_record(folder, row) for row in folder.round_results()]
    tokens = run_summary.add_tokens(row["tokens"] for row in folder.round_results())
    decision = round_decision.decide(
        records,
        config,
        learning_rate=last["learning_rate"] or config.learning_rate,
        tokens_spent=sum(tokens.values()),
        seconds_spent=folder.load_state().get("wall_s", 0.0),
        money_spent=run_summary.money(tokens, config.prices.get(config.base_model)),
    )
    return decision.action == "continue" or decision.status == "target_met"


def round_record(folder: CheckpointManager, row: Mapping[str, Any]) -> round_decision.RoundRecord:
    """A round's kept result, with the scores of its samples (epochs averaged), as `round_decision` takes it."""
    scores: dict[tuple[str, str], list[float]] = {}
    for sample in folder.load_samples(row["round"]):
        scores.setdefault((sample.task, sample.id), []).append(sample.score)
    return round_decision.RoundRecord(
        round=row["round"],
        score=row["score"],
        ci_low=row["ci_low"],
        ci_high=row["ci_high"],
        n=row["n"],
        errors=row["errors"],
        task_scores=tuple(
            round_decision.TaskScore(task["task"], task["score"], task["threshold"], task["ci_low"])
            for task in row["tasks"]
        ),
        sample_scores={(task, name, 1): sum(values) / len(values) for (task, name), values in scores.items()},
    )


def refuse_changed_inputs(folder: CheckpointManager, prepared: Prepared) -> None:
    """Raise `ConfigurationError` when the data, the evaluator or the kind of service is not what the run began with."""
    state = folder.load_state()
    faults = []
    for name, digest in state.get("data_digests", {}).items():
        if prepared.data_digests.get(name) != digest:
            faults.append(f"  {name}: the file's content has changed since the run began")
    if state.get("evaluator", prepared.evaluator) != prepared.evaluator:
        faults.append(f"  evaluator: {state['evaluator']} when the run began, {prepared.evaluator} now")
    began, now = state.get("service", prepared.service), prepared.service
    if (began == "embedded") != (now == "embedded"):
        remedy = "set TINKER_MOCK=1" if began == "embedded" else "unset TINKER_MOCK and set TINKER_API_KEY"
        faults.append(f"  service: {began} when the run began, {now} now; {remedy}")
    if faults:
        raise ConfigurationError(
            f"run {folder.run_id} cannot go on as it began:\n"
            + "\n".join(faults)
            + "\nPut them back, or start a new run."
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*was, *now}):
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def tell_finished(folder: CheckpointManager, screen: StructuredLogger) -> dict[str, Any]:
    """Say that the run is finished and what came out; returns its summary."""
    summary = folder.load_summary()
    assert summary is not None, "a completed run has a summary"
    screen.say(f"run {folder.run_id} is finished: {summary['reason']}")
    tell_outcome(folder, summary, screen)
    return summary


def tell_outcome(folder: CheckpointManager, summary: Mapping[str, Any], screen: StructuredLogger) -> None:
    """The table of rounds, and where everything is."""
    screen.rounds_table(summary["rounds"])
    best = "the base model" if summary["best_round"] == 0 else f"round {summary['best_round']}"
    met = "target met" if summary["exit_code"] == 0 else "target not met"
    screen.say(f"{met}: best is {best} with {summary['best_score']:.3f} (threshold {summary['threshold']:g})")
    if summary.get("scores_are"):
        screen.warn(f"scores are {summary['scores_are']}")
    cost = f", ${summary['cost']:.2f}" if summary["cost"] is not None else ""
    tokens = summary["tokens"]
    screen.say(
        f"tokens: {tokens['train']:,} trained, {tokens['prefill']:,} prefilled, {tokens['sample']:,} sampled{cost}; "
        f"{summary['wall_s']:.0f} s"
    )
    if summary.get("evalops_unsent"):
        screen.warn(
            f"{summary['evalops_unsent']} EvalOps submissions are still unsent; send them with "
            f"python evalops_client.py flush {folder.run_dir}"
        )
    places: dict[str, Path | str] = {"run folder": folder.run_dir, "summary": folder.summary_path}
    if (folder.run_dir / "report.html").is_file():
        places["report"] = folder.run_dir / "report.html"
    if summary["final_checkpoint"]:
        places["checkpoint"] = summary["final_checkpoint"]
    screen.where(places)


def record_interruption(folder: CheckpointManager, status: str) -> None:
    """Write `interrupted` or `failed` into the state of a run that stops before its end."""
    folder.update_state(status=status, stopped_at=utc_now())


def _harmless(key: str) -> bool:
    return key in HARMLESS or key == "budget" or key.startswith(HARMLESS_GROUPS)
