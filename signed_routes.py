"""Addresses that any program may fetch for an hour without an API key: files of exported weights, session timelines.

    add_signed_routes(app, engine, Signer())

The address carries a signature over its path and its end. A checkpoint's address names the moment it was saved as
well, so it never leads to one that took its place.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from access_tokens import Signer
from adapter_store import SCHEME, CheckpointInfo, checkpoint_files
from engine_records import NotRecordedError
from local_engine import LocalEngine
from session_search import utc

SIGNED = "/api/v1/signed"
URL_LIFE_S = 3600
CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"


def add_signed_routes(app: FastAPI, engine: LocalEngine, signer: Signer) -> None:
    """Add the routes that hand out addresses (with the API key) and those that serve them (without)."""
    store, trace = engine.store, engine.queue.trace

    def address(request: Request, path: str) -> tuple[str, int]:
        ends = int(time.time()) + URL_LIFE_S
        return f"{str(request.base_url).rstrip('/')}{path}?{signer.sign_url(path, ends)}", ends

    def is_signed(request: Request, path: str) -> bool:
        query = request.query_params
        return signer.check_url(path, query.get("expires", ""), query.get("signature", ""))

    @app.get(CHECKPOINT + "/external_weights_urls")
    def external_weights_urls(model_id: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        checkpoint = store.find(checkpoint_path(model_id, kind, name), ("external_weights",))
        urls, ends = {}, 0
        for file in checkpoint_files(checkpoint.folder):
            urls[file.name], ends = address(request, _file_path(checkpoint.info, file.name))
        return {"urls": urls, "expires": utc(ends).isoformat()}

    @app.get(SIGNED + "/external_weights/{model_id}/{name}/{created}/{file}")
    def external_file(model_id: str, name: str, created: str, file: str, request: Request) -> Response:
        if not is_signed(request, _join("external_weights", model_id, name, created, file)):
            return _forbidden()
        checkpoint = store.find(checkpoint_path(model_id, "external_weights", name))
        files = {found.name: found for found in checkpoint_files(checkpoint.folder)}
        if str(checkpoint.info.created) != created or file not in files:
            raise NotRecordedError(f"{checkpoint.info.path} was deleted or replaced since this address was made")
        return FileResponse(files[file], filename=file)

    @app.get("/api/v1/sessions/{session_id}/trace_export")
    def export_trace(session_id: str, request: Request) -> dict[str, Any]:
        store.find_session(session_id)
        if trace.timeline(session_id) is None:
            error = "the engine knows no request of this session: it made none, or they are too long ago"
            return {"status": "failed", "error": error}
        return {"status": "ready", "url": address(request, _join("traces", session_id))[0]}

    @app.get(SIGNED + "/traces/{session_id}")
    def timeline(session_id: str, request: Request) -> Response:
        if not is_signed(request, _join("traces", session_id)):
            return _forbidden()
        rows = trace.timeline(session_id)
        if rows is None:
            raise NotRecordedError("the requests of this session are too long ago by now")
        return JSONResponse(rows, headers={"Content-Disposition": "attachment; filename=session.pftrace"})


def checkpoint_path(model_id: str, kind: str, name: str) -> str:
    """The `tinker://` path of what a URL names in parts."""
    return f"{SCHEME}{model_id}/{kind}/{name}"


def _file_path(info: CheckpointInfo, file: str) -> str:
    return _join("external_weights", info.model_id, info.name, str(info.created), file)


def _join(*parts: str) -> str:
    return "/".join([SIGNED, *(quote(part, safe="") for part in parts)])


def _forbidden() -> Response:
    detail = "the signature of this address is wrong or its time is over; ask for a new one"
    return JSONResponse({"detail": detail}, status_code=403)
