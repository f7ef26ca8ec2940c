"""Each number against a hand-worked value, and its defined behaviour at zero, NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import numerics as n

finite = st.floats(-1e6, 1e6, width=32)


def test_calc_diff_values() -> None:
    x = torch.tensor([3.0, 4.0])
    assert n.calc_diff(x, x) == 0.0
    assert n.calc_diff(x, -x) == 2.0
    assert n.calc_diff(x, torch.tensor([-4.0, 3.0])) == 1.0
    # y = x / 2.5: 1 - 2 (1/2.5) / (1 + 1/2.5^2) = 0.310 (kernels.md §5.4), where the cosine is 1
    assert n.calc_diff(x, x / 2.5) == pytest.approx(0.3103448, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_calc_diff_at_any_magnitude(scale: float) -> None:
    x = torch.tensor([3.0, 4.0]) * scale
    assert n.calc_diff(x, x / 2.5) == pytest.approx(0.3103448, abs=1e-6)
    assert n.relative_l2(x / 2.5, x) == pytest.approx(0.6, abs=1e-6)


def test_zero_and_non_finite_are_defined() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert n.calc_diff(zero, zero) == 0.0 and n.relative_l2(zero, zero) == 0.0
    assert n.calc_diff(torch.empty(0), torch.empty(0)) == 0.0
    assert n.calc_diff(zero, one) == 1.0
    assert n.relative_l2(one, zero) == math.inf and n.relative_l2(zero, one) == 1.0
    for bad in (math.nan, math.inf, -math.inf):
        broken = torch.tensor([1.0, bad, 1.0])
        assert n.calc_diff(broken, broken) == math.inf
        assert n.calc_diff(one, broken) == math.inf and n.relative_l2(broken, one) == math.inf


def test_shapes_must_agree() -> None:
    for fn in (n.calc_diff, n.relative_l2, n.ulp_distance):
        with pytest.raises(ValueError, match="shape"):
            fn(torch.zeros(3), torch.zeros(1, 3))


@given(st.lists(finite, min_size=1, max_size=20), st.lists(finite, min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_calc_diff_is_symmetric_and_bounded(a: list[float], b: list[float]) -> None:
    size = min(len(a), len(b))
    x, y = torch.tensor(a[:size]), torch.tensor(b[:size])
    assert n.calc_diff(x, y) == n.calc_diff(y, x)
    assert -1e-12 <= n.calc_diff(x, y) <= 2 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_counts_representable_values(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    up = torch.nextafter(x, infinity)
    assert n.ulp_distance(x, up).tolist() == [1, 1, 1, 1]
    assert n.ulp_distance(x, torch.nextafter(up, infinity)).tolist() == [2, 2, 2, 2]
    assert n.max_ulp(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)) == 0
    tiny = torch.nextafter(torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    assert n.max_ulp(tiny, -tiny) == 2


def test_ulp_of_fp8() -> None:
    values = torch.tensor([1.0, 1.125, 1.25], dtype=torch.float8_e4m3fn)
    assert n.ulp_distance(values, values[0].expand(3)).tolist() == [0, 1, 2]


def test_ulp_of_nan() -> None:
    x, y = torch.tensor([math.nan, math.nan, 1.0]), torch.tensor([math.nan, 1.0, 1.0])
    assert n.ulp_distance(x, y).tolist() == [0, torch.iinfo(torch.int64).max, 0]
    assert n.max_ulp(torch.empty(0), torch.empty(0)) == 0
    with pytest.raises(ValueError, match="float64"):
        n.max_ulp(torch.zeros(1).double(), torch.zeros(1).double())


def test_matched_ratio_is_flashinfers_rule() -> None:
    """The slack scales with the actual value: 0.54x to 6.7x of the reference pass at rtol 0.85."""
    reference = torch.full((6,), 1.0)
    actual = torch.tensor([0.53, 0.55, 1.0, 6.6, 6.7, -1.0])
    got = [n.matched_ratio(reference[i : i + 1], actual[i : i + 1], atol=0.0, rtol=0.85) for i in range(6)]
    assert got == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert n.matched_ratio(reference, actual, atol=0.0, rtol=0.85) == 0.5
    assert n.matched_ratio(reference[:2], torch.tensor([1.1, 1.3]), atol=0.2, rtol=0.0) == 0.5
    assert n.matched_ratio(torch.tensor([math.nan]), torch.tensor([math.nan]), atol=1.0, rtol=1.0) == 0.0
    assert n.matched_ratio(torch.empty(0), torch.empty(0), atol=0.0, rtol=0.0) == 1.0


def test_bitwise_equality_names_the_first_mismatch() -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    n.assert_bitwise_equal(a, a.clone())
    b = a.clone()
    b[1, 0] = 3.5
    with pytest.raises(AssertionError, match=r"y: 1 of 4 .* at \(1, 0\): 3\.5 \(0x40600000\).*0x40400000"):
        n.assert_bitwise_equal(b, a, "y")
    with pytest.raises(AssertionError, match="0x8000"):
        n.assert_bitwise_equal(torch.tensor([-0.0]).bfloat16(), torch.tensor([0.0]).bfloat16())
    with pytest.raises(AssertionError, match="float32"):
        n.assert_bitwise_equal(a, a.double())
    n.assert_bitwise_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
    n.assert_bitwise_equal(a.to(torch.float8_e4m3fn), a.to(torch.float8_e4m3fn))
    with pytest.raises(AssertionError, match="first at"):
        n.assert_bitwise_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_kl_values() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]
    assert n.kl_divergence(p, q).tolist() == pytest.approx(expected)
    assert n.kl_divergence(q, p).tolist()[1] == math.inf
    assert n.kl_divergence(p, p).tolist() == [0.0, 0.0]


def test_kl_against_torch() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(5, 50).log_softmax(-1), torch.randn(5, 50).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q.double(), p.double(), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(n.kl_divergence(p, q), expected)
