"""O'Brien–Fleming looks: boundaries by numerical integration, repeated intervals, exact curtailment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from evals.statistics.paired import mcnemar_midp, tango_upper, tango_z

DEFAULT_LOOKS = 4


def crossing_probabilities(boundaries: Sequence[float], fractions: Sequence[float]) -> list[float]:
    """P(first crossing z_k >= boundary_k at look k) for k = 1..K when the true effect is zero.

    Z_k = B(t_k)/sqrt(t_k), B a Brownian motion observed at information fractions t_k: the density of the
    paths that have not crossed is carried from look to look by quadrature (Armitage, McPherson & Rowe 1969;
    Jennison & Turnbull 2000, ch. 19). Panels of Gauss–Legendre nodes on [-9 sqrt(t), boundary).
    """
    times = np.asarray(fractions, dtype=np.float64)
    if len(boundaries) != len(times) or np.any(np.diff(times) <= 0) or times[0] <= 0:
        raise ValueError(f"need one boundary per look and increasing fractions, got {list(fractions)}")
    node, weight = np.polynomial.legendre.leggauss(16)
    exits: list[float] = []
    x = w = density = None
    for k, (z, t) in enumerate(zip(boundaries, times, strict=True)):
        top, bottom = z * math.sqrt(t), -9.0 * math.sqrt(t)
        step = t if k == 0 else t - times[k - 1]
        if x is None or w is None or density is None:
            exits.append(float(norm.sf(z)))
        else:
            exits.append(float((w * density) @ norm.sf((top - x) / math.sqrt(step))))
        # panels no wider than the kernel that will be integrated against this density next
        following = times[k + 1] - t if k + 1 < len(times) else step
        panels = max(4, math.ceil((top - bottom) / math.sqrt(min(step, following))))
        edges = np.linspace(bottom, top, panels + 1)
        half = np.diff(edges)[:, None] / 2
        grid = (edges[:-1, None] + half + half * node).ravel()
        grid_weight = (half * weight).ravel()
        if x is None or w is None or density is None:
            new = norm.pdf(grid, scale=math.sqrt(t))
        else:
            new = norm.pdf(grid[:, None] - x[None, :], scale=math.sqrt(step)) @ (w * density)
        x, w, density = grid, grid_weight, new
    return exits


@cache
def obrien_fleming(fractions: tuple[float, ...], alpha: float = 0.05) -> tuple[float, ...]:
    """One-sided O'Brien–Fleming critical values z_k = C / sqrt(t_k) with overall error alpha.

    `fractions`: information fractions of the looks, increasing, the last one 1. Four equal looks at 0.05 give
    3.466, 2.451, 2.001, 1.733 (O'Brien & Fleming 1979; Jennison & Turnbull 2000).
    """
    if not fractions or abs(fractions[-1] - 1) > 1e-12 or any(f <= 0 for f in fractions):
        raise ValueError(f"information fractions must rise to 1, got {fractions}")
    root = [1 / math.sqrt(t) for t in fractions]
    constant = brentq(
        lambda c: sum(crossing_probabilities([c * r for r in root], fractions)) - alpha,
        norm.isf(alpha) - 1e-9,
        norm.isf(alpha / len(fractions)) + 1e-9,
        xtol=1e-10,
    )
    return tuple(float(constant) * r for r in root)


@dataclass(frozen=True)
class Looks:
    """The planned looks: after how many items, and the critical value there."""

    items: tuple[int, ...]
    z: tuple[float, ...]
    alpha: float

    def at(self, seen: int) -> int | None:
        """Index of the look that `seen` finished items make due; None when that is no planned look."""
        return self.items.index(seen) if seen in self.items else None


def plan_looks(n: int, looks: int = DEFAULT_LOOKS, alpha: float = 0.05) -> Looks:
    """`looks` nearly equally spaced looks at n items (330, 660, 990, 1319 for 1,319); one look = no early
    stop."""
    if n < 1 or looks < 1:
        raise ValueError(f"need at least one item and one look, got n={n}, looks={looks}")
    items = tuple(sorted({max(1, math.ceil(n * k / looks)) for k in range(1, looks + 1)}))
    return Looks(items, obrien_fleming(tuple(i / n for i in items), alpha), alpha)


def shown_noninferior(b: int, c: int, n: int, margin: float, z: float) -> bool:
    """Tango's statistic against -margin exceeds z: the lower bound lies above -margin (exact duality)."""
    return n > 0 and float(tango_z(b, c, n, -margin)) > z


def shown_regression(b: int, c: int, n: int, margin: float, z: float, min_drop: float = 0.0) -> bool:
    """Regression shown: mid-p below the level of z, not non-inferior, and the drop is at least `min_drop`.

    "At least": the upper bound lies below -min_drop, or the estimate itself is beyond the margin.
    """
    if n <= 0 or float(mcnemar_midp(b, c)) >= float(norm.sf(z)) or shown_noninferior(b, c, n, margin, z):
        return False
    return (c - b) / n <= -margin or float(tango_upper(b, c, n, z)) < -min_drop


def curtail(b: int, c: int, seen: int, n: int, margin: float, z: float, min_drop: float = 0.0) -> str | None:
    """What the final accuracy answer must be whatever the remaining n - seen items do; None while it is open.

    Returns "noninferior", "regression", "undecided" (neither can be reached any more) or None. Exact: every
    further answer moves b and c by at most the remaining items; non-inferiority falls in b and rises in c,
    regression the other way round, so the extreme corners decide (tests check this by enumeration).
    """
    left = n - seen
    if left < 0 or b + c > seen:
        raise ValueError(f"impossible state: b={b}, c={c}, {seen} of {n} items seen")
    if shown_noninferior(b + left, c, n, margin, z):
        return "noninferior"
    if shown_regression(b, c + left, n, margin, z, min_drop):
        return "regression"
    can_pass = shown_noninferior(b, c + left, n, margin, z)
    can_fail = shown_regression(b + left, c, n, margin, z, min_drop)
    return None if can_pass or can_fail else "undecided"
