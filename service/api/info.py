"""Routes that say what is served and how it is: models, health, version, fingerprint, server_info, metrics."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.api.state import Service
from service.api.stream import Json, error_response
from service.errors import ApiError

router = APIRouter()


def _service(request: Request) -> Service:
    return request.app.state.service


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "moe-parity",
        "root": service.settings.model_path,
        "parent": None,
        "max_model_len": service.loaded.max_model_len if service.loaded else None,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model of this service."""
    service = _service(request)
    service.require()
    return Json({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, request: Request) -> Response:
    """The model by name; 404 for any other."""
    service = _service(request)
    service.require()
    service.check_model(model_id)
    return Json(_model(service))


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 when requests will be answered; 503 while loading, draining, or after a fatal error."""
    service = _service(request)
    try:
        service.require()
    except ApiError as error:
        return error_response(error)
    return Json({"status": "ok"})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """The same as /health, as SageMaker-style callers spell it."""
    return await health(request)


@router.get("/version")
@router.head("/version", include_in_schema=False)
async def versions() -> Response:
    """This package's version."""
    return Json({"version": version("moe-parity")})


@router.get("/fingerprint")
async def fingerprint(request: Request) -> Response:
    """What exactly answers here: weights, tokenizer, variant per layer, versions, device, determinism as probed."""
    return Json(_service(request).require().fingerprint)


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Phase, settings, limits and the engine's statistics."""
    service = _service(request)
    service.check_engine()
    s, loaded = service.settings, service.loaded
    body: dict[str, Any] = {
        "phase": service.phase,
        "uptime_seconds": round(time.time() - service.started, 3),
        "model": s.model_name,
        "path": s.model_path,
        "variant": s.variant,
        "version": version("moe-parity"),
        "limits": {
            "max_body_bytes": s.max_body_bytes,
            "max_sequences_per_request": s.max_sequences,
            "max_n": s.max_n,
            "max_logprobs": s.max_logprobs,
        },
    }
    if loaded is not None:
        body["limits"]["max_model_len"] = loaded.max_model_len
        body["engine"] = loaded.fingerprint.get("engine")
        body["stats"] = asdict(loaded.engine.stats())
    return Json(body)


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(_service(request).metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})
