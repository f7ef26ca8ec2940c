"""Turns every exception of a route into an OpenAI error body: 400 instead of FastAPI's 422, also for 404 and 405."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.api.stream import error_response
from service.errors import ApiError, invalid

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path[:200]} here"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path[:200]}"
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return error_response(ApiError(error.status_code, message, type=kind, headers=dict(error.headers or {})))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_explain(error))


def _explain(error: RequestValidationError) -> ApiError:
    """The first fault, with the field's name in `param`; never quotes the request's text."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"] if part != "body"]
    if fault["type"] == "json_invalid":
        reason = (fault.get("ctx") or {}).get("error", "it cannot be parsed")
        return invalid(
            None, f"the body is not valid JSON: {reason} at byte {place[-1] if place else '?'}", "invalid_json"
        )
    if not place:
        return invalid(None, "the body must be a JSON object, sent with Content-Type: application/json", "invalid_body")
    field = place[0]
    where = ".".join(part for part in place if not ("[" in part or part in ("str", "int", "constrained-str")))
    if fault["type"] == "missing":
        return invalid(field, f"{field} is required")
    return invalid(field, f"{where}: {fault['msg'].removeprefix('Value error, ')}")


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
