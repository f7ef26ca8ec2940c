"""Errors of the HTTP surface: each carries its status and the fields of an OpenAI error body."""

from __future__ import annotations

from moe_kernels.errors import MoeParityError
from service.engine.types import EngineError

RETRY_AFTER_SECONDS = 1  # the queue moves within an engine step; clients add their own backoff on top


class StartupError(MoeParityError):
    """The service cannot start: a port in use, no tokenizer, a model without MoE. Exit code 2."""


class ApiError(Exception):
    """An answer other than 200. `param` names the request field at fault, `code` is for machines."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON every error answer has, also as an event in the middle of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400 for a field that would change results and that this service does not implement."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unavailable(message: str, code: str) -> ApiError:
    """503: loading, draining, or stopped after a fatal error."""
    return ApiError(
        503, message, type="service_unavailable_error", code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
    )


def queue_full(message: str) -> ApiError:
    """429: too much is waiting already."""
    return ApiError(
        429, message, type="rate_limit_error", code="queue_full", headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
    )


def from_engine(error: EngineError) -> ApiError:
    """The HTTP answer for an error the engine raised or reported."""
    text = str(error)
    match error.kind:
        case "queue_full":
            return queue_full(text)
        case "stopped":
            return unavailable(text, "engine_stopped")
        case "too_long":
            return invalid("max_tokens", text, "context_length_exceeded")
        case "invalid":
            return invalid(None, text)
        case "non_finite":
            return ApiError(500, text, type="server_error", code="non_finite_logits")
        case _:
            return ApiError(500, text or "the engine failed on this request", type="server_error", code="engine_error")
