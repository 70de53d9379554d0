"""Beginning a run and taking one up again: what may have changed since, and what a finished run says.

A new run folder is made only after every check has passed. A run that is resumed must be the run it was: the same
configuration but for limits, the same data, the same kind of service.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config_schema
import cost_estimate
import durable_files
import evalops_client
import paid_tokens
import round_decision
import run_summary
from checkpoint_manager import CheckpointManager
from error_handling import CheckpointError, ConfigurationError
from logger import StructuredLogger, redact_values, utc_now
from preparation import Prepared

# Changing these makes no finished step or score wrong; they may reopen a run that stopped below its target.
HARMLESS = ("max_rounds", "eval_threshold", "decision.patience", "budget.tokens", "budget.money", "budget.seconds")
HARMLESS_GROUPS = ("prices.",)

MEASURED_ONCE = "reused_from"
"""Key of round 0's result that names the run whose answers of the base model were taken over."""


def show_plan(prepared: Prepared, screen: StructuredLogger) -> None:
    """What will be done, with one example and its loss mask (`>` marks what is trained)."""
    for line in prepared.lines:
        screen.say(line)
    for warning in prepared.warnings:
        screen.warn(warning)
    screen.say(prepared.mask_preview)


def create_run_folder(prepared: Prepared, runs_dir: Path | str, command: str, **state_fields: Any) -> CheckpointManager:
    """Make and lock the folder of a new run; `state_fields` are further fields of its `state.json`."""
    config = prepared.config
    return CheckpointManager.create(
        runs_dir,
        config.to_json_dict(),
        command=command,
        hparams={
            "learning_rate": prepared.learning_rate,
            "warmup_steps": prepared.warmup_steps,
            "lora_rank": config.lora_rank,
            "batch_size": config.batch_size,
            "seed": config.seed,
        },
        service=prepared.service,
        evaluator=prepared.evaluator,
        data_digests=prepared.data_digests,
        config_digest=_digest(redact_values(config.to_json_dict())),
        scores_are=run_summary.ON_TRAINING_DATA if prepared.on_training_data else None,
        near_matches=[match.to_json() for match in prepared.near_matches],
        **state_fields,
    )


@dataclass(frozen=True)
class Reopening:
    """How a run goes on. `config` is None when it is finished and stays so. `obstacle` says why changed settings are
    left out, `changes` are those taken; `decide_again` names the round of a finished run whose decision is taken back.
    """

    config: config_schema.TrainingConfig | None
    changes: Mapping[str, Any]
    obstacle: str = ""
    decide_again: int | None = None


def reopen(folder: CheckpointManager, asked: config_schema.TrainingConfig | None) -> Reopening:
    """Whether and how the run goes on under `asked` (None: its own configuration). Writes nothing.

    Raises `ConfigurationError` listing every difference that would make the run another one. A run that stopped below
    its target is reopened when a changed limit would have let it go on, or lets it end as met. One that met its target
    ends so under its own configuration, also when it was killed before that was written down. What changed limits mean
    for the last decision of any other unfinished run, `take_over` looks at.
    """
    written = folder.load_state().get("config_digest")
    if written is not None and written != _digest(folder.load_config()):
        raise ConfigurationError(
            f"{folder.config_path} is not what the run wrote there. Put it back; a limit is changed on the command "
            "line (--resume RUN max_rounds=6), and anything else needs a new run."
        )
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
    told = {key: {"was": was, "now": now} for key, (was, now) in changes.items()}
    if folder.load_state()["status"] != "completed":
        decided = _last_decided(folder)
        if changes and decided is not None and decided["decision"] == "target_met":
            return Reopening(own, {}, obstacle_to_going_on(folder, config, decided))
        return Reopening(config, told)
    if not changes:
        return Reopening(None, {})
    last = folder.round_results()[-1]
    obstacle = obstacle_to_going_on(folder, config, last)
    if obstacle:
        return Reopening(None, told, obstacle)
    return Reopening(config, told, decide_again=last["round"])


def _last_decided(folder: CheckpointManager) -> dict[str, Any] | None:
    """The last round's result when it is decided; None while the decision, which looks at all rounds, is to come."""
    rows = folder.round_results()
    return rows[-1] if rows and folder.is_done(rows[-1]["round"], "decide") else None


def _decided_otherwise(folder: CheckpointManager, prepared: Prepared) -> int | None:
    """The last round when its decision comes out otherwise under the configuration of `prepared`, else None.

    Of the round that is begun, only what is left of it is expected to be spent.
    """
    last = _last_decided(folder)
    if last is None:
        return None
    expected = expected_tokens(folder, prepared, last["round"] + 1)
    begun = paid_tokens.paid_tokens(folder, last["round"] + 1)
    seconds = folder.load_state().get("wall_s", 0.0)
    decision = decide(
        folder,
        prepared.config,
        learning_rate=last["learning_rate"] or prepared.learning_rate,
        seconds_spent=seconds,
        next_tokens={kind: max(0, count - begun[kind]) for kind, count in expected.items()},
        next_seconds=max(0.0, last.get("seconds", 0.0) - (seconds - last["wall_s"])),
    )
    same = (decision.action, decision.status) == (last["action"], last["decision"])
    return None if same else int(last["round"])


def take_over(folder: CheckpointManager, reopening: Reopening, prepared: Prepared, command: str) -> None:
    """Write down that the run goes on, once every check has passed.

    Where changed limits alter an unfinished run's last decision, that is taken back, with what was begun after it.
    """
    assert reopening.config is not None
    decide_again = reopening.decide_again
    if reopening.changes and decide_again is None:
        decide_again = _decided_otherwise(folder, prepared)
    if decide_again is not None:
        folder.redo_from(decide_again, "decide", status="interrupted")
    config = redact_values(reopening.config.to_json_dict())
    if reopening.changes:
        # No digest while the two are written one after the other: killed in between, either configuration is good.
        folder.update_state(config_digest=None)
        durable_files.write_json(folder.config_path, config)
    folder.record_resume(command=command, changes=dict(reopening.changes))
    folder.update_state(config_digest=_digest(config))


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def obstacle_to_going_on(
    folder: CheckpointManager, config: config_schema.TrainingConfig, last: Mapping[str, Any]
) -> str:
    """Why a finished run is not decided differently under `config`; empty when it is."""
    if last["decision"] == "target_met":
        target = folder.load_config()["eval_threshold"]
        return f"it met its target of {target:g}, so there is nothing left to do; for another target start a new run"
    decision = decide(
        folder,
        config,
        learning_rate=last["learning_rate"] or config.learning_rate,
        seconds_spent=folder.load_state().get("wall_s", 0.0),
    )
    goes_on = decision.action == "continue" or decision.status == "target_met"
    return "" if goes_on else decision.reason


def decide(
    folder: CheckpointManager,
    config: config_schema.TrainingConfig,
    *,
    learning_rate: float,
    seconds_spent: float,
    next_tokens: Mapping[str, int] | None = None,
    next_seconds: float = 0.0,
) -> round_decision.Decision:
    """`round_decision.decide` about the rounds that the folder holds; spent is all that was paid, by `paid_tokens`."""
    tokens = paid_tokens.spent(folder)
    price = config.prices.get(config.base_model)
    expected = next_tokens or {}
    return round_decision.decide(
        [round_record(folder, row) for row in folder.round_results()],
        config,
        learning_rate=learning_rate,
        tokens_spent=sum(tokens.values()),
        seconds_spent=seconds_spent,
        money_spent=run_summary.money(tokens, price),
        next_tokens=sum(expected.values()),
        next_seconds=next_seconds,
        next_money=run_summary.money(expected, price) or 0.0 if expected else 0.0,
    )


def expected_tokens(folder: CheckpointManager, prepared: Prepared, round: int) -> dict[str, int]:
    """The most tokens that `round`, which is to come, is expected to take."""
    rows = folder.round_results()
    return cost_estimate.expected_round(
        prepared.estimate.round(round), rows[0]["tokens"], [row["tokens"] for row in rows[1:]]
    )


def round_record(folder: CheckpointManager, row: Mapping[str, Any]) -> round_decision.RoundRecord:
    """A round's kept result, with the scores of its samples (epochs combined as in the score), as `round_decision`
    takes it."""
    scores: dict[tuple[str, str], list[float]] = {}
    clusters: dict[round_decision.SampleKey, str] = {}
    for sample in folder.load_samples(row["round"]):
        scores.setdefault((sample.task, sample.id), []).append(sample.score)
        if sample.cluster is not None:
            clusters[sample.task, sample.id, 1] = sample.cluster
    combined = folder.load_sample_scores(row["round"])
    return round_decision.RoundRecord(
        round=row["round"],
        checkpoint=row["checkpoint"],
        score=row["score"],
        ci_low=row["ci_low"],
        ci_high=row["ci_high"],
        n=row["n"],
        errors=row["errors"],
        task_scores=tuple(
            round_decision.TaskScore(task["task"], task["score"], task["threshold"], task["ci_low"])
            for task in row["tasks"]
        ),
        sample_scores={
            (task, name, 1): combined.get((task, name), sum(values) / len(values))
            for (task, name), values in scores.items()
        },
        task_weights={task["task"]: task["weight"] for task in row["tasks"]},
        clusters=clusters,
    )


def refuse_changed_inputs(folder: CheckpointManager, prepared: Prepared) -> None:
    """Raise `ConfigurationError` when the data, the evaluator or the kind of service is not what the run began with."""
    state = folder.load_state()
    faults = []
    for name, digest in state.get("data_digests", {}).items():
        if prepared.data_digests.get(name) != digest:
            faults.append(f"  {name}: the content has changed since the run began")
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


def tell_finished(
    folder: CheckpointManager, why: str, screen: StructuredLogger, *, send: bool = True
) -> dict[str, Any]:
    """Say that the run is finished, what came out, and `why` changed limits do not reopen it; returns its summary.

    With `send`, what EvalOps has not taken is sent again.
    """
    summary = folder.load_summary()
    if summary is None or not {"reason", "rounds", "best_round"} <= summary.keys():
        raise CheckpointError(
            f"{folder.summary_path} is missing or damaged, and the run is finished: state.json still holds its rounds. "
            "Restore the file from a copy."
        )
    screen.say(f"run {folder.run_id} is finished: {summary['reason']}")
    if send and folder.outbox_path.exists():
        result = evalops_client.send_kept(folder.outbox_path, folder.load_config().get("evalops_api_url"))
        for error in result.errors:
            screen.warn(f"EvalOps did not take what was kept: {error}")
        folder.note_unsent(result.left)
        summary = {**summary, "evalops_unsent": result.left}
    if why:
        screen.warn(f"the changed settings do not let it go on: {why}")
    tell_outcome(folder, summary, screen)
    return summary


def tell_outcome(folder: CheckpointManager, summary: Mapping[str, Any], screen: StructuredLogger) -> None:
    """The table of rounds, and where everything is."""
    scores_are = f" ({summary['scores_are']})" if summary.get("scores_are") else ""
    screen.rounds_table(summary["rounds"], scores_are=summary.get("scores_are"))
    start = "the starting adapter" if summary["final_checkpoint"] else "the base model"
    best = start if summary["best_round"] == 0 else f"round {summary['best_round']}"
    met = "target met" if summary["exit_code"] == 0 else "target not met"
    screen.say(
        f"{met}: best is {best} with {summary['best_score']:.3f}{scores_are} (threshold {summary['threshold']:g})"
    )
    for lead in summary["leads"]:
        screen.say(f"  {lead['text']}")
    cost = f", {cost_estimate.dollars(summary['cost'])}" if summary["cost"] is not None else ""
    tokens = summary["tokens"]
    taken_back = sum(summary["taken_back"]["tokens"].values()) if "taken_back" in summary else 0
    of_these = f" ({taken_back:,} of these for rounds taken back)" if taken_back else ""
    screen.say(
        f"tokens: {tokens['train']:,} trained, {tokens['prefill']:,} prefilled, {tokens['sample']:,} sampled"
        f"{of_these}{cost}; {summary['wall_s']:.0f} s"
    )
    if summary.get("evalops_unsent"):
        screen.warn(
            f"{summary['evalops_unsent']} EvalOps submissions are still unsent; send them with "
            + shlex.join(
                [sys.executable, str(Path(__file__).with_name("evalops_client.py")), "flush", str(folder.run_dir)]
            )
        )
    places: dict[str, Path | str] = {"run folder": folder.run_dir, "summary": folder.summary_path}
    if (folder.run_dir / "report.html").is_file():
        places["report"] = folder.run_dir / "report.html"
    if summary["final_checkpoint"]:
        places["checkpoint"] = summary["final_checkpoint"]
    elif summary["rounds"][-1]["checkpoint"]:
        places["checkpoint"] = (
            f"none, the base model was best; the last round's is {summary['rounds'][-1]['checkpoint']}"
        )
    screen.where(places)


def record_interruption(folder: CheckpointManager, status: str, wall_s: float | None) -> None:
    """Write `interrupted` or `failed` into the state of a run that stops before its end, `wall_s` seconds into it.

    None for the seconds: as many as the state holds already.
    """
    spent = {} if wall_s is None else {"wall_s": wall_s}
    folder.update_state(status=status, stopped_at=utc_now(), **spent)


def _harmless(key: str) -> bool:
    return key in HARMLESS or key == "budget" or key.startswith(HARMLESS_GROUPS)
