"""One run being worked on: a method per phase of the loop, each a no-op when the run folder says it is done.

`trainer_with_eval.run_loop` calls the phases in order; what they decide comes from pure functions (`data_selector`,
`round_decision`, `hyperparam_utils`), what they keep goes through `checkpoint_manager`. A phase is marked done
together with its results in one atomic write, so that a killed run resumes at the first phase that is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import adapter_effect
import data_loader
import evalops_client
import hyperparam_utils
import paid_tokens
import preparation
import round_decision
import run_opening
import run_summary
import tinker_backend
from checkpoint_evaluation import ask_checkpoint, tell_score
from checkpoint_manager import Checkpoint, CheckpointManager
from data_selector import DataSelector, Selection
from durable_files import StorageError
from error_handling import (
    EXIT_TARGET_MET,
    EXIT_TARGET_MISSED,
    CheckpointError,
    DamagedFileError,
    EvalLoopError,
    InterruptedRunError,
    TrainingError,
)
from logger import StructuredLogger
from record_files import first_ten
from service_waits import in_thread
from start_points import LostRoundError, StartPoints
from step_pipeline import StepPipeline

if TYPE_CHECKING:
    import tinker

    from evaluation import SampleResult
    from preparation import Prepared

T = TypeVar("T")

# How often the seconds spent are written down: a kill loses no more of them, but for time in which Python computes.
KEEP_TIME_S = 10.0

# The phase whose completion each event of a round tells of.
PHASE_OF_EVENT = {
    "selection": "select",
    "checkpoint": "checkpoint",
    "evaluation": "evaluate",
    "evalops": "submit",
    "decision": "decide",
    "finish": "finish",
}


class TrainingRun:
    """The phases of one run over an open run folder and an open connection.

    `stop` is set when the user or the system asks the run to stop; the phase in progress then saves what it can and
    raises `InterruptedRunError`.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: CheckpointManager,
        backend: tinker_backend.Backend,
        log: StructuredLogger,
        stop: asyncio.Event,
    ) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.folder = folder
        self.backend = backend
        self.log = log
        self.stop = stop
        self._watch = tinker_backend.Watch(note=log.say, is_alive=backend.is_alive, stop=stop)
        backend.watch = self._watch
        self._starts = StartPoints(folder, backend, self.config, log, self._watch)
        self._client: tinker.TrainingClient | None = None
        # How many steps of the round that the client is in its weights contain, and whether it was here that they were
        # saved as the round's checkpoint.
        self._steps_done = 0
        self._saved_here = False
        # An event is written before its phase is done: what a kill left between the two comes again.
        log.supersede(self._is_unfinished)
        self._started = time.monotonic()
        self._wall_before: float = folder.load_state().get("wall_s", 0.0)
        usable = prepared.loader.usable
        self._train_rows = usable(prepared.train.rows)
        self._pool_rows = usable(prepared.pool.rows) if prepared.pool else []
        self._rows = data_loader.RowsById(self._train_rows, self._pool_rows)
        eval_rows = prepared.evaluation_rows.rows if prepared.evaluation_rows else ()
        self._passed_over: dict[str, str] = {}
        self._selector = DataSelector(
            self._train_rows,
            self._pool_rows,
            eval_rows,
            selection_config=self.config.selection,
            seed=self.config.seed,
            allow_overlap=self.config.allow_overlap,
            can_train=self._can_train,
        )

    # Where the run stands

    def results(self) -> list[dict[str, Any]]:
        """The rounds' results so far, the baseline first."""
        return self.folder.round_results()

    def result(self, round: int) -> dict[str, Any]:
        return next(row for row in self.results() if row["round"] == round)

    def next_round(self) -> int | None:
        """The round to work on: the first that is not decided; None when the last decision was to stop."""
        decided = [row for row in self.results() if self.folder.is_done(row["round"], "decide")]
        if not decided:
            return 0
        last = decided[-1]
        return None if last["action"] == "stop" else last["round"] + 1

    def _is_unfinished(self, event: Mapping[str, Any]) -> bool:
        """Whether the event tells of a phase that is not done, so that it will be told again."""
        phase = PHASE_OF_EVENT.get(event.get("event", ""))
        if phase is None or (phase == "select" and self.folder.load_selection(event["round"]) is not None):
            return False
        if phase == "evaluate" and event["round"] == 0:
            phase = "baseline"
        return not self.folder.is_done(event["round"], phase)

    def wall_seconds(self) -> float:
        """Seconds spent on this run so far, in this process and the ones before."""
        return self._wall_before + time.monotonic() - self._started

    async def keep_time(self) -> None:
        """Write the seconds spent down every `KEEP_TIME_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_TIME_S)
            with contextlib.suppress(StorageError):  # the next thing that must be kept will tell
                self.folder.update_state(wall_s=self.wall_seconds())

    def learning_rate(self, round: int) -> float:
        """The base learning rate of `round` (from 1): decided after the round before."""
        return float(self.result(round - 1)["next_lr"])

    def _first_step(self, round: int) -> int:
        """Optimizer steps submitted before `round`; steps never rewind, so it is a function of the round alone."""
        return (round - 1) * self.config.steps_per_round

    def _begin(self, round: int, phase: str, **fields: Any) -> None:
        self.folder.start_phase(round, phase, wall_s=self.wall_seconds(), **fields)

    def _done(self, round: int, *phases: str, **fields: Any) -> None:
        self.folder.phase_done(round, *phases, **{"wall_s": self.wall_seconds(), **fields})

    def check_stop(self) -> None:
        """Raise `InterruptedRunError` when the run was asked to stop."""
        if self.stop.is_set():
            raise InterruptedRunError("interrupted; everything finished so far is saved")

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Await `work`, abandoning it when the run is asked to stop; what it kept as it went stays kept."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=30)
            self.check_stop()
            raise InterruptedRunError("interrupted")
        finally:
            stopped.cancel()

    # The training client

    async def begin(self, round: int) -> bool:
        """Have the weights that `round` goes on from; False when a lost checkpoint takes the run back."""
        if self._client is not None or self.folder.is_done(round, "evaluate"):
            return True
        try:
            self._client, self._steps_done = await self._starts.restore(round)
        except LostRoundError as err:
            spent = self.wall_seconds()
            self.folder.redo_from(err.round, "train", wall_s=spent, went_back_s=spent)
            self.log.supersede(self._is_unfinished)
            self.log.warn(f"{err}, so the run goes back and trains that round again", round=err.round)
            return False
        return True

    async def client(self, round: int) -> tinker.TrainingClient:
        """The training client, holding the weights that `round` needs; made or restored on first use."""
        if self._client is None:
            self._client, self._steps_done = await self._starts.restore(round)
        return self._client

    # Phases

    async def baseline(self) -> None:
        """Evaluate the untouched base model, or with `init_from` the adapter that the run starts from."""
        if self.folder.is_done(0, "baseline"):
            return
        self._begin(0, "baseline")
        await self._try_the_engine()
        model_path = None
        if self.config.init_from:
            model_path = await self._save_start(await self.client(0))
        figures = await self._evaluate(0, model_path, "baseline")
        result = {**figures, "checkpoint": model_path, "learning_rate": None, "steps": 0, "rows": 0}
        self._done(0, "baseline", result=result, best_val=figures["nll"])
        tell_score(self.result(0), self.config.evaluation.max_tokens, self.log)

    async def select(self, round: int) -> None:
        """Choose the rows of the round, and write down which and why."""
        if self.folder.is_done(round, "select"):
            return
        self._begin(round, "select")
        if self.folder.load_selection(round) is None:
            known = set(self._passed_over)
            selection = await self._choose(round)
            self._tell_replaced(round, known)
            for note in selection.notes:
                self.log.say(f"round {round}: {note}")
            if selection.overlapping and not self._scores_are():
                self.folder.update_state(scores_are=run_summary.ON_TRAINING_DATA)
                self.log.warn(f"every score from round {round} on is {run_summary.ON_TRAINING_DATA}", round=round)
            self.folder.write_set_aside(round, [row.to_json() for row in selection.set_aside])
            self.log.event(
                "selection",
                round=round,
                step=self._first_step(round),
                rows=len(selection.rows),
                notes=list(selection.notes),
                set_aside=[row.to_json() for row in selection.set_aside],
            )
            self.folder.write_selection(round, [row.to_json() for row in selection.rows])
        self._done(round, "select")

    def _scores_are(self) -> str | None:
        """What the scores are when evaluation items are in the training data; None where they are not."""
        told: str | None = self.folder.load_state().get("scores_are")
        return told

    def _can_train(self, row: data_loader.Row) -> bool:
        """Whether a row about to be chosen can be trained on; `_passed_over` keeps why one cannot."""
        if self.prepared.loader.can_train(row):
            return True
        self._passed_over[row.id] = self.prepared.loader.dropped[row.id]
        return False

    def _tell_replaced(self, round: int, known: set[str]) -> None:
        """Warn of rows that could not be trained on when their turn came; those `known` were told before."""
        reasons = {row: why for row, why in self._passed_over.items() if row not in known}
        if reasons:
            listed = "; ".join(first_ten(f"{row}: {why}" for row, why in reasons.items()))
            self.log.warn(
                f"{len(reasons)} rows cannot be trained on, so others took their places: {listed}", round=round
            )

    async def _choose(self, round: int) -> Selection:
        # After a rollback the weights are those of an earlier round, and so are its failures and what it knows.
        base = self.result(round - 1).get("rollback_to")
        seen: Counter[str] = Counter()
        for earlier in range(1, round):
            seen.update(row.id for step in self._batches(earlier) for row in step)
        choose = partial(
            self._selector.select,
            round=round,
            count=self.config.steps_per_round * self.config.batch_size,
            seen=seen,
            samples=self._samples(round - 1 if base is None else base),
        )
        if not self._selector.uses_losses(round):
            return choose()
        # The guard looks at the rows that would be trained on: measuring the whole supply would cost a round.
        candidates = list({chosen.row.id: chosen.row for chosen in choose(row_losses={}).rows}.values())
        groups = {row.id: [ex.datum for ex in self.prepared.loader.render(row)] for row in candidates}
        paid_tokens.note_forward(
            self.folder, round, sum(datum.model_input.length for group in groups.values() for datum in group)
        )
        return choose(row_losses=await tinker_backend.group_losses(await self.client(round), groups, watch=self._watch))

    def _samples(self, round: int) -> list[SampleResult]:
        """All samples of a round that is done. Those of tasks are known from there alone, so that without one of them a
        row which asks the same could be trained on."""
        samples = self.folder.load_samples(round)
        n, found = self.result(round)["n"], len({(sample.task, sample.id) for sample in samples})
        if found < n:
            raise DamagedFileError(
                f"{self.folder.samples_path(round)}: holds {found} of the {n} samples of round {round}; put the file "
                "back as it was, or start a new run"
            )
        return samples

    def _batches(self, round: int) -> list[list[data_loader.Row]]:
        """The rows of every step of a round whose selection is written."""
        chosen = self.folder.load_selection(round) or []
        found = self._rows.find(row["id"] for row in chosen)
        missing = [row["id"] for row in chosen if row["id"] not in found]
        if missing:
            raise CheckpointError(
                f"{self.folder.selection_path(round)}: rows {missing[:3]} are in no data file any more; put the files "
                "back as they were, or start a new run"
            )
        rows = [found[row["id"]] for row in chosen]
        return [
            data_loader.batch_rows(
                rows, batch_size=self.config.batch_size, seed=self.config.seed, round=round, step_in_round=number
            )
            for number in range(self.config.steps_per_round)
        ]

    async def train(self, round: int) -> None:
        """Train the steps of the round, one batch submitted ahead; save a state every `save_every` steps."""
        if self.folder.is_done(round, "train"):
            return
        batches = self._batches(round)
        if not batches or not batches[0]:
            raise TrainingError(f"round {round} has no steps to train")
        client = await self.client(round)
        done = self._steps_done
        self._begin(round, "train", step=self._first_step(round) + done)
        again = self.log.supersede_after(self._first_step(round) + done)
        if again:
            self.log.say(f"round {round}: steps after {self._first_step(round) + done} are done again")
        pipeline = StepPipeline(
            client, self.prepared.loader, self.log, round, first_step=self._first_step(round), watch=self._watch
        )
        with self.log.progress(len(batches), f"round {round}") as bar:
            if done:
                bar.advance(done)
            for number in range(done, len(batches)):
                await pipeline.submit(number, batches[number], self._scheduled_rate(round, number), bar)
                last = number + 1 == len(batches)
                if self.stop.is_set() or (number + 1) % self.config.save_every == 0 or last:
                    await pipeline.drain(bar)
                    if not last:
                        step = self._first_step(round) + number + 1
                        await self._starts.save_within(client, round, done=number + 1, step=step)
                        self.folder.update_state(step=step, wall_s=self.wall_seconds())
                        self.check_stop()
        # The weights of a finished round are only safe once the checkpoint phase saved them: both are one phase to a
        # resume, so "train" is marked done together with it.

    def _scheduled_rate(self, round: int, number: int) -> float:
        return hyperparam_utils.get_lr_with_warmup(
            self._first_step(round) + number,
            self.learning_rate(round),
            self.prepared.warmup_steps,
            self.config.max_steps,
            self.config.min_lr,
        )

    async def checkpoint(self, round: int) -> None:
        """Save the round's state (weights and optimizer) and its weights for sampling."""
        if self.folder.is_done(round, "checkpoint"):
            return
        self._begin(round, "checkpoint")
        client = await self.client(round)
        step = self._first_step(round + 1)
        if self.folder.checkpoint_of_round(round) is None:
            name = f"round_{round:02d}"
            state = await self._wait(client.save_state(name, overwrite=True), f"the state of round {round}")
            weights = await self._wait(client.save_weights_for_sampler(name), f"the weights of round {round}")
            self.folder.add_checkpoint(
                name,
                batch=self.config.steps_per_round,
                round=round,
                step=step,
                state_path=state.path,
                sampler_path=weights.path,
            )
            self._saved_here = True
        saved = self._round_checkpoint(round)
        self.log.event(
            "checkpoint", round=round, step=step, state_path=saved.state_path, sampler_path=saved.sampler_path
        )
        await self._starts.let_go(round)
        self._done(round, "train", "checkpoint", step=step, adapter_path=saved.sampler_path)

    def _round_checkpoint(self, round: int) -> Checkpoint:
        checkpoint = self.folder.checkpoint_of_round(round)
        if checkpoint is None:
            raise CheckpointError(f"{self.folder.checkpoints_path}: the checkpoint of round {round} is missing")
        return checkpoint

    async def _sampled_checkpoint(self, round: int) -> Checkpoint:
        """The round's checkpoint, its weights for sampling saved anew when the service has lost them since."""
        checkpoint = self._round_checkpoint(round)
        assert checkpoint.sampler_path is not None
        if self._saved_here or await asyncio.to_thread(self.backend.has_checkpoint, checkpoint.sampler_path):
            return checkpoint
        self.log.warn(
            f"the service has no {checkpoint.sampler_path} any more; the weights are saved again from the state",
            round=round,
        )
        saving = (await self.client(round)).save_weights_for_sampler(checkpoint.name)
        weights = await self._wait(saving, f"the weights of round {round}")
        return self.folder.add_checkpoint(
            checkpoint.name,
            batch=self.config.steps_per_round,
            round=round,
            step=self._first_step(round + 1),
            state_path=checkpoint.state_path,
            sampler_path=weights.path,
        )

    async def evaluate(self, round: int) -> None:
        """Measure the round's checkpoint; answered samples of an interrupted attempt are not asked again."""
        if self.folder.is_done(round, "evaluate"):
            return
        self._begin(round, "evaluate")
        checkpoint = await self._sampled_checkpoint(round)
        path = checkpoint.sampler_path
        # Weights that an earlier process saved, its server may have let go of.
        state_path = None if self._saved_here else checkpoint.state_path
        figures = await self._evaluate(round, path, f"round {round}", state_path)
        batches = self._batches(round)
        result = {
            **figures,
            "checkpoint": path,
            "learning_rate": self.learning_rate(round),
            "steps": len(batches),
            "rows": len({row.id for step in batches for row in step}),
        }
        measured = [row["nll"] for row in (*self.results(), result) if row["nll"] is not None]
        self._done(round, "evaluate", result=result, best_val=min(measured, default=None), adapter_path=path)
        self._steps_done, self._saved_here = 0, False
        tell_score(self.result(round), self.config.evaluation.max_tokens, self.log)

    async def _evaluate(
        self, round: int, model_path: str | None, name: str, state_path: str | None = None
    ) -> dict[str, Any]:
        """Ask the checkpoint (None: the base model) the evaluation and measure the targets' likelihood."""
        result = await ask_checkpoint(
            self.prepared,
            self.folder,
            self.backend,
            self.log,
            self.stop,
            round=round,
            model_path=model_path,
            name=name,
            state_path=state_path,
        )
        data, left_out = preparation.target_examples(self.prepared, result.samples)
        if left_out:
            self.log.warn(
                f"{name}: the likelihood leaves out {len(left_out)} targets: {left_out[0]['reason']}", round=round
            )
        nll = None
        if data:
            paid_tokens.note_forward(self.folder, round, sum(datum.model_input.length for datum in data))
            client = await self.client(round)
            likelihoods = await self._unless_stopped(adapter_effect.target_likelihoods(client, data, watch=self._watch))
            nll = adapter_effect.mean_nll(likelihoods)
            if not math.isfinite(nll):
                raise TrainingError(
                    f"{name}: the likelihood of the targets is {nll}: the weights hold values that are not finite, and "
                    "the replies are no result. The learning rate is probably too high: lower learning_rate and start "
                    "a new run."
                )
            await self._check_effect(
                round, data, likelihoods, result.samples, model_path=model_path, state_path=state_path
            )
            self.folder.write_likelihood(round, [one.to_row() for one in likelihoods])
        elif round:
            self.log.warn(
                f"{name}: no target's likelihood can be measured, so whether the adapter has an effect is not checked",
                round=round,
            )
        tokens = paid_tokens.paid_tokens(self.folder, round)
        if any(sample.epoch > 1 for sample in result.samples):
            self.folder.write_sample_scores(round, result.sample_scores)
        figures = run_summary.measured(result, nll)
        if scores_are := self._scores_are():
            figures["scores_are"] = scores_are
        self.log.event("evaluation", round=round, step=self._first_step(round + 1), **figures, logs=result.log_paths)
        cost = run_summary.money(tokens, self.config.prices.get(self.config.base_model))
        return {**figures, "tokens": tokens, "cost": cost}

    async def _try_the_engine(self) -> None:
        """Where a step costs nothing (the embedded engine), see that one trains before anything depends on it."""
        if self.backend.kind != "embedded":
            return
        trainable = (row for row in self._train_rows if self.prepared.loader.can_train(row))
        few = [example.datum for row in islice(trainable, 32) for example in self.prepared.loader.render(row)]
        shortest = min(few, key=lambda datum: datum.model_input.length)
        await self._unless_stopped(
            adapter_effect.canary(
                self.backend,
                self.config.base_model,
                shortest,
                rank=self.config.lora_rank,
                seed=self.config.seed,
                watch=self._watch,
            )
        )

    async def _save_start(self, client: tinker.TrainingClient) -> str:
        saved = await self._wait(client.save_weights_for_sampler("start"), "the starting adapter's weights")
        return str(saved.path)

    async def _start_path(self) -> str | None:
        """The weights that the baseline measured, for sampling; None for the base model."""
        baseline = self.result(0)
        if self.config.init_from and run_opening.MEASURED_ONCE in baseline:
            # Another run saved them, and may have done so in an engine of its own.
            return await self._save_start(
                await self.backend.restore_training_client(self.config.init_from, optimizer=False)
            )
        path: str | None = baseline["checkpoint"]
        return path

    async def _check_effect(
        self,
        round: int,
        data: Sequence[tinker.Datum],
        likelihoods: Sequence[adapter_effect.TargetLikelihood],
        samples: Sequence[SampleResult],
        *,
        model_path: str | None,
        state_path: str | None,
    ) -> None:
        """Refuse a trained adapter that changes nothing."""
        if round == 0:
            return
        base = [adapter_effect.TargetLikelihood.from_row(row) for row in self.folder.load_likelihood(0)]
        adapter_effect.refuse_without_effect(round, base, likelihoods, learning_rate=self.learning_rate(round))
        same = adapter_effect.same_replies(self.folder.load_samples(0), samples)
        if not same:
            return
        self.log.warn(f"round {round}: all {same} replies are, word for word, those of the baseline", round=round)
        start = await self._start_path()
        model = None if start else self.config.base_model
        before = await self.backend.create_sampling_client(model_path=start, base_model=model)
        after = await self.backend.create_sampling_client(model_path=model_path, state_path=state_path)
        paid_tokens.note_forward(self.folder, round, adapter_effect.tokens_asked_of_samplers(data))
        await self._unless_stopped(adapter_effect.refuse_unused_adapter(round, before, after, data, watch=self._watch))

    async def submit(self, round: int) -> None:
        """Send the round's result to EvalOps when the run is set up for it; a failure is kept for later, and told."""
        if self.folder.is_done(round, "submit"):
            return
        config = self.config
        if config.evalops_enabled and config.evalops_test_suite_id:
            self._begin(round, "submit")
            result = self.result(round)
            figures = ("score", "lenient_score", "ci_low", "ci_high", "n", "errors", "truncated", "nll")
            payload = evalops_client.training_results_payload(
                config.evalops_test_suite_id,
                round,
                result["checkpoint"] or config.base_model,
                {key: result[key] for key in figures},
                {
                    "run_id": self.folder.run_id,
                    "base_model": config.base_model,
                    "threshold": config.eval_threshold,
                    **({"scores_are": result["scores_are"]} if result.get("scores_are") else {}),
                },
            )
            error = await self._send(
                partial(
                    evalops_client.submit_round,
                    payload,
                    self.folder.outbox_path,
                    config.evalops_api_url,
                    f"{self.folder.run_id}-round-{round}",
                ),
                f"EvalOps to take round {round}",
            )
            if error:
                self.log.warn(f"EvalOps did not take round {round}: {error}", round=round)
            self.log.event("evalops", round=round, step=self._first_step(round + 1), sent=error is None)
        self._done(round, "submit")

    def decide(self, round: int) -> None:
        """Decide what comes next, and write the decision down with its reason."""
        if self.folder.is_done(round, "decide"):
            return
        self._begin(round, "decide")
        spent = self.wall_seconds()
        seconds = self._seconds_of(round, spent)
        decision = run_opening.decide(
            self.folder,
            self.config,
            learning_rate=self.learning_rate(round) if round else self.prepared.learning_rate,
            seconds_spent=spent,
            next_tokens=run_opening.expected_tokens(self.folder, self.prepared, round + 1),
            # Before the first round only the time of an evaluation is known, which a round holds as well.
            next_seconds=seconds,
        )
        fields = {
            "wall_s": spent,
            "seconds": seconds,
            "decision": decision.status,
            "action": decision.action,
            "reason": decision.reason,
            "best_round": decision.best_round,
            "next_lr": decision.next_lr,
            "rollback_to": decision.rollback_to,
        }
        self.log.event("decision", round=round, step=self._first_step(round + 1), **fields)
        self._done(round, "decide", result=fields, wall_s=spent)
        if decision.rollback_to is not None:
            self._client = None
        scores_are = self._scores_are()
        self.log.say(f"decision: {decision.reason}" + (f" (scores {scores_are})" if scores_are else ""))

    def _seconds_of(self, round: int, now: float) -> float:
        """Seconds that a round took which is decided at `now`; decided again, what it took the first time."""
        known = self.result(round).get("seconds")
        if known is not None:
            return float(known)
        began = self.result(round - 1)["wall_s"] if round else 0.0
        return now - max(began, self.folder.load_state().get("went_back_s", 0.0))

    async def _abandon_after(self, last: int) -> None:
        """Mark what was begun after round `last` and is in no result; its states are deleted."""
        self.log.supersede(lambda event: "event" in event and (event["round"] or 0) > last)
        later = [c for c in self.folder.checkpoints() if (c.round or 0) > last and c.gone is None]
        if later:
            await self._starts.let_go(last)
            self.folder.mark_gone([c for c in later if c.kind != "state"], "superseded")

    async def finish(self) -> dict[str, Any]:
        """Name the best checkpoint, write the summary and the report, and say where everything is."""
        import report

        last = self.results()[-1]
        self._begin(last["round"], "finish")
        await self._abandon_after(last["round"])
        met = last["decision"] == "target_met"
        best = self.folder.checkpoint_of_round(last["best_round"]) if last["best_round"] else None
        # The baseline is the untouched base model, which has no checkpoint, or the adapter that the run started from.
        start_state = self.config.init_from if last["best_round"] == 0 else None
        unsent = await self.send_kept()
        notes: dict[str, Any] = {"model": self.config.base_model, "evalops_unsent": unsent}
        if scores_are := self._scores_are():
            notes["scores_are"] = scores_are
        summary = run_summary.build_summary(
            run_id=self.folder.run_id,
            status="completed",
            exit_code=EXIT_TARGET_MET if met else EXIT_TARGET_MISSED,
            reason=last["reason"],
            rounds=self.results(),
            best_round=last["best_round"],
            threshold=self.config.eval_threshold,
            final_checkpoint=best.sampler_path if best else self.result(last["best_round"])["checkpoint"],
            final_state=best.state_path if best else start_state,
            price=self.config.prices.get(self.config.base_model),
            taken_back=paid_tokens.taken_back(self.folder),
            wall_s=self.wall_seconds(),
            leads=round_decision.leads(
                [run_opening.round_record(self.folder, row) for row in self.results()], last["best_round"]
            ),
            notes=notes,
        )
        self.folder.write_summary(summary)
        try:
            report.write_report(self.folder.run_dir)
        except EvalLoopError as err:
            self.log.warn(f"the report could not be written: {err}")
        self.log.event("finish", round=last["round"], exit_code=summary["exit_code"], best_round=last["best_round"])
        self._done(last["round"], "finish", status="completed", adapter_path=summary["final_checkpoint"])
        return summary

    # Helpers

    async def send_kept(self) -> int:
        """Try once more what EvalOps did not take; returns how many submissions are still unsent."""
        if not self.folder.outbox_path.exists():
            return 0
        send = partial(evalops_client.send_kept, self.folder.outbox_path, self.config.evalops_api_url)
        result = await self._send(send, "EvalOps to take what was kept")
        for error in result.errors:
            self.log.warn(f"EvalOps: {error}")
        return result.left

    async def _send(self, send: Callable[[], T], what: str) -> T:
        # In a thread, so that a service which hangs does not keep the run from hearing that it shall stop.
        watch = tinker_backend.Watch(note=self.log.say, stop=self.stop, queue=None)
        result: T = await tinker_backend.wait_for(asyncio.wrap_future(in_thread(send)), what, watch=watch)
        return result

    async def _wait(self, future: Any, what: str) -> Any:
        return await tinker_backend.wait_for(future, what, watch=self._watch)
