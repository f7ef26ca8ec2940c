"""Where two completions of one item part: the first differing token (or word) and the logprob gap there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evals.records import ItemResult

_PIECES = re.compile(r"\s+|\w+|[^\w\s]")


def first_difference(baseline: ItemResult, candidate: ItemResult) -> dict[str, Any] | None:
    """The first place where the texts differ; None when they are the same string.

    With token lists in both results the unit is a token and `gap_*` is the logprob gap between the two best tokens
    there (nats, None where unknown); otherwise the unit is a word, number or sign. `start` is the character offset
    common to both texts; `baseline` and `candidate` are the differing pieces ("" = the text ended).
    """
    if baseline.text == candidate.text:
        return None
    if baseline.tokens and candidate.tokens and baseline.text.startswith("".join(baseline.tokens[:1])):
        unit, x, y = "token", baseline.tokens, candidate.tokens
    else:
        unit, x, y = "word", _PIECES.findall(baseline.text), _PIECES.findall(candidate.text)
    index = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    start = len("".join(x[:index]))
    if start > min(len(baseline.text), len(candidate.text)) or baseline.text[:start] != candidate.text[:start]:
        # token texts that do not add up to the completion (byte pieces): fall back to characters
        unit, start = "character", _common_prefix(baseline.text, candidate.text)
        x, y, index = list(baseline.text), list(candidate.text), start
    token = unit == "token"
    return {
        "unit": unit,
        "index": index,
        "start": start,
        "baseline": x[index] if index < len(x) else "",
        "candidate": y[index] if index < len(y) else "",
        "gap_baseline": _at(baseline.gaps, index) if token else None,
        "gap_candidate": _at(candidate.gaps, index) if token else None,
    }


def _common_prefix(x: str, y: str) -> int:
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))


def _at(values: Sequence[float | None] | None, index: int) -> float | None:
    return values[index] if values is not None and index < len(values) else None
