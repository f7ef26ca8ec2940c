"""Repeated runs: the item is the cluster. Design effect and effective counts for the score methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from evals.statistics.paired import mcnemar_midp


@dataclass(frozen=True)
class Clustered:
    """Discordant totals over all pairs, the design effect of repeating items, and effective counts.

    `pairs` = items × repeats (less what is missing). `deff` >= 1: by how much the cluster-robust variance of
    the mean difference exceeds the variance of that many independent items. Dividing all counts by it (Rao &
    Scott 1992, Biometrics 48:577) lets Tango's interval be used as it stands. With one repeat deff is 1.
    """

    items: int
    pairs: int
    b: int
    c: int
    deff: float
    se: float

    @property
    def difference(self) -> float:
        return (self.c - self.b) / self.pairs

    @property
    def effective(self) -> tuple[float, float, float]:
        """(b, c, n) to give to `tango_lower` and the others."""
        return self.b / self.deff, self.c / self.deff, self.pairs / self.deff

    def regression_p(self) -> float:
        """One-sided p of "the candidate is worse": mid-p for single runs, else the score z over
        sqrt(deff)."""
        if self.b + self.c == 0:
            return 1.0
        if self.deff == 1.0:
            return float(mcnemar_midp(self.b, self.c))
        return float(norm.cdf((self.c - self.b) / math.sqrt((self.b + self.c) * self.deff)))


def clustered(baseline: npt.ArrayLike, candidate: npt.ArrayLike, valid: npt.ArrayLike | None = None) -> Clustered:
    """Cluster paired answers by item.

    `baseline`, `candidate`: bool arrays [items, repeats], right or wrong; `valid`: bool array of the same
    shape, False where either arm has no answer (an error left over). Items without any valid pair are left
    out. The robust variance is sum_i (D_i - m_i mean)² / M², D_i the summed difference of item i over its
    m_i pairs (CR0 of a regression on a constant, Liang & Zeger 1986).

    When nothing differs between the arms the design effect cannot be estimated; it is then taken to be the
    number of repeats (repeats of a deterministic server are no new information).
    """
    x, y = np.asarray(baseline, dtype=bool), np.asarray(candidate, dtype=bool)
    if x.ndim == 1:
        x, y = x[:, None], y[:, None] if y.ndim == 1 else y
    if x.shape != y.shape:
        raise ValueError(f"arms have shapes {x.shape} and {y.shape}; give the same items and repeats")
    ok = np.ones(x.shape, bool) if valid is None else np.asarray(valid, dtype=bool).reshape(x.shape)
    keep = ok.any(axis=1)
    x, y, ok = x[keep], y[keep], ok[keep]
    items, pairs = int(x.shape[0]), int(ok.sum())
    if pairs == 0:
        raise ValueError("no item has an answer in both arms")
    difference = np.where(ok, y.astype(np.int64) - x.astype(np.int64), 0)
    b, c = int((difference < 0).sum()), int((difference > 0).sum())
    mean = (c - b) / pairs
    per_item, m = difference.sum(axis=1), ok.sum(axis=1)
    robust = float(((per_item - m * mean) ** 2).sum()) / pairs**2
    naive = (b + c - pairs * mean**2) / pairs**2
    if m.max() == 1:
        deff = 1.0
    elif naive <= 0:
        deff = float(pairs / items)
    else:
        deff = max(1.0, robust / naive)
    return Clustered(items, pairs, b, c, deff, math.sqrt(max(naive, 0.0) * deff))
