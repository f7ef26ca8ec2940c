"""Per-token, per-128-column FP8 quantisation, with scales written column-major or row-major."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise(x, EPS: tl.constexpr, AXIS: tl.constexpr):
    """E4M3 values and FP32 scales of a tile whose groups run along AXIS: scale = max(amax, EPS) / 448.

    IEEE divisions, so that the bytes equal `quant.fp8.quantize_activations`'s.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=AXIS), EPS)
    scale = tl.math.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    q = tl.math.div_rn(x, tl.broadcast_to(tl.expand_dims(scale, AXIS), x.shape))
    # the clamp is the rule; NaN stays NaN through it, as in torch
    q = tl.clamp(q, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return q.to(tl.float8e4nv), scale


@triton.jit
def quantise_tile(hidden, x_q, x_scale, tokens, index, H: tl.constexpr, BQ: tl.constexpr, COLUMN_MAJOR: tl.constexpr):
    """Quantise columns [128 g, 128 g + 128) of BQ tokens; `index` = token block * (H / 128) + g."""
    group = index % (H // 128)
    rows = (index // (H // 128)) * BQ + tl.arange(0, BQ)
    live = rows < tokens
    where = rows.to(tl.int64)[:, None] * H + group * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(hidden + where, mask=live[:, None], other=0.0).to(tl.float32)
    q, scale = quantise(x, 1e-10, 1)
    tl.store(x_q + where, q, mask=live[:, None])
    if COLUMN_MAJOR:
        tl.store(x_scale + group.to(tl.int64) * tokens + rows, scale, mask=live)
    else:
        tl.store(x_scale + rows.to(tl.int64) * (H // 128) + group, scale, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def quantise_kernel(hidden, x_q, x_scale, tokens, H: tl.constexpr, BQ: tl.constexpr, COLUMN_MAJOR: tl.constexpr):
    """Stand-alone quantiser. hidden [T, H] -> x_q E4M3 [T, H], x_scale [H/128, T] or [T, H/128] FP32."""
    quantise_tile(hidden, x_q, x_scale, tokens, tl.program_id(0), H, BQ, COLUMN_MAJOR)
