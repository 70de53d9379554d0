"""Clients' sessions and samplers, as the engine keeps them in memory.

    book = SessionBook(store)
    session_id = book.create_session_now(body)
    sampler_id = book.add_sampler(session_id, 0, Sampler("Qwen/Qwen3-8B", None, checkpoint))

Safe from every thread: they change on the server's threads, the engine's and the tidying one.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adapter_store import SAMPLED_KINDS, AdapterStore, Checkpoint
from request_fields import text_of
from wire_format import RequestError

if TYPE_CHECKING:
    from custom_losses import CustomLoss

# A session whose client has neither asked nor sent a heartbeat (one every 10 s) for so long is over.
SESSION_IDLE_S = 3600.0


@dataclass
class Session:
    """A client's session: what belongs to it is let go when it ends."""

    session_id: str
    last_seen: float
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    custom_losses: dict[str, CustomLoss] = field(default_factory=dict)
    # Sampler weights without a name, and how many copies of a sampler other processes have made.
    nameless: list[Checkpoint] = field(default_factory=list)
    clones: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampler:
    """Where a sampling session samples from: a checkpoint, or the base model itself."""

    base_model: str
    model_path: str | None
    checkpoint: Checkpoint | None


class SessionBook:
    """Open sessions and samplers by id."""

    def __init__(self, store: AdapterStore) -> None:
        self.sessions: dict[str, Session] = {}
        self.samplers: dict[str, Sampler] = {}
        self.guard = threading.RLock()
        self._store = store

    def create_session_now(self, body: Mapping[str, Any]) -> str:
        """Open a session and return its id, unique over restarts."""
        session_id = str(uuid.uuid4())
        kept = {key: body.get(key) for key in ("tags", "user_metadata", "sdk_version", "display_name", "project_id")}
        self._store.add_session(session_id, {"created": time.time(), **kept})
        self.sessions[session_id] = Session(session_id, time.monotonic())
        return session_id

    def heartbeat_now(self, session_id: str) -> bool:
        """Note that the client of a session, or of a model or sampler in it, is alive; False without such a session."""
        session = self.sessions.get(session_id.split(":", 1)[0])
        if session is not None:
            session.last_seen = time.monotonic()
        return session is not None

    def alive(self, session_id: str) -> Session:
        """The session with this id, which is thereby alive. One from before a restart of the server is taken up again.

        Raises `CheckpointError` when it was never begun, `RequestError` when its client has ended it.
        """
        with self.guard:
            if session_id not in self.sessions:
                if self._store.find_session(session_id).get("finish"):
                    raise RequestError(f"the session {session_id} has ended; begin a new one (a new ServiceClient)")
                self.sessions[session_id] = Session(session_id, time.monotonic())
            self.heartbeat_now(session_id)
            return self.sessions[session_id]

    def end(self, session_id: str) -> tuple[Session, list[Checkpoint]] | None:
        """Take a session and its samplers out; returns it with the checkpoints they used, None without such a one."""
        with self.guard:
            session = self.sessions.pop(session_id, None)
            if session is None:
                return None
            samplers = [self.samplers.pop(sampler_id, None) for sampler_id in session.sampler_ids]
        checkpoints = [sampler.checkpoint for sampler in samplers if sampler and sampler.checkpoint]
        return session, list(dict.fromkeys([*checkpoints, *session.nameless]))

    def idle(self) -> list[Session]:
        """Sessions of whose clients nothing was heard for `SESSION_IDLE_S`."""
        limit = time.monotonic() - SESSION_IDLE_S
        return [session for session in list(self.sessions.values()) if session.last_seen < limit]

    def add_sampler(self, session_id: str, seq: int | None, sampler: Sampler) -> str:
        """Keep `sampler` under the number `seq` of its session (None: one of its own); returns its id."""
        sampler_id = f"{session_id}:sample:{seq if seq is not None else secrets.token_hex(4)}"
        with self.guard:
            session = self.alive(session_id)
            if sampler_id not in self.samplers:
                session.sampler_ids.append(sampler_id)
            self.samplers[sampler_id] = sampler
        return sampler_id

    def join_sampler_now(self, sampler_id: str) -> int:
        """A number for one more client of a sampler (its first has 0). Raises `RequestError`."""
        session = self.sessions.get(sampler_id.rsplit(":sample:", 1)[0])
        if session is None or sampler_id not in self.samplers:
            raise RequestError(f"there is no sampling session {sampler_id}; it ended, or the server was restarted")
        session.clones[sampler_id] = session.clones.get(sampler_id, 0) + 1
        return session.clones[sampler_id]

    def find_sampler(self, body: Mapping[str, Any]) -> Sampler:
        """The sampler that a sampling request names, or one made of the weights that it names."""
        sampler_id = body.get("sampling_session_id")
        if sampler_id:
            if sampler_id not in self.samplers:
                raise RequestError(f"there is no sampling session {sampler_id}; it ended, or the server was restarted")
            return self.samplers[sampler_id]
        path = body.get("model_path")
        if path:
            checkpoint = self._store.find(path, SAMPLED_KINDS)
            return Sampler(checkpoint.info.spec.base_model, path, checkpoint)
        return Sampler(text_of(body, "base_model"), None, None)


def session_of(model_id: str) -> str:
    """The session that a model belongs to."""
    return model_id.rsplit(":train:", 1)[0]
