"""Optimizer steps in flight: one batch is submitted ahead, every future is awaited, every step's loss is logged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import server_differences
import tinker_backend
from error_handling import TrainingError
from logger import Progress, StructuredLogger
from tinker_backend import Watch

if TYPE_CHECKING:
    import tinker

    from data_loader import DataLoader, Row


@dataclass(frozen=True)
class _SubmittedStep:
    """A step on its way: both futures, what it trains on, and the learning rate it was sent with."""

    step: int
    learning_rate: float
    data: list[tinker.Datum]
    n_rows: int
    gradients: Awaitable[Any]
    update: Awaitable[Any]


class StepPipeline:
    """Submits the steps of a round in order and awaits each while the next one is under way.

    `first_step` is the number of optimizer steps submitted before the round. A step is never submitted twice.
    """

    def __init__(
        self,
        client: tinker.TrainingClient,
        loader: DataLoader,
        log: StructuredLogger,
        round: int,
        *,
        first_step: int,
        watch: Watch,
    ) -> None:
        self._client = client
        self._loader = loader
        self._log = log
        self._round = round
        self._first_step = first_step
        self._watch = watch
        self._pending: deque[_SubmittedStep] = deque()

    async def submit(self, number: int, rows: Sequence[Row], learning_rate: float, bar: Progress) -> None:
        """Send step `number` of the round (from 0), then await the one before it."""
        data = [example.datum for row in rows for example in self._loader.render(row)]
        step = self._first_step + number + 1
        gradients = await tinker_backend.forward_backward_async(self._client, data)
        if not server_differences.runs_in_order(self._client):
            await tinker_backend.wait_for(gradients, f"the gradients of step {step}", watch=self._watch)
        update = await tinker_backend.optim_step_async(self._client, learning_rate)
        self._pending.append(_SubmittedStep(step, learning_rate, data, len(rows), gradients, update))
        if len(self._pending) > 1:
            await self._finish(self._pending.popleft(), bar)

    async def drain(self, bar: Progress) -> None:
        """Await everything submitted."""
        while self._pending:
            await self._finish(self._pending.popleft(), bar)

    async def _finish(self, submitted: _SubmittedStep, bar: Progress) -> None:
        """Await a step and log it; raises `TrainingError` when its loss is not finite."""
        name = f"step {submitted.step}"
        output = await tinker_backend.wait_for(submitted.gradients, f"the gradients of {name}", watch=self._watch)
        nll, weight = tinker_backend.trained_nll(submitted.data, output.loss_fn_outputs)
        loss = nll / weight if weight > 0 else math.nan
        if not math.isfinite(loss):
            raise TrainingError(
                f"round {self._round}, {name}: the loss is {loss}. The learning rate of "
                f"{submitted.learning_rate:.3g} is probably too high; nothing of this round since its last checkpoint "
                "is kept. Lower learning_rate and start a new run."
            )
        await tinker_backend.wait_for(submitted.update, f"the update of {name}", watch=self._watch)
        self._log.event(
            "step",
            round=self._round,
            step=submitted.step,
            loss=loss,
            lr=submitted.learning_rate,
            rows=submitted.n_rows,
            tokens=sum(datum.model_input.length for datum in submitted.data),
            trained_tokens=weight,
        )
        bar.advance(lr=submitted.learning_rate, loss=loss)
