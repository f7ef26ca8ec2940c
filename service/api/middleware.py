"""Around every request: its id, the API key, size limits, metrics, one log line, and an error body whatever happens."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.state import Service, Track
from service.api.stream import error_response, internal
from service.errors import ApiError, queue_full

log = logging.getLogger("service.access")
_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_OPEN_PATHS = frozenset(("/health", "/ping"))  # load balancers have no key
_BUFFERED_BODIES = 8  # times max_body_bytes: what all request bodies together may hold in memory


class Surround:
    """ASGI middleware; pure, so that streaming and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.match(given) else uuid.uuid4().hex
        status = 0
        held = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def limited() -> Message:
            nonlocal held
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                held += size
                self._buffered += size
                self._check_size(held)
                if self._buffered > _BUFFERED_BODIES * self._service.settings.max_body_bytes:
                    raise HTTPException(429, "too many large requests at once; retry", {"Retry-After": "1"})
            return message

        metrics = self._service.metrics
        metrics.in_flight.inc()
        try:
            try:
                self._check_key(scope, headers)
                self._check_declared(headers)
                await self._app(scope, limited, answer)
            except ApiError as error:
                await error_response(error)(scope, receive, answer)
            except HTTPException as error:
                await error_response(ApiError(error.status_code, str(error.detail)))(scope, receive, answer)
            except Exception as raised:
                if status:  # the answer has begun: all that is left is to break it off
                    raise
                await error_response(internal(raised))(scope, receive, answer)
        finally:
            self._buffered -= held
            metrics.in_flight.dec()
            self._record(scope, request_id, status, time.monotonic() - started)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        key = self._service.settings.api_key
        if key is None or scope["path"] in _OPEN_PATHS:
            return
        scheme, _, rest = headers.get("authorization", "").encode("latin-1").partition(b" ")
        credentials = rest.strip() if scheme.lower() == b"bearer" else b""
        if scheme.lower() == b"basic":  # browsers can only send the key like this, for the status page
            with contextlib.suppress(binascii.Error):
                credentials = base64.b64decode(rest).partition(b":")[2]
        if not hmac.compare_digest(credentials, key.encode()):
            challenge = "Basic" if scope["path"] == "/" else "Bearer"
            raise ApiError(
                401,
                "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": f'{challenge} realm="moe-parity"'},
            )

    def _check_declared(self, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared))
            if self._buffered + int(declared) > _BUFFERED_BODIES * self._service.settings.max_body_bytes:
                raise queue_full("too many large requests at once; retry")

    def _check_size(self, size: int) -> None:
        limit = self._service.settings.max_body_bytes
        if size > limit:
            raise HTTPException(413, f"the request body has more than {limit} bytes, this service's limit")

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._service.metrics.http.labels(route, method, str(status)).inc()
        fields = {
            "request_id": request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
        }
        track: Track | None = scope.get("moe_parity.track")
        if track is not None:
            fields.update(
                id=track.id,
                state=track.state,
                sequences=track.sequences,
                prompt_tokens=track.prompt_tokens,
                completion_tokens=track.completion_tokens,
                finish_reasons=track.finish_reasons[:8],
            )
            if track.error:
                fields["error"] = track.error
        log.info("request", extra={"fields": fields})
