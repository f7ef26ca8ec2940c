"""Head norms, rotary embedding and the write to the paged cache in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.ops.kernels.common import begin, load_rows


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "eps"])
def rope_kernel(
    qkv, positions, cos, sin, slots, k_pool, v_pool, q_out, q_weight, k_weight, tokens, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):
    """HB heads of one token a program. Grid: T * (HQ + 2 HKV) / HB; HB divides HQ and HKV.

    qkv [T, (HQ + 2 HKV) D] (or FP32 [S, T, ...]); cos, sin FP32 [P, HALF]; pools [slots, HKV, D]; q_out [T, HQ, D].
    A dimension and its partner (HALF away) are both loaded; every step rounds as transformers' modules do.
    """
    begin(PDL)
    dtype: tl.constexpr = q_out.dtype.element_ty
    programs: tl.constexpr = (HQ + 2 * HKV) // HB
    WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    pid = tl.program_id(0)
    token = (pid // programs).to(tl.int64)
    head0 = (pid % programs) * HB
    heads = head0 + tl.arange(0, HB)
    dims = tl.arange(0, D)
    at = token * WIDTH + heads[:, None] * D + dims[None, :]
    plane = tokens.to(tl.int64) * WIDTH
    x = load_rows(qkv, at, plane, None, SPLITS, dtype).to(tl.float32)
    if head0 >= HQ + HKV:
        slot = tl.load(slots + token).to(tl.int64)
        tl.store(v_pool + slot * (HKV * D) + (heads - HQ - HKV)[:, None] * D + dims[None, :], x.to(dtype))
    else:
        turn = tl.where(dims < HALF, HALF, tl.where(dims < 2 * HALF, -HALF, 0))
        partner = load_rows(qkv, at + turn[None, :], plane, None, SPLITS, dtype).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
            weights = q_weight if head0 < HQ else k_weight
            w = tl.load(weights + dims).to(tl.float32)[None, :]
            w_partner = tl.load(weights + dims + turn).to(tl.float32)[None, :]
            x = _rounded(_rounded(x * factor, dtype) * w, dtype)
            partner = _rounded(_rounded(partner * factor, dtype) * w_partner, dtype)
        position = tl.load(positions + token).to(tl.int64)
        turning = dims < 2 * HALF
        column = tl.where(dims < HALF, dims, dims - HALF)
        c = _rounded(tl.load(cos + position * HALF + column, mask=turning, other=1.0), dtype)[None, :]
        s = _rounded(tl.load(sin + position * HALF + column, mask=turning, other=0.0), dtype)[None, :]
        s = tl.where(dims < HALF, -s, s)
        turned = _rounded(x * c, dtype) + _rounded(partner * s, dtype)
        y = tl.where(turning[None, :], turned, x).to(dtype)
        if head0 < HQ:
            tl.store(q_out + token * (HQ * D) + heads[:, None] * D + dims[None, :], y)
        else:
            slot = tl.load(slots + token).to(tl.int64)
            tl.store(k_pool + slot * (HKV * D) + (heads - HQ)[:, None] * D + dims[None, :], y)
