"""One proportion, two statuses, many variants: Wilson interval, status comparisons between arms, Holm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, fisher_exact
from statsmodels.stats.multitest import multipletests

from evals.statistics.paired import mcnemar_exact_two_sided


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Wilson score interval of a proportion (Wilson 1927), through scipy; (0, 1) when n = 0.

    Both arguments are counts; the bounds are fractions, not points.
    """
    if n < 0 or not 0 <= successes <= max(n, 0):
        raise ValueError(f"need 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    interval = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class StatusComparison:
    """How often a status (empty, truncated, ...) occurs in two arms on the same items.

    `p_paired` is the exact two-sided McNemar p on the items where only one arm has the status. `p_fisher` is
    the two-sided Fisher p that ignores pairing (what reports of others use; kept for comparison and for arms
    whose items could not be paired).
    """

    baseline: int
    candidate: int
    only_baseline: int
    only_candidate: int
    n: int
    p_paired: float
    p_fisher: float

    @property
    def p(self) -> float:
        """The smaller power loss of the two: the paired p, which conditions on the discordant items only."""
        return self.p_paired


def compare_status(baseline: Sequence[bool], candidate: Sequence[bool]) -> StatusComparison:
    """Compare how often a status occurs in two arms; entry i of both sequences belongs to the same item."""
    if len(baseline) != len(candidate):
        raise ValueError(f"arms have {len(baseline)} and {len(candidate)} items; pair them first")
    n = len(baseline)
    only_base = sum(1 for x, y in zip(baseline, candidate, strict=True) if x and not y)
    only_cand = sum(1 for x, y in zip(baseline, candidate, strict=True) if y and not x)
    both = sum(1 for x, y in zip(baseline, candidate, strict=True) if x and y)
    return status_from_counts(both + only_base, both + only_cand, only_base, only_cand, n)


def status_from_counts(
    baseline: int, candidate: int, only_baseline: int, only_candidate: int, n: int
) -> StatusComparison:
    """The same from counts. Fisher's p is two-sided over the 2×2 table (status yes/no × arm)."""
    p_fisher = 1.0
    if n and (baseline or candidate):
        p_fisher = float(fisher_exact([[baseline, n - baseline], [candidate, n - candidate]]).pvalue)
    return StatusComparison(
        baseline=baseline,
        candidate=candidate,
        only_baseline=only_baseline,
        only_candidate=only_candidate,
        n=n,
        p_paired=mcnemar_exact_two_sided(only_baseline, only_candidate),
        p_fisher=p_fisher,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm (1979) step-down adjusted p-values in the given order, through statsmodels.

    Needed to say *which* of several candidates regressed. To claim that *all* candidates pass, each at level
    alpha, no correction is needed (intersection–union test).
    """
    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]
