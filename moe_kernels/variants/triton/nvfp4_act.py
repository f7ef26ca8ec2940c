"""Rounds BF16 activations as an NVFP4 kernel would, for `act=nvfp4`: E2M1 values times E4M3 scales, kept in BF16."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_e4m3(x):
    """Non-negative FP32 up to 448 rounded half to even to an E4M3 value, still FP32 (step 2^-9 below 2^-6)."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, -6)
    step = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    return round_half_even(x / step) * step  # step is a power of two: both operations are exact


@triton.jit
def round_half_even(x):
    """Non-negative FP32 below 2^22 to the nearest integer, ties to even: adding 2^23 leaves no fraction bits."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def round_e2m1(x):
    """Non-negative FP32 to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6; ties to the even code, 6 at most."""
    x = tl.minimum(x, 6.0)
    small = round_half_even(x * 2.0) * 0.5
    middle = round_half_even(x)
    large = round_half_even(x * 0.5) * 2.0
    return tl.where(x < 2.0, small, tl.where(x < 4.0, middle, large))


@triton.jit
def nvfp4_round_kernel(
    x, out, row_scale, given_scale, N: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALE: tl.constexpr
):
    """One row a program: out BF16 = e2m1 * block scale (exact), row_scale FP32 = the scalar it is relative to.

    The scalar is `given_scale` (a checkpoint's input scale) or amax / (6 * 448) of the row, 1 for zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    if HAS_SCALE:
        scalar = tl.load(given_scale)
    else:
        amax = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, N, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            amax = tl.maximum(amax, tl.abs(tl.load(x + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)))
        most = tl.max(amax, axis=0)
        scalar = tl.where(most == 0, 1.0, tl.maximum(tl.math.div_rn(most, 6.0 * 448.0), 1.1754943508222875e-38))
    tl.store(row_scale + row, scalar)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        groups = tl.reshape(value, [BLOCK // 16, 16])
        magnitude = tl.abs(groups)
        six = tl.full([BLOCK // 16], 6.0, tl.float32)
        block = tl.math.div_rn(tl.math.div_rn(tl.max(magnitude, axis=1), six), scalar + tl.zeros_like(six))
        block = round_e4m3(tl.minimum(block, 448.0))
        step = block * scalar
        step = tl.where(step == 0, float("inf"), step)
        code = round_e2m1(tl.math.div_rn(magnitude, tl.broadcast_to(step[:, None], magnitude.shape)))
        rounded = tl.where(groups < 0, -code, code) * block[:, None]
        tl.store(out + row * N + columns, tl.reshape(rounded, [BLOCK]).to(tl.bfloat16), mask=columns < N)
