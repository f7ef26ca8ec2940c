"""The evaluation set of `gsm8k-mini`: 1,319 held-out generated problems, the same on every machine.

1,319 is GSM8K's test size, so that the statistics (margins, power) carry over; nothing else is GSM8K's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from evals.mini.generator import FAMILIES, VERSION, draw
from evals.mini.rng import Rng

SIZE = 1319
SEED = 2026
EVAL_FAMILIES = tuple(FAMILIES) + ("relations",)
# How often each number of steps is drawn, of 1,000. See README.md, "The evaluation set".
DIFFICULTY = {2: 143, 3: 143, 4: 143, 5: 143, 6: 143, 7: 143, 8: 142}


def load(size: int = SIZE, seed: int = SEED) -> list[dict[str, Any]]:
    """`size` problems as dicts {question, answer, difficulty, family}, all questions different, in a fixed order."""
    rng = Rng("gsm8k-mini", VERSION, "eval", seed)
    deck: Sequence[int] = [steps for steps, share in DIFFICULTY.items() for _ in range(share)]
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < size:
        problem = draw(rng, held_out=True, steps=rng.pick(deck), families=EVAL_FAMILIES)
        if problem.question in seen:
            continue
        seen.add(problem.question)
        rows.append(
            {
                "question": problem.question,
                "answer": problem.answer,
                "difficulty": problem.difficulty,
                "family": problem.family,
            }
        )
    return rows


def sha256(rows: Sequence[dict[str, Any]]) -> str:
    """SHA-256 of the questions and answers in order (the identity that reports show)."""
    text = "\n".join(json.dumps([row["question"], row["answer"]], ensure_ascii=False) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()
