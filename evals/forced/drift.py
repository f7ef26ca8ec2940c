"""Free-running drift from the journal: where answers part, how long they get, whether they run in loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evals.pairing import PairedOutcomes
from evals.records import ItemResult
from evals.rules import LayerEvidence
from evals.statistics import mcnemar_midp

LOOP_TIMES, LOOP_CHARS, LOOP_WINDOW = 3, 60, 4000
LOOP_ALPHA, LOOP_EXCESS = 0.01, 0.01  # as for flips: beyond chance and at least one item in a hundred


def in_loop(text: str) -> bool:
    """Does the text end in one piece repeated at least three times over at least 60 characters?

    The prefix function of the reversed text gives the smallest period of each of its ends.
    """
    end = text[-LOOP_WINDOW:][::-1]
    border = [0] * len(end)
    for i in range(1, len(end)):
        k = border[i - 1]
        while k and end[i] != end[k]:
            k = border[k - 1]
        border[i] = k + (end[i] == end[k])
        size = i + 1
        if size >= LOOP_CHARS and size >= LOOP_TIMES * (size - border[i]):
            return True
    return False


def first_difference(a: Sequence[str] | str, b: Sequence[str] | str) -> int | None:
    """Index of the first differing token (or character); None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _parted(a: ItemResult, b: ItemResult) -> float | None:
    """Where two answers part, as a share of the baseline's; None when they are the same."""
    x: Sequence[str] | str = a.tokens if a.tokens and b.tokens else a.text
    y: Sequence[str] | str = b.tokens if a.tokens and b.tokens else b.text
    at = first_difference(x, y)
    return None if at is None else min(at / max(len(x), 1), 1.0)


def drift_evidence(outcomes: PairedOutcomes) -> LayerEvidence:
    """Length, first divergence and repetition of the first repeat; moved only by repetition.

    Length and statuses have gates of their own; parting early is normal between formats, so both are figures here.
    """
    pairs = [
        (outcomes.baseline[0].items[i], outcomes.candidate[0].items[i])
        for row, i in enumerate(outcomes.items) if outcomes.valid[row, 0]
    ]
    n = max(len(pairs), 1)
    parted = [p for p in (_parted(a, b) for a, b in pairs) if p is not None]
    loops = [(in_loop(a.text), in_loop(b.text)) for a, b in pairs]
    worse, better = sum(y and not x for x, y in loops), sum(x and not y for x, y in loops)
    p = float(mcnemar_midp(worse, better))
    moved = p < LOOP_ALPHA and (worse - better) / n >= LOOP_EXCESS
    counted = [(a.completion_tokens, b.completion_tokens) for a, b in pairs]
    lengths = [(x, y) for x, y in counted if x is not None and y is not None]
    ratio = sum(y for _, y in lengths) / max(sum(x for x, _ in lengths), 1) if lengths else float("nan")
    tenths = np.bincount([min(int(p * 10), 9) for p in parted], minlength=10) if parted else np.zeros(10, int)
    metrics: dict[str, float | int | str] = {
        "pairs": len(pairs),
        "texts_differ": len(parted) / n,
        "first_divergence_median": float(np.median(parted)) if parted else 1.0,
        "first_divergence_by_tenth": " ".join(str(int(x)) for x in tenths),
        "loops_baseline": sum(x for x, _ in loops) / n,
        "loops_candidate": sum(y for _, y in loops) / n,
        "loops_p": p,
    }
    if lengths:
        metrics["length_ratio"] = ratio
    where = f", half of them before {100 * float(np.median(parted)):.0f} % of the answer" if parted else ""
    detail = (
        f"{len(parted)} of {len(pairs)} answers differ{where}; "
        f"in loops {sum(x for x, _ in loops)} → {sum(y for _, y in loops)} (p = {p:.2g})"
    )
    return LayerEvidence("drift", bool(moved), detail, metrics)
