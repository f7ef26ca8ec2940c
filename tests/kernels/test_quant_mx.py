"""MX and coarse FP8 quantisers against torch's own casts and against the definition, on random and awkward input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.errors import FormatError, QuantizationError
from moe_kernels.quant import codec, fp8_rows, mx
from moe_kernels.records import MX_GROUP

ENCODERS = [(mx.quantize_mxfp8, mx.dequantize_mxfp8, 448.0), (mx.quantize_mxfp4, mx.dequantize_mxfp4, 6.0)]


def sample(rows: int, columns: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * 10.0 ** (torch.rand(rows, 1, generator=g) * 12 - 6)


def test_e8m0_is_torchs_own_type() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.view(torch.float8_e8m0fnu).float()
    ours = mx.decode_e8m0(every)
    assert torch.equal(ours[:255], theirs[:255]) and ours[255].isnan() and theirs[255].isnan()
    assert torch.equal(mx.decode_e8m0(every.view(torch.float8_e8m0fnu))[:255], ours[:255])
    helpers = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    assert torch.equal(helpers.decompress_mx_scale(every[1:255]).float(), ours[1:255])


@pytest.mark.parametrize(("encode", "decode", "largest"), ENCODERS)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_scale_is_the_least_that_saturates_nothing(encode, decode, largest: float, seed: int, rows: int, groups: int):
    x = sample(rows, groups * MX_GROUP, seed)
    q, scale = encode(x)
    amax = x.view(rows, groups, MX_GROUP).abs().amax(-1)
    steps = mx.decode_e8m0(scale)
    assert (amax <= steps * largest * (1 + 2**-23)).all() and (amax > steps * largest / 2).all()
    back = decode(q, scale).view(rows, groups, MX_GROUP)
    # half a spacing: 2^-4 of the value for E4M3, 2^-2 for E2M1, and half the subnormal step below
    half = 2.0**-4 if largest == 448 else 2.0**-2
    floor = steps.unsqueeze(-1) * (2.0**-10 if largest == 448 else 0.25)
    error = (back - x.view_as(back)).abs()
    assert (error <= torch.maximum(x.view_as(back).abs() * half, floor)).all()


def test_mxfp8_elements_are_torchs_casts() -> None:
    x = sample(40, 64, 1)
    q, scale = mx.quantize_mxfp8(x)
    steps = mx.decode_e8m0(scale).repeat_interleave(32, 1)
    want = (x / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(mx.dequantize_mxfp8(q, scale), q.float() * steps)


@pytest.mark.parametrize(("encode", "decode", "largest"), ENCODERS)
def test_exact_powers_zeros_and_what_is_not_finite(encode, decode, largest: float) -> None:
    x = torch.zeros(5, 64)
    x[0, 3] = largest * 8  # exactly representable: scale 2^3, not 2^4
    x[1, :32] = 2.0**-140  # below the least scale
    x[2, 40], x[3, 2] = math.nan, math.inf
    q, scale = encode(x, check_finite=False)
    assert scale[0].tolist() == [130, 0] and scale[1].tolist() == [0, 0]
    back = decode(q, scale)
    assert back[0, 3] == largest * 8 and (back[4] == 0).all()
    assert back[2, 32:].isnan().all() and (back[2, :32] == 0).all() and back[3, :32].isnan().all()
    with pytest.raises(QuantizationError, match=r"x holds nan at \[2, 40\]"):
        encode(x, name="x")
    with pytest.raises(QuantizationError, match="48 columns, no multiple of 32"):
        encode(torch.zeros(2, 48))
    with pytest.raises(QuantizationError, match="E8M0 bytes"):
        decode(q, scale[:, :1])


def test_rows_of_any_batch_are_the_same() -> None:
    x = sample(33, 96, 3)
    for encode, _, _ in ENCODERS:
        q, scale = encode(x)
        for row in (0, 7, 32):
            one = encode(x[row : row + 1])
            assert torch.equal(one[0].view(torch.uint8), q[row : row + 1].view(torch.uint8))
            assert torch.equal(one[1], scale[row : row + 1])


def test_mxfp4_packs_the_even_column_low() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -1.0, 0.5, 3.0])
    packed, scale = mx.quantize_mxfp4(x)
    assert scale.item() == 127 and packed[0, :2].tolist() == [7 | (10 << 4), 1 | (5 << 4)]


@pytest.mark.parametrize("fmt", ["fp8_channel", "fp8_tensor"])
def test_coarse_fp8(fmt) -> None:
    w = sample(6, 40, 5).view(2, 3, 40)
    w[1, 2] = 0
    q, scale, none = codec.encode(fmt, w)
    dims = (-1,) if fmt == "fp8_channel" else (-2, -1)
    want = (w.abs().amax(dims) / 448).clamp(min=1e-10)
    assert none is None and torch.equal(scale.squeeze(-1) if fmt == "fp8_channel" else scale, want)
    full = want[..., None] if fmt == "fp8_channel" else want[..., None, None]
    assert torch.equal(q.view(torch.uint8), (w / full).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(codec.decode(fmt, q, scale, None), q.float() * full)
    with pytest.raises(QuantizationError, match="scale must be"):
        codec.decode(fmt, q, scale[:1], None)
    with pytest.raises(QuantizationError, match="holds inf"):
        codec.encode(fmt, torch.full((2, 2), math.inf))


def test_static_activations_saturate_and_keep_nan() -> None:
    x = torch.tensor([[1e9, -1e9, 0.5, math.nan]])
    got = fp8_rows.quantize_static(x, torch.tensor(0.25)).float()
    assert got[0, :3].tolist() == [448.0, -448.0, 2.0] and got[0, 3].isnan()


def test_codec_names_what_is_missing() -> None:
    with pytest.raises(FormatError, match="need their scale_2"):
        codec.decode("nvfp4", torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn), None)
    with pytest.raises(FormatError, match="need their scale"):
        codec.decode("mxfp8", torch.zeros(1, 32).to(torch.float8_e4m3fn), None, None)
