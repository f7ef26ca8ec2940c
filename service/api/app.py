"""Builds the FastAPI application around a Service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.api import chat, completions, handlers, info, status, tokens
from service.api.generation import Mailbox
from service.api.middleware import Surround
from service.api.schemas import ErrorBody
from service.api.state import Service

_ERRORS: dict[int | str, dict[str, object]] = {
    400: {"model": ErrorBody, "description": "The request is at fault; `param` names the field"},
    401: {"model": ErrorBody, "description": "Missing or wrong API key"},
    404: {"model": ErrorBody, "description": "No such path or model"},
    405: {"model": ErrorBody, "description": "Method not allowed"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "Too much is waiting; see Retry-After"},
    500: {"model": ErrorBody, "description": "The engine failed on this request"},
    503: {"model": ErrorBody, "description": "Loading, draining or failed; see Retry-After"},
}
_WATCH_SECONDS = 1.0


def create_app(service: Service) -> FastAPI:
    """The application; `service.ready(...)` may come later, until then generation answers 503."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.mailbox = Mailbox(asyncio.get_running_loop())
        watch = asyncio.create_task(_watch(service))
        try:
            yield
        finally:
            watch.cancel()

    # No /docs: FastAPI's page loads scripts from other hosts. /openapi.json is there for tools.
    app = FastAPI(
        title="moe-parity service",
        version=version("moe-parity"),
        lifespan=lifespan,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Surround, service=service)
    handlers.install(app)
    for module in (completions, chat, info, tokens, status):
        app.include_router(module.router)
    if service.settings.selftest:  # imported here only: a normal run cannot reach a fault
        from service import selftest

        selftest.install(app, service)
    _without_422(app)
    return app


async def _watch(service: Service) -> None:
    """Fail open requests of an engine that died without a word, so that no client waits for ever."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        service.check_engine()
        if service.phase == "failed" and service.mailbox is not None:
            await asyncio.sleep(_WATCH_SECONDS)  # the engine's own last events come first
            service.mailbox.fail_all(service.failure or "the engine has failed")


def _without_422(app: FastAPI) -> None:
    """FastAPI documents 422 for every body; ours are 400."""
    build = app.openapi

    def openapi() -> dict[str, object]:
        schema = build()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
