"""The evaluation set of `gsm8k-mini`: 1,319 held-out generated problems, the same on every machine.

1,319 is GSM8K's test size, so that the statistics (margins, power) carry over; nothing else is GSM8K's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.errors import UsageError
from evals.mini.generator import FAMILIES, VERSION, draw, training_shard
from evals.mini.rng import Rng

if TYPE_CHECKING:
    from evals.data import RawData

SIZE = 1319
SEED = 2026
# Each family equally often, but rates (the largest products) half as often again; more short problems than long ones.
EVAL_FAMILIES = tuple(FAMILIES) * 2 + ("rates",)
DIFFICULTY = {2: 180, 3: 180, 4: 160, 5: 140, 6: 120, 7: 110, 8: 110}  # shares of 1,000, by number of steps


def load(size: int = SIZE, seed: int = SEED) -> list[dict[str, Any]]:
    """`size` problems as dicts {question, answer, difficulty, family}, all questions different, in a fixed order."""
    deck: Sequence[int] = [steps for steps, share in DIFFICULTY.items() for _ in range(share)]
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for index in itertools.count():
        if len(rows) == size:
            break
        rng = Rng("gsm8k-mini", VERSION, "eval", seed, index)
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


def load_raw(data: Path | None, train: Path | None) -> RawData:
    """The task loader for `evals run gsm8k-mini`: 1,319 held-out problems, 64 training problems as possible shots."""
    from evals.data import RawData

    if data is not None or train is not None:
        raise UsageError("gsm8k-mini is generated from its seed: leave out --data and --train")
    rows = [row | {"difficulty": str(row["difficulty"])} for row in load()]
    shots = [{"question": p.question, "answer": p.answer} for p in training_shard(0, 0, 64)]
    label = f"gsm8k-mini: {len(rows)} generated problems for the embedded model (not GSM8K), seed {SEED}"
    return RawData(shots, rows, sha256(rows), label)
