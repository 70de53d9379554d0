"""Where training starts from: the saved state that a round goes on from or begins with, and which states are kept.

    starts = StartPoints(folder, backend, config, log, watch)
    client, done = await starts.restore(round)      # raises LostRoundError when a round before must be trained again
    await starts.save_within(client, round, done=20, step=60)
    await starts.let_go(round)                      # once the round's checkpoint is saved

The service may have let a state go: its life is over, or somebody deleted it. Then the one before serves: within a
round the state saved before, or what the round began with; where that is lost too, the round that made it is trained
again, and so on down to a fresh adapter. All of it is told, and nothing is tried twice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from error_handling import CheckpointError, ServiceError
from service_waits import Watch, wait_for

if TYPE_CHECKING:
    import tinker

    from checkpoint_manager import Checkpoint, CheckpointManager
    from config_schema import TrainingConfig
    from logger import StructuredLogger
    from tinker_backend import Backend

# A state within a round only serves a resume of that round; the service may let it go after two weeks.
LIFE_WITHIN_ROUND_S = 14 * 24 * 3600
# The newest may be lost, so the one before it is kept too.
KEPT_WITHIN_ROUND = 2


class LostRoundError(CheckpointError):
    """The checkpoint that ended `round` is gone, and training needs it: the round must be trained again."""

    def __init__(self, round: int) -> None:
        super().__init__(f"the checkpoint of round {round} is gone")
        self.round = round


class StartPoints:
    """The saved states of one run, on the service and in its folder."""

    def __init__(
        self,
        folder: CheckpointManager,
        backend: Backend,
        config: TrainingConfig,
        log: StructuredLogger,
        watch: Watch,
    ) -> None:
        self.folder = folder
        self.backend = backend
        self.config = config
        self.log = log
        self._watch = watch

    async def restore(self, round: int) -> tuple[tinker.TrainingClient, int]:
        """A training client with the newest weights that `round` has, and how many of its steps these contain.

        Raises `LostRoundError`, and `ServiceError`s where the service fails in another way than by having lost a state.
        """
        for within in self.folder.resume_points(round):
            client = await self._load(within)
            if client is not None:
                return client, within.batch or 0
            if within.kind != "state" and self.folder.is_done(round, "train"):
                break
        if round and self.folder.is_done(round, "train"):
            raise LostRoundError(round)
        return await self._begin(round), 0

    async def _begin(self, round: int) -> tinker.TrainingClient:
        """A training client with the weights that `round` begins with."""
        base = self.base(round)
        if base > 0:
            checkpoint = self.folder.checkpoint_of_round(base)
            client = await self._load(checkpoint) if checkpoint is not None else None
            if client is None:
                raise LostRoundError(base)
            return client
        if self.config.init_from:
            return await self.backend.restore_training_client(self.config.init_from, optimizer=False)
        return await self.backend.create_training_client(
            self.config.base_model, rank=self.config.lora_rank, seed=self.config.seed
        )

    def base(self, round: int) -> int:
        """The round whose weights `round` begins with; 0 is the adapter that the run started with."""
        if round <= 1:
            return 0
        before = next(row for row in self.folder.round_results() if row["round"] == round - 1)
        rolled_back = before.get("rollback_to")
        return round - 1 if rolled_back is None else int(rolled_back)

    async def _load(self, checkpoint: Checkpoint) -> tinker.TrainingClient | None:
        """A training client with the checkpoint's weights and optimizer; None, told and kept, when it is lost."""
        path = checkpoint.state_path
        assert path is not None, "only rows with a state are offered to training"
        try:
            client = await self.backend.restore_training_client(path)
        except CheckpointError:
            if await asyncio.to_thread(self.backend.has_checkpoint, path):
                raise
            self.folder.mark_gone([checkpoint], "lost")
            self.log.warn(
                f"the service has no {path} any more (step {checkpoint.step}): it expired or was deleted. Going back "
                "to what was saved before it",
                round=checkpoint.round,
            )
            return None
        self.log.say(f"restoring {checkpoint.name} (step {checkpoint.step}) with its optimizer state")
        return client

    async def save_within(self, client: tinker.TrainingClient, round: int, *, done: int, step: int) -> None:
        """Save a state after `done` steps of the round, the run's `step`-th, and let go of those it makes needless."""
        name = f"round_{round:02d}_step_{step:06d}"
        saving = client.save_state(name, ttl_seconds=LIFE_WITHIN_ROUND_S, overwrite=True)
        saved = await wait_for(saving, f"the state after step {step}", watch=self._watch)
        self.folder.add_checkpoint(name, batch=done, round=round, step=step, state_path=saved.path, kind="state")
        await self.let_go(round, keep=KEPT_WITHIN_ROUND)

    async def let_go(self, round: int, *, keep: int = 0) -> None:
        """Delete the states kept within rounds, but for the newest `keep` of `round`. What fails is told, and stays."""
        within = [c for c in self.folder.checkpoints() if c.kind == "state" and c.state_path]
        spared = [c for c in within if c.round == round and c.gone is None]
        spared = spared[-keep:] if keep else []
        deleted = []
        for checkpoint in within:
            if checkpoint in spared or checkpoint.gone in ("deleted", "lost"):
                continue
            assert checkpoint.state_path is not None
            try:
                await self.backend.delete_checkpoint(checkpoint.state_path)
            except ServiceError as err:
                self.log.say(f"note: {checkpoint.state_path} is not needed any more and could not be deleted: {err}")
                break
            deleted.append(checkpoint)
        self.folder.mark_gone(deleted, "deleted")
