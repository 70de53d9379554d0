"""Brings a fault plan to the local engine's server: real HTTP statuses, connections really closed, jobs that fail.

    app = build_app(engine)
    plan = inject_faults(app, engine, "faults.json", endpoint=True)
    uvicorn.Config(app, http=DroppableProtocol)     # so that the middleware can close a request's connection

With `endpoint`, `/api/v1/faults` tells the plan and what it did (GET), replaces it (PUT) and empties it (DELETE). No
fault ever touches that path, and a server to which no faults are brought has neither it nor the middleware.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from error_handling import CheckpointError, ConfigurationError
from fault_plan import DropFault, ExpireFault, FaultPlan, StatusFault, parse_plan, read_plan

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from adapter_store import AdapterStore
    from local_engine import LocalEngine

API = "/api/v1/"
ENDPOINT = "/api/v1/faults"
TRANSPORT = "tinker_transport"
# A long delay looks this often whether the server stops.
WAIT_SLICE_S = 0.2

PlanSource = Path | str | Sequence[Mapping[str, Any]]
"""A plan's file, or its faults as they stand in one."""


class DroppableProtocol(H11Protocol):
    """uvicorn's HTTP protocol; each request finds the connection it came by in its scope's `state`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio for a new connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}


def inject_faults(app: FastAPI, engine: LocalEngine, source: PlanSource | None, *, endpoint: bool) -> FaultPlan:
    """Put the plan in `source` (None: an empty one) between `app` and its clients, and into `engine`.

    Raises `ConfigurationError` for a plan that is wrong. To be called before the application serves.
    """
    routes = list(app.routes)
    plan = FaultPlan({name for route in routes if (name := _name(route)) is not None})
    if isinstance(source, Path | str):
        plan.put(read_plan(source, plan.calls))
    elif source is not None:
        plan.put(parse_plan({"faults": [dict(fault) for fault in source]}, plan.calls))
    engine.faults = plan
    if endpoint:
        _add_endpoint(app, plan)
    app.add_middleware(FaultMiddleware, engine=engine, plan=plan, routes=routes)
    return plan


class FaultMiddleware:
    """An ASGI application around another that lets calls go wrong as the plan says."""

    def __init__(self, app: ASGIApp, *, engine: LocalEngine, plan: FaultPlan, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._engine = engine
        self._plan = plan
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let it go wrong."""
        call = self._call(scope) if scope["type"] == "http" else None
        due = self._plan.due(call) if call is not None else None
        if due is None:
            await self._app(scope, receive, send)
            return
        for fault in due.expiries:
            self._plan.note(await run_in_threadpool(expire_checkpoint, self._engine.store, fault))
        await self._wait(due.wait_before)
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        if due.answer is None or due.answer.when == "after":
            await self._app(scope, receive, keep)
        await self._wait(due.wait_after)
        if isinstance(due.answer, DropFault):
            await _drop(scope, receive)
        elif isinstance(due.answer, StatusFault):
            await _refusal(due.answer, str(call))(scope, receive, send)
        else:
            for message in answer:
                await send(message)

    def _call(self, scope: Scope) -> str | None:
        partial = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match == Match.FULL:
                return _name(route)
            if match == Match.PARTIAL:
                partial = partial or _name(route)
        return partial

    async def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._engine.queue.stopping.is_set():
            await asyncio.sleep(min(left, WAIT_SLICE_S))


def expire_checkpoint(store: AdapterStore, fault: ExpireFault) -> str:
    """End the life of the checkpoint that `fault` names; returns what came of it, in words."""
    try:
        path = fault.path
        if path is None:
            paths = [info.path for info in store.list() if info.kind == fault.newest]
            if not paths:
                return f"there was no checkpoint of kind {fault.newest} that could expire"
            path = paths[-1]
        store.update(path, expires_at=time.time())
    except CheckpointError as error:
        return f"no checkpoint expired: {error}"
    return f"expired {path}"


def _add_endpoint(app: FastAPI, plan: FaultPlan) -> None:
    @app.get(ENDPOINT)
    async def get_faults() -> dict[str, Any]:
        return plan.report()

    @app.put(ENDPOINT)
    async def put_faults(request: Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as err:
            raise ConfigurationError(f"fault plan: the body is not JSON: {err}") from err
        plan.put(parse_plan(body, plan.calls))
        return plan.report()

    @app.delete(ENDPOINT)
    async def delete_faults() -> Response:
        plan.put([])
        return Response(status_code=204)


def _name(route: BaseRoute) -> str | None:
    """A call's name: its path below the API's root, without what changes from request to request."""
    if not isinstance(route, Route) or not route.path.startswith(API):
        return None
    return "/".join(part for part in route.path.removeprefix(API).split("/") if not part.startswith("{"))


def _refusal(fault: StatusFault, call: str) -> Response:
    headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
    detail = fault.message or f"the fault plan answers {call} with {fault.status}"
    body = {"detail": detail}
    if fault.queue_state is not None:
        body = {"type": "try_again", "queue_state": fault.queue_state, "queue_state_reason": detail}
    return JSONResponse(body, status_code=fault.status, headers=headers)


async def _drop(scope: Scope, receive: Receive) -> None:
    scope["state"][TRANSPORT].abort()
    # uvicorn answers for an application that returns without an answer, unless it knows the client is gone.
    while (await receive())["type"] != "http.disconnect":
        pass
