"""The run folder: its lock, its state, checkpoints, samples, selections and results, and where to go on.

    manager = CheckpointManager.create("runs", config.model_dump(), command="...", total_iters=30)
    if not manager.is_done(1, "select"):
        manager.write_selection(1, rows)
        manager.phase_done(1, "select")

    manager = CheckpointManager.open(resolve_run("runs", None))           # go on with the newest run
    manager = CheckpointManager.open("runs/<run_id>", lock=False)         # only look

What decides where a run stands is `state.json`, replaced as a whole: the phases that are done (`completed`) and the
results of the rounds (`rounds`) are in it, so that a crash can never leave the two disagreeing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import durable_files
from checkpoint_record import GONE, KINDS, Checkpoint, check_training_path
from durable_files import storage_errors
from error_handling import CheckpointError, ConfigurationError, DamagedFileError, RunLockedError, RunNotFoundError
from evaluation import SampleResult
from logger import redact, redact_values, utc_now
from run_folders import find_latest_run, list_runs, new_run_folder, resolve_run
from run_lock import RunLock

PHASES = ("baseline", "select", "train", "checkpoint", "evaluate", "submit", "decide", "heldout", "finish")
STATUSES = ("running", "interrupted", "completed", "failed")
# Folders of the run that hold a file of rows for every round.
ROW_FOLDERS = ("samples", "selection", "likelihood", "scores")

__all__ = [
    "PHASES",
    "STATUSES",
    "Checkpoint",
    "CheckpointManager",
    "check_training_path",
    "find_latest_run",
    "list_runs",
    "resolve_run",
]


class CheckpointManager:
    """One run folder. Writing needs the lock (`create`, `open`); `open(..., lock=False)` only reads.

    `notes` collects what reading had to say (a torn line dropped, a checkpoint passed over), each once; `on_note`, when
    it is set, is told each as it comes.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.notes: list[str] = []
        self.on_note: Callable[[str], object] | None = None
        self._lock = RunLock(self.run_dir / "run.lock")
        self._state: dict[str, Any] = {}
        # False between taking an unfinished run and `record_resume`: until then it still reads as interrupted.
        self._in_charge = False

    @classmethod
    def create(
        cls,
        runs_dir: Path | str,
        config: Mapping[str, Any],
        *,
        command: str = "",
        near_matches: Sequence[Mapping[str, Any]] = (),
        **state_fields: Any,
    ) -> CheckpointManager:
        """Make a new run folder in `runs_dir` and lock it; `config` (the resolved one) is written without secrets.

        `near_matches` are training rows that are nearly evaluation items; `state_fields` set or replace fields of
        `state.json` (`data_dir`, `total_iters`, `hparams`...). The folder appears whole or not at all. Raises
        `StorageError` when it cannot be written.
        """
        with new_run_folder(runs_dir) as (unfinished, final):
            now = utc_now()
            state = {
                "run_id": final.name,
                "status": "running",
                "phase": "baseline",
                "round": 0,
                "step": 0,
                "pid": os.getpid(),
                "command": command,
                "model": config.get("base_model"),
                "adapter_path": None,
                "data_dir": str(Path(config["train_file"]).parent) if config.get("train_file") else None,
                "log_path": str(final / "metrics.jsonl"),
                "total_iters": config.get("max_steps"),
                "save_every": config.get("save_every"),
                "hparams": {},
                "started_at": now,
                "updated_at": now,
                "best_val": None,
                "resume_history": [],
                "completed": {},
                "rounds": [],
                **state_fields,
            }
            durable_files.write_json(unfinished / "config.json", redact_values(config))
            if near_matches:
                durable_files.write_jsonl(unfinished / "near_matches.jsonl", redact_values(list(near_matches)))
            durable_files.write_json(unfinished / "state.json", redact_values(state))
        manager = cls(final)
        manager._lock.acquire(command=redact(command))
        manager._read_state()
        manager._in_charge = True
        return manager

    @classmethod
    def open(cls, run_dir: Path | str, *, lock: bool = True, command: str = "") -> CheckpointManager:
        """Open an existing run folder; with `lock` as its one writer.

        Raises `RunNotFoundError` when there is no run in it, `RunLockedError` when another process has it. With
        `lock`, leftovers of a crash are cleared: temporary files, and torn last lines (see `notes`).
        """
        manager = cls(run_dir)
        if not (manager.run_dir / "state.json").is_file():
            raise RunNotFoundError(f"{manager.run_dir} is no run folder: it has no state.json")
        if not lock:
            manager._read_state()
            return manager
        manager._lock.acquire(command=redact(command))
        try:
            manager._read_state()
            manager._in_charge = manager._state["status"] != "running"
            durable_files.remove_temporaries(manager.run_dir / "plots")
            for folder in (manager.run_dir, *(manager.run_dir / name for name in ROW_FOLDERS)):
                durable_files.remove_temporaries(folder)
                for path in sorted(folder.glob("*.jsonl")):
                    manager._note(durable_files.repair_jsonl(path))
        except BaseException:
            manager.close()
            raise
        return manager

    def close(self) -> None:
        """Give the lock back. What is on disk stays as it is."""
        self._lock.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def run_id(self) -> str:
        return self.run_dir.name

    @property
    def config_path(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.run_dir / "checkpoints.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.run_dir / "summary.json"

    @property
    def outbox_path(self) -> Path:
        """EvalOps submissions that are still to be sent."""
        return self.run_dir / "evalops_outbox.jsonl"

    @property
    def engine_dir(self) -> Path:
        return self.run_dir / "engine"

    @property
    def evals_dir(self) -> Path:
        return self.run_dir / "evals"

    def samples_path(self, round: int) -> Path:
        return self.run_dir / "samples" / f"round_{round:02d}.jsonl"

    def likelihood_path(self, round: int) -> Path:
        return self.run_dir / "likelihood" / f"round_{round:02d}.jsonl"

    def sample_scores_path(self, round: int) -> Path:
        return self.run_dir / "scores" / f"round_{round:02d}.jsonl"

    @property
    def near_matches_path(self) -> Path:
        return self.run_dir / "near_matches.jsonl"

    def selection_path(self, round: int) -> Path:
        return self.run_dir / "selection" / f"round_{round:02d}.jsonl"

    # State

    def load_config(self) -> dict[str, Any]:
        """The configuration the run was started with."""
        return durable_files.read_json(self.config_path)

    def load_state(self) -> dict[str, Any]:
        """A copy of `state.json`; a `running` run whose process is gone reads as `interrupted`."""
        if not self._lock.held:
            self._read_state()
        state = {**self._state}
        alive = self._in_charge if self._lock.held else self._lock.is_held()
        if state["status"] == "running" and not alive:
            state["status"] = "interrupted"
        return state

    def update_state(self, **fields: Any) -> None:
        """Set fields of `state.json`, all in one atomic replacement; `updated_at` is set too."""
        self._write_state({**self._state, **fields})

    def record_resume(self, *, command: str = "", **fields: Any) -> None:
        """Take an unfinished or reopened run over: status `running`, this process's pid, a row in `resume_history`.

        `fields` are kept in that row beside time, pid, and the phase, round and step gone on from.
        """
        row = {
            "at": utc_now(),
            "pid": os.getpid(),
            **{key: self._state.get(key) for key in ("phase", "round", "step")},
            **fields,
        }
        history = [*self._state.get("resume_history", []), row]
        self._in_charge = True
        changes: dict[str, Any] = {"status": "running", "pid": os.getpid(), "resume_history": history}
        self.update_state(**changes, **({"command": command} if command else {}))

    def start_phase(self, round: int, phase: str, **fields: Any) -> None:
        """Say that `phase` of `round` is being worked on."""
        self.update_state(round=round, phase=phase, **fields)

    def phase_done(self, round: int, *phases: str, result: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Record that `phases` of `round` are complete, in one replacement of `state.json`.

        `result` is kept with it as by `save_round_result`, and `fields` of the state are set.
        """
        completed = self._completed()
        done = completed.setdefault(str(round), [])
        for phase in phases:
            if _known(phase, PHASES, "phase") not in done:
                done.append(phase)
        if result is not None:
            fields["rounds"] = self._rounds_with(round, result)
        self.update_state(round=round, phase=phases[-1], completed=completed, **fields)

    def is_done(self, round: int, phase: str) -> bool:
        """True when `phase` of `round` was completed, by this process or an earlier one."""
        _known(phase, PHASES, "phase")
        return phase in self._state.get("completed", {}).get(str(round), [])

    def redo_from(self, round: int, phase: str, **fields: Any) -> None:
        """Take back the completion of `phase` of `round` and of all after it, with the results of those rounds.

        For a run that is reopened, or whose checkpoint is lost. Selections and samples that are taken back stay beside
        as `round_NN.superseded.jsonl` (then `round_NN.superseded_2.jsonl`...), a summary as `summary.superseded.json`;
        checkpoints that are taken back are marked as gone, but for the states within `round`.
        """
        first = PHASES.index(_known(phase, PHASES, "phase"))
        completed = {
            key: [done for done in phases if int(key) < round or PHASES.index(done) < first]
            for key, phases in self._completed().items()
            if int(key) <= round
        }
        scored_from = round if first <= PHASES.index("evaluate") else round + 1
        chosen_from = round if first <= PHASES.index("select") else round + 1
        self._need_lock()
        # Files first: a crash before the state is written finds the phases still complete and comes here again.
        for folder, start in (("samples", scored_from), ("selection", chosen_from)):
            for path in sorted((self.run_dir / folder).glob("round_[0-9]*.jsonl")):
                name = path.name.removesuffix(".jsonl").removeprefix("round_")
                if name.isdigit() and int(name) >= start:
                    with storage_errors(path, "rename"):
                        path.replace(_free_name(path.with_name(f"round_{name}.superseded.jsonl")))
        if first <= PHASES.index("checkpoint"):
            self.mark_gone(
                [
                    c
                    for c in self.checkpoints()
                    if c.gone is None and ((c.round or 0) > round or (c.round == round and c.kind != "state"))
                ],
                "superseded",
            )
        if self.summary_path.is_file():  # it tells of an end that is taken back
            with storage_errors(self.summary_path, "rename"):
                self.summary_path.replace(self.run_dir / "summary.superseded.json")
        rounds = [row for row in self.round_results() if row["round"] < scored_from]
        self.update_state(round=round, phase=phase, completed=completed, rounds=rounds, **fields)

    # Checkpoints

    def add_checkpoint(
        self,
        name: str,
        *,
        batch: int,
        round: int,
        step: int,
        state_path: str | None = None,
        sampler_path: str | None = None,
        kind: str = "both",
        epoch: int | None = None,
        final: bool | None = None,
        **extra: Any,
    ) -> Checkpoint:
        """Append a checkpoint that the service has confirmed; see `Checkpoint` for the fields.

        Raises `CheckpointError` when a path that `kind` promises is missing or is of the wrong sort.
        """
        _known(kind, KINDS, "kind of checkpoint")
        if kind in {"both", "state"}:
            check_training_path(state_path or "")
        if kind in {"both", "sampler"} and not sampler_path:
            raise CheckpointError(f"checkpoint {name!r} of kind {kind!r} has no sampler_path")
        checkpoint = Checkpoint(
            name=name,
            batch=batch,
            epoch=epoch,
            final=final,
            state_path=state_path,
            sampler_path=sampler_path,
            round=round,
            step=step,
            kind=kind,
            extra=extra,
        )
        self._append(self.checkpoints_path, redact_values(checkpoint.to_row()))
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints in the order in which they were saved."""
        return [Checkpoint.from_row(row) for row in self._rows(self.checkpoints_path)]

    def mark_gone(self, checkpoints: Iterable[Checkpoint], why: str) -> None:
        """Write down that nothing goes on from `checkpoints` any more; `why` is one of `GONE`."""
        _known(why, GONE, "reason")
        paths = {(c.state_path, c.sampler_path) for c in checkpoints}
        rows = self._rows(self.checkpoints_path)
        marked = [row for row in rows if (row.get("state_path"), row.get("sampler_path")) in paths]
        for row in marked:
            row["gone"] = why
        if marked:
            self._need_lock()
            durable_files.write_jsonl(self.checkpoints_path, rows)

    def resume_points(self, round: int) -> list[Checkpoint]:
        """The checkpoints from which `round` can go on, the newest first.

        A row without a state, or with sampler weights in its place, is passed over; `notes` says so.
        """
        return [c for c in reversed(self.checkpoints()) if c.round == round and self._can_train(c)]

    def checkpoint_of_round(self, round: int) -> Checkpoint | None:
        """The checkpoint that ended `round` (state and sampler weights), None while there is none."""
        ended = [c for c in self.checkpoints() if c.round == round and c.kind != "state" and c.sampler_path]
        return next((c for c in reversed(ended) if self._can_train(c)), None)

    def _can_train(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.kind == "sampler" or checkpoint.gone:
            return False
        row = f"{self.checkpoints_path}: checkpoint {checkpoint.name!r}"
        if not checkpoint.state_path:
            self._note(f"{row} has no saved state, passed over")
            return False
        try:
            check_training_path(checkpoint.state_path)
        except CheckpointError as err:
            self._note(f"{row} is passed over: {err}")
            return False
        return True

    # Samples, selections, results

    def append_sample(self, round: int, sample: SampleResult) -> None:
        """`append_samples` of one."""
        self.append_samples(round, [sample])

    def append_samples(self, round: int, samples: Sequence[SampleResult]) -> None:
        """Keep evaluated samples of `round`, on disk when the call returns."""
        rows = [sample.to_row() for sample in samples]
        # Reply, input and target stay as they are; an error text may quote a request with its key.
        self._append(self.samples_path(round), *({**row, "error": redact_values(row["error"])} for row in rows))

    def load_samples(self, round: int) -> list[SampleResult]:
        """The samples of `round` kept so far, one per key (task, id, epoch): the last row wins."""
        by_key = {sample.key: sample for sample in map(SampleResult.from_row, self._rows(self.samples_path(round)))}
        return list(by_key.values())

    def write_likelihood(self, round: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep how likely each evaluation target was in `round`; what was kept before is replaced."""
        self._need_lock()
        self._make_folder(self.likelihood_path(round).parent)
        durable_files.write_jsonl(self.likelihood_path(round), rows)

    def load_likelihood(self, round: int) -> list[dict[str, Any]]:
        """The rows that `write_likelihood` kept of `round`, empty when there are none."""
        return self._rows(self.likelihood_path(round))

    def write_sample_scores(self, round: int, scores: Mapping[tuple[str, str], float]) -> None:
        """Keep each sample's score, epochs combined, by (task, id); what was kept of `round` before is replaced."""
        self._need_lock()
        self._make_folder(self.sample_scores_path(round).parent)
        rows = [{"task": task, "id": identity, "score": score} for (task, identity), score in scores.items()]
        durable_files.write_jsonl(self.sample_scores_path(round), rows)

    def load_sample_scores(self, round: int) -> dict[tuple[str, str], float]:
        """What `write_sample_scores` kept of `round`, empty when there is nothing."""
        return {(row["task"], row["id"]): row["score"] for row in self._rows(self.sample_scores_path(round))}

    def write_selection(self, round: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write which rows `round` trains on, once; the same again is accepted, others raise `CheckpointError`."""
        path = self.selection_path(round)
        existing = self.load_selection(round)
        if existing is not None:
            if existing != [dict(row) for row in rows]:
                raise CheckpointError(
                    f"{path}: the rows of round {round} were already chosen; load them, do not choose again"
                )
            return
        self._need_lock()
        self._make_folder(path.parent)
        durable_files.write_jsonl(path, rows)

    def write_set_aside(self, round: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows that the label guard kept out of `round`, for a person to look at; no file without any."""
        if rows:
            self._need_lock()
            path = self.run_dir / "selection" / f"round_{round:02d}.set_aside.jsonl"
            self._make_folder(path.parent)
            durable_files.write_jsonl(path, redact_values(list(rows)))

    def load_near_matches(self) -> list[dict[str, Any]]:
        """The training rows that are nearly evaluation items, empty when there is no file."""
        return self._rows(self.near_matches_path)

    def load_selection(self, round: int) -> list[dict[str, Any]] | None:
        """The rows chosen for `round`, None when none were chosen yet."""
        path = self.selection_path(round)
        return self._rows(path) if path.exists() else None

    def save_round_result(self, round: int, result: Mapping[str, Any]) -> None:
        """Keep the result of `round` (an item of `summary.rounds`); keys given again replace those kept before."""
        self.update_state(rounds=self._rounds_with(round, result))

    def round_results(self) -> list[dict[str, Any]]:
        """The results kept so far, in the order of rounds."""
        return [dict(row) for row in self._state.get("rounds", [])]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        self._need_lock()
        durable_files.write_json(self.summary_path, redact_values(summary))

    def note_unsent(self, left: int) -> None:
        """Write into the summary, where there is one, how many EvalOps submissions are left to send."""
        summary = self.load_summary()
        if summary is not None and summary.get("evalops_unsent") != left:
            self.write_summary({**summary, "evalops_unsent": left})

    def load_summary(self) -> dict[str, Any] | None:
        """`summary.json`, None while the run is not finished."""
        return durable_files.read_json(self.summary_path) if self.summary_path.exists() else None

    # Helpers

    def _rounds_with(self, round: int, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        by_round = {row["round"]: row for row in self.round_results()}
        by_round[round] = {**by_round.get(round, {}), **result, "round": round}
        return [by_round[number] for number in sorted(by_round)]

    def _completed(self) -> dict[str, list[str]]:
        return {key: list(phases) for key, phases in self._state.get("completed", {}).items()}

    def _read_state(self) -> None:
        path = self.run_dir / "state.json"
        self._state = durable_files.read_json(path)
        _known(self._state.get("status"), STATUSES, f"status in {path}")
        kinds: dict[str, Any] = {
            "hparams": dict,
            "completed": dict,
            "rounds": list,
            "resume_history": list,
            "wall_s": (int, float),
        }
        for name, kind in kinds.items():
            if name in self._state and not isinstance(self._state[name], kind):
                raise DamagedFileError(f"{path}: damaged, {name} is {self._state[name]!r}; restore it from a copy")

    def _write_state(self, state: Mapping[str, Any]) -> None:
        self._need_lock()
        _known(state["status"], STATUSES, "status")
        _known(state["phase"], PHASES, "phase")
        new_state = redact_values({**state, "updated_at": utc_now()})
        durable_files.write_json(self.run_dir / "state.json", new_state)
        self._state = new_state

    def _append(self, path: Path, *rows: Mapping[str, Any]) -> None:
        self._need_lock()
        self._make_folder(path.parent)
        durable_files.append_lines(path, rows)

    def _make_folder(self, folder: Path) -> None:
        # Never the run folder itself: one that has vanished is an error, not a reason to begin an empty one.
        if folder != self.run_dir:
            with storage_errors(folder, "make"):
                folder.mkdir(exist_ok=True)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        rows, note = durable_files.read_jsonl(path, missing_ok=True)
        self._note(note)
        return rows

    def _note(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)
            if self.on_note is not None:
                self.on_note(note)

    def _need_lock(self) -> None:
        if not self._lock.held:
            raise RunLockedError(f"{self.run_dir} was opened for reading only; open it with its lock to write to it")


def _known(value: Any, choices: Iterable[str], what: str) -> str:
    if value not in choices:
        raise ConfigurationError(f"{what}: {value!r} is not one of {', '.join(choices)}")
    return value


def _free_name(path: Path) -> Path:
    """`path`, or the first of `<stem>_2`, `<stem>_3`... beside it that is not taken."""
    number = 1
    found = path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return found
