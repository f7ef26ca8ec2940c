"""Builds arms with a wanted 2×2 table, statuses and lengths for tests of pairing, verdict and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.records import ArmResult, ItemResult, Status, item_id, sha256_hex


def question(index: int) -> str:
    return f"Question number {index}?"


def item(
    index: int,
    right: bool,
    *,
    status: Status = "completed",
    tokens: int | None = 100,
    prompt: str | None = None,
    text: str | None = None,
    **more: Any,
) -> ItemResult:
    """One scored answer; a right one ends in the gold answer, a wrong one in another number."""
    q = question(index)
    score = None if status == "error" else bool(right)
    if text is None:
        text = "" if status in ("empty", "error") else f"Two and two are four.\n#### {4 if right else 5}"
    return ItemResult(
        item=item_id(q),
        doc_id=index,
        question=q,
        gold="4",
        prompt_sha256=sha256_hex(prompt or q),
        status=status,
        text=text,
        finish_reason=None if status == "error" else "length" if "truncated" in status else "stop",
        prompt_tokens=50,
        completion_tokens=None if status == "error" else tokens,
        seconds=0.5,
        strict=score,
        flexible=score,
        ours=score,
        error="HTTP 500" if status == "error" else None,
        **more,
    )


def arm(
    name: str,
    right: Sequence[bool],
    *,
    statuses: Mapping[int, Status] | None = None,
    tokens: Sequence[int] | int | None = 100,
    repeat: int = 0,
    variant: str = "fp8/emulated",
    fingerprint: Mapping[str, Any] | None = None,
    **more: Any,
) -> ArmResult:
    """An arm over items 0..n-1; `tokens` per item or one number for all."""
    results = {}
    for index, ok in enumerate(right):
        length = tokens[index] if isinstance(tokens, Sequence) else tokens
        result = item(index, bool(ok), status=(statuses or {}).get(index, "completed"), tokens=length, **more)
        results[result.item] = result
    return ArmResult(name, variant, fingerprint, fingerprint, results, repeat)


def arms(
    a: int, b: int, c: int, d: int, *, base: Mapping[str, Any] | None = None, cand: Mapping[str, Any] | None = None
) -> tuple[ArmResult, ArmResult]:
    """Two arms whose table is (a, b, c, d): both right, only baseline, only candidate, neither."""
    x = [True] * (a + b) + [False] * (c + d)
    y = [True] * a + [False] * b + [True] * c + [False] * d
    return arm("baseline", x, **(base or {})), arm("candidate", y, **(cand or {}))


def second_run(a: int, b: int, c: int, d: int, lost: int, gained: int) -> ArmResult:
    """The baseline of `arms(a, b, c, d)` run again: `lost` right answers wrong, `gained` wrong ones right.

    The flips fall on other items than the candidate's.
    """
    first = [True] * (a + b) + [False] * (c + d)
    again = list(first)
    again[:lost] = [False] * lost
    if gained:
        again[-gained:] = [True] * gained
    return arm("baseline_repeat", again)
