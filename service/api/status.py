"""GET /: a status page rendered on the server, readable on a phone, in the dark and without JavaScript."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from service.api.state import Service, Track

router = APIRouter()
_pages = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_REFRESH = 5


@router.get("/", include_in_schema=False)
@router.head("/", include_in_schema=False)
async def status(request: Request) -> Response:
    """Model, variant, queue, throughput, KV use, recent requests (never their text)."""
    service: Service = request.app.state.service
    service.check_engine()
    page = _pages.get_template("status.html").render(_view(service))
    return HTMLResponse(page, headers={"cache-control": "no-store"})


def _view(service: Service) -> dict[str, Any]:
    loaded, settings = service.loaded, service.settings
    fingerprint: dict[str, Any] = loaded.fingerprint if loaded else {}
    variant = fingerprint.get("variant") or {}
    return {
        "refresh": _REFRESH,
        "phase": service.phase,
        "failure": service.failure,
        "model": settings.model_name,
        "path": settings.model_path,
        "requested": variant.get("requested", settings.variant),
        "resolved": _groups(variant.get("resolved") or {}),
        "fallbacks": variant.get("fallbacks"),
        "fingerprint": fingerprint,
        "max_model_len": loaded.max_model_len if loaded else None,
        "stats": loaded.engine.stats() if loaded else None,
        "uptime": _duration(time.time() - service.started),
        "now": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "requests": [_row(track) for track in list(service.recent)[:20]],
        "live": len(service.live),
    }


def _groups(resolved: dict[str, str]) -> list[tuple[str, str]]:
    """[(variant, "1-5, 7")]: consecutive layers that resolved to the same variant, together."""
    by_variant: dict[str, list[int]] = {}
    for layer, name in sorted(resolved.items(), key=lambda item: int(item[0])):
        by_variant.setdefault(name, []).append(int(layer))
    return [(name, _ranges(layers)) for name, layers in by_variant.items()]


def _ranges(layers: list[int]) -> str:
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _row(track: Track) -> dict[str, Any]:
    reasons = ", ".join(
        f"{track.finish_reasons.count(r)} {r}" if len(track.finish_reasons) > 1 else r
        for r in dict.fromkeys(track.finish_reasons)
    )
    return {
        "id": track.id[-8:],
        "endpoint": track.endpoint,
        "state": track.state,
        "detail": track.error or reasons,
        "sequences": track.sequences,
        "prompt": track.prompt_tokens,
        "completion": track.completion_tokens,
        "seconds": f"{track.seconds:.2f}",
    }


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02d} min" if hours else f"{minute} min {second:02d} s"
