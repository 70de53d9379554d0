"""Search learning rate and LoRA rank over short runs: `trainer_with_eval.py --config C --tune N`.

    runs/tuning-<id>/search.json       what is searched: N, ranges, sampler, data
                     config.json       the configuration that the search began with
                     <run_id>/         a trial: an ordinary run of one round
                     trials.jsonl      a line per finished trial
                     table.md          the same for people, with how sure the winner is
                     best_config.json  the winner, for --config

Trials go one after the other. The base model is the same for all, so the first trial alone asks it; the others take
over its answers. Killed anywhere, a resumed search runs no finished trial again and goes on with the interrupted one
where it stopped. Trials are compared by the validation score; the test set is never
asked or scored, only compared with the training rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import config_schema
import cost_estimate
import durable_files
import round_decision
import run_opening
import run_summary
import search_folder
import search_space
import tinker_backend
from checkpoint_manager import CheckpointManager
from config_groups import Price
from config_schema import TrainingConfig
from error_handling import (
    EXIT_TARGET_MET,
    EXIT_TARGET_MISSED,
    ConfigurationError,
    EvaluationError,
    NoEffectError,
    TrainingError,
)
from logger import StructuredLogger, redact_values
from paid_tokens import paid_tokens
from preparation import Prepared, prepare
from run_lock import RunLock
from search_space import Point, Proposals, TrialResult

RunTrial = Callable[[Prepared, CheckpointManager, tinker_backend.Backend], Awaitable[dict[str, Any]]]
"""Works on an open run folder until the run is finished, and returns its summary."""

# What a round's result holds of the decision after it, which every trial makes for itself.
_DECIDED = ("wall_s", "decision", "action", "reason", "best_round", "next_lr", "rollback_to")


async def search(
    config: TrainingConfig | None,
    run_trial: Callable[[Path], RunTrial],
    *,
    trials: int | None,
    runs_dir: Path | str,
    resume: str | None = None,
    dry_run: bool = False,
    command: str = "",
    console: bool = True,
) -> dict[str, Any]:
    """Run the search to its end and return how it came out: exit_code, best, trials, tokens, table (none of a dry run).

    `run_trial(folder)` makes what runs a trial of the search in `folder`. `resume` continues a search: "" the newest,
    else a name or path; `config` may then be None, and `trials` changes their number when it is given. Raises
    `EvalLoopError`s; all that was finished is kept.
    """
    screen = StructuredLogger(None, console=console)
    if resume is None:
        if config is None or trials is None:
            raise ConfigurationError("a new search needs a configuration and a number of trials")
        open_for_checks = tinker_backend.connect_if_possible if dry_run else tinker_backend.connect
        with open_for_checks(adopt=config.init_from, adopt_from=runs_dir) as backend:
            prepared = _prepare(config, backend)
        _show_plan(config, prepared, trials, screen)
        if dry_run:
            screen.say("dry run: all of this was checked; nothing was trained, sampled or saved")
            return {}
        path = search_folder.create(config, prepared, trials, runs_dir)
    else:
        path = search_folder.resolve_search(runs_dir, resume)
    lock = RunLock(path / "search.lock")
    lock.acquire(command=command)
    try:
        if resume is not None:
            config = config or config_schema.load_and_validate_config(path / "config.json")
            with tinker_backend.connect(adopt=config.init_from, adopt_from=runs_dir) as backend:
                prepared = _prepare(config, backend)
            trials = search_folder.reopen(path, config, prepared, trials, write=not dry_run)
            _show_plan(config, prepared, trials, screen)
            if dry_run:
                screen.say("dry run: the search can go on as planned; nothing was changed")
                return {}
        assert config is not None
        assert trials is not None
        work = _Search(
            path=path,
            config=config,
            prepared=prepared,
            trials=trials,
            run_trial=run_trial(path),
            screen=screen,
            runs_dir=Path(runs_dir),
            command=command,
        )
        return await work.run()
    finally:
        lock.release()


@dataclasses.dataclass
class _Search:
    """A search being worked on, its folder locked. `finished` are its trials so far, in order."""

    path: Path
    config: TrainingConfig
    prepared: Prepared
    trials: int
    run_trial: RunTrial
    screen: StructuredLogger
    runs_dir: Path
    command: str
    finished: list[TrialResult] = dataclasses.field(default_factory=list)

    @property
    def price(self) -> Price | None:
        return self.config.prices.get(self.config.base_model)

    async def run(self) -> dict[str, Any]:
        """Replay what is finished, run the rest, and say how it came out."""
        self.screen.say(f"search {self.path.name}")
        proposals = Proposals(search_space.search_space(self.config), self.config.seed)
        stopped = ""
        for kept in search_folder.finished_trials(self.path):
            _refuse_other_proposal(proposals.next(), kept, self.path)
            proposals.tell(kept.score)
            self.finished.append(kept)
        while len(self.finished) < self.trials and not stopped:
            number = len(self.finished) + 1
            folder = search_folder.trial_folder(self.path, number)
            stopped = "" if folder is not None else self._over_budget() or ""
            if stopped and not self.finished:
                raise ConfigurationError(f"the budget does not hold one trial: {stopped}. Nothing was sent.")
            if not stopped:
                result = await self._trial(number, proposals.next(), folder)
                durable_files.append_line(self.path / "trials.jsonl", result.to_row())
                proposals.tell(result.score)
                self.finished.append(result)
                self._write_results("")
        return self._conclude(stopped)

    async def _trial(self, number: int, point: Point, existing: Path | None) -> TrialResult:
        """Run trial `number` at `point`, or go on with it in the folder `existing`."""
        config = search_space.trial_config(self.config, point)
        assert config.warmup_steps is not None, "a trial's warm-up is always written"
        prepared = dataclasses.replace(
            self.prepared, config=config, learning_rate=point.learning_rate, warmup_steps=config.warmup_steps
        )
        self.screen.say(f"trial {number} of {self.trials}: learning rate {point.learning_rate:.4g}, rank {point.rank}")
        if existing is None:
            folder = run_opening.create_run_folder(prepared, self.path, self.command, trial=number)
        else:
            folder = CheckpointManager.open(existing, command=self.command)
        with folder:
            failure = ""
            if folder.load_state()["status"] != "completed":
                if existing is not None:
                    reopening = run_opening.reopen(folder, config)
                    run_opening.refuse_changed_inputs(folder, prepared)
                    run_opening.take_over(folder, reopening, prepared, self.command)
                self._take_over_baseline(folder)
                try:
                    with tinker_backend.connect(
                        folder.engine_dir, adopt=config.init_from, adopt_from=self.runs_dir
                    ) as backend:
                        await self.run_trial(prepared, folder, backend)
                except (TrainingError, NoEffectError) as err:
                    # A learning rate that breaks training down or moves no weight is a finding,
                    # not an end of the search.
                    failure = str(err)
                    self.screen.warn(f"trial {number} failed: {failure}")
            return _result(number, point, folder, failure)

    def _take_over_baseline(self, folder: CheckpointManager) -> None:
        """Give a trial the answers of the base model that an earlier one was paid for."""
        if folder.is_done(0, "baseline"):
            return
        source = search_folder.measured_base_model(self.path)
        if source is None:
            return
        samples = [sample.to_row() for sample in source.load_samples(0)]
        path = folder.samples_path(0)
        with durable_files.storage_errors(path.parent, "make"):
            path.parent.mkdir(exist_ok=True)
        durable_files.write_jsonl(path, samples)
        folder.write_likelihood(0, source.load_likelihood(0))
        measured = {key: value for key, value in source.round_results()[0].items() if key not in _DECIDED}
        nothing = {"train": 0, "prefill": 0, "sample": 0}
        result = {
            **measured,
            "tokens": nothing,
            "cost": run_summary.money(nothing, self.price),
            run_opening.MEASURED_ONCE: source.run_id,
        }
        folder.phase_done(0, "submit", "baseline", result=result, best_val=measured["nll"])

    def _over_budget(self) -> str | None:
        """Why one more trial would pass a limit of the whole search; None while there is room."""
        spent = run_summary.add_tokens(trial.tokens for trial in self.finished)
        estimate = self.prepared.estimate
        expected = run_summary.add_tokens([estimate.baseline, estimate.first_round])
        source = search_folder.measured_base_model(self.path)
        if source is not None:
            baseline = source.round_results()[0]["tokens"]
            rounds = [_round_tokens(self.path / trial.run) for trial in self.finished if trial.score is not None]
            expected = cost_estimate.expected_round(estimate.first_round, baseline, rounds)
        return cost_estimate.limit_passed(
            self.config.budget,
            spent=spent,
            expected=expected,
            price=self.price,
            seconds_spent=sum(trial.wall_s for trial in self.finished),
            seconds_expected=max((trial.wall_s for trial in self.finished), default=0.0),
        )

    def _conclude(self, stopped: str) -> dict[str, Any]:
        text = self._write_results(stopped)
        order = search_space.ranked(self.finished)
        self.screen.say(text)
        if not order:
            raise EvaluationError(
                f"none of {len(self.finished)} trials came to a score; {self.path / 'table.md'} says why. Change "
                "learning_rate and start a new search."
            )
        best = order[0]
        record = _record(self.path, best)
        met = record is not None and round_decision.target_met(record, self.config)[0]
        self.screen.where(
            {"search": self.path, "table": self.path / "table.md", "best": self.path / "best_config.json"}
        )
        return {
            "exit_code": EXIT_TARGET_MET if met else EXIT_TARGET_MISSED,
            "best": best.to_row(),
            "trials": [trial.to_row() for trial in self.finished],
            "stopped": stopped,
            "tokens": run_summary.add_tokens(trial.tokens for trial in self.finished),
            "folder": str(self.path),
            "table": text,
        }

    def _write_results(self, stopped: str) -> str:
        """Write `table.md` and `best_config.json` as they stand now; returns the table."""
        order = search_space.ranked(self.finished)
        source = search_folder.measured_base_model(self.path)
        baseline = source.round_results()[0] if source is not None else None
        notes = ["Scores are on training data."] if self.prepared.on_training_data else []
        if stopped:
            notes.append(f"Stopped after {len(self.finished)} of {self.trials} trials: {stopped}.")
        elif len(self.finished) < self.trials:
            notes.append(f"{len(self.finished)} of {self.trials} trials are finished.")
        if len(order) > 1:
            best_two = compared(self.path, order[0], order[1])
            notes.append(search_space.lead_sentence(order[0], order[1], best_two))
            notes.append(
                f"The best of {len(order)} scores on the same questions tends to be too high: measure the winner anew."
            )
        if order and baseline is not None and (order[0].score or 0.0) <= baseline["score"]:
            notes.append("No trial is better than the untouched base model.")
        if order:
            best = Point(order[0].learning_rate, order[0].rank)
            durable_files.write_json(
                self.path / "best_config.json", redact_values(search_space.best_config(self.config, best))
            )
        text = search_space.table(self.finished, baseline, notes, self.price)
        durable_files.write_atomic(self.path / "table.md", text)
        return text


def compared(path: Path, best: TrialResult, second: TrialResult) -> round_decision.Comparison | None:
    """`best` against `second` over the samples that both trials of the search in `path` have; None without any."""
    one, other = _record(path, best), _record(path, second)
    return round_decision.compare(other, one) if one is not None and other is not None else None


def _record(path: Path, trial: TrialResult) -> round_decision.RoundRecord | None:
    folder = CheckpointManager.open(path / trial.run, lock=False)
    rows = folder.round_results()
    return run_opening.round_record(folder, rows[-1]) if rows else None


def _prepare(config: TrainingConfig, backend: tinker_backend.Backend) -> Prepared:
    """Every check, on the first trial's configuration: it is the one that was written."""
    return prepare(search_space.trial_config(config, search_space.search_space(config).start), backend)


def _show_plan(config: TrainingConfig, prepared: Prepared, trials: int, screen: StructuredLogger) -> None:
    """The plan of a trial, then that of the search; refuses one whose first trial the budget does not hold."""
    run_opening.show_plan(prepared, screen)
    estimate, price = prepared.estimate, config.prices.get(config.base_model)
    first = run_summary.add_tokens([estimate.baseline, estimate.first_round])
    whole = run_summary.add_tokens([estimate.baseline, *[estimate.first_round] * trials])
    screen.say(
        f"search: {trials} trials of one round of {config.steps_per_round} steps; "
        f"{search_space.search_space(config).describe()}; the first trial is the configuration as it stands, TPE "
        f"proposes from trial {search_space.RANDOM_TRIALS + 1} on, seed {config.seed}"
    )
    screen.say(f"estimate of the search (baseline once): {cost_estimate.amount(whole, price)}")
    cost_estimate.refuse_over_budget("the baseline and one trial", first, config)


def _refuse_other_proposal(point: Point, kept: TrialResult, path: Path) -> None:
    if point != Point(kept.learning_rate, kept.rank):
        raise ConfigurationError(
            f"{path / 'trials.jsonl'}: trial {kept.trial} was run at learning rate {kept.learning_rate:g} and rank "
            f"{kept.rank}, and the sampler now proposes {point.learning_rate:g} and {point.rank}: the installed optuna "
            "is another than the search began with. Install that of requirements.txt, or start a new search."
        )


def _round_tokens(run: Path) -> dict[str, int]:
    return paid_tokens(CheckpointManager.open(run, lock=False), 1)


def _result(number: int, point: Point, folder: CheckpointManager, failure: str) -> TrialResult:
    """What a trial came to, from its run folder."""
    rows = folder.round_results()
    measured: Mapping[str, Any] = {} if failure else rows[-1]
    own_rounds = [1] if rows and run_opening.MEASURED_ONCE in rows[0] else [0, 1]
    return TrialResult(
        trial=number,
        learning_rate=point.learning_rate,
        rank=point.rank,
        run=folder.run_id,
        status="failed" if failure else "completed",
        score=measured.get("score"),
        ci_low=measured.get("ci_low"),
        ci_high=measured.get("ci_high"),
        n=measured.get("n"),
        tokens=run_summary.add_tokens(paid_tokens(folder, round) for round in own_rounds),
        wall_s=float(folder.load_state().get("wall_s", 0.0)),
        reason=failure or measured["reason"],
    )
