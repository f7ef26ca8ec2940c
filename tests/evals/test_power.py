"""Planning formulas and exact power against the reference tables, simulation and each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.statistics import (
    attainable_margin,
    critical,
    detectable_drop,
    mcnemar_midp,
    noninferiority_power,
    regression_power,
    required_items,
    required_repeats,
    standard_error,
    tango_lower,
    tango_z,
)

ROOT = Path(__file__).resolve().parents[2]
N = 1319
PSI = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08)


def test_table_of_what_1319_items_show() -> None:
    """evals.md 4.2: SE, NI margin at 95 % and 97.5 % with 80 % power, TOST margin, detectable drop; in points."""
    table = {
        0.01: (0.275, 0.68, 0.77, 0.81, 0.68),
        0.02: (0.389, 0.97, 1.09, 1.14, 0.97),
        0.03: (0.477, 1.19, 1.34, 1.40, 1.18),
        0.04: (0.551, 1.37, 1.54, 1.61, 1.37),
        0.06: (0.674, 1.68, 1.89, 1.97, 1.68),
        0.08: (0.779, 1.94, 2.18, 2.28, 1.93),
    }
    for psi, (se, ni, ni975, tost, drop) in table.items():
        assert 100 * standard_error(psi, N) == pytest.approx(se, abs=6e-4)
        assert 100 * attainable_margin(psi, N) == pytest.approx(ni, abs=6e-3)
        assert 100 * attainable_margin(psi, N, alpha=0.025) == pytest.approx(ni975, abs=6e-3)
        assert 100 * attainable_margin(psi, N, tost=True) == pytest.approx(tost, abs=6e-3)
        assert 100 * detectable_drop(psi, N) == pytest.approx(drop, abs=6e-3)


def test_items_needed() -> None:
    """evals.md 4.2, psi = 2, 4, 6 %."""
    table = {
        0.005: (4947, 9893, 14839),
        0.01: (1237, 2474, 3710),
        0.015: (550, 1100, 1649),
        0.02: (310, 619, 928),
        0.03: (138, 275, 413),
    }
    for margin, needed in table.items():
        assert tuple(required_items(margin, psi) for psi in (0.02, 0.04, 0.06)) == needed


@settings(max_examples=100, deadline=None)
@given(psi=st.floats(0, 0.2), margin=st.floats(0.003, 0.1))
def test_items_and_margin_are_inverse(psi: float, margin: float) -> None:
    n = required_items(margin, psi)
    assert attainable_margin(psi, n) <= margin
    assert n == 1 or attainable_margin(psi, n - 1) >= margin * (1 - 1e-9)


def test_identical_answers_still_need_items() -> None:
    n = required_items(0.015, 0.0)
    assert n == 178
    z = critical(0.05)
    assert tango_lower(0, 0, n, z) > -0.015 >= tango_lower(0, 0, n - 1, z)


def test_a_true_difference_costs_items() -> None:
    assert required_items(0.015, 0.04, true_difference=-0.005) > 2 * required_items(0.015, 0.04)
    with pytest.raises(ValueError, match="cannot be shown"):
        required_items(0.015, 0.04, true_difference=-0.02)
    with pytest.raises(ValueError, match="fraction"):
        required_items(1.5, 0.04)


def test_repeats() -> None:
    """evals.md 4.2: SE at psi0 = 4 % falls .551/.389/.275/.195 for k = 1/2/4/8."""
    for k, se in ((1, 0.551), (2, 0.389), (4, 0.275), (8, 0.195)):
        assert 100 * standard_error(0.04, N * k) == pytest.approx(se, abs=6e-4)
    k = required_repeats(0.01, 0.04, N)
    assert k == 2  # margin 0.97 pt at 2 repeats, 1.37 pt at 1
    assert required_repeats(0.01, 0.0, N, item_discordance=0.04) is None  # repeats do not touch real differences
    assert required_repeats(0.015, 0.02, N, item_discordance=0.02) == 1


def test_exact_power_matches_the_simulated_table() -> None:
    """evals.md 4.2 (simulated, 8,000 runs): P(NI shown) at 0.5/1/1.5/2 points, P(mid-p flags), P(exact flags)."""
    table = {
        (0.02, 0.0): (0.35, 0.79, 0.98, 1.0, 0.049, 0.034),
        (0.02, -0.01): (0.002, 0.044, 0.32, 0.76, 0.84, 0.80),
        (0.04, 0.0): (0.23, 0.55, 0.84, 0.97, 0.050, 0.039),
        (0.04, -0.01): (0.005, 0.047, 0.21, 0.54, 0.57, 0.52),
        (0.04, -0.02): (0.0, 0.0, 0.006, 0.046, 0.98, 0.98),
        (0.06, 0.0): (0.18, 0.42, 0.71, 0.90, 0.049, 0.039),
        (0.06, -0.01): (0.010, 0.047, 0.17, 0.42, 0.43, 0.39),
        (0.06, -0.02): (0.0, 0.0, 0.008, 0.049, 0.91, 0.89),
    }
    for (psi, d), row in table.items():
        for margin, seen in zip((0.005, 0.01, 0.015, 0.02), row[:4], strict=True):
            assert noninferiority_power(N, psi, d, margin) == pytest.approx(seen, abs=0.012)
        assert regression_power(N, psi, d) == pytest.approx(row[4], abs=0.012)
        assert regression_power(N, psi, d, exact=True) == pytest.approx(row[5], abs=0.012)


def test_exact_power_against_an_independent_simulation() -> None:
    rng = np.random.default_rng(5)
    psi, d, runs = 0.05, -0.008, 40_000
    lost = (psi - d) / 2
    x = rng.multinomial(N, [lost, psi - lost, 1 - psi], size=runs)
    ni = (np.asarray(tango_z(x[:, 0], x[:, 1], N, -0.015)) > critical(0.05)).mean()
    flag = (np.asarray(mcnemar_midp(x[:, 0], x[:, 1])) < 0.05).mean()
    assert noninferiority_power(N, psi, d, 0.015) == pytest.approx(ni, abs=0.01)
    assert regression_power(N, psi, d) == pytest.approx(flag, abs=0.01)


def test_sizes_at_the_edge_of_the_hypotheses() -> None:
    """Exact size: NI when the candidate is exactly a margin worse, regression when it is equal; nominal 5 %."""
    for psi in PSI[1:]:
        for margin in (0.01, 0.015, 0.02):
            if margin <= psi:
                assert noninferiority_power(N, psi, -margin, margin) <= 0.055
        assert regression_power(N, psi, 0.0) <= 0.0505


def test_zero_discordance() -> None:
    assert noninferiority_power(N, 0.0, 0.0, 0.015) == 1.0
    assert noninferiority_power(100, 0.0, 0.0, 0.015) == 0.0
    assert regression_power(N, 0.0, 0.0) == 0.0
    with pytest.raises(ValueError, match="discordance"):
        noninferiority_power(N, 0.01, -0.02, 0.015)
    with pytest.raises(ValueError, match="n > 0"):
        standard_error(0.04, 0)


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    path = ROOT / "benchmarks" / "gates.py"
    spec = importlib.util.spec_from_file_location("benchmarks_gates", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_other_gates_let_through(gates: ModuleType) -> None:
    """evals.md 3.3, computed there independently; reference 0.960, columns .960 … .900."""
    known = {
        "TensorRT-LLM, sigma 50": (1.00, 1.00, 1.00, 1.00, 0.97, 0.64, 0.15, 0.00),
        "vLLM evals, 0.90 − 0.08": (1, 1, 1, 1, 1, 1, 1, 1),
        "isclose rtol 0.08 (vLLM, SGLang)": (1, 1, 1, 1, 1, 1, 1, 0.98),
        "llm-compressor, ≥ 0.95 rounded, n = 1000": (1, 1, 1, 1, 1, 1, 0.93, 0.22),
        "SGLang kit, 200 questions ≥ 0.93": (0.98, 0.96, 0.92, 0.86, 0.78, 0.57, 0.36, 0.09),
        "InferenceX, ≥ 0.94": (1, 0.99, 0.95, 0.80, 0.52, 0.08, 0, 0),
        "MLPerf 99 %": (0.96, 0.79, 0.48, 0.20, 0.05, 0, 0, 0),
        "MLPerf 99.9 %": (0.60, 0.26, 0.07, 0.01, 0, 0, 0, 0),
    }
    rows = dict(gates.ROWS)
    for name, expected in known.items():
        assert [rows[name](p) for p in gates.TRUE] == pytest.approx(expected, abs=0.006), name
    assert rows["vLLM gate=ci, rtol 0.01"](0.96) == pytest.approx(0.49, abs=0.006)
    assert rows["vLLM gate=ci, rtol 0.01"](0.95) == pytest.approx(0.04, abs=0.006)


def test_the_document_holds_the_computed_table(gates: ModuleType) -> None:
    assert gates.table() in (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
