"""FP8 quantisers: error bounds, layouts, ragged and zero blocks, bad input; rounding against a table of all codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.errors import ContractError, QuantizationError
from moe_kernels.quant import blocks
from moe_kernels.quant.fp8 import (
    MIN_WEIGHT_SCALE,
    ceil_power_of_two,
    decode_e4m3,
    dequantize_activations,
    dequantize_weight_blocks,
    quantize_activations,
    quantize_weight_blocks,
)

E4M3 = torch.float8_e4m3fn
# Every finite E4M3 number, from the format's definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits.
POSITIVE = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)
SETTINGS = settings(max_examples=40, deadline=None)


def random(shape: tuple[int, ...], seed: int, spread: float = 2.0) -> torch.Tensor:
    """Values over several binades, so that small ones meet E4M3's subnormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def nearest_e4m3(x: float) -> float:
    """Brute force: nearest of all codes, ties to the even code, saturating."""
    magnitude = min(abs(x), 448.0)
    best = min(range(len(POSITIVE)), key=lambda i: (abs(POSITIVE[i] - magnitude), i % 2))
    return math.copysign(POSITIVE[best], x)


def test_the_table_is_e4m3() -> None:
    assert len(POSITIVE) == 127 and POSITIVE[-1] == 448.0 and POSITIVE[1] == 2.0**-9


@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 8])
@pytest.mark.parametrize("columns", [128, 256, 200])
def test_values_are_the_nearest_codes(tokens: int, columns: int, group: int) -> None:
    x = random((tokens, columns), tokens * columns)
    q, scale = quantize_activations(x, group)
    for t in range(tokens):
        for g in range(math.ceil(columns / group)):
            part = x[t, g * group : (g + 1) * group]
            want = (part.abs().max() / torch.tensor(448.0)).item()
            assert scale[t, g].item() == want
            for value, code in zip(part, q[t, g * group : (g + 1) * group].float(), strict=True):
                assert code.item() == nearest_e4m3((value / scale[t, g]).item())


@SETTINGS
@given(
    tokens=st.sampled_from([1, 2, 3, 5, 7, 8, 9]), columns=st.integers(1, 300), seed=st.integers(0, 2**20),
    scale=st.sampled_from([1e-4, 1.0, 1e4]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["row", "column", "column_tma"]),
)  # fmt: skip
def test_error_is_at_most_half_a_step(tokens, columns, seed, scale, dtype, layout) -> None:
    x = (random((tokens, columns), seed) * scale).clamp(-6e4, 6e4).to(dtype)
    q, s = quantize_activations(x, layout=layout)
    error = (dequantize_activations(q, s) - x.float()).abs()
    per_column = s.repeat_interleave(128, dim=1)[:, :columns]
    # FP32 rounds x / s and q * s: 2^-23 of up to 448 s, beside half a step of 16 s
    slack = 1 + 4e-6
    # half the largest spacing of E4M3 is 16; relative half-spacing of its normal numbers 2^-4
    assert (error <= per_column * 16 * slack).all()
    normal = x.float().abs() >= per_column * 2.0**-6
    assert (error[normal] <= x.float().abs()[normal] * 2.0**-4 * slack).all()
    assert (error[~normal] <= per_column[~normal] * 2.0**-10 * slack).all()


@SETTINGS
@given(tokens=st.sampled_from([1, 3, 5, 7]), columns=st.integers(1, 300), seed=st.integers(0, 2**20))
def test_quantising_again_changes_nothing(tokens, columns, seed) -> None:
    q, s = quantize_activations(random((tokens, columns), seed))
    again, s_again = quantize_activations(dequantize_activations(q, s))
    assert torch.equal(q.view(torch.uint8) & 0x7F, again.view(torch.uint8) & 0x7F)
    torch.testing.assert_close(s_again, s, rtol=2**-22, atol=0)  # (448 * s) / 448 may round


@SETTINGS
@given(seed=st.integers(0, 2**20), factor=st.integers(-30, 30))
def test_powers_of_two_scale_exactly(seed, factor) -> None:
    x = random((3, 256), seed, 1.0)
    q, s = quantize_activations(x)
    q_scaled, s_scaled = quantize_activations(x * 2.0**factor, eps=0.0)
    assert torch.equal(q.view(torch.uint8), q_scaled.view(torch.uint8))
    assert torch.equal(s * 2.0**factor, s_scaled)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("columns", [128, 512, 640, 700])
def test_layouts_have_the_strides_of_sglang(tokens: int, columns: int) -> None:
    groups, padded = math.ceil(columns / 128), 4 * math.ceil(tokens / 4)
    x = random((tokens, columns), 1)
    q, row = quantize_activations(x)
    assert q.dtype == E4M3 and q.is_contiguous() and row.dtype == torch.float32
    assert row.shape == (tokens, groups) and row.stride() == (groups, 1)
    q_col, column = quantize_activations(x, layout="column")
    assert column.shape == (tokens, groups) and column.stride() == (1, tokens)
    assert column.t().is_contiguous()
    q_tma, tma = quantize_activations(x, layout="column_tma")
    assert tma.shape == (tokens, groups) and tma.stride() == (1, padded)
    assert tma.t().is_contiguous() == (tokens % 4 == 0 or groups == 1)
    storage = torch.as_strided(tma, (groups, padded), (padded, 1))
    assert (storage[:, tokens:] == 0).all()
    assert torch.equal(row, column) and torch.equal(row, tma)
    for other in (q_col, q_tma):
        assert torch.equal(q.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 3, 4, 7])
def test_ue8m0_scales(tokens: int) -> None:
    x = random((tokens, 640), 2)
    q, row = quantize_activations(x, ue8m0=True)
    exact = quantize_activations(x)[1]
    assert torch.equal(torch.frexp(row).mantissa, torch.full_like(row, 0.5))  # powers of two
    assert (row >= exact).all() and (row < 2 * exact).all()
    q_packed, packed = quantize_activations(x, ue8m0=True, layout="column_tma")
    assert packed.dtype == torch.int32 and packed.shape == (tokens, 2)
    assert packed.stride() == (1, 4 * math.ceil(tokens / 4))
    for t in range(tokens):
        for g in range(5):
            exponent = (packed[t, g // 4].item() >> (8 * (g % 4))) & 0xFF
            assert 2.0 ** (exponent - 127) == row[t, g].item()
    assert torch.equal(q.view(torch.uint8), q_packed.view(torch.uint8))
    assert torch.equal(dequantize_activations(q, row), dequantize_activations(q_packed, packed))
    with pytest.raises(ContractError, match="column_tma"):
        quantize_activations(x, ue8m0=True, layout="column")


def test_ceil_power_of_two_is_exact_at_its_edges() -> None:
    edge = torch.tensor([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 0.75, 2.0**-126, 1e-12 / 448, 2.0**100])
    up = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0**-126, 2.0**-48, 2.0**100])
    assert torch.equal(ceil_power_of_two(edge), up)


def test_zero_groups_come_back_as_zeros() -> None:
    x = torch.zeros(3, 384)
    x[1, 130] = 5.0
    q, s = quantize_activations(x)
    assert (s > 0).all() and s[0, 0].item() == pytest.approx(1e-10 / 448)
    assert torch.equal(dequantize_activations(q, s), x)


def test_no_tokens_and_no_columns() -> None:
    q, s = quantize_activations(torch.zeros(0, 256), layout="column_tma")
    assert q.shape == (0, 256) and s.shape == (0, 2) and dequantize_activations(q, s).shape == (0, 256)
    assert quantize_activations(torch.zeros(2, 0))[1].shape == (2, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_activations_poison_their_group_or_raise(bad: float) -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    x[1, 200] = bad
    back = dequantize_activations(*quantize_activations(x))
    assert not torch.isfinite(back[1, 128:]).any()
    assert torch.equal(back[0], torch.ones(256)) and torch.equal(back[1, :128], torch.ones(128))
    with pytest.raises(QuantizationError, match=r"activations holds .* at \[1, 200\]"):
        quantize_activations(x, check_finite=True)


def test_wrong_arguments() -> None:
    with pytest.raises(ContractError, match="tokens, hidden"):
        quantize_activations(torch.zeros(2, 3, 128))
    with pytest.raises(ContractError, match="layout"):
        quantize_activations(torch.zeros(2, 128), layout="diagonal")  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match="floating-point"):
        quantize_activations(torch.zeros(2, 128, dtype=torch.int64))
    q, s = quantize_activations(torch.zeros(2, 256))
    with pytest.raises(ContractError, match=r"scale must be \[2, 2\]"):
        dequantize_activations(q, s.t().contiguous()[:1])


def test_no_value_becomes_nan_at_the_top() -> None:
    """torch casts above 464 to NaN; x / (amax / 448) may exceed 448 by rounding."""
    x = torch.linspace(0.9, 1.1, 128 * 64).view(64, 128)
    q, _ = quantize_activations(x)
    assert not q.float().isnan().any() and (q.float().amax(1) == 448).all()


@SETTINGS
@given(
    lead=st.sampled_from([(), (2,), (2, 3)]), rows=st.integers(1, 260), columns=st.integers(1, 260),
    seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_weight_blocks(lead, rows, columns, seed, dtype) -> None:
    w = random((*lead, rows, columns), seed).to(dtype)
    q, s = quantize_weight_blocks(w)
    assert q.shape == w.shape and q.dtype == E4M3
    assert s.shape == (*lead, math.ceil(rows / 128), math.ceil(columns / 128)) and s.dtype == torch.float32
    per_value = s.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    assert ((dequantize_weight_blocks(q, s) - w.float()).abs() <= per_value * 16 * (1 + 1e-6)).all()
    assert torch.equal(dequantize_weight_blocks(q, s), q.float() * per_value)
    assert torch.equal(dequantize_weight_blocks(q, s, torch.bfloat16), (q.float() * per_value).bfloat16())
    corner = w[..., :128, :128].float().abs().amax((-2, -1)) / 448
    torch.testing.assert_close(s[..., 0, 0], corner.clamp(min=MIN_WEIGHT_SCALE), rtol=0, atol=0)


def test_zero_weight_blocks_have_the_smallest_scale() -> None:
    w = torch.zeros(256, 256)
    w[:128, 128:] = 1.0
    w[128:, :128] = 1e-30  # a dead expert's weights
    q, s = quantize_weight_blocks(w)
    assert torch.equal(s, torch.tensor([[1e-10, 1 / 448], [1e-10, 1e-10]]))
    back = dequantize_weight_blocks(q, s)
    assert torch.equal(back[:128, :128], torch.zeros(128, 128)) and torch.equal(back[128:], torch.zeros(128, 256))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_raise_with_name_and_position(bad: float) -> None:
    w = torch.ones(3, 200, 130)
    w[2, 150, 129] = bad
    with pytest.raises(QuantizationError, match=r"experts\.2 holds .* at \[2, 150, 129\]"):
        quantize_weight_blocks(w, name="experts.2")


def test_wrong_weight_shapes() -> None:
    with pytest.raises(QuantizationError, match=r"\[\.\.\., N, K\]"):
        quantize_weight_blocks(torch.zeros(128))
    q, s = quantize_weight_blocks(torch.ones(130, 128))
    with pytest.raises(QuantizationError, match=r"scale must be \[2, 1\]"):
        dequantize_weight_blocks(q, s[:1])


def test_slicing_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = random((37, 384), 5), random((2, 300, 384), 6)
    whole = (*quantize_activations(x, layout="column"), *quantize_weight_blocks(w))
    monkeypatch.setattr(blocks, "_CPU_ELEMENTS", 1000)
    sliced = (*quantize_activations(x, layout="column"), *quantize_weight_blocks(w))
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a.float(), b.float())
    assert torch.equal(dequantize_activations(*sliced[:2]), dequantize_activations(*whole[:2]))


def test_decode_knows_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = decode_e4m3(codes.view(E4M3))
    for code, value in zip(codes.tolist(), got.tolist(), strict=True):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
        else:
            assert value == math.copysign(POSITIVE[code & 0x7F], -1 if code & 0x80 else 1)
            assert math.copysign(1, value) == (-1 if code & 0x80 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_cuda_gives_the_bits_of_the_cpu(tokens: int) -> None:
    x = random((tokens, 700), tokens).bfloat16()
    w = random((2, 300, 200), tokens).bfloat16()
    for layout in ("row", "column", "column_tma"):
        q, s = quantize_activations(x, layout=layout)  # type: ignore[arg-type]
        q_gpu, s_gpu = quantize_activations(x.cuda(), layout=layout)  # type: ignore[arg-type]
        assert s_gpu.stride() == s.stride() and torch.equal(s_gpu.cpu(), s)
        assert torch.equal(q_gpu.cpu().view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(dequantize_activations(q_gpu, s_gpu).cpu(), dequantize_activations(q, s))
    q, s = quantize_weight_blocks(w)
    q_gpu, s_gpu = quantize_weight_blocks(w.cuda())
    assert torch.equal(s_gpu.cpu(), s) and torch.equal(q_gpu.cpu().view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(dequantize_weight_blocks(q_gpu, s_gpu).cpu(), dequantize_weight_blocks(q, s))
