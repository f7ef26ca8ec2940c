"""Evidence of the earlier layers in a run folder: stored by `evals run all`, read whenever the run is judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evals.errors import JournalError
from evals.rules import LayerEvidence

FILE = "layers.json"

# layer -> (what a movement usually means, what to look at)
MEANING: dict[str, tuple[str, str]] = {
    "contract": (
        "the weights or the call break what the kernel demands",
        "scales that are zero or tiny, dtypes, w13 order, expert counts and groups, the scaling factor",
    ),
    "kernel": (
        "a layer computes something else than its format's arithmetic",
        "the worst token and expert: scale layout and block size, gate/up order, weight of an expert; odd token counts "
        "and 128 or more: tile or tactic; repeat or batch: atomics, stale padding",
    ),
    "routing": (
        "the choice of experts sees other numbers",
        "dtype of correction bias, router weight and logits; scoring function; flips growing with depth alone come "
        "from the hidden states, so look at the kernel",
    ),
    "logprobs": (
        "the distribution over next tokens changed",
        "kernel parity first; if that is sound: shared experts, attention, RoPE, KV cache, lm_head; the worst tokens",
    ),
    "drift": (
        "free-running answers degenerate or end elsewhere",
        "end-of-sequence ids, stop strings, sampling; loops point to damage that grows with the length",
    ),
}


def explained(evidence: LayerEvidence) -> LayerEvidence:
    """The same with what a movement usually means among its metrics."""
    means, look = MEANING.get(evidence.layer, ("", ""))
    if not evidence.moved or not means:
        return evidence
    return replace(evidence, metrics={**evidence.metrics, "usually": means, "look at": look})


def attributed(rows: Sequence[LayerEvidence]) -> list[LayerEvidence]:
    """Kernel parity that fails only where other experts were chosen is routing's, if routing itself has moved."""
    by_routing = any(e.layer == "routing" and e.moved for e in rows)
    out = []
    for e in rows:
        if e.layer == "kernel" and e.moved and by_routing and e.metrics.get("cause") == "routing":
            detail = f"agrees wherever the same experts were chosen; routing is what moved ({e.detail})"
            e = replace(e, moved=False, detail=detail)
        out.append(e)
    return out


def save(folder: Path, found: Mapping[str, Sequence[LayerEvidence]]) -> None:
    """Write the evidence per candidate name."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: [asdict(e) | {"metrics": dict(e.metrics)} for e in rows] for name, rows in found.items()}
    (folder / FILE).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, tuple[LayerEvidence, ...]]:
    """The stored evidence; empty when the run measured none."""
    file = folder / FILE
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {name: tuple(LayerEvidence(**row) for row in rows) for name, rows in data.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError(f"{file} is damaged ({error}); remove it to judge the run without its layers") from None
