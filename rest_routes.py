"""The part of the local engine's HTTP side that answers without a model: sessions, runs and checkpoints, listed,
searched, published, copied, given a life and deleted.

    add_rest_routes(app, engine, Signer())     # everything the SDK's `RestClient` asks for, under `/api/v1`

Addresses of files that any program may fetch are made in `signed_routes`. What an account of the hosted service has
and this engine has not stands in `ACCOUNT_FUNCTIONS`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from access_tokens import USER_URN, Signer
from adapter_store import KINDS, Checkpoint, CheckpointInfo
from engine_records import NotRecordedError, session_of
from local_engine import LocalEngine
from request_fields import expiry
from session_search import (
    NO_PROJECT,
    check_session,
    parse_finish,
    parse_search,
    project_of,
    search,
    status_of,
    text_metadata,
    utc,
)
from signed_routes import CHECKPOINT, add_signed_routes, checkpoint_path
from wire_format import RequestError

GIGABYTE = 10**9
# (method, path) of what the hosted service keeps for an account, and why there is no such thing here. They answer 404:
# a client takes a 5xx for a passing fault and repeats the request for minutes.
ACCOUNT_FUNCTIONS = {
    ("GET", "/api/v1/billing/usage/events"): "the local engine keeps no billing: nothing it does is paid for",
    ("GET", "/api/v1/audit"): "the local engine keeps no audit log: it has one user",
    ("PUT", "/api/v1/sessions/{session_id}/project"): (
        "the local engine has no projects to move a session between: a project is the label given to "
        "ServiceClient(project_id=...), and stays"
    ),
}

Limit = Annotated[int, Query(ge=0)]
Offset = Annotated[int, Query(ge=0)]
# Everything here belongs to the one user, so both scopes hold the same.
Scope = Literal["owned", "accessible"]


def add_rest_routes(app: FastAPI, engine: LocalEngine, signer: Signer) -> None:
    """Add the routes over `engine`'s records; `signer` signs the URLs that are handed out."""
    app.add_exception_handler(RequestValidationError, _refuse_parameters)
    app.add_exception_handler(HTTPException, _refuse_route)
    _add_session_routes(app, engine)
    _add_run_routes(app, engine)
    _add_checkpoint_routes(app, engine)
    add_signed_routes(app, engine, signer)
    _add_account_routes(app, engine, signer)


async def json_body(request: Any) -> dict[str, Any]:
    """The JSON object that a request carries ({} without a body). Raises `RequestError`."""
    content = await request.body() or b"{}"
    try:
        body = json.loads(content)
        if b"\\u" in content:
            # Half of a surrogate pair is legal JSON, but no text: no file, header or answer could hold it.
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as err:
        raise RequestError("the body holds half of a surrogate pair, which is no text") from err
    except (ValueError, RecursionError) as err:
        raise RequestError(f"the body is not JSON: {err}") from err
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


async def _refuse_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
    return JSONResponse({"detail": f"this request is malformed: {faults}"}, status_code=400)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if detail in ("Not Found", "Method Not Allowed"):
        detail = f"the local engine does not answer {request.method} {request.scope['path']}"
    return JSONResponse({"detail": detail}, status_code=error.status_code, headers=error.headers)


def _add_session_routes(app: FastAPI, engine: LocalEngine) -> None:
    store = engine.store

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        body = check_session(await json_body(request))
        return {"type": "create_session", "session_id": engine.book.create_session_now(body)}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish_session(session_id: str, request: Request) -> Response:
        finish = parse_finish(await json_body(request))
        live = engine.book.sessions.get(session_id)
        if finish is not None:
            finish.update(time=time.time(), sampler_ids=list(live.sampler_ids) if live else [])
        try:
            await run_in_threadpool(store.finish_session, session_id, finish)
        finally:
            engine.finish_session_now(session_id)
        return Response(status_code=204)

    @app.get("/api/v1/sessions")
    def sessions(limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned") -> dict[str, Any]:
        ids = [session["session_id"] for session in store.sessions()]
        return {"sessions": ids[offset : offset + limit], "cursor": _cursor(offset, limit, len(ids))}

    @app.post("/api/v1/sessions/search")
    async def search_sessions(request: Request) -> dict[str, Any]:
        wanted = parse_search(await json_body(request))

        def answer() -> dict[str, Any]:
            page, cursor = search(store.sessions(), wanted, engine.book.sessions)
            return {"sessions": [_summarize_session(engine, record) for record in page], "next_cursor": cursor}

        return await run_in_threadpool(answer)

    @app.get("/api/v1/sessions/{session_id}")
    def get_session(session_id: str, access_scope: Scope = "owned") -> dict[str, Any]:
        record, live = store.find_session(session_id), engine.book.sessions.get(session_id)
        return {
            "training_run_ids": [run["model_id"] for run in store.runs(session_id)],
            "sampler_ids": list(live.sampler_ids) if live else (record.get("finish") or {}).get("sampler_ids", []),
            "user_metadata": text_metadata(record.get("user_metadata")),
            "display_name": record.get("display_name"),
        }


def _add_run_routes(app: FastAPI, engine: LocalEngine) -> None:
    store = engine.store

    @app.get("/api/v1/training_runs")
    def training_runs(
        limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned", project_id: str | None = None
    ) -> dict[str, Any]:
        records = store.runs()
        if project_id is not None:
            inside = {session["session_id"] for session in store.sessions() if project_of(session) == project_id}
            records = [record for record in records if session_of(record["model_id"]) in inside]
        page = [_describe_run(engine, record) for record in records[offset : offset + limit]]
        return {"training_runs": page, "cursor": _cursor(offset, limit, len(records))}

    @app.get("/api/v1/training_runs/{model_id}")
    def training_run(model_id: str, access_scope: Scope = "owned") -> dict[str, Any]:
        return _describe_run(engine, store.find_run(model_id))

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    def run_checkpoints(model_id: str) -> dict[str, Any]:
        store.find_run(model_id)
        return {"checkpoints": [_describe(info) for info in store.list(model_id)]}


def _add_checkpoint_routes(app: FastAPI, engine: LocalEngine) -> None:
    store = engine.store

    @app.get("/api/v1/checkpoints")
    def checkpoints(limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        infos = list(reversed(store.list()))
        page = [_describe(info) for info in infos[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(offset, limit, len(infos))}

    @app.delete(CHECKPOINT)
    def delete_checkpoint(model_id: str, kind: str, name: str) -> Response:
        store.delete(checkpoint_path(model_id, kind, name))
        return Response(status_code=204)

    # The service answers 409 when nothing would change, which its SDK repeats for five minutes; here that is done.
    @app.post(CHECKPOINT + "/publish")
    def publish(model_id: str, kind: str, name: str) -> Response:
        store.update(checkpoint_path(model_id, kind, name), public=True)
        return Response(status_code=204)

    @app.delete(CHECKPOINT + "/publish")
    def unpublish(model_id: str, kind: str, name: str) -> Response:
        store.update(checkpoint_path(model_id, kind, name), public=False)
        return Response(status_code=204)

    @app.put(CHECKPOINT + "/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, request: Request) -> Response:
        expires_at = expiry((await json_body(request)).get("ttl_seconds"))
        await run_in_threadpool(store.update, checkpoint_path(model_id, kind, name), expires_at=expires_at)
        return Response(status_code=204)

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        spec = (await run_in_threadpool(store.find, (await json_body(request)).get("tinker_path"))).info.spec
        return {
            "base_model": spec.base_model,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    @app.post("/api/v1/save_weights_external")
    async def save_weights_external(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_save(await json_body(request), "external_weights")}

    @app.post("/api/v1/copy_weights")
    async def copy_weights(request: Request) -> dict[str, Any]:
        key = request.headers.get("x-idempotency-key") or uuid.uuid4().hex
        copied = await run_in_threadpool(_copy_weights, engine, await json_body(request), key)
        return {"tinker_path": copied.info.path}


def _add_account_routes(app: FastAPI, engine: LocalEngine, signer: Signer) -> None:
    store = engine.store

    @app.post("/api/v1/auth/token")
    async def auth_token() -> dict[str, Any]:
        return {"jwt": signer.issue_token()}

    @app.get("/api/v1/billing/usage/checkpoints/current")
    def storage_usage(project_id: str | None = None) -> dict[str, Any]:
        projects = {session["session_id"]: project_of(session) for session in store.sessions()}
        sizes = defaultdict(list)
        for info in store.list():
            sizes[projects.get(session_of(info.model_id), NO_PROJECT)].append(info.size_bytes)
        data = [
            {
                "project_id": project,
                "org_user_urn": USER_URN,
                "checkpoint_count": len(sizes[project]),
                "size_bytes": sum(sizes[project]),
                "size_gigabytes": sum(sizes[project]) / GIGABYTE,
            }
            for project in sorted(sizes)
            if project_id in (None, project)
        ]
        return {"data": data}

    def refusal(reason: str) -> Callable[[], Response]:
        return lambda: JSONResponse({"detail": reason}, status_code=404)

    for (method, path), reason in ACCOUNT_FUNCTIONS.items():
        app.add_api_route(path, refusal(reason), methods=[method], response_model=None)


def _copy_weights(engine: LocalEngine, body: dict[str, Any], key: str) -> Checkpoint:
    """Copy a checkpoint into a new run, that of the request's session or of a new one under the project it names.

    A request that is repeated (the same `key`) finds its first copy. Raises `RequestError`, `CheckpointError`.
    """
    store = engine.store
    source, expires_at = store.find(body.get("source_path")), expiry(body.get("ttl_seconds"))
    project, session_id, number = (body.get(name) for name in ("destination_project_id", "session_id", "model_seq_id"))
    if project is None and isinstance(session_id, str) and isinstance(number, int):
        store.find_session(session_id)
    elif session_id is None and number is None and isinstance(project, str) and project:
        session_id, number = str(uuid.uuid5(uuid.NAMESPACE_OID, key)), 0
    else:
        raise RequestError("give destination_project_id, or session_id and model_seq_id, to hold the copy")
    model_id = f"{session_id}:train:{number}"
    try:
        run = store.find_run(model_id)
    except NotRecordedError:
        now, spec = time.time(), source.info.spec
        run = {"base_model": spec.base_model, "lora_rank": spec.rank, "session_id": session_id, "created": now}
        run["copied_from"] = source.info.path
        if project:
            store.add_session(session_id, {"created": now, "project_id": project})
        store.add_run(model_id, run)
    if run.get("copied_from") != source.info.path:
        raise RequestError(f"the training run {model_id} holds something else; copy into another one")
    return store.copy(source, model_id, expires_at)


def _describe_run(engine: LocalEngine, record: dict[str, Any]) -> dict[str, Any]:
    infos = engine.store.list(record["model_id"])
    newest = {info.kind: info for info in infos}
    last = max([record["created"], *(info.created for info in infos)])
    return {
        "training_run_id": record["model_id"],
        "base_model": record["base_model"],
        "model_owner": USER_URN,
        "is_lora": True,
        "lora_rank": record.get("lora_rank"),
        "last_request_time": utc(last).isoformat(),
        "last_checkpoint": _describe(newest["weights"]) if "weights" in newest else None,
        "last_sampler_checkpoint": _describe(newest["sampler_weights"]) if "sampler_weights" in newest else None,
        "user_metadata": text_metadata(record.get("user_metadata")),
    }


def _summarize_session(engine: LocalEngine, record: dict[str, Any]) -> dict[str, Any]:
    store = engine.store
    infos = [info for run in store.runs(record["session_id"]) for info in store.list(run["model_id"])]
    return {
        "session_id": record["session_id"],
        "created_at": utc(record["created"]).isoformat(),
        "owner": USER_URN,
        "project_id": project_of(record),
        "status": status_of(record, engine.book.sessions),
        "checkpoints_count": len(infos),
        "checkpoint_storage_bytes": sum(info.size_bytes for info in infos),
        "display_name": record.get("display_name"),
        "user_metadata": text_metadata(record.get("user_metadata")),
    }


def _describe(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{info.kind}/{info.name}",
        "checkpoint_type": KINDS[info.kind],
        "time": utc(info.created).isoformat(),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "public": info.public,
        "user_metadata": text_metadata(info.user_metadata),
        "expires_at": utc(info.expires_at).isoformat() if info.expires_at is not None else None,
        "step": info.step,
    }


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}
