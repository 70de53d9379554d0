"""The local engine behind the HTTP server: sessions, training runs, samplers, and the requests made of them.

What a request asks is done on the engine's thread (`RequestQueue`); torch is imported there, on first use, so that a
server answers at once after its start. Methods ending in `_now` run on the caller's thread and touch no model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapter_store import (
    SAMPLED_KINDS,
    TRAINED_KINDS,
    AdapterSpec,
    AdapterStore,
    Checkpoint,
    CheckpointInfo,
    check_name,
)
from age_export import encrypt_files, parse_recipients
from engine_models import ServedModels
from engine_sessions import Sampler, SessionBook, session_of
from error_handling import EvalLoopError
from queued_request import USER_ERRORS, Reply
from queued_samples import QueuedSamples
from request_fields import check_optimizer, expiry, metadata_of, number_of, object_of, text_of
from request_queue import RequestQueue
from running_batch import RunningBatch
from sample_format import SampleRequest, decode_sample
from wire_format import RequestError, decode_forward_backward, encode_forward_backward

if TYPE_CHECKING:
    from custom_losses import CustomLoss
    from fault_plan import FaultPlan
    from local_model import Adapter, LocalModel

logger = logging.getLogger("mock_tinker")

# How often is looked for sessions, replies and checkpoints whose time is over.
TIDY_S = 60.0
SAVE_CALLS = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


@dataclass
class TrainingRun:
    """A model being trained: an adapter over a base model that others share."""

    model_id: str
    base_model: str
    model: LocalModel
    adapter: Adapter
    saves: int = 0
    # Samplers that follow the newest weights published for them, and the last two weights published.
    inflight: list[str] = field(default_factory=list)
    published: list[Checkpoint] = field(default_factory=list)


def _usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under taskset or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """Everything the server does, apart from HTTP."""

    def __init__(
        self, state_dir: Path | str, *, models: Sequence[str] = (), threads: int | None = None, device: str = "cpu"
    ) -> None:
        self.store = AdapterStore(state_dir)
        self.queue = RequestQueue(self._run_samples)
        self.models = ServedModels(
            models, threads=threads or _usable_cores(), device=device, should_stop=self.queue.stopping.is_set
        )
        self.book = SessionBook(self.store)
        self.runs: dict[str, TrainingRun] = {}
        self.faults: FaultPlan | None = None
        self._listing_due = 0.0

    def start(self) -> None:
        """Take the state folder and start the thread. Raises `RunLockedError`, `StorageError`."""
        self.store.open()
        self.queue.start()
        threading.Thread(target=self._tidy, name="tinker-tidy", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current step and give the state folder back."""
        self.queue.stop()
        self.store.close()

    # What follows answers at once, on the server's threads.

    def finish_session_now(self, session_id: str) -> None:
        """End a session: its models and samplers leave memory, its nameless samplers the disk; checkpoints stay."""
        ended = self.book.end(session_id)
        if ended is None:
            return
        session, checkpoints = ended
        for model_id in session.model_ids:
            self.queue.post(partial(self._drop_run, model_id))
        for checkpoint in checkpoints:
            self.queue.post(partial(self._drop_sampled, checkpoint, checkpoint in session.nameless))

    def _tidy(self) -> None:
        while not self.queue.stopping.wait(TIDY_S):
            self.tidy_now()

    def tidy_now(self) -> None:
        """Let go of what nobody has asked for long enough: idle sessions, old replies, checkpoints past their life."""
        for session in self.book.idle():
            logger.info("session %s: nothing heard of its client for long, it has ended", session.session_id)
            self.finish_session_now(session.session_id)
        self.queue.sweep()
        started = time.monotonic()
        if started < self._listing_due:
            return
        try:
            self.store.list()
        except (EvalLoopError, OSError) as error:
            logger.warning("checkpoints past their life could not be removed: %s", error)
        # There may be very many: a hundredth of the time goes into reading their records.
        self._listing_due = time.monotonic() + 100 * (time.monotonic() - started)

    def _drop_run(self, model_id: str) -> Reply:
        run = self.runs.pop(model_id, None)
        self.queue.close_stream(model_id)
        if run is not None:
            run.model.drop_adapter(run.adapter)
        return Reply({})

    def _drop_sampled(self, checkpoint: Checkpoint, is_nameless: bool) -> Reply:
        """Take a checkpoint that no sampler needs any more out of memory, and a nameless one off the disk."""
        if all(sampler.checkpoint != checkpoint for sampler in list(self.book.samplers.values())):
            for model in self.models.loaded.values():
                model.drop_sampler(checkpoint)
        if is_nameless:
            self.store.remove_ephemeral(checkpoint)
        return Reply({})

    def create_sampler_now(self, body: Mapping[str, Any]) -> str:
        """Open a sampling session. Raises `RequestError`, `CheckpointError`, `ConfigurationError`."""
        session_id, seq = text_of(body, "session_id"), number_of(body, "sampling_session_seq_id", 0)
        self.book.alive(session_id)
        path, base_model = body.get("model_path"), body.get("base_model")
        checkpoint = self.store.find(path, SAMPLED_KINDS) if path else None
        if checkpoint is not None:
            base_model = checkpoint.info.spec.base_model
        if not base_model:
            raise RequestError("give base_model or model_path: there is nothing to sample from")
        self.models.resolve_now(base_model)
        return self.book.add_sampler(session_id, seq, Sampler(base_model, path, checkpoint))

    def submit_custom_loss(self, body: Mapping[str, Any]) -> str:
        """Queue keeping a client's own loss for its session."""
        session_id, number = text_of(body, "session_id"), body.get("custom_loss_seq_id")

        def job() -> Reply:
            from custom_losses import build_custom_loss

            if session_id not in self.book.sessions:
                raise RequestError(f"there is no session {session_id}; it ended, or the server was restarted")
            loss_id = f"{session_id}:loss:{number}"
            self.book.sessions[session_id].custom_losses[loss_id] = build_custom_loss(body)
            return Reply({"type": "create_custom_loss", "loss_id": loss_id})

        return self.queue.submit(f"{session_id}:loss", number if isinstance(number, int) else None, job)

    def _find_custom_loss(self, model_id: str, loss_id: str) -> CustomLoss:
        session = self.book.sessions.get(session_of(model_id))
        if session is None or loss_id not in session.custom_losses:
            raise RequestError(
                f"there is no custom loss {loss_id!r} in this session; create it with create_custom_loss"
            )
        return session.custom_losses[loss_id]

    # What follows queues a request and returns its id.

    def submit_create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Queue the creation of a model; returns (request id, model id)."""
        model_id = self._new_model_id(body)
        job = partial(self._create_model, model_id, body)
        self.queue.open_stream(model_id)
        return self.queue.submit(model_id, 0, self._planned("create_model", job)), model_id

    def submit_load_weights(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Queue loading a checkpoint into a model that exists, or (session and number given) into a new one."""
        if body.get("model_id"):
            model_id = text_of(body, "model_id")
            return self.submit("load_weights", body, partial(self._load_weights, model_id, body)), model_id
        model_id = self._new_model_id(body)
        job = partial(self._create_from_checkpoint, model_id, body)
        self.queue.open_stream(model_id)
        return self.queue.submit(model_id, 0, self._planned("load_weights", job)), model_id

    def _new_model_id(self, body: Mapping[str, Any]) -> str:
        session_id, number = text_of(body, "session_id"), number_of(body, "model_seq_id", 0)
        if number is None:
            raise RequestError("model_seq_id is missing: it numbers the session's models from 0 on")
        model_id = f"{session_id}:train:{number}"
        with self.book.guard:
            session = self.book.alive(session_id)
            if model_id not in session.model_ids:
                session.model_ids.append(model_id)
        return model_id

    def submit(self, call: str, body: Mapping[str, Any], job: Callable[[], Reply]) -> str:
        """Queue `job`, which serves `call`, at its place among the requests of the model that `body` names."""
        model_id, number = text_of(body, "model_id"), number_of(body, "seq_id", 1)
        self.book.heartbeat_now(model_id)
        return self.queue.submit(model_id, number, self._planned(call, job))

    def _planned(self, call: str, job: Callable[[], Reply]) -> Callable[[], Reply]:
        return job if self.faults is None else self.faults.guard(call, job)

    def submit_forward_backward(self, message: Any) -> str:
        """Queue a parsed protobuf request; what is wrong with its data fails it when its turn comes."""

        def job() -> Reply:
            run = self._run(message.model_id)
            batch = decode_forward_backward(message, partial(self._find_custom_loss, message.model_id))
            logprobs, metrics = run.model.forward_backward(run.adapter, batch)
            return Reply(encode_forward_backward(logprobs, metrics))

        body = {"model_id": message.model_id, "seq_id": message.seq_id or None}
        return self.submit("forward_backward", body, job)

    def submit_optim_step(self, body: Mapping[str, Any]) -> str:
        """Queue an optimizer step."""

        def job() -> Reply:
            run = self._run(text_of(body, "model_id"))
            sent = [body[name] for name in ("adam_params", "optimizer_params", "optim_params") if name in body]
            if not sent or not isinstance(sent[0], dict):
                raise RequestError("adam_params is missing, or no object")
            return Reply({"metrics": run.model.optim_step(run.adapter, sent[0])})

        return self.submit("optim_step", body, job)

    def submit_save(self, body: Mapping[str, Any], kind: str) -> str:
        """Queue saving a model as a checkpoint of `kind`."""
        return self.submit(SAVE_CALLS[kind], body, partial(self._save, body, kind))

    def submit_sample(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Queue a sampling request; returns its id and the ids of its sequences."""
        stem = f"sample:{uuid.uuid4().hex}"
        try:
            seq = number_of(body, "seq_id", 0)
            if body.get("sampling_session_id"):
                sampler_id = text_of(body, "sampling_session_id")
                self.book.heartbeat_now(sampler_id)
                stem = f"{sampler_id}:{seq}" if seq is not None else stem
            sampler = self.book.find_sampler(body)
            request = decode_sample(body)
        except USER_ERRORS as error:
            return self.queue.submit_failed(stem, None, error), []
        group = sampler.checkpoint.key if sampler.checkpoint else sampler.base_model
        sequence_ids = [f"{stem}:{index}" for index in range(request.num_samples)]
        return self.queue.submit_sample(group, stem, (sampler, request)), sequence_ids

    # What follows runs on the engine's thread.

    def _run(self, model_id: str) -> TrainingRun:
        run = self.runs.get(model_id)
        if run is None:
            raise RequestError(
                f"there is no model {model_id}: its creation failed, its session ended, or the server was restarted. "
                "Create a training client from a saved state to go on"
            )
        return run

    def _create_model(self, model_id: str, body: Mapping[str, Any]) -> Reply:
        lora = object_of(body, "lora_config")
        rank, seed = number_of(lora, "rank"), number_of(lora, "seed")
        trained = {name: lora.get(name, True) for name in ("train_attn", "train_mlp", "train_unembed")}
        for name, value in trained.items():
            if not isinstance(value, bool):
                raise RequestError(f"lora_config.{name} is {value!r}; it must be true or false")
        check_optimizer(body)
        base_model = text_of(body, "base_model")
        spec = AdapterSpec(
            base_model=base_model,
            rank=32 if rank is None else rank,
            seed=secrets.randbits(31) if seed is None else seed,
            **trained,
        )
        model = self.models.load(base_model)
        if spec.train_unembed and model.is_tied:
            logger.info("%s: the output layer is tied to the input embedding and stays frozen", base_model)
        self._add_run(model_id, spec, body, model, model.create_adapter(spec))
        return Reply({"model_id": model_id, "type": "create_model"})

    def _add_run(
        self, model_id: str, spec: AdapterSpec, body: Mapping[str, Any], model: LocalModel, adapter: Adapter
    ) -> None:
        self.runs[model_id] = TrainingRun(model_id, spec.base_model, model, adapter)
        session_id = session_of(model_id)
        record = {
            "base_model": spec.base_model,
            "lora_rank": spec.rank,
            "session_id": session_id,
            "created": time.time(),
            "user_metadata": body.get("user_metadata"),
        }
        self.store.add_run(model_id, record)

    def _create_from_checkpoint(self, model_id: str, body: Mapping[str, Any]) -> Reply:
        checkpoint = self._training_checkpoint(body)
        check_optimizer(body)
        spec = checkpoint.info.spec
        other = body.get("base_model")
        if other and self.models.resolve_now(other).folder != self.models.resolve_now(spec.base_model).folder:
            raise RequestError(
                f"{checkpoint.info.path} was trained over {spec.base_model}, it cannot continue over {other}"
            )
        model = self.models.load(spec.base_model)
        adapter = model.create_adapter(spec)
        try:
            model.load_adapter(adapter, checkpoint, optimizer=bool(body.get("optimizer")))
        except BaseException:
            model.drop_adapter(adapter)
            raise
        self._add_run(model_id, spec, body, model, adapter)
        return Reply({"path": checkpoint.info.path, "model_id": model_id, "type": "load_weights"})

    def _load_weights(self, model_id: str, body: Mapping[str, Any]) -> Reply:
        run = self._run(model_id)
        checkpoint = self._training_checkpoint(body)
        run.model.load_adapter(run.adapter, checkpoint, optimizer=bool(body.get("optimizer")))
        return Reply({"path": checkpoint.info.path, "model_id": model_id, "type": "load_weights"})

    def _training_checkpoint(self, body: Mapping[str, Any]) -> Checkpoint:
        return self.store.find(text_of(body, "path"), TRAINED_KINDS)

    def _save(self, body: Mapping[str, Any], kind: str) -> Reply:
        run = self._run(text_of(body, "model_id"))
        model, adapter = run.model, run.adapter
        name = body.get("path")
        nameless = name is None and kind == "sampler_weights"
        if kind == "weights" and name is None:
            run.saves += 1
            name = f"checkpoint-{adapter.step:06d}-{run.saves}"
        is_state = kind == "weights"
        recipients = parse_recipients(body.get("age_encryption_recipients")) if kind == "external_weights" else []
        info = CheckpointInfo(
            model_id=run.model_id,
            kind=kind,
            name="ephemeral" if nameless else check_name(name),
            spec=adapter.spec,
            fingerprint=model.fingerprint,
            step=adapter.step,
            optimizer_steps=adapter.optimizer_steps if is_state else 0,
            created=time.time(),
            expires_at=expiry(body.get("ttl_seconds")),
            user_metadata=metadata_of(body),
        )

        def write(folder: Path) -> None:
            model.save_adapter(adapter, folder, optimizer=is_state)
            if recipients:
                encrypt_files(folder, recipients)

        if nameless:
            checkpoint = self.store.save_ephemeral(replace(info, expires_at=None), write)
            sampler_id = self._publish(run, checkpoint, body)
            return Reply({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        # Only a saved state has an overwrite flag in the API: of the other kinds a name used again is replaced.
        checkpoint = self.store.save(info, write, overwrite=bool(body.get("overwrite")) or not is_state)
        return Reply({"path": checkpoint.info.path, "type": SAVE_CALLS[kind]})

    def _publish(self, run: TrainingRun, checkpoint: Checkpoint, body: Mapping[str, Any]) -> str:
        """Open a sampler over nameless weights; of kind "inflight", the run's earlier ones take the new weights too."""
        session_id = session_of(run.model_id)
        session = self.book.alive(session_id)
        session.nameless.append(checkpoint)
        sampler = Sampler(run.base_model, None, checkpoint)
        sampler_id = self.book.add_sampler(session_id, number_of(body, "sampling_session_seq_id", 0), sampler)
        if body.get("kind") == "inflight":
            run.inflight = [*(other for other in run.inflight if other in self.book.samplers), sampler_id]
            self.book.samplers.update(dict.fromkeys(run.inflight, sampler))
            run.published.append(checkpoint)
            # Requests that wait still name the weights before these.
            while len(run.published) > 2:
                outdated = run.published.pop(0)
                if outdated in session.nameless:
                    session.nameless.remove(outdated)
                    self._drop_sampled(outdated, is_nameless=True)
        return sampler_id

    def _run_samples(self, group: str, batch: RunningBatch) -> None:
        sampler: Sampler = batch.first[0]
        model = self.models.load(sampler.base_model)

        def check(request: SampleRequest) -> Reply | None:
            model.check_sample(request)
            return self.faults.failure("asample") if self.faults is not None else None

        model.serve(sampler.checkpoint, QueuedSamples(batch, check))

    # What follows answers questions about models and checkpoints, on the server's threads.

    def model_info_now(self, model_id: str) -> dict[str, Any]:
        """What `get_info` answers. `step` is ours: optimizer steps taken. Raises `RequestError`."""
        run = self._run(model_id)
        base = self.models.resolve_now(run.base_model)
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {
                "arch": json.loads((base.folder / "config.json").read_text(encoding="utf-8")).get("model_type"),
                "model_name": run.base_model,
                "tokenizer_id": str(base.folder),
            },
            "is_lora": True,
            "lora_rank": run.adapter.spec.rank,
            "model_name": run.base_model,
            "step": run.adapter.step,
        }
