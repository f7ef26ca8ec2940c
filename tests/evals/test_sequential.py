"""O'Brien–Fleming boundaries, early stops, curtailment and e-processes, by integration, enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm

from evals.statistics import (
    AnytimeMonitor,
    crossing_probabilities,
    curtail,
    mcnemar_midp,
    noninferiority_log_e,
    obrien_fleming,
    plan_looks,
    regression_log_e,
    shown_noninferior,
    shown_regression,
    tango_z,
)
from evals.statistics.anytime import betting_fractions

QUARTERS = (0.25, 0.5, 0.75, 1.0)
N = 1319


def simulate(rng: np.random.Generator, psi: float, difference: float, runs: int, n: int) -> np.ndarray:
    """Differences per item in {-1, 0, 1}, int8 [runs, n]."""
    u = rng.random((runs, n), dtype=np.float32)
    lost = (psi - difference) / 2
    return (u < psi).astype(np.int8) - 2 * (u < lost).astype(np.int8)


def test_published_boundaries() -> None:
    assert obrien_fleming(QUARTERS) == pytest.approx((3.466, 2.451, 2.001, 1.733), abs=5e-4)
    assert obrien_fleming((1.0,)) == pytest.approx((norm.isf(0.05),), abs=1e-8)
    # two-sided 5 % (one-sided 2.5 %), five looks: C = 2.040 (Jennison & Turnbull 2000, table 2.3)
    assert obrien_fleming(tuple(k / 5 for k in range(1, 6)), 0.025)[-1] == pytest.approx(2.040, abs=1e-3)


@pytest.mark.parametrize("fractions", [QUARTERS, (0.5, 1.0), (0.1, 0.9, 1.0), (330 / N, 660 / N, 990 / N, 1.0)])
def test_integration_against_the_multivariate_normal(fractions: tuple[float, ...]) -> None:
    """P(no crossing) is a normal orthant probability with correlation sqrt(t_i / t_j): scipy's Genz integration."""
    z = obrien_fleming(fractions)
    covariance = [[math.sqrt(min(s, t) / max(s, t)) for t in fractions] for s in fractions]
    inside = multivariate_normal.cdf(np.array(z), cov=np.array(covariance), rng=np.random.default_rng(1), abseps=1e-7)
    assert 1 - inside == pytest.approx(0.05, abs=2e-5)
    assert sum(crossing_probabilities(z, fractions)) == pytest.approx(0.05, abs=1e-8)


def test_crossing_probabilities_refuse_disorder() -> None:
    with pytest.raises(ValueError, match="increasing"):
        crossing_probabilities([2.0, 2.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="rise to 1"):
        obrien_fleming((0.5, 0.9))


def test_planned_looks() -> None:
    looks = plan_looks(N)
    assert looks.items == (330, 660, 990, 1319)
    assert looks.at(660) == 1 and looks.at(661) is None
    assert plan_looks(3, 4).items == (1, 2, 3)
    assert plan_looks(100, 1).z == pytest.approx((1.6449,), abs=1e-4)
    with pytest.raises(ValueError, match="look"):
        plan_looks(100, 0)


def test_size_and_power_of_the_looks() -> None:
    """False alarms of both claims at most 5 %, power as with one look, fewer items (reference: .56 and .98 at 4 %)."""
    rng = np.random.default_rng(11)
    looks, runs = plan_looks(N), 4000
    for difference, low, high in ((0.0, 0.035, 0.057), (-0.01, 0.52, 0.60), (-0.02, 0.965, 0.99)):
        d = simulate(rng, 0.04, difference, runs, N)
        b, c = np.cumsum(d == -1, axis=1, dtype=np.int32), np.cumsum(d == 1, axis=1, dtype=np.int32)
        flagged, stop = np.zeros(runs, bool), np.full(runs, N)
        for n, z in zip(looks.items, looks.z, strict=True):
            hit = ~flagged & (np.asarray(mcnemar_midp(b[:, n - 1], c[:, n - 1])) < norm.sf(z))
            stop[hit], flagged = n, flagged | hit
        assert low < flagged.mean() < high
        if difference == -0.02:
            assert stop.mean() < 900
    # non-inferiority at its margin: early success must not raise its error either
    d = simulate(rng, 0.04, -0.015, runs, N)
    b, c = np.cumsum(d == -1, axis=1, dtype=np.int32), np.cumsum(d == 1, axis=1, dtype=np.int32)
    passed = np.zeros(runs, bool)
    for n, z in zip(looks.items, looks.z, strict=True):
        passed |= np.asarray(tango_z(b[:, n - 1], c[:, n - 1], n, -0.015)) > z
    assert passed.mean() < 0.058


def test_naive_peeking_is_worse() -> None:
    """Testing at 5 % every 50 items without correction: about one false alarm in five."""
    rng = np.random.default_rng(12)
    d = simulate(rng, 0.04, 0.0, 4000, N)
    at = np.arange(49, N, 50)
    b = np.cumsum(d == -1, axis=1, dtype=np.int32)[:, at]
    c = np.cumsum(d == 1, axis=1, dtype=np.int32)[:, at]
    naive = (np.asarray(mcnemar_midp(b, c)) < 0.05).any(axis=1).mean()
    assert 0.16 < naive < 0.24
    anytime = (regression_log_e(b, c) >= math.log(20)).any(axis=1).mean()
    assert anytime <= 0.05 < naive


def test_regression_e_value_is_the_mixture_integral() -> None:
    for b, c in ((0, 0), (5, 1), (20, 20), (3, 17), (60, 10)):
        integral, _ = quad(lambda t, b=b, c=c: 2 * (2 * t) ** b * (2 * (1 - t)) ** c, 0.5, 1, epsabs=1e-13)
        assert regression_log_e(b, c) == pytest.approx(math.log(integral), abs=1e-8)
    assert np.isfinite(regression_log_e(0, 600))
    assert np.isfinite(regression_log_e(600, 0))


@settings(max_examples=60, deadline=None)
@given(b=st.integers(0, 80), c=st.integers(0, 80), n=st.integers(0, 300), margin=st.floats(0.005, 0.1))
def test_e_values_are_fair_games(b: int, c: int, n: int, margin: float) -> None:
    """One step ahead under the edge of H0 the expected E equals E (a martingale), inside H0 it is smaller."""
    e = regression_log_e(b, c)
    ahead = np.logaddexp(regression_log_e(b + 1, c), regression_log_e(b, c + 1)) - math.log(2)
    assert ahead == pytest.approx(float(e), abs=1e-9)
    total = n + b + c
    now = noninferiority_log_e(b, c, total, margin)
    for psi, d, equal in ((0.2, -margin, True), (0.2, -margin - 0.02, False)):
        lost, won = (psi - d) / 2, (psi + d) / 2
        outcomes = [
            math.log(lost) + noninferiority_log_e(b + 1, c, total + 1, margin),
            math.log(won) + noninferiority_log_e(b, c + 1, total + 1, margin),
            math.log(1 - psi) + noninferiority_log_e(b, c, total + 1, margin),
        ]
        expected = float(np.logaddexp.reduce(outcomes))
        assert expected == pytest.approx(float(now), abs=1e-9) if equal else expected < now


def test_bets_keep_the_capital_positive() -> None:
    for margin in (0.001, 0.015, 0.2):
        bets = betting_fractions(margin)
        assert (1 - bets * (1 - margin) > 0).all() and (bets > 0).all()
    with pytest.raises(ValueError, match="fraction"):
        betting_fractions(1.5)


def test_e_process_false_alarms_and_speed() -> None:
    """Ville's bound by simulation over 8,000 items; a gross failure is caught within 50."""
    rng = np.random.default_rng(13)
    d = simulate(rng, 0.06, 0.0, 400, 8000)
    at = np.arange(0, 8000, 8)
    b, c = np.cumsum(d == -1, axis=1, dtype=np.int32)[:, at], np.cumsum(d == 1, axis=1, dtype=np.int32)[:, at]
    assert (regression_log_e(b, c) >= math.log(20)).any(axis=1).mean() <= 0.05
    d = simulate(rng, 0.06, -0.02, 400, 4000)
    at = np.arange(0, 4000, 8)
    b, c = np.cumsum(d == -1, axis=1, dtype=np.int32)[:, at], np.cumsum(d == 1, axis=1, dtype=np.int32)[:, at]
    assert (noninferiority_log_e(b, c, at[None, :] + 1, 0.02) >= math.log(20)).any(axis=1).mean() <= 0.05
    d = simulate(rng, 0.4, -0.38, 500, 50)
    b, c = np.cumsum(d == -1, axis=1, dtype=np.int32), np.cumsum(d == 1, axis=1, dtype=np.int32)
    assert (regression_log_e(b, c) >= math.log(20)).any(axis=1).mean() > 0.99


def test_monitor_concludes_and_remembers() -> None:
    monitor = AnytimeMonitor(margin=0.02)
    said = [monitor.add(True, False) for _ in range(9)]
    assert said[-1] == "regression" and said[0] is None and monitor.p_regression <= 0.05
    for _ in range(50):
        monitor.add(True, True)
    assert monitor.conclusion == "regression"  # what was shown once stays shown
    calm = AnytimeMonitor(margin=0.05)
    answers = [calm.add(True, True) for _ in range(120)]
    assert answers[-1] == "noninferior"


def brute_force(b: int, c: int, seen: int, n: int, margin: float, z: float) -> str | None:
    """Every possible rest, one by one."""
    left, ends = n - seen, set()
    for i, j in itertools.product(range(left + 1), repeat=2):
        if i + j <= left:
            if shown_noninferior(b + i, c + j, n, margin, z):
                ends.add("noninferior")
            elif shown_regression(b + i, c + j, n, margin, z):
                ends.add("regression")
            else:
                ends.add("undecided")
    return ends.pop() if len(ends) == 1 else None


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_curtailment_is_exact(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    left = data.draw(st.integers(0, min(n, 7)))
    seen = n - left
    b = data.draw(st.integers(0, seen))
    c = data.draw(st.integers(0, seen - b))
    margin = data.draw(st.sampled_from([0.015, 0.05, 0.1, 0.2]))
    assert curtail(b, c, seen, n, margin, 1.645) == brute_force(b, c, seen, n, margin, 1.645)


def test_curtailment_examples() -> None:
    assert curtail(0, 0, 1318, 1319, 0.015, 1.645) == "noninferior"
    assert curtail(300, 0, 1000, 1319, 0.015, 1.645) is None  # the remaining 319 could still all be gains
    assert curtail(330, 0, 1100, 1319, 0.015, 1.645) == "regression"
    assert curtail(0, 0, 0, 50, 0.015, 1.645) is None  # a regression could still be shown
    assert curtail(0, 0, 49, 50, 0.015, 1.645) == "undecided"
    with pytest.raises(ValueError, match="impossible"):
        curtail(3, 3, 5, 10, 0.015, 1.645)
