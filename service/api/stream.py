"""Answers that follow their client: server-sent events, and plain answers that stop when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import ApiError

log = logging.getLogger("service.api")
DONE = b"data: [DONE]\n\n"


def dump(value: Any) -> bytes:
    """Compact UTF-8 JSON. Text that is no valid Unicode (only error messages can quote some) stays escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Body bytes."""
        return dump(content)


def error_response(error: ApiError) -> Json:
    """The answer for an error."""
    return Json(error.body(), status_code=error.status, headers=error.headers)


def internal(raised: Exception) -> ApiError:
    """The 500 for a fault of ours: details go to the log, not to the client."""
    log.error("unexpected %s while answering", type(raised).__name__, exc_info=raised)
    return ApiError(
        500,
        f"internal error ({type(raised).__name__}); the service's log has the details",
        type="server_error",
        code="internal_error",
    )


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[Response], give_up: Callable[[], None]) -> Response:
    """Await `work`, but call `give_up` and cancel it when the client goes away first."""
    task: asyncio.Future[Response] = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(gone(receive))
    waiting: set[asyncio.Future[Any]] = {task, watcher}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # nobody reads this; the log line shows it
    finally:
        give_up()
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator of JSON objects.

    The status line waits for the first object, so that a request which fails at once gets a proper status. A later
    error becomes an event with an `error` object. `give_up` is called once when the stream ends for whatever reason.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], give_up: Callable[[], None]) -> None:
        super().__init__()
        self._chunks, self._give_up = chunks, give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the generator ends or the client goes away."""
        task = asyncio.ensure_future(self._send_all(scope, receive, send))
        watcher = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            self._give_up()
            for pending in (task, watcher):
                pending.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)
            await self._chunks.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for chunk in self._chunks:
                if not started:
                    started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": [
                                (b"content-type", b"text/event-stream; charset=utf-8"),
                                (b"cache-control", b"no-cache"),
                                (b"x-accel-buffering", b"no"),
                            ],
                        }
                    )
                await send({"type": "http.response.body", "body": b"data: " + dump(chunk) + b"\n\n", "more_body": True})
        except Exception as raised:
            error = raised if isinstance(raised, ApiError) else internal(raised)
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await send(
                {"type": "http.response.body", "body": b"data: " + dump(error.body()) + b"\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
