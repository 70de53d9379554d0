"""The HTTP routes of the local Tinker server, under `/api/v1`.

    app = build_app(engine, api_key="tml-local")     # a FastAPI application; uvicorn serves it

A request that does work is queued and answered with its id; the client then polls `retrieve_future`. Beside Tinker's
own routes there are two of ours: `healthz` tells how many requests wait, and `tokenizer_files?model=` gives the files
from which a client builds the tokenizer of the model that is really served.
"""

from __future__ import annotations

import hmac
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from adapter_store import KINDS, SCHEME, CheckpointInfo
from error_handling import CheckpointError
from local_engine import LocalEngine, expiry
from request_queue import USER_ERRORS
from wire_format import RequestError, parse_forward_backward

# A poll is answered within this time; the SDK gives up on one after 45 s.
LONG_POLL_S = 30.0
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
OWNER = "local"


def build_app(engine: LocalEngine, api_key: str | None = None) -> FastAPI:
    """The HTTP application over `engine`. With `api_key`, requests must bring it."""
    app = FastAPI(title="Local Tinker server", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        if api_key and request.url.path != "/api/v1/healthz":
            sent = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(), api_key.encode()):
                return JSONResponse({"detail": "the API key is missing or wrong"}, status_code=401)
        return await call_next(request)

    # The SDK repeats a request for minutes after a 5xx, so what a client did wrong is always a 4xx.
    async def refuse(request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, CheckpointError) else 400
        return JSONResponse({"detail": str(error)}, status_code=status)

    for kind in USER_ERRORS:
        app.add_exception_handler(kind, refuse)

    _add_service_routes(app, engine)
    _add_request_routes(app, engine)
    _add_rest_routes(app, engine)
    return app


async def _body(request: Any) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as err:
        raise RequestError(f"the body is not JSON: {err}") from err
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _add_service_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "engine": "mock_tinker", "pending": engine.queue.pending}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        return {"supported_models": await run_in_threadpool(engine.capabilities_now)}

    @app.get("/api/v1/tokenizer_files")
    async def tokenizer_files(model: str) -> Response:
        try:
            base = await run_in_threadpool(engine.resolve_now, model)
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, status_code=422)
        files = {
            name: (base.folder / name).read_text(encoding="utf-8")
            for name in TOKENIZER_FILES
            if (base.folder / name).is_file()
        }
        served_by = base.folder.name if base.stand_in else base.name
        return JSONResponse(
            {
                "model": model,
                "stand_in": base.stand_in,
                "served_by": served_by,
                "max_context": base.max_context,
                "files": files,
            }
        )

    @app.post("/api/v1/client/config")
    async def client_config() -> dict[str, Any]:
        return {}

    @app.post("/api/v1/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        return {"type": "create_session", "session_id": engine.create_session_now(await _body(request))}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        alive = engine.heartbeat_now(str((await _body(request)).get("session_id")))
        if not alive:
            return JSONResponse({"detail": "this session has ended"}, status_code=410)
        return JSONResponse({"type": "session_heartbeat"})

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str) -> Response:
        engine.finish_session_now(session_id)
        return Response(status_code=204)

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}


def _add_request_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        request_id, model_id = engine.submit_create_model(await _body(request))
        return {"request_id": request_id, "model_id": model_id}

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        return engine.model_info_now(str((await _body(request)).get("model_id")))

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        message = parse_forward_backward(await request.body(), request.headers.get("content-encoding"))
        return {"request_id": engine.submit_forward_backward(message), "model_id": message.model_id}

    @app.post("/api/v1/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_optim_step(await _body(request))}

    @app.post("/api/v1/save_weights")
    async def save_weights(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_save(await _body(request), "weights")}

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_save(await _body(request), "sampler_weights")}

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        request_id, model_id = engine.submit_load_weights(await _body(request))
        return {"request_id": request_id, "model_id": model_id}

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        sampler_id = engine.create_sampler_now(await _body(request))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @app.get("/api/v1/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> Response:
        sampler = engine.samplers.get(sampler_id)
        if sampler is None:
            return JSONResponse({"detail": f"there is no sampling session {sampler_id}"}, status_code=404)
        return JSONResponse(
            {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        )

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> dict[str, Any]:
        request_id, sequence_ids = engine.submit_sample(await _body(request))
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    @app.post("/api/v1/cancel_future")
    async def cancel_future(request: Request) -> Response:
        engine.queue.cancel(str((await _body(request)).get("request_id")))
        return Response(status_code=204)

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = str((await _body(request)).get("request_id"))
        try:
            reply = await engine.queue.wait(request_id, LONG_POLL_S)
        except KeyError:
            return JSONResponse({"detail": f"there is no request {request_id}"}, status_code=410)
        if engine.queue.stopping.is_set() and reply is None:
            return JSONResponse({"detail": "the server is stopping"}, status_code=503)
        if reply is None:
            body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(body, status_code=408)
        if isinstance(reply.body, bytes):
            return Response(reply.body, media_type="application/x-protobuf")
        return JSONResponse(reply.body)


def _add_rest_routes(app: FastAPI, engine: LocalEngine) -> None:
    store = engine.store

    def describe_run(record: dict[str, Any]) -> dict[str, Any]:
        infos = store.list(record["model_id"])
        newest = {
            kind: next((i for i in reversed(infos) if i.kind == kind), None) for kind in ("weights", "sampler_weights")
        }
        last = max([record["created"], *(info.created for info in infos)])
        return {
            "training_run_id": record["model_id"],
            "base_model": record["base_model"],
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": record["lora_rank"],
            "last_request_time": _time(last),
            "last_checkpoint": _describe(newest.get("weights")),
            "last_sampler_checkpoint": _describe(newest.get("sampler_weights")),
            "user_metadata": record.get("user_metadata"),
        }

    @app.get("/api/v1/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        records = store.runs()
        page = [describe_run(record) for record in records[offset : offset + limit]]
        return {"training_runs": page, "cursor": _cursor(offset, limit, len(records))}

    @app.get("/api/v1/training_runs/{model_id}")
    async def training_run(model_id: str) -> dict[str, Any]:
        return describe_run(store.find_run(unquote(model_id)))

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    async def run_checkpoints(model_id: str) -> dict[str, Any]:
        store.find_run(unquote(model_id))
        return {"checkpoints": [_describe(info) for info in store.list(unquote(model_id))]}

    @app.get("/api/v1/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        infos = list(reversed(store.list()))
        page = [_describe(info) for info in infos[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(offset, limit, len(infos))}

    @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete_checkpoint(model_id: str, kind: str, name: str) -> Response:
        store.delete(f"{SCHEME}{unquote(model_id)}/{kind}/{name}")
        return Response(status_code=204)

    @app.post("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/publish")
    async def publish(model_id: str, kind: str, name: str) -> Response:
        store.update(f"{SCHEME}{unquote(model_id)}/{kind}/{name}", public=True)
        return Response(status_code=204)

    @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/publish")
    async def unpublish(model_id: str, kind: str, name: str) -> Response:
        store.update(f"{SCHEME}{unquote(model_id)}/{kind}/{name}", public=False)
        return Response(status_code=204)

    @app.put("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, request: Request) -> Response:
        expires_at = expiry((await _body(request)).get("ttl_seconds"))
        store.update(f"{SCHEME}{unquote(model_id)}/{kind}/{name}", expires_at=expires_at)
        return Response(status_code=204)

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        spec = store.find(str((await _body(request)).get("tinker_path"))).info.spec
        return {
            "base_model": spec.base_model,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    @app.get("/api/v1/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": [session["session_id"] for session in store.sessions()][offset : offset + limit]}

    @app.get("/api/v1/sessions/{session_id}")
    async def get_session(session_id: str) -> Response:
        record = next((session for session in store.sessions() if session["session_id"] == session_id), None)
        if record is None:
            return JSONResponse({"detail": f"there is no session {session_id}"}, status_code=404)
        live = engine.sessions.get(session_id)
        return JSONResponse(
            {
                "training_run_ids": [run["model_id"] for run in store.runs() if run.get("session_id") == session_id],
                "sampler_ids": list(live.sampler_ids) if live else [],
                "user_metadata": record.get("user_metadata"),
                "display_name": record.get("display_name"),
            }
        )


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe(info: CheckpointInfo | None) -> dict[str, Any] | None:
    if info is None:
        return None
    return {
        "checkpoint_id": f"{info.kind}/{info.name}",
        "checkpoint_type": KINDS[info.kind],
        "time": _time(info.created),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "public": info.public,
        "user_metadata": info.user_metadata,
        "expires_at": _time(info.expires_at) if info.expires_at is not None else None,
        "step": info.step,
    }
