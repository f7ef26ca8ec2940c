"""The A/A floor: how much the baseline differs from its own second run, measured or reused from a stored
run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evals.pairing import PairedOutcomes
from evals.statistics import (
    FlipTest,
    attainable_margin,
    critical,
    flips_against_floor,
    flips_against_stored_floor,
    mcnemar_midp_two_sided,
    standard_error,
)

UNSTABLE_P = 0.001  # a baseline that disagrees with itself this clearly is drifting, not noisy


@dataclass(frozen=True, eq=False)
class Floor:
    """Flips between two runs of the same server over the same items.

    `b`, `c`: items only the first, only the second run got right; `texts_differ`: completions that are not
    the same string (None when unknown). `outcomes` is present when the floor was measured in this run.
    """

    n: int
    b: int
    c: int
    texts_differ: int | None = None
    source: Literal["measured", "stored"] = "measured"
    outcomes: PairedOutcomes | None = None

    @classmethod
    def measured(cls, outcomes: PairedOutcomes) -> Floor:
        """From the pairing of the baseline with its second run."""
        table = outcomes.counts
        return cls(table.n, table.b, table.c, outcomes.texts_differ, "measured", outcomes)

    @property
    def flips(self) -> int:
        return self.b + self.c

    @property
    def discordance(self) -> float:
        return self.flips / self.n if self.n else 0.0

    @property
    def deterministic(self) -> bool | None:
        """True when every completion was the same string twice, None when that was not recorded."""
        return None if self.texts_differ is None else self.texts_differ == 0

    @property
    def p_drift(self) -> float:
        """Two-sided mid-p that one of the two runs is better; they are the same server, so small is bad."""
        return mcnemar_midp_two_sided(self.b, self.c)

    @property
    def stable(self) -> bool:
        return self.p_drift >= UNSTABLE_P

    def noise(self, pairs: float, alpha: float) -> float:
        """Drop that run-to-run noise alone exceeds with probability alpha, z sqrt(psi0/pairs) (a fraction).

        A margin below it would be decided by luck: even a candidate equal to the baseline would more often
        than not fail to show it.
        """
        return critical(alpha) * standard_error(self.discordance, pairs)

    def attainable(self, pairs: float, alpha: float, power: float) -> float:
        """Smallest margin that `pairs` items show with `power`, this floor being the only noise."""
        return attainable_margin(self.discordance, pairs, alpha, power)

    def as_dict(self) -> dict[str, Any]:
        """What a later run with the same protocol and fingerprint needs to reuse the floor."""
        return {"n": self.n, "b": self.b, "c": self.c, "texts_differ": self.texts_differ}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Floor:
        """A stored floor (`as_dict`); the caller checks that protocol and fingerprint match."""
        return cls(int(data["n"]), int(data["b"]), int(data["c"]), data.get("texts_differ"), "stored")


def compare_flips(floor: Floor, outcomes: PairedOutcomes, losses_only: bool = False) -> FlipTest:
    """Flips of the candidate against the floor's, on the items all three runs answered.

    `losses_only` counts right→wrong only (used when the candidate is shown to be better). The first repeat of
    each arm is used: the exact test needs one answer per item and arm. A stored floor is compared as two
    independent proportions.
    """
    if floor.outcomes is None:
        table = outcomes.counts
        if losses_only:
            return flips_against_stored_floor(table.b, table.n, floor.b, floor.n)
        return flips_against_stored_floor(table.flips, table.n, floor.flips, floor.n)
    aa = floor.outcomes
    index = {item: i for i, item in enumerate(aa.items)}
    rows = [
        (i, index[item])
        for i, item in enumerate(outcomes.items)
        if item in index and outcomes.valid[i, 0] and aa.valid[index[item], 0]
    ]
    first = [bool(outcomes.right_baseline[i, 0]) for i, _ in rows]
    again = [bool(aa.right_candidate[j, 0]) for _, j in rows]
    other = [bool(outcomes.right_candidate[i, 0]) for i, _ in rows]
    if losses_only:  # where the baseline was wrong nothing can be lost: make those items agree
        again = [x and y for x, y in zip(first, again, strict=True)]
        other = [x and y for x, y in zip(first, other, strict=True)]
    return flips_against_floor(first, again, other)
