"""Forced evidence as JSON, as terminal tables and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from evals.forced.divergence import LogprobSummary
from evals.forced.run import Forced, parts_of

STATES = {0: "nothing moved", 3: "too few tokens to tell", 4: "invalid", 5: "moved"}


def plain(value: Any) -> Any:
    """JSON types; infinities and NaN become null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(forced: Forced, layer: str, code: int) -> dict[str, Any]:
    """One candidate's figures of a layer ("routing", "logprobs")."""
    evidence = forced.routing() if layer == "routing" else forced.logprobs()
    out: dict[str, Any] = {
        "name": forced.name, "variant": forced.label, "exit_code": code, "state": STATES[code],
        "same_weights": forced.same_weights, "failure": forced.failure,
        "findings": [asdict(f) for f in forced.findings],
        "evidence": None if evidence is None else {
            "layer": evidence.layer, "moved": evidence.moved, "detail": evidence.detail,
            "metrics": dict(evidence.metrics), "svg": evidence.svg,
        },
    }
    for key, comparison in (("candidate", forced.comparison), ("floor", forced.floor)):
        if comparison is None:
            continue
        if layer == "routing":
            out[key] = [asdict(x) for x in comparison.routing.by_layer()] if comparison.routed else None
        else:
            out[key] = {name: asdict(s) for name, s in parts_of(comparison).items()}
    return plain(out)  # type: ignore[no-any-return]


def tables(forced: Forced, layer: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of what a person wants to see."""
    if forced.comparison is None:
        return []
    if layer == "routing":
        rows = [
            [str(x.layer), f"{100 * x.exact:.2f}", f"{100 * x.overlap:.2f}", f"{100 * x.near_tie_flips:.2f}",
             f"{100 * x.beyond_ties:.2f}", f"{100 * x.load_shift:.2f}"]
            for x in forced.comparison.routing.by_layer()
        ]
        head = ["layer", "same set %", "overlap %", "near-tie flips %", "beyond ties %", "load shift %"]
        return [(f"Experts chosen, {forced.label}", head, rows)]
    parts = {k: v for k, v in parts_of(forced.comparison).items() if v.tokens}
    head = ["", *parts]
    shown = [[name, *[f(s) for s in parts.values()]] for name, f in _LINES]
    out = [(f"Logprobs, {forced.label}", head, shown)]
    worst = [
        [k, f"{t.kl:.3g}", t.item, str(t.position), (t.context + "▸" + t.token).replace("\n", "⏎"),
         f"{t.logprob_a:.2f} → {t.logprob_b:.2f}"]
        for k, s in parts.items() for t in s.worst[:5]
    ]
    out.append(("Worst tokens (▸ marks the token)", ["", "KL", "item", "at", "text", "logprob"], worst))
    return out


_LINES: list[tuple[str, Any]] = [
    ("texts / tokens", lambda s: f"{s.texts} / {s.tokens}"),
    ("mean KL (nats)", lambda s: f"{s.mean_kl:.3g}"),
    ("KL p50 / p90 / p99 / p99.9", lambda s: " / ".join(f"{v:.2g}" for v in s.percentiles.values())),
    ("max KL", lambda s: f"{s.max_kl:.3g}"),
    ("top-1 agreement %", lambda s: f"{100 * s.top1_agreement:.3f}"),
    ("ΔNLL, 95 % interval", lambda s: _interval(s)),
    ("perplexity ratio", lambda s: f"{s.perplexity_ratio:.5f}"),
]


def _interval(s: LogprobSummary) -> str:
    if not math.isfinite(s.delta_nll_low):
        return f"{s.delta_nll:+.4f}"
    return f"{s.delta_nll:+.4f} [{s.delta_nll_low:+.4f}, {s.delta_nll_high:+.4f}]"


def html_page(title: str, sections: Sequence[tuple[Forced, str, int]]) -> str:
    """A page without scripts: tables and heat maps."""
    body = []
    for forced, layer, code in sections:
        evidence = forced.routing() if layer == "routing" else forced.logprobs()
        detail = evidence.detail if evidence else forced.failure or "not measured"
        body.append(f"<h2>{escape(layer)}: {escape(forced.label)} – {STATES[code]}</h2><p>{escape(detail)}</p>")
        if evidence is not None and evidence.svg:
            body.append(f"<div>{evidence.svg}</div>")
        for caption, head, rows in tables(forced, layer):
            cells = "".join(f"<th>{escape(h)}</th>" for h in head)
            lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            body.append(f"<table><caption>{escape(caption)}</caption><tr>{cells}</tr>{lines}</table>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body><h1>{escape(title)}</h1>"
        + "\n".join(body) + "</body></html>\n"
    )


_CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "body{background:#fff}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "caption{text-align:left;font-weight:600}"
    "th,td{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;white-space:pre-wrap}"
    "svg{max-width:100%;height:auto}"
)
