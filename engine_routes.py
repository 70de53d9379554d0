"""The HTTP routes of the local Tinker server, under `/api/v1`.

    app = build_app(engine, api_key="tml-local")     # a FastAPI application; uvicorn serves it

A request that does work is queued and answered with its id; the client then polls `retrieve_future`. Beside Tinker's
own routes there are two of ours: `healthz` tells how many requests wait, and `tokenizer_files?model=` gives the files
from which a client builds the tokenizer of the model that is really served.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers

from access_tokens import TOKEN_PREFIX, TOKEN_REFUSED, Signer
from durable_files import StorageError
from engine_records import NotRecordedError
from local_engine import LocalEngine
from queued_request import USER_ERRORS, message_of
from request_trace import CallNames
from rest_routes import add_rest_routes, json_body
from signed_routes import SIGNED
from wire_format import parse_forward_backward

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# A poll is answered within this time; the SDK gives up on one after 45 s.
LONG_POLL_S = 30.0
# Bytes of a request. The SDK cuts batches into requests of 5 MB.
MAX_BODY = 256_000_000
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


def build_app(engine: LocalEngine, api_key: str | None = None) -> FastAPI:
    """The HTTP application over `engine`. With `api_key`, requests must bring it."""
    signer = Signer()
    app = FastAPI(title="Local Tinker server", docs_url=None, redoc_url=None, openapi_url=None, max_body_size=MAX_BODY)

    # The SDK repeats a request for minutes after a 5xx, so what a client did wrong is always a 4xx.
    async def refuse(request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, NotRecordedError) else 400
        return JSONResponse({"detail": message_of(error)}, status_code=status)

    # Neither would repeating help while the disk is full.
    for kind in (*USER_ERRORS, StorageError):
        app.add_exception_handler(kind, refuse)

    # Routes are looked through in their order, so those that are called most come first.
    _add_request_routes(app, engine)
    _add_service_routes(app, engine)
    add_rest_routes(app, engine, signer)
    app.add_middleware(CallNames)
    if api_key:
        app.add_middleware(KeyCheck, api_key=api_key, signer=signer)
    return app


class KeyCheck:
    """An ASGI application around another that lets requests pass which bring the key, or a token made for it."""

    def __init__(self, app: ASGIApp, *, api_key: str, signer: Signer) -> None:
        self._app = app
        self._api_key = api_key
        self._signer = signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        # The path as it was routed: that of `request.url` is made up from the Host header, too.
        path, headers = scope["path"], Headers(scope=scope)
        if path == "/api/v1/healthz" or path.startswith(f"{SIGNED}/"):
            return None
        sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if sent.startswith(TOKEN_PREFIX) and sent != self._api_key:
            if not self._signer.check_token(sent):
                detail = "this token is not of this server, or its time is over"
                return JSONResponse({"detail": detail}, status_code=401, headers=TOKEN_REFUSED)
        elif not hmac.compare_digest(sent.encode(), self._api_key.encode()):
            return JSONResponse({"detail": "the API key is missing or wrong"}, status_code=401)
        return None


Handler = Callable[[Request], Awaitable[Response]]


def _post(app: FastAPI, path: str) -> Callable[[Handler], Handler]:
    """A route without FastAPI's work on parameters and results, which takes longer than these handlers do."""

    def add(handler: Handler) -> Handler:
        app.add_route(path, handler, methods=["POST"])
        return handler

    return add


def _add_service_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "engine": "mock_tinker", "pending": engine.queue.pending}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        return {"supported_models": await run_in_threadpool(engine.models.capabilities_now)}

    @app.get("/api/v1/tokenizer_files")
    async def tokenizer_files(model: str) -> Response:
        try:
            base = await run_in_threadpool(engine.models.resolve_now, model)
        except ValueError as error:
            return JSONResponse({"detail": message_of(error)}, status_code=422)
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
        return {"pjwt_auth_enabled": True, "custom_loss_server_side": True, "sample_join_sampling_session": True}

    @app.post("/api/v1/create_custom_loss")
    async def create_custom_loss(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_custom_loss(await json_body(request))}

    @app.post("/api/v1/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        alive = engine.book.heartbeat_now(str((await json_body(request)).get("session_id")))
        if not alive:
            return JSONResponse({"detail": "this session has ended"}, status_code=410)
        return JSONResponse({"type": "session_heartbeat"})

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}


def _add_request_routes(app: FastAPI, engine: LocalEngine) -> None:
    @_post(app, "/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = str((await json_body(request)).get("request_id"))
        engine.book.heartbeat_now(request_id)
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

    @_post(app, "/api/v1/asample")
    async def asample(request: Request) -> Response:
        request_id, sequence_ids = engine.submit_sample(await json_body(request))
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequence_ids})

    @_post(app, "/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        message = parse_forward_backward(await request.body(), request.headers.get("content-encoding"))
        return JSONResponse({"request_id": engine.submit_forward_backward(message), "model_id": message.model_id})

    @_post(app, "/api/v1/optim_step")
    async def optim_step(request: Request) -> Response:
        return JSONResponse({"request_id": engine.submit_optim_step(await json_body(request))})

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        request_id, model_id = engine.submit_create_model(await json_body(request))
        return {"request_id": request_id, "model_id": model_id}

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        return engine.model_info_now(str((await json_body(request)).get("model_id")))

    @app.post("/api/v1/save_weights")
    async def save_weights(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_save(await json_body(request), "weights")}

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
        return {"request_id": engine.submit_save(await json_body(request), "sampler_weights")}

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        request_id, model_id = engine.submit_load_weights(await json_body(request))
        return {"request_id": request_id, "model_id": model_id}

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        # Resolving a base model may convert it first, which takes seconds.
        sampler_id = await run_in_threadpool(engine.create_sampler_now, await json_body(request))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @app.get("/api/v1/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> Response:
        sampler = engine.book.samplers.get(sampler_id)
        if sampler is None:
            return JSONResponse({"detail": f"there is no sampling session {sampler_id}"}, status_code=404)
        return JSONResponse(
            {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        )

    @app.post("/api/v1/join_sampling_session")
    async def join_sampling_session(request: Request) -> dict[str, Any]:
        number = engine.book.join_sampler_now(str((await json_body(request)).get("sampling_session_id")))
        return {"type": "join_sampling_session", "client_counter": number}

    @app.post("/api/v1/cancel_future")
    async def cancel_future(request: Request) -> Response:
        engine.queue.cancel(str((await json_body(request)).get("request_id")))
        return Response(status_code=204)
