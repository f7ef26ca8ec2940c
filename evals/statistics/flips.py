"""Did the candidate change more answers than the baseline changes by itself? A/B flips against A/A flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import fisher_exact

from evals.statistics.paired import mcnemar_midp


@dataclass(frozen=True)
class FlipTest:
    """Flips baseline→candidate beside flips baseline→baseline-again; p is one-sided ("more than by itself").

    `method` says which test: "paired" (same items, McNemar mid-p on items flipped in only one of the two
    comparisons) or "independent" (a stored floor from other items or another day, Fisher's exact test).
    """

    ab_flips: int
    ab_n: int
    aa_flips: int
    aa_n: int
    only_ab: int | None
    only_aa: int | None
    p: float
    method: str

    @property
    def excess(self) -> float:
        """A/B flip share minus A/A flip share (fraction of items)."""
        return self.ab_flips / self.ab_n - self.aa_flips / self.aa_n if self.ab_n and self.aa_n else 0.0


def flips_against_floor(baseline: Sequence[bool], repeat: Sequence[bool], candidate: Sequence[bool]) -> FlipTest:
    """Same items in all three sequences: baseline A1, its second run A2, candidate B (right or wrong).

    Null hypothesis: given A1, the second answer of the baseline and the candidate's answer to an item are
    exchangeable. The two flip indicators X = [A1 != B] and Y = [A1 != A2] share A1, so they are *not*
    independent; but under the null swapping A2 and B swaps X and Y, so among items with X != Y each is as
    likely as the other: McNemar's conditional test on (X, Y) is exact, whatever the dependence and however
    unequal the items. Two independent proportions would throw the pairing away.
    """
    if not len(baseline) == len(repeat) == len(candidate):
        raise ValueError(f"need the same items three times, got {len(baseline)}, {len(repeat)} and {len(candidate)}")
    n = len(baseline)
    x = [bool(a) != bool(b) for a, b in zip(baseline, candidate, strict=True)]
    y = [bool(a) != bool(r) for a, r in zip(baseline, repeat, strict=True)]
    only_ab = sum(1 for i, j in zip(x, y, strict=True) if i and not j)
    only_aa = sum(1 for i, j in zip(x, y, strict=True) if j and not i)
    p = float(mcnemar_midp(only_ab, only_aa))
    return FlipTest(sum(x), n, sum(y), n, only_ab, only_aa, p, "paired")


def flips_against_stored_floor(ab_flips: int, ab_n: int, aa_flips: int, aa_n: int) -> FlipTest:
    """A floor known only as counts: Fisher's one-sided exact test of the two proportions (conservative)."""
    if ab_n <= 0 or aa_n <= 0:
        return FlipTest(ab_flips, ab_n, aa_flips, aa_n, None, None, 1.0, "independent")
    table = [[ab_flips, ab_n - ab_flips], [aa_flips, aa_n - aa_flips]]
    p = float(fisher_exact(table, alternative="greater").pvalue)
    return FlipTest(ab_flips, ab_n, aa_flips, aa_n, None, None, p, "independent")
