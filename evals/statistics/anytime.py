"""Evidence that may be looked at after every item: e-processes for regression and for non-inferiority.

Both are non-negative supermartingales under their null hypothesis, so the chance that they ever reach 1/alpha
is at most alpha (Ville 1939), whatever the stopping rule.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, betaln, logsumexp

LAMBDAS = 12


def regression_log_e(b: npt.ArrayLike, c: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """log E that the candidate is worse, from b and c so far. Vectorised.

    Given that an item is discordant, H0 says the candidate loses it with probability <= 1/2. Mixture of the
    likelihood ratios against 1/2 over a uniform prior on (1/2, 1):
    E = 2^(b+c) · 2 · ∫_{1/2}^{1} t^b (1-t)^c dt = 2^(b+c+1) B(b+1, c+1) P(Beta(b+1, c+1) > 1/2).
    The Beta tail uses I_{1/2}(c+1, b+1) so that it does not cancel.
    """
    bb, cc = np.asarray(b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    with np.errstate(divide="ignore"):
        tail = np.log(betainc(cc + 1, bb + 1, 0.5))
    return np.asarray((bb + cc + 1) * math.log(2) + betaln(bb + 1, cc + 1) + tail)


def betting_fractions(margin: float, count: int = LAMBDAS) -> npt.NDArray[np.float64]:
    """The fixed grid of bets on non-inferiority: 0.05 … 0.9/(1 - margin), all keeping the capital
    positive."""
    if not 0 < margin < 1:
        raise ValueError(f"margin must be a fraction between 0 and 1, got {margin} (1.5 points is 0.015)")
    return np.linspace(0.05, 0.9 / (1 - margin), count)


def noninferiority_log_e(
    b: npt.ArrayLike, c: npt.ArrayLike, n: npt.ArrayLike, margin: float
) -> npt.NDArray[np.float64]:
    """log E that the candidate is less than `margin` worse, from the counts after n items. Vectorised.

    With D in {-1, 0, 1} the difference on an item, H0 is E[D | past] <= -margin; then prod(1 + lambda (D +
    margin)) is a supermartingale for every lambda in (0, 1/(1 - margin)), and so is their average (betting
    mixture, Waudby-Smith & Ramdas 2024, JRSS B 86:1). It depends on the counts only.
    """
    bb, cc, nn = (np.asarray(x, dtype=np.float64)[..., None] for x in (b, c, n))
    bets = betting_fractions(margin)
    logs = (
        cc * np.log1p(bets * (1 + margin))
        + bb * np.log1p(bets * (margin - 1))
        + (nn - bb - cc) * np.log1p(bets * margin)
    )
    return np.asarray(logsumexp(logs, axis=-1) - math.log(len(bets)))


class AnytimeMonitor:
    """Feeds on items one by one and says when a conclusion may be drawn; valid at any stopping time.

    `alpha` applies to each of the two conclusions separately.
    """

    def __init__(self, margin: float, alpha: float = 0.05) -> None:
        self.margin, self.threshold = margin, -math.log(alpha)
        self.b = self.c = self.n = 0
        self.peak_regression = self.peak_noninferiority = 0.0

    def add(self, baseline_right: bool, candidate_right: bool) -> str | None:
        """Add one item's pair of answers; returns "regression", "noninferior" or None."""
        self.n += 1
        self.b += baseline_right and not candidate_right
        self.c += candidate_right and not baseline_right
        self.peak_regression = max(self.peak_regression, float(regression_log_e(self.b, self.c)))
        self.peak_noninferiority = max(
            self.peak_noninferiority, float(noninferiority_log_e(self.b, self.c, self.n, self.margin))
        )
        return self.conclusion

    @property
    def conclusion(self) -> str | None:
        if self.peak_regression >= self.threshold:
            return "regression"
        return "noninferior" if self.peak_noninferiority >= self.threshold else None

    @property
    def p_regression(self) -> float:
        """Anytime-valid p-value 1 / max E of "the candidate is not worse"."""
        return min(1.0, math.exp(-self.peak_regression))
