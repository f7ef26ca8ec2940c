"""Planning: what margin n items can show, how many items or repeats a margin needs, exact power."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, norm

from evals.statistics.paired import critical, mcnemar_midp, tango_z


def standard_error(discordance: float, n: float, difference: float = 0.0) -> float:
    """Standard error of the paired difference, sqrt((psi - d²)/n); psi the share of discordant items."""
    if n <= 0 or not 0 <= discordance <= 1:
        raise ValueError(f"need n > 0 and a discordance between 0 and 1, got n={n}, {discordance}")
    return math.sqrt(max(discordance - difference**2, 0.0) / n)


def attainable_margin(
    discordance: float, n: float, alpha: float = 0.05, power: float = 0.8, tost: bool = False
) -> float:
    """Smallest margin that n items show with the given power when the arms are truly equal (a fraction).

    (z_alpha + z_beta) sqrt(psi/n) (z_beta/2 for TOST), but never below what identical answers leave open,
    z²/(n + z²): the score bound at zero flips.
    """
    z = critical(alpha)
    z_power = float(norm.ppf(power if not tost else (1 + power) / 2))
    return max((z + z_power) * standard_error(discordance, n), z * z / (n + z * z))


def required_items(
    margin: float, discordance: float, alpha: float = 0.05, power: float = 0.8, true_difference: float = 0.0
) -> int:
    """Items for a non-inferiority claim at `margin` with the given power; inverse of `attainable_margin`.

    n = (z_alpha + z_beta)² (psi - d²) / (margin + d)², and at least z²(1 - margin)/margin.
    """
    gap = margin + true_difference
    if not 0 < margin < 1:
        raise ValueError(f"margin must be a fraction between 0 and 1, got {margin} (1.5 points is 0.015)")
    if gap <= 0:
        raise ValueError(f"a candidate that is truly {-true_difference:.4f} worse cannot be shown within {margin:.4f}")
    z = critical(alpha)
    by_noise = (z + float(norm.ppf(power))) ** 2 * max(discordance - true_difference**2, 0.0) / gap**2
    by_zero_flips = z * z * (1 - margin) / margin
    n = math.floor(max(by_noise, by_zero_flips)) + 1  # strictly more: "shown" is bound > -margin
    return max(n, 1)


def required_repeats(
    margin: float,
    run_discordance: float,
    n: int,
    item_discordance: float = 0.0,
    alpha: float = 0.05,
    power: float = 0.8,
) -> int | None:
    """Repeats of both arms over n items for a margin; None when no number of repeats is enough.

    Repeats average the run-to-run part of the discordance only: Var = (psi_run/k + psi_item)/n.
    """
    factor = (critical(alpha) + float(norm.ppf(power))) ** 2 / n
    room = margin**2 - factor * item_discordance
    z = critical(alpha)
    if room <= 0 or (z * z / (n + z * z) >= margin and run_discordance == 0):
        return None
    return max(1, math.ceil(factor * run_discordance / room))


def detectable_drop(discordance: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Drop that the one-sided regression test flags with the given power: root of
    sqrt(n) D = z_alpha sqrt(psi) + z_beta sqrt(psi - D²). At most psi itself."""
    z, z_power = critical(alpha), float(norm.ppf(power))

    def gap(drop: float) -> float:
        spread = z_power * math.sqrt(max(discordance - drop * drop, 0.0))
        return math.sqrt(n) * drop - z * math.sqrt(discordance) - spread

    return float(brentq(gap, 0.0, discordance)) if gap(discordance) > 0 else discordance


def outcome_grid(n: int, discordance: float, difference: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(b, c, probability) of every outcome worth summing: m ~ Bin(n, psi), b | m ~ Bin(m, p_b/psi)."""
    if abs(difference) > discordance:
        raise ValueError(f"a difference of {difference} needs a discordance of at least {abs(difference)}")
    if discordance == 0:
        zero = np.zeros(1, dtype=np.int64)
        return zero, zero, np.ones(1)
    low, high = (int(x) for x in binom.interval(1 - 1e-10, n, discordance))
    m = np.arange(max(low, 0), high + 1)
    b = np.arange(0, high + 1)
    grid_m, grid_b = np.meshgrid(m, b, indexing="ij")
    inside = grid_b <= grid_m
    m_in, b_in = grid_m[inside], grid_b[inside]
    share = (discordance - difference) / 2 / discordance
    weight = binom.pmf(m_in, n, discordance) * binom.pmf(b_in, m_in, share)
    return b_in, m_in - b_in, weight


def noninferiority_power(n: int, discordance: float, difference: float, margin: float, alpha: float = 0.05) -> float:
    """P(non-inferiority shown) by summing the exact distribution of (b, c); size when difference =
    -margin."""
    b, c, weight = outcome_grid(n, discordance, difference)
    return float(weight[np.asarray(tango_z(b, c, n, -margin)) > critical(alpha)].sum())


def regression_power(n: int, discordance: float, difference: float, alpha: float = 0.05, exact: bool = False) -> float:
    """P(one-sided McNemar p < alpha), mid-p or exact, by summation; size when difference = 0."""
    b, c, weight = outcome_grid(n, discordance, difference)
    p = binom.sf(b - 1, b + c, 0.5) if exact else np.asarray(mcnemar_midp(b, c))
    return float(weight[np.where(b + c > 0, p, 1.0) < alpha].sum())
