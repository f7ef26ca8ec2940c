"""The items worth reading: flips first, then answers that ended badly, each with where the two texts part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evals.floor import Floor
from evals.pairing import TRUNCATED, PairedOutcomes
from evals.records import ItemResult
from evals.report.first_difference import first_difference

MAX_ITEMS = 200  # notable items kept per comparison; flips.jsonl has every flip
MAX_TEXT = 6000  # characters of a completion kept


def _side(result: ItemResult) -> dict[str, Any]:
    text = result.text if len(result.text) <= MAX_TEXT else result.text[:MAX_TEXT] + " …"
    return {
        "text": text,
        "status": result.status,
        "right": result.ours,
        "extracted": result.extracted,
        "finish_reason": result.finish_reason,
        "completion_tokens": result.completion_tokens,
        "error": result.error,
    }


def notable_item(
    kind: str, baseline: ItemResult, candidate: ItemResult, repeat: int, unstable: bool | None
) -> dict[str, Any]:
    """One line of flips.jsonl and one card of the HTML report. `unstable`: it also flipped in the A/A run."""
    return {
        "kind": kind,
        "item": baseline.item,
        "doc_id": baseline.doc_id,
        "repeat": repeat,
        "difficulty": baseline.difficulty,
        "question": baseline.question,
        "gold": baseline.gold.rpartition("####")[2].strip(),
        "unstable": unstable,
        "baseline": _side(baseline),
        "candidate": _side(candidate),
        "difference": first_difference(baseline, candidate),
    }


def _unstable(floor: Floor | None) -> set[str] | None:
    """Items whose score changed between the baseline's two runs."""
    if floor is None or floor.outcomes is None:
        return None
    return {f.item for f in floor.outcomes.flips()}


def all_flips(outcomes: PairedOutcomes, floor: Floor | None) -> Iterator[dict[str, Any]]:
    """Every flip, for flips.jsonl."""
    noisy = _unstable(floor)
    for flip in outcomes.flips():
        unstable = None if noisy is None else flip.item in noisy
        yield notable_item(flip.direction, flip.baseline, flip.candidate, flip.repeat, unstable)


def notable(outcomes: PairedOutcomes, floor: Floor | None) -> dict[str, Any]:
    """Flips, then answers that ended badly in either arm, at most MAX_ITEMS of them."""
    found = list(all_flips(outcomes, floor))
    seen = {(x["item"], x["repeat"]) for x in found}
    for item in outcomes.items:
        for k, (x, y) in enumerate(zip(outcomes.baseline, outcomes.candidate, strict=True)):
            ended = {x.items[item].status, y.items[item].status} - {"completed"}
            if ended and (item, k) not in seen:
                kind = next(s for s in ("error", "empty", "truncated", "truncated_in_reasoning") if s in ended)
                kind = "truncated" if kind in TRUNCATED else kind
                found.append(notable_item(kind, x.items[item], y.items[item], k, None))
    return {"notable": found[:MAX_ITEMS], "notable_omitted": max(0, len(found) - MAX_ITEMS)}
