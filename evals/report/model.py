"""Builds report.json: one dict with every number and text the renderings need; no wall-clock outside "timing"."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jsonschema

from evals.analysis import Analysis, Bound
from evals.pairing import TRUNCATED, ArmCounts
from evals.records import ArmResult
from evals.report.notable import notable
from evals.statistics import PairedCounts, wilson
from evals.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from evals.floor import Floor
    from evals.run_judge import Comparison, Judged

SCHEMA = 1


def build(judged: Judged) -> dict[str, Any]:
    """The report of a judged run, validated against schema.json. Same journal, same bytes, except "timing"."""
    meta, protocol = judged.meta, judged.protocol
    fields = protocol.as_dict()
    items = fields.pop("items")
    report = {
        "schema": SCHEMA,
        "tool": {"name": "moe-parity", "version": meta.tool_version},
        "task": meta.task,
        "model": meta.model,
        "score": judged.comparisons[0].outcomes.score,
        "state": judged.state,
        "exit_code": EXIT_CODES[judged.state],  # type: ignore[index]
        "headline": _headline(judged),
        "margin": meta.margin,
        "alpha": meta.alpha,
        "repeats": meta.repeats,
        "factors": list(meta.factors),
        "command": meta.command,
        "protocol_sha256": protocol.hash(),
        "protocol": fields
        | {"items": len(items), "items_sha256": hashlib.sha256(json.dumps(items).encode()).hexdigest()},
        "data": dict(meta.data),
        "environment": dict(meta.environment),
        "integrity": {
            "findings": [
                {"code": f.code, "severity": f.severity, "message": f.message, "arm": f.arm}
                for f in judged.integrity.findings
            ],
            "attestation": dict(judged.integrity.attestation),
        },
        "floor": _floor(judged),
        "arms": [_arm(name, runs) for name, runs in _grouped(judged.arms)],
        "comparisons": [_comparison(c, judged) for c in judged.comparisons],
        "timing": _timing(judged),
    }
    report = _plain(report)
    validate(report)
    return report


@cache
def _validator() -> jsonschema.protocols.Validator:
    schema = json.loads(resources.files("evals.report").joinpath("schema.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def validate(report: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError when a report does not follow schema.json."""
    _validator().validate(report)


def dumps(report: Mapping[str, Any], *, timing: bool = True) -> str:
    """Canonical text of a report; without timing it is the part that a resumed run must reproduce byte by byte."""
    kept = report if timing else {k: v for k, v in report.items() if k != "timing"}
    return json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"


def _headline(judged: Judged) -> str:
    """The headline of the comparison that decides the run's state."""
    deciding = next(c for c in judged.comparisons if c.verdict.state == judged.state)
    text = deciding.verdict.headline
    return text if len(judged.comparisons) == 1 else f"{deciding.variant}: {text}"


def _plain(value: Any) -> Any:
    """Plain JSON types: floats rounded to 12 significant digits, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return float(f"{number:.12g}") if math.isfinite(number) else None


def _grouped(arms: tuple[ArmResult, ...]) -> Iterator[tuple[str, list[ArmResult]]]:
    for name in dict.fromkeys(a.name for a in arms):
        yield name, [a for a in arms if a.name == name]


def _share(right: int, n: int) -> dict[str, Any]:
    low, high = wilson(right, n)
    return {"right": right, "n": n, "share": right / n if n else 0.0, "low": low, "high": high}


def _arm(name: str, runs: list[ArmResult]) -> dict[str, Any]:
    """One arm over all its repeats: scores, how answers ended, and what its server said it ran."""
    results = [r for run in runs for r in run.items.values()]
    answered = [r for r in results if r.status != "error"]
    tokens = [r.completion_tokens for r in answered if r.completion_tokens is not None]
    completed = [r for r in answered if r.status == "completed"]
    scores: dict[str, Any] = {}
    for score in ("ours", "strict", "flexible"):
        known = [getattr(r, score) for r in answered if getattr(r, score) is not None]
        scores[score] = _share(sum(known), len(known)) if known else None
    return {
        "name": name,
        "variant": runs[0].variant,
        "repeats": len(runs),
        "items": len(results),
        "scores": scores,
        "completed": _share(sum(bool(r.ours) for r in completed), len(completed)),
        "statuses": {
            "completed": len(completed),
            "truncated": sum(r.status in TRUNCATED for r in results),
            "empty": sum(r.status == "empty" for r in results),
            "error": len(results) - len(answered),
        },
        "mean_completion_tokens": sum(tokens) / len(tokens) if tokens else None,
        "server": _server(runs[0].fingerprint_before),
    }


def _server(fingerprint: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the server attests, its per-layer kernels as counts."""
    if fingerprint is None:
        return None
    variant = fingerprint.get("variant") or {}
    resolved = [str(v) for v in (variant.get("resolved") or {}).values()]
    keys = (
        "model",
        "format",
        "dtype",
        "device",
        "device_name",
        "max_model_len",
        "weights_sha256",
        "versions",
        "determinism",
        "id",
    )
    return {k: fingerprint[k] for k in keys if k in fingerprint} | {
        "requested": variant.get("requested"),
        "resolved": {name: resolved.count(name) for name in dict.fromkeys(resolved)},
        "fallbacks": variant.get("fallbacks"),
    }


def _floor(judged: Judged) -> dict[str, Any] | None:
    floor: Floor | None = judged.floor
    if floor is None:
        return None
    outcomes = judged.comparisons[0].outcomes
    pairs = outcomes.clustered.effective[2] if outcomes.pairs else floor.n
    return {
        "source": floor.source,
        "n": floor.n,
        "b": floor.b,
        "c": floor.c,
        "flips": floor.flips,
        "discordance": floor.discordance,
        "texts_differ": floor.texts_differ,
        "deterministic": floor.deterministic,
        "p_drift": floor.p_drift,
        "stable": floor.stable,
        "noise": floor.noise(pairs, judged.policy.alpha),
        "attainable": floor.attainable(pairs, judged.policy.alpha, judged.policy.power),
    }


def _table(table: PairedCounts) -> dict[str, Any]:
    return {"a": table.a, "b": table.b, "c": table.c, "d": table.d, "n": table.n, "difference": table.difference}


def _bound(bound: Bound) -> dict[str, Any]:
    return _table(bound.table) | {"lower": bound.lower, "upper": bound.upper}


def _counts(counts: ArmCounts) -> dict[str, Any]:
    return vars(counts) | {"answered": counts.answered, "accuracy": counts.accuracy}


def _comparison(comparison: Comparison, judged: Judged) -> dict[str, Any]:
    verdict: Verdict = comparison.verdict
    outcomes = comparison.outcomes
    return {
        "name": comparison.name,
        "variant": comparison.variant,
        "baseline_variant": outcomes.baseline[0].variant,
        "state": verdict.state,
        "exit_code": verdict.exit_code,
        "headline": verdict.headline,
        "reasons": [{"code": r.code, "message": r.message} for r in verdict.reasons],
        "advice": list(verdict.advice),
        "warnings": list(verdict.warnings),
        "gates": [{"name": g.name, "state": g.state, "summary": g.summary} for g in verdict.gates],
        "layers": [
            {"layer": e.layer, "moved": e.moved, "detail": e.detail, "metrics": dict(e.metrics), "svg": e.svg}
            for e in verdict.evidence
        ],
        "numbers": None if verdict.analysis is None else _numbers(verdict.analysis, verdict.p_adjusted),
        "stopped": dict(comparison.stopped) if comparison.stopped else None,
        "texts_differ": outcomes.texts_differ,
        "missing": {"in_candidate": len(outcomes.only_in_baseline), "in_baseline": len(outcomes.only_in_candidate)},
        "both_wrong": outcomes.both_wrong(),
        "difficulty": [{"label": label} | _table(t) for label, t in outcomes.by_difficulty().items()],
        **notable(outcomes, judged.floor),
    }


def _numbers(a: Analysis, p_adjusted: float | None) -> dict[str, Any]:
    ratios = {"recovery": a.recovery, "length": a.length}
    statuses = {"empty": a.empty, "truncated": a.truncated}
    return {
        "table": _table(a.table),
        "difference": a.difference,
        "items": a.clustered.items,
        "pairs": a.clustered.pairs,
        "design_effect": a.clustered.deff,
        "z": a.z,
        "level": a.level,
        "lower": a.ni.lower,
        "upper": a.ni.upper,
        "noninferior": a.ni.shown,
        "tango": list(a.tango),
        "newcombe": list(a.newcombe),
        "p_worse": a.p_worse,
        "p_worse_adjusted": p_adjusted,
        "p_worse_exact": a.p_worse_exact,
        "p_better": a.p_better,
        "p_noninferior": a.ni.p,
        "p_equivalence": a.equivalence_p,
        "baseline": _counts(a.baseline) | {"low": a.wilson_baseline[0], "high": a.wilson_baseline[1]},
        "candidate": _counts(a.candidate) | {"low": a.wilson_candidate[0], "high": a.wilson_candidate[1]},
        "flips": None if a.flips is None else vars(a.flips) | {"excess": a.flips.excess},
        "nonempty": _table(a.nonempty),
        "completed": _table(a.completed),
        "errors": {"unresolved": a.errors.unresolved, "worst": _bound(a.worst), "best": _bound(a.best)},
        "needs": vars(a.needs),
        "look": None if a.look is None else vars(a.look),
        **{k: None if r is None else {"estimate": r.estimate, "low": r.low, "high": r.high} for k, r in ratios.items()},
        **{k: vars(s) for k, s in statuses.items()},
    }


def _timing(judged: Judged) -> dict[str, Any]:
    """The only block with wall-clock values."""
    arms = {}
    for name, runs in _grouped(judged.arms):
        seconds = [r.seconds for run in runs for r in run.items.values() if r.seconds is not None]
        arms[name] = {"median_seconds": statistics.median(seconds) if seconds else None}
    return {"run": dict(judged.meta.timing), "arms": arms}
