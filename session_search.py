"""Sessions of the local engine as its clients see them: how they stand, and the search over them.

    request = parse_search(body)                         # raises RequestError
    page, cursor = search(store.sessions(), request, alive=engine.book.sessions)
    status_of(page[0], engine.book.sessions)                  # {"type": "active"}

A record is what `engine_records` keeps of a session. The engine has one user, and a project is no more than the label
under which a session was opened.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from access_tokens import USER_URN
from wire_format import RequestError

if TYPE_CHECKING:
    from tinker.types import SessionSearchRequest

# The project of sessions that were opened under none.
NO_PROJECT = "local"
FINISHES = ("success", "errored", "interrupted")


def parse_search(body: Mapping[str, Any]) -> SessionSearchRequest:
    """The search that a client asks for. Raises `RequestError` naming everything that is wrong with it."""
    from pydantic import ValidationError
    from tinker.types import SessionSearchRequest

    try:
        return SessionSearchRequest.model_validate(body)
    except ValidationError as err:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in err.errors())
        raise RequestError(f"the search is malformed: {'; '.join(faults)}") from err


def search(
    records: Iterable[dict[str, Any]], request: SessionSearchRequest, alive: Container[str]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """One page of the records that match, newest first, and the cursor of the next page (None after the last).

    `alive` holds the ids of the sessions that are open.
    """
    matching = sorted((record for record in records if _matches(record, request, alive)), key=_place, reverse=True)
    if request.cursor is not None:
        last = (request.cursor.last_created_at, request.cursor.last_session_id)
        matching = [record for record in matching if _place(record) < last]
    page = matching[: request.limit]
    if len(matching) == len(page):
        return page, None
    created, session_id = _place(page[-1])
    return page, {"last_created_at": created.isoformat(), "last_session_id": session_id}


def check_session(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a client opens a session with, when it can be told again. Raises `RequestError`."""
    for name in ("display_name", "project_id"):
        if not isinstance(body.get(name), str | None) or _text(body.get(name) or "") != (body.get(name) or ""):
            raise RequestError(f"{name} must be a string")
    if not isinstance(body.get("user_metadata"), dict | None):
        raise RequestError("user_metadata must be an object")
    return body


def status_of(record: Mapping[str, Any], alive: Container[str]) -> dict[str, Any] | None:
    """How a session stands: finished by its client, active, or (None) neither: it went silent, or the server did."""
    finish = record.get("finish")
    if finish:
        return {"type": "client_finished", "reason": {"type": finish["type"]}, "detail": finish.get("detail")}
    return {"type": "active"} if record["session_id"] in alive else None


def parse_finish(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a client says that its session ended; None when it does not say. Raises `RequestError`."""
    reason, detail = body.get("reason"), body.get("detail")
    if reason is None:
        return None
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in FINISHES:
        raise RequestError(f"reason.type is {kind!r}; it must be one of {', '.join(FINISHES)}")
    if detail is not None and not isinstance(detail, str):
        raise RequestError("detail must be a string")
    return {"type": kind, "detail": detail}


def project_of(record: Mapping[str, Any]) -> str:
    """The project under which a session was opened."""
    return record.get("project_id") or NO_PROJECT


def text_metadata(metadata: Any) -> dict[str, str] | None:
    """A user's metadata as the API answers it: as text. It takes values of any type, which go out as JSON."""
    if not isinstance(metadata, dict):
        return None
    return {
        _text(name): _text(value if isinstance(value, str) else json.dumps(value)) for name, value in metadata.items()
    }


def utc(seconds: float) -> datetime:
    """Unix seconds as a moment, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC)


def _text(value: str) -> str:
    # JSON can carry half a character, which no answer in UTF-8 can.
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _place(record: Mapping[str, Any]) -> tuple[datetime, str]:
    return utc(record["created"]), record["session_id"]


def _matches(record: Mapping[str, Any], request: SessionSearchRequest, alive: Container[str]) -> bool:
    metadata = text_metadata(record.get("user_metadata")) or {}
    return (
        _is_named(record, request)
        and (request.project_ids is None or project_of(record) in request.project_ids)
        and all(metadata.get(name) == value for name, value in request.user_metadata.items())
        and (request.owner.type != "user" or USER_URN in request.owner.owner_urns)
        and (request.statuses is None or any(_stands(record, status, alive) for status in request.statuses))
    )


def _is_named(record: Mapping[str, Any], request: SessionSearchRequest) -> bool:
    wanted = []
    if request.session_id is not None:
        wanted.append(record["session_id"] == request.session_id)
    if request.display_name is not None:
        name = str(record.get("display_name") or "").casefold()
        wanted.append(all(word in name for word in request.display_name.casefold().split()))
    return any(wanted) or not wanted


def _stands(record: Mapping[str, Any], wanted: Any, alive: Container[str]) -> bool:
    status = status_of(record, alive)
    if status is None or status["type"] != wanted.type:
        return False
    reasons = getattr(wanted, "reasons", None)
    return reasons is None or status["reason"]["type"] in reasons
