"""Ratios with intervals: recovery (candidate / baseline accuracy) and completion-length ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, norm

from evals.statistics.paired import PairedCounts, critical


@dataclass(frozen=True)
class Ratio:
    """A ratio with a two-sided interval."""

    estimate: float
    low: float
    high: float
    confidence: float


def restricted_ratio_cells(table: PairedCounts, ratio: float) -> tuple[float, float]:
    """ML estimates of P(only baseline), P(only candidate) under candidate = ratio × baseline accuracy.

    Write w = P(right in at least one arm) and u = P(only baseline) = w t. The restriction makes
    P(only candidate) = w (t - (1 - R)) / R and P(both) = w (1 - (1 + R) t) / R, so the likelihood separates:
    w stays (a + b + c) / n and t maximises a log(1 - (1 + R) t) + b log t + c log(t - (1 - R)), whose
    derivative multiplied out is a quadratic in t.
    """
    if ratio <= 0:
        raise ValueError(f"ratio must be positive, got {ratio}")
    a, b, c = table.a, table.b, table.c
    right = a + b + c
    if right == 0:
        return 0.0, 0.0
    w, k, shift = right / table.n, 1 + ratio, 1 - ratio
    p2 = -k * right
    p1 = k * shift * (a + b) + b + c
    p0 = -b * shift
    disc = math.sqrt(max(p1 * p1 - 4 * p2 * p0, 0.0))
    low, high = max(0.0, shift), 1 / k

    def log_likelihood(t: float) -> float:
        total = 0.0
        for count, p in ((a, 1 - k * t), (b, t), (c, t - shift)):
            if count:
                total += count * math.log(p) if p > 0 else -math.inf
        return total

    # the maximum is a stationary point inside the range or, with empty cells, its edge
    candidates = [min(max(t, low), high) for t in ((-p1 - disc) / (2 * p2), (-p1 + disc) / (2 * p2))]
    t = max([*candidates, low, high], key=log_likelihood)
    return w * t, w * max(t - shift, 0.0) / ratio


def _recovery_excess(table: PairedCounts, ratio: float, z: float) -> float:
    u, v = restricted_ratio_cells(table, ratio)
    spread = math.sqrt(table.n * ratio * (u + v))
    return table.candidate_right - ratio * table.baseline_right - z * spread


def recovery(table: PairedCounts, confidence: float = 0.95) -> Ratio:
    """Recovery = candidate accuracy / baseline accuracy, with the score interval of a paired ratio.

    The bounds are the R at which (x_B - R x_A) = ±z sqrt(n R (p_b + p_c)), the discordant cells re-estimated
    under R (Nam & Blackwelder 2002, Statistics in Medicine 21:689). A bare recovery percentage hides that one
    pass over 1,319 items at 2 % discordance leaves almost ±0.8 % on it.
    """
    if table.baseline_right == 0:
        raise ValueError("recovery needs at least one right baseline answer")
    z = critical((1 - confidence) / 2)
    estimate = table.candidate_right / table.baseline_right

    def bisect(low: float, high: float, z_signed: float) -> float:
        for _ in range(70):
            mid = 0.5 * (low + high)
            low, high = (mid, high) if _recovery_excess(table, mid, z_signed) > 0 else (low, mid)
        return 0.5 * (low + high)

    low = bisect(0.0, estimate, z) if estimate > 0 else 0.0
    top = max(2 * estimate, 2.0)
    while _recovery_excess(table, top, -z) > 0 and top < 1e9:
        top *= 2
    return Ratio(estimate, low, bisect(estimate, top, -z), confidence)


def _check_lengths(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"need two sequences of the same length, got shapes {x.shape} and {y.shape}")
    if x.size < 2:
        raise ValueError(f"a length ratio needs at least 2 items, got {x.size}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or (x < 0).any() or (y < 0).any():
        raise ValueError("completion lengths must be finite and not negative")
    if x.sum() == 0:
        raise ValueError("every baseline completion has length 0: there is no ratio")
    return x, y


def length_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Mean candidate length / mean baseline length over the same items (tokens), delta-method interval.

    The interval is symmetric on the log scale: Var(log R) = sum((y_i - R x_i)²) / (n - 1) / (n ȳ²), the
    linearised ratio estimator of survey sampling (Cochran 1977, §6.4). Pairing matters: hard items are long
    in both arms. A candidate that says nothing at all has ratio 0 and the interval (0, 0).
    """
    x, y = _check_lengths(baseline, candidate)
    n, ratio = x.size, float(y.sum() / x.sum())
    if ratio == 0:
        return Ratio(0.0, 0.0, 0.0, confidence)
    residual = y - ratio * x
    log_se = math.sqrt(float(residual @ residual) / (n - 1) / n) / float(y.mean())
    half = float(norm.isf((1 - confidence) / 2)) * log_se
    return Ratio(ratio, ratio * math.exp(-half), ratio * math.exp(half), confidence)


def length_ratio_bca(
    baseline: Sequence[float],
    candidate: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 20261202,
) -> Ratio:
    """The same ratio with scipy's paired BCa bootstrap over items (Efron 1987); deterministic for a seed.

    For skewed length distributions and as a check of `length_ratio`; the report uses the closed form.
    """
    x, y = _check_lengths(baseline, candidate)
    ratio = float(y.sum() / x.sum())
    if np.allclose(y, ratio * x):
        return Ratio(ratio, ratio, ratio, confidence)

    def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return b.sum(axis=axis) / a.sum(axis=axis)

    result = bootstrap(
        (x, y),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=confidence,
        method="BCa",
        batch=500,
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Ratio(ratio, float(interval.low), float(interval.high), confidence)
