"""False alarms: what the rule says when the same server is compared with itself, 200 times.

The forced layers are repeated for real. Accuracy runs of 1,319 items are simulated from a discordance between two runs
of one server: 0 where a server repeats itself exactly, 2 to 6 % as published for FP8 and FP4 MoE kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evals.policy import Policy
from evals.statistics import critical, flips_against_stored_floor, shown_regression

RUNS, ITEMS = 200, 1319
DISCORDANCE = (0.0, 0.02, 0.04, 0.06)


@dataclass(frozen=True)
class Alarms:
    """Of `runs` simulated A/A comparisons: how many ended FAIL, and how many CHANGED because of flips."""

    discordance: float
    runs: int
    failed: int
    changed: int


def simulate(discordance: float, runs: int = RUNS, items: int = ITEMS, seed: int = 1, alpha: float = 0.05) -> Alarms:
    """Each run: a floor (the baseline twice) and a candidate that behaves as the baseline does.

    Items flip independently, as often either way; the rule's own functions judge the counts.
    """
    policy, rng = Policy(alpha=alpha), np.random.default_rng(seed)
    failed = changed = 0
    for _ in range(runs):
        floor, candidate = rng.multinomial(items, [discordance / 2, discordance / 2, 1 - discordance], size=2)
        b, c = int(candidate[0]), int(candidate[1])
        if shown_regression(b, c, items, policy.delta, critical(alpha), policy.min_drop / 100):
            failed += 1
            continue
        flips = flips_against_stored_floor(b + c, items, int(floor[0] + floor[1]), items)
        changed += flips.p < policy.flips_alpha and flips.excess >= policy.max_excess_flips
    return Alarms(discordance, runs, failed, changed)
