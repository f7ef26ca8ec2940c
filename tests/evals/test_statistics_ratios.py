"""Recovery and length ratios, repeated runs and flip tests against brute force, bootstrap and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import fisher_exact

from evals.statistics import (
    PairedCounts,
    clustered,
    critical,
    flips_against_floor,
    flips_against_stored_floor,
    length_ratio,
    length_ratio_bca,
    mcnemar_midp,
    recovery,
    restricted_ratio_cells,
    tango_lower,
    tango_z,
)

small = st.integers(0, 60)


def brute_cells(table: PairedCounts, ratio: float) -> tuple[float, float]:
    """Maximise the multinomial likelihood under p_B = R p_A numerically over u = P(only baseline)."""
    a, b, c, n = table.a, table.b, table.c, table.n
    w = (a + b + c) / n

    def cells(u: float) -> tuple[float, float, float]:
        v = (u - (1 - ratio) * w) / ratio
        return w - u - v, u, v

    def loss(u: float) -> float:
        total = 0.0
        for count, p in zip((a, b, c), cells(u), strict=True):
            if count:
                if p <= 0:
                    return math.inf
                total -= count * math.log(p)
        return total

    low, high = max(0.0, (1 - ratio) * w), w / (1 + ratio)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-14})
    u = min((low, high, float(found.x)), key=loss)
    return u, max(cells(u)[2], 0.0)


@settings(max_examples=150, deadline=None)
@given(a=st.integers(1, 300), b=small, c=small, d=small, ratio=st.floats(0.5, 1.8))
def test_restricted_cells_maximise_the_likelihood(a: int, b: int, c: int, d: int, ratio: float) -> None:
    table = PairedCounts(a, b, c, d)
    assert restricted_ratio_cells(table, ratio) == pytest.approx(brute_cells(table, ratio), abs=2e-6)


@settings(max_examples=60, deadline=None)
@given(a=st.integers(5, 300), b=small, c=small, d=small)
def test_recovery_interval_brackets_and_inverts(a: int, b: int, c: int, d: int) -> None:
    result = recovery(PairedCounts(a, b, c, d))
    assert 0 <= result.low <= result.estimate <= result.high
    other = recovery(PairedCounts(a, c, b, d))
    assert result.low == pytest.approx(1 / other.high, rel=1e-6)
    assert result.high == pytest.approx(1 / other.low, rel=1e-6)
    # R = 1 is McNemar's test: excluded iff |z| exceeds the critical value
    z = abs(float(tango_z(b, c, a + b + c + d, 0.0)))
    if abs(z - critical(0.025)) > 1e-6:
        assert (result.low > 1 or result.high < 1) == (z > critical(0.025))


def test_recovery_coverage() -> None:
    rng = np.random.default_rng(8)
    p = [0.93, 0.025, 0.015, 0.03]
    truth = (p[0] + p[2]) / (p[0] + p[1])
    tables = rng.multinomial(1319, p, size=400)
    inside = [r.low <= truth <= r.high for r in (recovery(PairedCounts(*map(int, t))) for t in tables)]
    assert 0.92 <= np.mean(inside) <= 0.985


def test_recovery_edges() -> None:
    same = recovery(PairedCounts(1268, 0, 0, 51))
    assert same.estimate == 1.0 and same.low < 1 < same.high  # identical answers still leave an interval
    none = recovery(PairedCounts(0, 30, 0, 10))
    assert none.estimate == 0.0 and none.low == 0.0 and none.high < 0.3
    with pytest.raises(ValueError, match="at least one right"):
        recovery(PairedCounts(0, 0, 3, 10))


def test_length_ratio_closed_form_and_bootstrap_agree() -> None:
    rng = np.random.default_rng(4)
    base = rng.lognormal(4.8, 0.5, 1319)
    cand = base * rng.lognormal(-0.02, 0.2, 1319)
    exact, boot = length_ratio(base, cand), length_ratio_bca(base, cand)
    assert exact.estimate == pytest.approx(cand.mean() / base.mean())
    assert (exact.low, exact.high) == pytest.approx((boot.low, boot.high), abs=2e-3)
    assert length_ratio_bca(base, cand) == boot  # deterministic
    unpaired = length_ratio(base, rng.permutation(cand))
    assert unpaired.high - unpaired.low > 1.5 * (exact.high - exact.low)  # pairing is what makes it sharp


def test_length_ratio_coverage() -> None:
    rng = np.random.default_rng(9)
    base = rng.lognormal(4.8, 0.4, (600, 300))
    cand = base * rng.lognormal(-0.05, 0.3, base.shape)
    truth = math.exp(-0.05 + 0.3**2 / 2)
    inside = [r.low <= truth <= r.high for r in (length_ratio(x, y) for x, y in zip(base, cand, strict=True))]
    assert 0.92 <= np.mean(inside) <= 0.98


def test_length_ratio_edges() -> None:
    assert length_ratio([10, 20, 30], [10, 20, 30]).high == 1.0
    assert length_ratio([10, 20], [0, 0]).high == 0.0
    for bad, match in (
        (([1, 2], [1]), "same length"),
        (([1], [1]), "at least 2"),
        (([0, 0], [1, 1]), "no ratio"),
        (([1, math.nan], [1, 1]), "finite"),
    ):
        with pytest.raises(ValueError, match=match):
            length_ratio(*bad)
    assert length_ratio_bca([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]).low == 2.0


def test_single_runs_are_not_clustered() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.random(500) < 0.95, rng.random(500) < 0.94
    result = clustered(x, y)
    b, c = int((x & ~y).sum()), int((~x & y).sum())
    assert (result.b, result.c, result.deff, result.pairs) == (b, c, 1.0, 500)
    assert result.effective == (b, c, 500)
    assert result.regression_p() == mcnemar_midp(b, c)


def test_cluster_robust_error_is_statsmodels() -> None:
    rng = np.random.default_rng(3)
    p = rng.beta(3, 0.3, 400)
    x, y = rng.random((400, 4)) < p[:, None], rng.random((400, 4)) < (p * rng.choice([1, 0.6], 400))[:, None]
    result = clustered(x, y)
    d = (y.astype(float) - x).ravel()
    fit = sm.OLS(d, np.ones_like(d)).fit(
        cov_type="cluster", cov_kwds={"groups": np.repeat(np.arange(400), 4), "use_correction": False}
    )
    assert result.difference == pytest.approx(fit.params[0])
    assert result.deff > 1 and result.se == pytest.approx(fit.bse[0])


def test_copies_are_no_new_information() -> None:
    """Repeating identical answers k times must give the bound of one run."""
    rng = np.random.default_rng(6)
    x, y = rng.random(600) < 0.95, rng.random(600) < 0.93
    once = clustered(x, y)
    copied = clustered(np.repeat(x[:, None], 5, 1), np.repeat(y[:, None], 5, 1))
    assert copied.deff == pytest.approx(5)
    assert tango_lower(*copied.effective, 1.645) == pytest.approx(tango_lower(*once.effective, 1.645), abs=1e-9)
    same = clustered(np.ones((100, 3), bool), np.ones((100, 3), bool))
    assert same.effective == (0, 0, 100) and same.regression_p() == 1.0


def test_repeats_hold_their_size() -> None:
    """NI at its margin with 4 repeats and item-to-item differences: naive pooling exceeds 5 %, clustering holds it."""
    rng = np.random.default_rng(7)
    n, k, runs, z = 400, 4, 1500, critical(0.05)
    naive = robust = 0
    lost, won = 0.035, 0.02  # items that change for good: true difference -1.5 pt, plus run noise
    for _ in range(runs):
        u = rng.random(n)
        shift = np.where(u < lost, -1, np.where(u < lost + won, 1, 0))
        base = np.repeat((shift <= 0)[:, None], k, 1) ^ (rng.random((n, k)) < 0.01)
        cand = np.repeat((shift >= 0)[:, None], k, 1) ^ (rng.random((n, k)) < 0.01)
        result = clustered(base, cand)
        truth = -(lost - won) * 0.98
        robust += float(tango_z(*result.effective, truth)) > z
        naive += float(tango_z(result.b, result.c, result.pairs, truth)) > z
    assert robust / runs < 0.07 and naive / runs > 0.12


def test_missing_answers_are_left_out_pairwise() -> None:
    x = np.array([[1, 1], [1, 0], [1, 1]], bool)
    y = np.array([[0, 1], [1, 0], [0, 0]], bool)
    valid = np.array([[1, 0], [1, 1], [0, 0]], bool)
    result = clustered(x, y, valid)
    assert (result.items, result.pairs, result.b, result.c) == (2, 3, 1, 0)
    with pytest.raises(ValueError, match="no item"):
        clustered(x, y, np.zeros_like(valid))
    with pytest.raises(ValueError, match="shapes"):
        clustered(x, y[:2])


def test_flips_against_the_floor_counts() -> None:
    first = [True, True, True, False, False]
    again = [True, False, True, False, True]
    other = [True, False, False, True, False]
    test = flips_against_floor(first, again, other)
    assert (test.ab_flips, test.aa_flips, test.only_ab, test.only_aa) == (3, 2, 2, 1)
    assert test.p == mcnemar_midp(2, 1) and test.excess == pytest.approx(0.2)
    with pytest.raises(ValueError, match="three times"):
        flips_against_floor(first, again, other[:2])


def test_flip_test_holds_its_size_and_has_power() -> None:
    """The three answers share A1 and items differ in noise; under the null at most 5 % are flagged."""
    rng = np.random.default_rng(10)
    n, runs = 1319, 1500
    p = np.where(rng.random(n) < 0.1, rng.random(n), 0.99)
    null = power = 0
    for _ in range(runs):
        a1, a2, b = (rng.random(n) < p for _ in range(3))
        null += flips_against_floor(a1, a2, b).p < 0.05
        moved = b ^ (rng.random(n) < 0.03)
        power += flips_against_floor(a1, a2, moved).p < 0.05
    assert null / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert power / runs > 0.8


def test_stored_floor_is_fisher() -> None:
    test = flips_against_stored_floor(32, 1319, 28, 1319)
    assert test.p == pytest.approx(fisher_exact([[32, 1287], [28, 1291]], alternative="greater").pvalue)
    assert test.method == "independent" and test.only_ab is None
    assert flips_against_stored_floor(3, 10, 0, 0).p == 1.0
