"""The local engine behind the HTTP server: sessions, training runs, samplers, and the requests made of them.

What a request asks is done on the engine's thread (`RequestQueue`); torch is imported there, on first use, so that a
server answers at once after its start. Methods ending in `_now` run on the caller's thread and touch no model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapter_store import AdapterSpec, AdapterStore, Checkpoint, CheckpointInfo, check_name
from error_handling import CheckpointError
from request_queue import Reply, RequestQueue, failed
from wire_format import (
    RequestError,
    SampleRequest,
    decode_forward_backward,
    decode_sample,
    encode_forward_backward,
    encode_sample,
)

if TYPE_CHECKING:
    from base_models import BaseModel
    from local_model import Adapter, LocalModel

logger = logging.getLogger("mock_tinker")

# A session whose client has neither asked nor sent a heartbeat (one every 10 s) for so long is over.
SESSION_IDLE_S = 3600.0
TTL_RANGE_S = (1, 10 * 366 * 86400)


@dataclass
class Session:
    """A client's session: what belongs to it is let go when it ends."""

    session_id: str
    last_seen: float
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


@dataclass
class TrainingRun:
    """A model being trained: an adapter over a base model that others share."""

    model_id: str
    base_model: str
    model: LocalModel
    adapter: Adapter
    saves: int = 0


@dataclass(frozen=True)
class Sampler:
    """Where a sampling session samples from: a checkpoint, or the base model itself."""

    base_model: str
    model_path: str | None
    checkpoint: Checkpoint | None


class LocalEngine:
    """Everything the server does, apart from HTTP."""

    def __init__(
        self, state_dir: Path | str, *, models: Sequence[str] = (), threads: int | None = None, device: str = "cpu"
    ) -> None:
        self.store = AdapterStore(state_dir)
        self.queue = RequestQueue(self._run_samples)
        self.threads = threads or os.cpu_count() or 1
        self.device = device
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, TrainingRun] = {}
        self.samplers: dict[str, Sampler] = {}
        self._offered = list(models)
        self._bases: dict[str, BaseModel] = {}
        self._loaded: dict[str, LocalModel] = {}
        self._announced: set[str] = set()

    def start(self) -> None:
        """Take the state folder and start the thread. Raises `RunLockedError`, `StorageError`."""
        self.store.open()
        self.queue.start()

    def stop(self) -> None:
        """End the thread after its current step and give the state folder back."""
        self.queue.stop()
        self.store.close()

    # What follows answers at once, on the server's threads.

    def resolve_now(self, name: str) -> BaseModel:
        """The base model behind `name`. Raises `ConfigurationError` (a `ValueError`) listing the choices."""
        import base_models

        if self._offered and name not in self._offered:
            raise RequestError(f"this server offers {', '.join(self._offered)}; not {name!r}")
        if name not in self._bases:
            base = base_models.resolve_base_model(name)
            config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
            self._bases[name] = replace(base, max_context=_context_length(base.max_context, config))
        return self._bases[name]

    def capabilities_now(self) -> list[dict[str, Any]]:
        """Models offered, with their context length where finding it out costs nothing."""
        import base_models

        models = []
        for name in self._offered or base_models.available_models():
            # Resolving the model from the wheel may convert it first, which takes many seconds.
            known = name in self._bases or name != base_models.SMOLLM2_NAME
            context = self.resolve_now(name).max_context if known else None
            models.append({"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True})
        return models

    def create_session_now(self, body: Mapping[str, Any]) -> str:
        """Open a session and return its id, unique over restarts."""
        self._end_idle_sessions()
        session_id = str(uuid.uuid4())
        self.sessions[session_id] = Session(session_id, time.monotonic())
        kept = {key: body.get(key) for key in ("tags", "user_metadata", "sdk_version", "display_name")}
        self.store.add_session(session_id, {"created": time.time(), **kept})
        return session_id

    def heartbeat_now(self, session_id: str) -> bool:
        """Note that a client is alive; False when there is no such session."""
        session = self.sessions.get(session_id)
        if session is not None:
            session.last_seen = time.monotonic()
        return session is not None

    def finish_session_now(self, session_id: str) -> None:
        """End a session: its models leave memory (checkpoints stay), its nameless samplers leave the disk."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.model_ids:
            self.queue.submit(f"{model_id}:end", None, partial(self._drop_run, model_id))
        for sampler_id in session.sampler_ids:
            sampler = self.samplers.pop(sampler_id, None)
            if sampler is not None and sampler.checkpoint is not None and sampler.model_path is None:
                self.queue.submit(f"{sampler_id}:end", None, partial(self._drop_sampler, sampler.checkpoint))

    def _end_idle_sessions(self) -> None:
        limit = time.monotonic() - SESSION_IDLE_S
        for session in [session for session in self.sessions.values() if session.last_seen < limit]:
            self.finish_session_now(session.session_id)

    def _drop_run(self, model_id: str) -> Reply:
        run = self.runs.pop(model_id, None)
        self.queue.close_stream(model_id)
        if run is not None:
            run.model.drop_adapter(run.adapter)
        return Reply({})

    def _drop_sampler(self, checkpoint: Checkpoint) -> Reply:
        self.store.remove_ephemeral(checkpoint)
        return Reply({})

    def create_sampler_now(self, body: Mapping[str, Any]) -> str:
        """Open a sampling session. Raises `RequestError`, `CheckpointError`, `ConfigurationError`."""
        session_id = _text(body, "session_id")
        path, base_model = body.get("model_path"), body.get("base_model")
        checkpoint = self.store.find(path) if path else None
        if checkpoint is not None:
            base_model = checkpoint.info.spec.base_model
        if not base_model:
            raise RequestError("give base_model or model_path: there is nothing to sample from")
        self.resolve_now(base_model)
        return self._add_sampler(session_id, body.get("sampling_session_seq_id"), Sampler(base_model, path, checkpoint))

    def _add_sampler(self, session_id: str, seq: Any, sampler: Sampler) -> str:
        sampler_id = f"{session_id}:sample:{seq if seq is not None else secrets.token_hex(4)}"
        self.samplers[sampler_id] = sampler
        if session_id in self.sessions and sampler_id not in self.sessions[session_id].sampler_ids:
            self.sessions[session_id].sampler_ids.append(sampler_id)
        return sampler_id

    # What follows queues a request and returns its id.

    def submit_create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Queue the creation of a model; returns (request id, model id)."""
        model_id = self._new_model_id(body)
        self.queue.open_stream(model_id)
        return self.queue.submit(model_id, 0, lambda: self._create_model(model_id, body)), model_id

    def submit_load_weights(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Queue loading a checkpoint into a model that exists, or (session and number given) into a new one."""
        if body.get("model_id"):
            model_id = _text(body, "model_id")
            return self.submit(body, lambda: self._load_weights(model_id, body)), model_id
        model_id = self._new_model_id(body)
        self.queue.open_stream(model_id)
        return self.queue.submit(model_id, 0, lambda: self._create_from_checkpoint(model_id, body)), model_id

    def _new_model_id(self, body: Mapping[str, Any]) -> str:
        session_id = _text(body, "session_id")
        number = body.get("model_seq_id")
        if not isinstance(number, int):
            raise RequestError("model_seq_id must be an integer")
        return f"{session_id}:train:{number}"

    def submit(self, body: Mapping[str, Any], job: Callable[[], Reply]) -> str:
        """Queue `job` at its place among the requests of the model that `body` names."""
        seq = body.get("seq_id")
        return self.queue.submit(_text(body, "model_id"), seq if isinstance(seq, int) else None, job)

    def submit_forward_backward(self, message: Any) -> str:
        """Queue a parsed protobuf request; what is wrong with its data fails it when its turn comes."""

        def job() -> Reply:
            run = self._run(message.model_id)
            logprobs, metrics = run.model.forward_backward(run.adapter, decode_forward_backward(message))
            return Reply(encode_forward_backward(logprobs, metrics))

        return self.queue.submit(message.model_id, message.seq_id or None, job)

    def submit_optim_step(self, body: Mapping[str, Any]) -> str:
        """Queue an optimizer step."""

        def job() -> Reply:
            run = self._run(_text(body, "model_id"))
            params = body.get("adam_params") or body.get("optimizer_params") or body.get("optim_params") or {}
            return Reply({"metrics": run.model.optim_step(run.adapter, params)})

        return self.submit(body, job)

    def submit_save(self, body: Mapping[str, Any], kind: str) -> str:
        """Queue saving a model's state (kind "weights") or its weights for sampling ("sampler_weights")."""
        return self.submit(body, lambda: self._save(body, kind))

    def submit_sample(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Queue a sampling request; returns its id and the ids of its sequences."""
        sampler_id, seq = body.get("sampling_session_id"), body.get("seq_id")
        stem = f"{sampler_id}:{seq}" if sampler_id and seq is not None else f"sample:{uuid.uuid4().hex}"
        count = body.get("num_samples", 1)
        sequence_ids = [f"{stem}:{index}" for index in range(count if isinstance(count, int) else 0)]
        try:
            sampler = self._find_sampler(body)
            request = decode_sample(body)
        except (RequestError, CheckpointError, ValueError) as error:
            return self.queue.submit_failed(stem, None, error), sequence_ids
        group = sampler.checkpoint.key if sampler.checkpoint else sampler.base_model
        return self.queue.submit_sample(group, stem, (sampler, request)), sequence_ids

    def _find_sampler(self, body: Mapping[str, Any]) -> Sampler:
        sampler_id = body.get("sampling_session_id")
        if sampler_id:
            if sampler_id not in self.samplers:
                raise RequestError(f"there is no sampling session {sampler_id}; it ended, or the server was restarted")
            return self.samplers[sampler_id]
        path = body.get("model_path")
        if path:
            checkpoint = self.store.find(path)
            return Sampler(checkpoint.info.spec.base_model, path, checkpoint)
        return Sampler(_text(body, "base_model"), None, None)

    # What follows runs on the engine's thread.

    def _model(self, name: str) -> LocalModel:
        base = self.resolve_now(name)
        key = str(base.folder)
        if key not in self._loaded:
            import torch

            from local_model import LocalModel

            # The order in which sums are formed depends on the number of threads, so it is fixed.
            torch.set_num_threads(self.threads)
            started = time.monotonic()
            model = LocalModel(base.folder, max_context=base.max_context, device=self.device)
            model.should_stop = self.queue.stopping.is_set
            self._loaded[key] = model
            logger.info("loaded %s from %s in %.1f s", name, base.folder, time.monotonic() - started)
        if base.stand_in and name not in self._announced:
            self._announced.add(name)
            logger.info("%s is served by the small stand-in model in %s", name, base.folder)
        return self._loaded[key]

    def _run(self, model_id: str) -> TrainingRun:
        run = self.runs.get(model_id)
        if run is None:
            raise RequestError(
                f"there is no model {model_id}: its creation failed, its session ended, or the server was restarted. "
                "Create a training client from a saved state to go on"
            )
        return run

    def _create_model(self, model_id: str, body: Mapping[str, Any]) -> Reply:
        lora = body.get("lora_config") or {}
        rank, seed = lora.get("rank", 32), lora.get("seed")
        if not isinstance(rank, int):
            raise RequestError(f"lora_config.rank is {rank!r}; it must be an integer")
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise RequestError(f"the optimizer {kind!r} is not supported; this engine has adamw")
        base_model = _text(body, "base_model")
        spec = AdapterSpec(
            base_model=base_model,
            rank=rank,
            seed=seed if isinstance(seed, int) else secrets.randbits(31),
            train_attn=lora.get("train_attn", True),
            train_mlp=lora.get("train_mlp", True),
            train_unembed=lora.get("train_unembed", True),
        )
        model = self._model(base_model)
        if spec.train_unembed and model.is_tied:
            logger.info("%s: the output layer is tied to the input embedding and stays frozen", base_model)
        self._add_run(model_id, spec, body, model, model.create_adapter(spec))
        return Reply({"model_id": model_id, "type": "create_model"})

    def _add_run(
        self, model_id: str, spec: AdapterSpec, body: Mapping[str, Any], model: LocalModel, adapter: Adapter
    ) -> None:
        self.runs[model_id] = TrainingRun(model_id, spec.base_model, model, adapter)
        session_id = model_id.rsplit(":train:", 1)[0]
        if session_id in self.sessions:
            self.sessions[session_id].model_ids.append(model_id)
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
        spec = checkpoint.info.spec
        other = body.get("base_model")
        if other and self.resolve_now(other).folder != self.resolve_now(spec.base_model).folder:
            raise RequestError(
                f"{checkpoint.info.path} was trained over {spec.base_model}, it cannot continue over {other}"
            )
        model = self._model(spec.base_model)
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
        checkpoint = self.store.find(_text(body, "path"))
        if checkpoint.info.kind != "weights":
            raise CheckpointError(
                f"{checkpoint.info.path} holds weights for sampling only; training continues from a path with "
                "/weights/ in it, as save_state returns"
            )
        return checkpoint

    def _save(self, body: Mapping[str, Any], kind: str) -> Reply:
        run = self._run(_text(body, "model_id"))
        model, adapter = run.model, run.adapter
        name = body.get("path")
        nameless = name is None and kind == "sampler_weights"
        if not nameless and name is None:
            run.saves += 1
            name = f"checkpoint-{adapter.step:06d}-{run.saves}"
        is_state = kind == "weights"
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
            user_metadata=body.get("user_metadata"),
        )

        def write(folder: Path) -> None:
            model.save_adapter(adapter, folder, optimizer=is_state)

        if nameless:
            checkpoint = self.store.save_ephemeral(replace(info, expires_at=None), write)
            session_id = run.model_id.rsplit(":train:", 1)[0]
            sampler = Sampler(run.base_model, None, checkpoint)
            sampler_id = self._add_sampler(session_id, body.get("sampling_session_seq_id"), sampler)
            return Reply({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        # Sampler weights have no overwrite flag in the API: a name used again is replaced.
        checkpoint = self.store.save(info, write, overwrite=bool(body.get("overwrite")) or not is_state)
        return Reply({"path": checkpoint.info.path, "type": f"save_{kind}" if is_state else "save_weights_for_sampler"})

    def _run_samples(self, group: str, items: Sequence[tuple[Sampler, SampleRequest]]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(items)
        model = self._model(items[0][0].base_model)
        sound = []
        for index, (_, request) in enumerate(items):
            try:
                model.check_sample(request)
                sound.append(index)
            except RequestError as error:
                replies[index] = failed(error)
        if sound:
            checkpoint = items[0][0].checkpoint
            requests = [items[index][1] for index in sound]
            for index, result in zip(sound, model.sample(checkpoint, requests), strict=True):
                replies[index] = Reply(encode_sample(result))
        return [reply for reply in replies if reply is not None]

    # What follows answers questions about models and checkpoints, on the server's threads.

    def model_info_now(self, model_id: str) -> dict[str, Any]:
        """What `get_info` answers. `step` is ours: optimizer steps taken. Raises `RequestError`."""
        run = self._run(model_id)
        base = self.resolve_now(run.base_model)
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


def _context_length(limit: int, config: Mapping[str, Any]) -> int:
    """Tokens that a model can be served with; at most its sliding window, as the masks here know none."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return min(limit, window) if window else limit


def expiry(ttl_seconds: Any) -> float | None:
    """When a checkpoint of this life ends, in Unix seconds; None for one without end. Raises `RequestError`."""
    if ttl_seconds is None:
        return None
    low, high = TTL_RANGE_S
    if not isinstance(ttl_seconds, int) or not low <= ttl_seconds <= high:
        raise RequestError(f"ttl_seconds is {ttl_seconds!r}; it must be a whole number from {low} to {high}")
    return time.time() + ttl_seconds


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a non-empty string")
    return value
