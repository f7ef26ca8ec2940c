"""Paired intervals and tests against published vectors, independent brute force, and their own duality."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom, binomtest, norm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from evals.statistics import (
    PairedCounts,
    compare_status,
    critical,
    equivalence,
    holm,
    mcnemar_exact,
    mcnemar_exact_two_sided,
    mcnemar_midp,
    mcnemar_midp_two_sided,
    newcombe_interval,
    noninferiority,
    recovery,
    tango_interval,
    tango_lower,
    tango_upper,
    tango_z,
    wilson,
)

WORKED = PairedCounts(1250, 17, 9, 43)
Z95 = critical(0.05)

cells = st.integers(0, 400)
thetas = st.floats(-0.9, 0.9)


def test_worked_example_of_the_reference() -> None:
    b, c, n = WORKED.b, WORKED.c, WORKED.n
    low, high = tango_interval(b, c, n)
    assert (round(100 * low, 3), round(100 * high, 3)) == (-1.449, 0.163)
    assert round(100 * tango_lower(b, c, n, Z95), 3) == -1.298
    low, high = newcombe_interval(WORKED)
    assert (round(100 * low, 3), round(100 * high, 3)) == (-1.441, 0.188)
    assert round(mcnemar_exact(b, c), 3) == 0.084
    assert round(mcnemar_midp(b, c), 3) == 0.061
    assert round(mcnemar_exact_two_sided(b, c), 4) == 0.1686


def test_published_example_of_a_paired_table() -> None:
    """Complete response before and after consolidation (Cavo et al. 2012) in Fagerland, Lydersen & Laake,
    Statistical Analysis of Contingency Tables, ch. 8; values as in the tests of their R package contingencytables."""
    table = PairedCounts(59, 16, 6, 80)
    low, high = tango_interval(table.b, table.c, table.n)
    assert (round(low, 4), round(high, 4)) == (-0.1240, -0.0054)
    assert round(mcnemar_midp_two_sided(table.b, table.c), 6) == 0.034690
    assert round(mcnemar_exact_two_sided(table.b, table.c), 6) == 0.052479
    ratio = recovery(table)
    assert [round(x, 4) for x in (ratio.estimate, ratio.low, ratio.high)] == [0.8667, 0.7476, 0.9876]


def test_newcombe_published_examples() -> None:
    """Newcombe 1998, table II, method 10: (a, b, c, d) = (36, 12, 2, 0) -> 0.0569..0.3404 for b - c = 10 of 50."""
    low, high = newcombe_interval(PairedCounts(36, 2, 12, 0))
    assert low == pytest.approx(0.0569, abs=5e-4) and high == pytest.approx(0.3404, abs=5e-4)


@pytest.mark.parametrize("n", [1, 7, 200, 1319])
def test_identical_arms_leave_the_wilson_bound(n: int) -> None:
    """b = c = 0: the score bound is z²/(n + z²), which is Wilson's bound of 0 of n."""
    expected = Z95**2 / (n + Z95**2)
    assert tango_lower(0, 0, n, Z95) == pytest.approx(-expected, abs=1e-12)
    assert tango_upper(0, 0, n, Z95) == pytest.approx(expected, abs=1e-12)
    assert wilson(0, n, 0.90)[1] == pytest.approx(expected, abs=1e-9)


def brute_force_z(b: int, c: int, n: int, theta: float) -> float:
    """The score statistic with the restricted likelihood maximised numerically instead of in closed form."""

    def negative_log_likelihood(q: float) -> float:  # q = P(only baseline), P(only candidate) = q + theta
        total = 0.0
        for count, p in ((b, q), (c, q + theta), (n - b - c, 1 - 2 * q - theta)):
            if count:
                if p <= 0:
                    return math.inf
                total -= count * math.log(p)
        return total

    low, high = max(0.0, -theta), (1 - theta) / 2
    found = minimize_scalar(negative_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-13})
    q = min((low, high, found.x), key=negative_log_likelihood)
    return (c - b - n * theta) / math.sqrt(n * (2 * q + theta - theta * theta))


@settings(max_examples=150, deadline=None)
@given(b=st.integers(0, 60), c=st.integers(0, 60), rest=st.integers(1, 500), theta=st.floats(-0.3, 0.3))
def test_restricted_estimate_maximises_the_likelihood(b: int, c: int, rest: int, theta: float) -> None:
    n = b + c + rest
    if abs(theta) < 1e-3:
        theta = 0.01
    assert tango_z(b, c, n, theta) == pytest.approx(brute_force_z(b, c, n, theta), abs=2e-4, rel=2e-4)


@settings(max_examples=150, deadline=None)
@given(b=cells, c=cells, rest=cells, theta=thetas)
def test_interval_and_test_agree(b: int, c: int, rest: int, theta: float) -> None:
    """Duality: theta lies below the lower bound iff the statistic against theta exceeds z."""
    n = b + c + rest
    if n == 0:
        return
    z = float(tango_z(b, c, n, theta))
    if abs(abs(z) - Z95) < 1e-6:
        return
    assert (theta < tango_lower(b, c, n, Z95)) == (z > Z95)
    assert (theta > tango_upper(b, c, n, Z95)) == (z < -Z95)


@settings(max_examples=80, deadline=None)
@given(b=cells, c=cells, rest=st.integers(1, 400))
def test_swapping_the_arms_mirrors_everything(b: int, c: int, rest: int) -> None:
    n = b + c + rest
    low, high = tango_interval(b, c, n)
    mirrored = tango_interval(c, b, n)
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-9)
    assert -1 <= low <= (c - b) / n <= high <= 1
    table, swapped = PairedCounts(rest, b, c, 0), PairedCounts(rest, c, b, 0)
    low, high = newcombe_interval(table)
    other = newcombe_interval(swapped)
    assert (low, high) == pytest.approx((-other[1], -other[0]), abs=1e-9)
    assert mcnemar_midp(b, c) + mcnemar_midp(c, b) == pytest.approx(1 if b + c else 2)


@settings(max_examples=80, deadline=None)
@given(b=cells, c=cells, rest=st.integers(2, 400))
def test_bounds_are_monotone(b: int, c: int, rest: int) -> None:
    """One more answer lost never raises a bound, one more gained never lowers it."""
    n = b + c + rest
    base = tango_lower(b, c, n, Z95), tango_upper(b, c, n, Z95)
    worse = tango_lower(b + 1, c, n, Z95), tango_upper(b + 1, c, n, Z95)
    better = tango_lower(b, c + 1, n, Z95), tango_upper(b, c + 1, n, Z95)
    assert worse[0] <= base[0] + 1e-12 and worse[1] <= base[1] + 1e-9
    assert better[0] >= base[0] - 1e-9 and better[1] >= base[1] - 1e-12
    if b + c:  # at b = c = 0 the p-value is 1 by convention
        assert mcnemar_midp(b + 1, c) <= mcnemar_midp(b, c) <= mcnemar_midp(b, c + 1)


def test_vectorised_equals_scalar() -> None:
    b, c = np.array([0, 17, 3, 40]), np.array([0, 9, 30, 2])
    lower = np.asarray(tango_lower(b, c, 1319, Z95))
    for i in range(4):
        assert lower[i] == pytest.approx(tango_lower(int(b[i]), int(c[i]), 1319, Z95), abs=1e-14)
    assert np.asarray(mcnemar_midp(b, c))[0] == 1.0


@pytest.mark.parametrize(("b", "c"), list(itertools.product(range(0, 9), range(0, 9))))
def test_mcnemar_against_enumeration_and_statsmodels(b: int, c: int) -> None:
    m = b + c
    outcomes = [math.comb(m, k) / 2**m for k in range(m + 1)]
    assert mcnemar_exact(b, c) == pytest.approx(sum(outcomes[b:]) if m else 1.0)
    assert mcnemar_midp(b, c) == pytest.approx(sum(outcomes[b + 1 :]) + outcomes[b] / 2 if m else 1.0)
    if m:
        two = mcnemar([[10, b], [c, 10]], exact=True).pvalue
        assert mcnemar_exact_two_sided(b, c) == pytest.approx(two)
        assert mcnemar_exact(b, c) == pytest.approx(binomtest(b, m, 0.5, alternative="greater").pvalue)
        symmetric = sum(p for p in outcomes if p < outcomes[b] * (1 - 1e-9)) + 0.5 * sum(
            p for p in outcomes if abs(p - outcomes[b]) <= outcomes[b] * 1e-9
        )
        assert mcnemar_midp_two_sided(b, c) == pytest.approx(symmetric)


def test_mcnemar_without_discordant_items_is_one() -> None:
    assert mcnemar_exact(0, 0) == mcnemar_midp(0, 0) == 1.0
    assert mcnemar_exact_two_sided(0, 0) == mcnemar_midp_two_sided(0, 0) == 1.0


def test_noninferiority_and_equivalence() -> None:
    result = noninferiority(17, 9, 1319, 0.015)
    assert result.shown and result.lower == pytest.approx(-0.01298, abs=1e-5)
    assert result.p < 0.05 and result.p == pytest.approx(norm.sf(result.statistic))
    assert not noninferiority(17, 9, 1319, 0.0125).shown
    # TOST is the intersection of two one-sided tests: 90 % interval inside the margins
    for b, c in ((17, 9), (5, 40), (30, 30), (0, 0)):
        shown, p = equivalence(b, c, 1319, 0.015)
        low, high = tango_interval(b, c, 1319, 0.90)
        assert shown == (low > -0.015 and high < 0.015) == (p < 0.05)


@pytest.mark.parametrize("margin", [0, -0.01, 1.0, 1.5])
def test_a_margin_in_points_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        noninferiority(1, 1, 100, margin)
    with pytest.raises(ValueError, match="fraction"):
        equivalence(1, 1, 100, margin)


def test_wilson_against_its_closed_form() -> None:
    for x, n in ((1268, 1319), (0, 50), (50, 50), (1262, 1319)):
        z, p = norm.isf(0.025), x / n
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = wilson(x, n)
        assert low == pytest.approx((centre - half) / (1 + z * z / n), abs=1e-12)
        assert high == pytest.approx((centre + half) / (1 + z * z / n), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)
    assert [round(100 * x, 2) for x in wilson(1268, 1319)] == [94.95, 97.05]
    assert [round(100 * x, 2) for x in wilson(1262, 1319)] == [94.44, 96.65]
    with pytest.raises(ValueError, match="successes"):
        wilson(5, 4)


def test_holm_step_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
    rng = np.random.default_rng(3)
    p = rng.random(20) * 0.05
    assert holm(list(p)) == pytest.approx(list(multipletests(p, method="holm")[1]))


def test_status_comparison_counts_and_tests() -> None:
    baseline = [True] * 5 + [False] * 95
    candidate = [True] * 3 + [False] * 2 + [True] * 12 + [False] * 83
    result = compare_status(baseline, candidate)
    assert (result.baseline, result.candidate, result.only_baseline, result.only_candidate) == (5, 15, 2, 12)
    assert result.p_paired == pytest.approx(binomtest(2, 14).pvalue)
    assert compare_status([False] * 9, [False] * 9).p_fisher == 1.0
    with pytest.raises(ValueError, match="pair them"):
        compare_status([True], [])


def test_size_of_the_tests_is_held() -> None:
    """Monte Carlo with a fixed seed: NI at the margin at most 5 %, mid-p under no difference at most 5 %."""
    rng = np.random.default_rng(20261202)
    n, runs = 1319, 40_000
    for psi in (0.02, 0.04, 0.06):
        lost = (psi + 0.015) / 2
        x = rng.multinomial(n, [lost, psi - lost, 1 - psi], size=runs)
        passed = np.asarray(tango_z(x[:, 0], x[:, 1], n, -0.015)) > Z95
        assert passed.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs) + 0.003  # score test: nominal, not exact
        x = rng.multinomial(n, [psi / 2, psi / 2, 1 - psi], size=runs)
        flagged = np.asarray(mcnemar_midp(x[:, 0], x[:, 1])) < 0.05
        assert 0.035 < flagged.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_coverage_of_tango_by_exact_summation() -> None:
    """Two-sided 95 % coverage over the exact trinomial distribution, also with few flips, stays near nominal."""
    n = 200
    for psi, d in ((0.02, 0.0), (0.05, -0.02), (0.10, 0.03)):
        m = np.arange(0, 60)
        b = np.arange(0, 60)
        grid_m, grid_b = np.meshgrid(m, b, indexing="ij")
        keep = grid_b <= grid_m
        mm, bb = grid_m[keep], grid_b[keep]
        weight = binom.pmf(mm, n, psi) * binom.pmf(bb, mm, (psi - d) / 2 / psi)
        z = np.asarray(tango_z(bb, mm - bb, n, d))
        coverage = weight[np.abs(z) <= norm.isf(0.025)].sum()
        assert weight.sum() == pytest.approx(1, abs=1e-9)
        assert 0.93 < coverage < 0.985
