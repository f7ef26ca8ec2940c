"""Generate `gsm8k-mini`: word problems in GSM8K's answer format, made for the embedded model. It is not GSM8K.

The grammar is documented in README.md. A problem belongs to exactly one split by the SHA-256 of its chain of arithmetic
(its `expression=value` steps, without names or things): one chain in sixteen is held out, so no held-out problem's
arithmetic was ever trained on, whatever the seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evals.mini.amounts import conversions, fractions, percentages, rates
from evals.mini.draft import Draft, Family, NoProblem, prose
from evals.mini.money import below_zero, shopping, wages
from evals.mini.people import comparison, events, relations
from evals.mini.rng import Rng

VERSION = 1  # part of every seed: raise it when the grammar changes
MIN_STEPS, MAX_STEPS = 2, 8
HELD_OUT = 16  # one chain of arithmetic in this many is held out for evaluation

FAMILIES: dict[str, Family] = {
    "relations": relations,
    "comparison": comparison,
    "events": events,
    "shopping": shopping,
    "wages": wages,
    "below_zero": below_zero,
    "percentages": percentages,
    "fractions": fractions,
    "rates": rates,
    "conversions": conversions,
}
# Training draws relations four times as often as each other family: it is the one that is slow to learn.
TRAINING_FAMILIES = tuple(FAMILIES) + ("relations",) * 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One generated problem. `answer` is GSM8K's format; `difficulty` is its number of reasoning steps."""

    question: str
    answer: str
    difficulty: int
    family: str
    chain: str  # the steps as "expression=value|expression=value": what the split is decided on


def is_held_out(chain: str) -> bool:
    """Whether a chain of arithmetic belongs to the evaluation split."""
    return hashlib.sha256(chain.encode()).digest()[0] % HELD_OUT == 0


def _finish(draft: Draft, family: str, chain: str) -> Problem:
    question = " ".join([*draft.facts, draft.question])
    answer = "\n".join([*draft.lines, f"#### {prose(draft.value)}"])
    return Problem(question, answer, len(draft.lines), family, chain)


def draw(rng: Rng, *, held_out: bool, steps: int | None = None, families: Sequence[str] = TRAINING_FAMILIES) -> Problem:
    """One problem of a split; the number of steps is uniform in 2–8 unless given, the family uniform in `families`."""
    wanted = steps or rng.between(MIN_STEPS, MAX_STEPS)
    while True:
        name = rng.pick(families)
        try:
            draft = FAMILIES[name](rng, wanted)
        except NoProblem:
            continue
        chain = "|".join(draft.exprs)
        if is_held_out(chain) is held_out:
            return _finish(draft, name, chain)


def training_shard(seed: int, shard: int, count: int) -> Iterator[Problem]:
    """`count` training problems; every (seed, shard) is its own reproducible stream."""
    rng = Rng("gsm8k-mini", VERSION, "train", seed, shard)
    for _ in range(count):
        yield draw(rng, held_out=False)
