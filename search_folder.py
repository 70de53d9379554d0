"""The folder of a search: found, made, taken up again, and what its trials left in it; see `hyperparameter_search`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import config_schema
import durable_files
import run_opening
import search_space
from checkpoint_manager import CheckpointManager
from config_schema import TrainingConfig
from error_handling import ConfigurationError, RunNotFoundError
from logger import redact_values, utc_now
from preparation import Prepared
from run_folders import list_runs, new_run_id
from search_space import SearchSpace, TrialResult

FOLDER_PREFIX = "tuning-"


def is_search(path: Path) -> bool:
    """True for the folder of a search."""
    return (path / "search.json").is_file()


def resolve_search(runs_dir: Path | str, name: str) -> Path:
    """The folder of the search meant: "" is the newest in `runs_dir`, else a name in there or a path.

    Raises `RunNotFoundError` when there is none.
    """
    runs_dir = Path(runs_dir)
    found = sorted(path for path in runs_dir.glob(f"{FOLDER_PREFIX}*") if is_search(path))
    if not name and found:
        return found[-1]
    for path in (runs_dir / name, Path(name)) if name else ():
        if is_search(path):
            return path
    listed = f"; there are {', '.join(path.name for path in found[-10:])}" if found else ""
    raise RunNotFoundError(f"there is no search {name or 'to resume'} in {runs_dir}{listed}")


def spec(config: TrainingConfig, prepared: Prepared) -> dict[str, Any]:
    """What a resumed search must have in common with its beginning."""
    space: SearchSpace = search_space.search_space(config)
    return {
        "space": {
            "learning_rate": [space.lowest, space.highest],
            "lora_rank": list(space.ranks),
            "start": dataclasses.asdict(space.start),
        },
        "trial": {"rounds": 1, "steps": config.steps_per_round},
        "sampler": {"name": "TPE", "seed": config.seed, "random_trials": search_space.RANDOM_TRIALS},
        "service": prepared.service,
        "evaluator": prepared.evaluator,
        "data_digests": prepared.data_digests,
    }


def create(config: TrainingConfig, prepared: Prepared, trials: int, runs_dir: Path | str) -> Path:
    path = Path(runs_dir) / f"{FOLDER_PREFIX}{new_run_id()}"
    with durable_files.storage_errors(path, "make the folder"):
        path.mkdir(parents=True)
    durable_files.write_json(path / "config.json", redact_values(config.to_json_dict()))
    # Last: the folder is a search from here on.
    durable_files.write_json(
        path / "search.json",
        {"trials": trials, "started_at": utc_now(), **spec(config, prepared), "estimate": counts(prepared)},
    )
    return path


def counts(prepared: Prepared) -> dict[str, Mapping[str, int]]:
    return {"baseline": prepared.estimate.baseline, "trial": prepared.estimate.first_round}


def reopen(path: Path, config: TrainingConfig, prepared: Prepared, trials: int | None, *, write: bool) -> int:
    """Refuse a search that is not the one begun, write down changed limits, and return the number of trials."""
    written = durable_files.read_json(path / "search.json")
    own = config_schema.load_and_validate_config(path / "config.json")
    changes = run_opening.differences(own.to_json_dict(), redact_values(config.to_json_dict()))
    faults = [
        f"  {key}: {was!r} in the search, {now!r} now"
        for key, (was, now) in sorted(changes.items())
        if not key.startswith(("budget", "prices"))
    ]
    asked = spec(config, prepared)
    moved = run_opening.differences({key: written.get(key) for key in asked}, asked)
    faults += [f"  {key}: {was!r} when the search began, {now!r} now" for key, (was, now) in sorted(moved.items())]
    if faults:
        raise ConfigurationError(
            f"search {path.name} cannot go on as it began:\n"
            + "\n".join(faults)
            + "\nPut them back, or start a new search. These may change: the number of trials, budget, prices."
        )
    wanted = written["trials"] if trials is None else trials
    if write and wanted != written["trials"]:
        durable_files.write_json(path / "search.json", {**written, "trials": wanted})
    if write and changes:
        durable_files.write_json(path / "config.json", redact_values(config.to_json_dict()))
    return int(wanted)


def finished_trials(path: Path) -> list[TrialResult]:
    """The trials that came to an end, in order; a line torn by a kill is cut off, and its trial looked at again."""
    durable_files.repair_jsonl(path / "trials.jsonl")
    rows, _ = durable_files.read_jsonl(path / "trials.jsonl", missing_ok=True)
    return [TrialResult.from_row(row) for row in rows]


def trial_folder(path: Path, number: int) -> Path | None:
    """The run folder of trial `number`; None while it was not begun."""
    for run in list_runs(path):
        if CheckpointManager.open(run, lock=False).load_state().get("trial") == number:
            return run
    return None


def measured_base_model(path: Path) -> CheckpointManager | None:
    """The trial that asked the base model itself; None while none has done so to the end."""
    for run in sorted(list_runs(path)):
        folder = CheckpointManager.open(run, lock=False)
        if folder.is_done(0, "baseline") and run_opening.MEASURED_ONCE not in folder.round_results()[0]:
            return folder
    return None
