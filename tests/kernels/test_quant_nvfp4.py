"""NVFP4 quantiser against brute force and against compressed-tensors' own packing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.errors import QuantizationError
from moe_kernels.quant import blocks, nvfp4

E4M3 = torch.float8_e4m3fn
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1 by definition: 1 sign, 2 exponent (bias 1), 1 mantissa bit
SETTINGS = settings(max_examples=40, deadline=None)


def random(shape: tuple[int, ...], seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


def nearest(x: float) -> float:
    """Nearest E2M1 number by trying all, ties to the even code, saturating."""
    best = min(range(8), key=lambda i: (abs(GRID[i] - min(abs(x), 6.0)), i % 2))
    return math.copysign(GRID[best], x)


def test_every_tie_and_its_neighbours() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    up, zero = torch.tensor(math.inf), torch.tensor(0.0)
    values = [0.0, 1e-30, 6.0, 7.0, 1e30]
    for t in map(torch.tensor, [*ties, *GRID]):
        values += [t.item(), torch.nextafter(t, up).item(), torch.nextafter(t, zero).item()]
    x = torch.tensor(values + [-v for v in values])
    codes = nvfp4.encode_e2m1(x)
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        got = math.copysign(GRID[code & 7], -1 if code & 8 else 1)
        assert got == nearest(value), value
        assert math.copysign(1, got) == math.copysign(1, value)
    ties_to_even = nvfp4.encode_e2m1(torch.tensor(ties)).tolist()
    assert ties_to_even == [0, 2, 2, 4, 4, 6, 6]


@SETTINGS
@given(
    rows=st.sampled_from([1, 3, 5, 7, 8]), groups=st.integers(1, 5), seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.3, 1.0, 3.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    room=st.sampled_from([1.0, 3.0, 0.25]),
)  # fmt: skip
def test_against_brute_force(rows, groups, seed, spread, dtype, room) -> None:
    """Every group by the rule, written out with Python floats; `room` makes a static scale too wide or too narrow."""
    x = random((rows, groups * 16), seed, spread).to(dtype)
    scale_2 = nvfp4.global_scale(x) * room
    packed, scale = nvfp4.quantize(x, scale_2)
    assert packed.shape == (rows, groups * 8) and packed.dtype == torch.uint8
    assert scale.shape == (rows, groups) and scale.dtype == E4M3
    back = nvfp4.dequantize(packed, scale, scale_2)
    for r in range(rows):
        for g in range(groups):
            group = x[r, 16 * g : 16 * g + 16].float()
            want = min(((group.abs().max() / 6) / scale_2).item(), 448.0)
            s = scale[r, g].float().item()
            assert s == torch.tensor(want).to(E4M3).float().item()
            step = torch.tensor(s) * scale_2
            for c in range(16):
                byte = packed[r, 8 * g + c // 2].item()
                code = byte & 15 if c % 2 == 0 else byte >> 4
                value = math.copysign(GRID[code & 7], -1 if code & 8 else 1)
                exact = nearest((group[c] / step).item()) if step > 0 else 0.0
                assert value == exact
                assert back[r, 16 * g + c].item() == (torch.tensor(value) * s * scale_2).item()


def test_error_bound_with_the_tensors_own_scale() -> None:
    """Half a step of E2M1 (1 between 4 and 6), plus saturation where the E4M3 scale rounded down (at most 1/17)."""
    x = random((512, 256), 7, 0.5)
    scale_2 = nvfp4.global_scale(x)
    packed, scale = nvfp4.quantize(x, scale_2)
    error = (nvfp4.dequantize(packed, scale, scale_2) - x).abs().unflatten(-1, (-1, 16)).amax(-1)
    normal = scale.float() >= 2.0**-6
    assert normal.float().mean() > 0.99
    assert (error <= scale.float() * scale_2 * 1.0001)[normal].all()


def test_the_largest_value_is_kept_exactly_when_representable() -> None:
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 20] = 6 * 448 * 0.5, -6 * 448 * 0.25
    scale_2 = nvfp4.global_scale(x)
    assert scale_2.item() == 0.5
    assert torch.equal(nvfp4.dequantize(*nvfp4.quantize(x, scale_2), scale_2), x)


@SETTINGS
@given(rows=st.sampled_from([1, 3, 7]), groups=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_representable_values_come_back(rows, groups, seed) -> None:
    """Any grid value times any scale, each group holding a 6, survives quantisation bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(GRID)[torch.randint(0, 8, (rows, groups, 16), generator=generator)]
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    values[..., 0] = 6.0
    scales = (torch.rand(rows, groups, generator=generator) * 447 + 1).to(E4M3).float()
    x = (values * scales.unsqueeze(-1) * 2.0**-5).flatten(1)
    scale_2 = torch.tensor(2.0**-5)
    packed, scale = nvfp4.quantize(x, scale_2)
    assert torch.equal(scale.float(), scales)
    assert torch.equal(nvfp4.dequantize(packed, scale, scale_2), x)
    again = nvfp4.quantize(nvfp4.dequantize(packed, scale, scale_2), scale_2)
    assert torch.equal(again[0] & 0x77, packed & 0x77)


def test_bytes_are_those_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    x = random((6, 64), 3)
    scale_2 = nvfp4.global_scale(x)
    packed, scale = nvfp4.quantize(x, scale_2)
    values = helpers.unpack_fp4_from_uint8(packed, 6, 64, dtype=torch.float32)
    assert set(values.abs().unique().tolist()) <= set(GRID)
    ours = nvfp4.dequantize(packed, scale, scale_2)
    theirs = values * scale.float().repeat_interleave(16, 1) * scale_2
    assert torch.equal(ours, theirs)
    assert torch.equal(helpers.pack_fp4_to_uint8(values), packed)


def test_batched_with_one_scale_per_expert_and_half() -> None:
    w = random((3, 2, 5, 32), 4)
    scale_2 = nvfp4.global_scale(w, 2)
    assert scale_2.shape == (3, 2)
    packed, scale = nvfp4.quantize(w, scale_2[..., None, None])
    back = nvfp4.dequantize(packed, scale, scale_2[..., None, None])
    for e in range(3):
        for half in range(2):
            assert scale_2[e, half] == w[e, half].abs().max() / (6 * 448)
            one, one_scale = nvfp4.quantize(w[e, half], scale_2[e, half])
            assert torch.equal(one, packed[e, half]) and torch.equal(one_scale.float(), scale[e, half].float())
            assert torch.equal(back[e, half], nvfp4.dequantize(one, one_scale, scale_2[e, half]))
    bf16 = nvfp4.dequantize(packed, scale, scale_2[..., None, None], torch.bfloat16)
    assert torch.equal(bf16, back.bfloat16())


def test_zeros_and_tiny_groups() -> None:
    x = torch.zeros(2, 48)
    assert nvfp4.global_scale(x).item() == 1.0
    packed, scale = nvfp4.quantize(x, torch.tensor(1.0))
    assert not packed.any() and not scale.float().any()
    assert torch.equal(nvfp4.dequantize(packed, scale, torch.tensor(1.0)), x)
    x[0, 0], x[0, 16:32] = 6 * 448.0, 6 * 2.0**-11  # second group: scale 2^-11 rounds to zero
    packed, scale = nvfp4.quantize(x, nvfp4.global_scale(x))
    assert scale.float()[0].tolist() == [448.0, 0.0, 0.0]
    assert torch.equal(nvfp4.dequantize(packed, scale, torch.tensor(1.0))[0, 16:], torch.zeros(32))
    smallest = 1.1754943508222875e-38  # of FP32's normal numbers
    assert nvfp4.scale_from_amax(torch.tensor([0.0, 2688.0, 1e-44])).tolist() == [1.0, 1.0, smallest]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values(bad: float) -> None:
    x = torch.full((2, 3, 32), 6.0)
    x[1, 2, 17] = bad
    one = torch.tensor(1.0)
    with pytest.raises(QuantizationError, match=r"w2 holds .* at \[1, 2, 17\]"):
        nvfp4.quantize(x, one, name="w2")
    with pytest.raises(QuantizationError, match=r"at \[1, 2, 17\]"):
        nvfp4.global_scale(x)
    back = nvfp4.dequantize(*nvfp4.quantize(x, one, check_finite=False), one)
    if math.isnan(bad):
        assert back[1, 2, 16:].isnan().all()
    else:
        assert back[1, 2, 17] == math.copysign(6 * 448, bad)  # saturates
    assert torch.equal(back[0], torch.full((3, 32), 6.0))


def test_wrong_shapes() -> None:
    with pytest.raises(QuantizationError, match="40 columns"):
        nvfp4.quantize(torch.ones(2, 40), torch.tensor(1.0))
    with pytest.raises(QuantizationError, match="does not broadcast"):
        nvfp4.quantize(torch.ones(3, 2, 32), torch.ones(3))
    with pytest.raises(QuantizationError, match="floating-point"):
        nvfp4.quantize(torch.ones(2, 32, dtype=torch.int32), torch.tensor(1.0))
    packed, scale = nvfp4.quantize(torch.ones(2, 32), torch.tensor(1.0))
    with pytest.raises(QuantizationError, match="K/16"):
        nvfp4.dequantize(packed, scale[:, :1], torch.tensor(1.0))


def test_slicing_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random((2, 33, 64), 9)
    scale_2 = nvfp4.global_scale(x, 1)[:, None, None]
    packed, scale = nvfp4.quantize(x, scale_2)
    back = nvfp4.dequantize(packed, scale, scale_2)
    monkeypatch.setattr(blocks, "_CPU_ELEMENTS", 100)
    again = nvfp4.quantize(x, scale_2)
    assert torch.equal(packed, again[0]) and torch.equal(scale.float(), again[1].float())
    assert torch.equal(back, nvfp4.dequantize(packed, scale, scale_2))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_cuda_gives_the_bits_of_the_cpu(rows: int) -> None:
    x = random((3, rows, 64), rows).bfloat16()
    scale_2 = nvfp4.global_scale(x, 1)[:, None, None]
    packed, scale = nvfp4.quantize(x, scale_2)
    scale_2_gpu = nvfp4.global_scale(x.cuda(), 1)[:, None, None]
    packed_gpu, scale_gpu = nvfp4.quantize(x.cuda(), scale_2_gpu)
    assert torch.equal(scale_2_gpu.cpu(), scale_2) and torch.equal(packed_gpu.cpu(), packed)
    assert torch.equal(scale_gpu.cpu().view(torch.uint8), scale.view(torch.uint8))
    back = nvfp4.dequantize(packed_gpu, scale_gpu, scale_2_gpu)
    assert torch.equal(back.cpu(), nvfp4.dequantize(packed, scale, scale_2))
