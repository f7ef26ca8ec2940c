"""Two arms on the same items: Tango's score interval, Newcombe's method 10, McNemar exact and mid-p, NI,
TOST.

Signs and cells used everywhere in this package: b = only the baseline is right, c = only the candidate is
right, theta = (c - b) / n = candidate accuracy minus baseline accuracy (negative = the candidate is worse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import binom, norm

Number = float | npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairedCounts:
    """The 2×2 table of paired right/wrong answers: a both right, b only baseline, c only candidate, d
    neither."""

    a: int
    b: int
    c: int
    d: int

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c, self.d) < 0:
            raise ValueError(f"counts cannot be negative: {self.a, self.b, self.c, self.d}")

    @property
    def n(self) -> int:
        return self.a + self.b + self.c + self.d

    @property
    def baseline_right(self) -> int:
        return self.a + self.b

    @property
    def candidate_right(self) -> int:
        return self.a + self.c

    @property
    def flips(self) -> int:
        return self.b + self.c

    @property
    def difference(self) -> float:
        """Candidate minus baseline accuracy, a fraction; 0 when there are no items."""
        return (self.c - self.b) / self.n if self.n else 0.0

    @property
    def discordance(self) -> float:
        """Share of items on which the arms differ (psi)."""
        return self.flips / self.n if self.n else 0.0


def critical(alpha: float) -> float:
    """One-sided standard normal critical value, e.g. 1.645 for alpha = 0.05."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    return float(norm.isf(alpha))


def _score_parts(b: Number, c: Number, n: Number, theta: Number) -> tuple[Number, Number]:
    """Numerator c - b - n theta and its variance under theta, the nuisance being P(only baseline right).

    The restricted estimate q of that cell is the root of A q² + B q + C = 0 with A = 2n,
    B = -b - c + (2n - c + b) theta, C = -b theta (1 - theta) (Tango 1998, Statistics in Medicine 17:891,
    written for our sign). Of the two algebraically equal forms of the root the one without cancellation is
    used.
    """
    b, c, n, theta = (np.asarray(x, dtype=np.float64) for x in (b, c, n, theta))
    qa = 2 * n
    qb = -b - c + (2 * n - c + b) * theta
    qc = -b * theta * (1 - theta)
    root = np.sqrt(np.maximum(qb * qb - 4 * qa * qc, 0.0))
    denominator = qb + root
    with np.errstate(divide="ignore", invalid="ignore"):
        stable = np.where(denominator > 0, -2 * qc / np.where(denominator > 0, denominator, 1.0), 0.0)
        q = np.where(qb > 0, stable, (root - qb) / (2 * qa))
    variance = np.maximum(n * (2 * q + theta * (1 - theta)), 0.0)
    return c - b - n * theta, variance


def tango_z(b: Number, c: Number, n: Number, theta: Number) -> Number:
    """Tango's score statistic for H0: difference = theta; large positive = the candidate is better than
    theta.

    Vectorised over all arguments (counts may be fractional: effective counts of repeated runs). At theta = 0
    it is McNemar's (c - b) / sqrt(b + c). Where the restricted variance is 0 the statistic is 0 or ±inf.
    """
    numerator, variance = _score_parts(b, c, n, theta)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.asarray(numerator / np.sqrt(variance))
    z = np.where(np.abs(numerator) < 1e-12, 0.0, z)
    return z if z.ndim else float(z)


def _tango_bound(b: Number, c: Number, n: Number, z: float, *, upper: bool) -> Number:
    """Root in theta of (c - b - n theta) ∓ z sqrt(variance), by bisection (60 halvings of [-1, 1])."""
    b, c, n = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (b, c, n)))
    if np.any(n <= 0):
        raise ValueError("Tango's interval needs at least one item")
    d = (c - b) / n
    lo = d.copy() if upper else np.full_like(d, -1.0)
    hi = np.full_like(d, 1.0) if upper else d.copy()
    sign = 1.0 if upper else -1.0
    for _ in range(60):
        mid = 0.5 * (lo + hi)
        numerator, variance = _score_parts(b, c, n, mid)
        above = numerator + sign * z * np.sqrt(variance) > 0  # statistic above its target: the root lies right
        lo = np.where(above, mid, lo)
        hi = np.where(above, hi, mid)
    bound = 0.5 * (lo + hi)
    return bound if bound.ndim else float(bound)


def tango_lower(b: Number, c: Number, n: Number, z: float) -> Number:
    """Lower score bound of the difference at critical value z (one-sided 95 %: z = 1.645). Vectorised.

    With b = c = 0 it is -z²/(n + z²): identical answers still leave that much unproven.
    """
    return _tango_bound(b, c, n, z, upper=False)


def tango_upper(b: Number, c: Number, n: Number, z: float) -> Number:
    """Upper score bound of the difference at critical value z. Vectorised."""
    return _tango_bound(b, c, n, z, upper=True)


def tango_interval(b: Number, c: Number, n: Number, confidence: float = 0.95) -> tuple[Number, Number]:
    """Two-sided Tango score interval of candidate minus baseline accuracy (fractions)."""
    z = critical((1 - confidence) / 2)
    return tango_lower(b, c, n, z), tango_upper(b, c, n, z)


def newcombe_interval(table: PairedCounts, confidence: float = 0.95) -> tuple[float, float]:
    """Newcombe (1998, Statistics in Medicine 17:2635) method 10: Wilson limits joined with a corrected phi.

    A second opinion beside Tango, with no iteration. The continuity correction applies to a positive
    numerator of phi only, as in the paper.
    """
    from evals.statistics.counts import wilson

    n = table.n
    if n == 0:
        raise ValueError("Newcombe's interval needs at least one item")
    pa, pb = table.baseline_right / n, table.candidate_right / n
    la, ua = wilson(table.baseline_right, n, confidence)
    lb, ub = wilson(table.candidate_right, n, confidence)
    product = float(table.a + table.b) * (table.c + table.d) * (table.a + table.c) * (table.b + table.d)
    phi = 0.0
    if product > 0:
        numerator = float(table.a) * table.d - float(table.b) * table.c
        if numerator > 0:
            numerator = max(numerator - n / 2, 0.0)
        phi = numerator / math.sqrt(product)
    down = math.sqrt(max((pb - lb) ** 2 - 2 * phi * (pb - lb) * (ua - pa) + (ua - pa) ** 2, 0.0))
    up = math.sqrt(max((ub - pb) ** 2 - 2 * phi * (ub - pb) * (pa - la) + (pa - la) ** 2, 0.0))
    return pb - pa - down, pb - pa + up


def mcnemar_exact(b: int, c: int) -> float:
    """Exact one-sided p of "the candidate is worse": P(X >= b), X ~ Bin(b + c, 1/2). 1 when b + c = 0."""
    return float(binom.sf(b - 1, b + c, 0.5)) if b + c else 1.0


def mcnemar_midp(b: Number, c: Number) -> Number:
    """One-sided mid-p of "the candidate is worse": P(X > b) + P(X = b)/2. 1 when b + c = 0. Vectorised.

    Closer to the nominal level than the exact test and in practice not above it (Fagerland, Lydersen, Laake
    2013, BMC Med Res Methodol 13:91).
    """
    b, c = np.asarray(b), np.asarray(c)
    m = b + c
    p = np.where(m > 0, binom.sf(b, m, 0.5) + 0.5 * binom.pmf(b, m, 0.5), 1.0)
    return p if p.ndim else float(p)


def mcnemar_exact_two_sided(b: int, c: int) -> float:
    """Exact two-sided McNemar p, 2 P(X <= min(b, c)) capped at 1. 1 ("identical") when b + c = 0."""
    return min(1.0, 2 * float(binom.cdf(min(b, c), b + c, 0.5))) if b + c else 1.0


def mcnemar_midp_two_sided(b: int, c: int) -> float:
    """Two-sided mid-p: the exact two-sided p less the probability of what was seen (half of it when b =
    c)."""
    m = b + c
    if m == 0:
        return 1.0
    seen = float(binom.pmf(b, m, 0.5))
    return 1.0 - 0.5 * seen if b == c else 2 * float(binom.cdf(min(b, c), m, 0.5)) - seen


@dataclass(frozen=True)
class NonInferiority:
    """Result of the one-sided question "is the candidate at most `margin` worse?"; fractions, not points."""

    margin: float
    z: float
    lower: float
    upper: float
    statistic: float
    p: float
    shown: bool


def noninferiority(
    b: float, c: float, n: float, margin: float, alpha: float = 0.05, z: float | None = None
) -> NonInferiority:
    """Non-inferiority by Tango's score bound: shown iff the one-sided lower bound lies above -margin.

    `margin` is a positive fraction (0.015 = 1.5 points). `z` replaces the critical value of alpha at an
    interim look. The bound and the test agree by construction (both invert the same statistic).
    """
    if not 0 < margin < 1:
        raise ValueError(f"margin must be a fraction between 0 and 1, got {margin} (1.5 points is 0.015)")
    z = critical(alpha) if z is None else z
    lower, upper = float(tango_lower(b, c, n, z)), float(tango_upper(b, c, n, z))
    statistic = float(tango_z(b, c, n, -margin))
    return NonInferiority(margin, z, lower, upper, statistic, float(norm.sf(statistic)), lower > -margin)


def equivalence(b: float, c: float, n: float, margin: float, alpha: float = 0.05) -> tuple[bool, float]:
    """TOST: is |difference| < margin? Returns (shown, p), p the larger of the two one-sided score
    p-values."""
    if not 0 < margin < 1:
        raise ValueError(f"margin must be a fraction between 0 and 1, got {margin} (1.5 points is 0.015)")
    p = float(max(norm.sf(tango_z(b, c, n, -margin)), norm.cdf(tango_z(b, c, n, margin))))
    return p < alpha, p
