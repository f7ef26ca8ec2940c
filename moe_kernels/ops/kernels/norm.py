"""Residual additions, RMS norm and FP8 quantisation of one row a program."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.ops.kernels.common import begin, load_rows
from moe_kernels.variants.triton.quant import quantise


@triton.jit(do_not_specialize=["tokens", "eps"])
def norm_kernel(
    x, x2, residual, weight, y, new_residual, y_q, y_scale, tokens, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS2: tl.constexpr, HAS_X2: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, QUANTISE: tl.constexpr, PDL: tl.constexpr,
):
    """r = residual + (x + x2), y = weight * round(r / rms(r)). Grid: T. All [T, H], x and x2 maybe [S, T, H] FP32.

    y_q E4M3 [T, H], y_scale FP32 [H/128, T]. Every step rounds to y's dtype, as transformers' modules do.
    """
    begin(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    at = row.to(tl.int64) * H + columns
    plane = tokens.to(tl.int64) * H
    value = load_rows(x, at, plane, mask, SPLITS, dtype)
    if HAS_X2:
        other = load_rows(x2, at, plane, mask, SPLITS2, dtype)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        value = (tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) + value.to(tl.float32)).to(dtype)
        tl.store(new_residual + at, value, mask=mask)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / H
    normed = (wide * tl.rsqrt(mean + eps)).to(dtype)
    out = (tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) * normed.to(tl.float32)).to(dtype)
    tl.store(y + at, out, mask=mask)
    if QUANTISE:
        groups: tl.constexpr = BLOCK // 128
        q, scale = quantise(tl.reshape(out.to(tl.float32), [groups, 128]), 1e-10, 1)
        index = tl.arange(0, groups)
        tl.store(y_q + at, tl.reshape(q, [BLOCK]), mask=mask)
        tl.store(y_scale + index.to(tl.int64) * tokens + row, scale, mask=index < H // 128)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_kernel(
    gate_up, out, out_scale, tokens,
    INTER: tl.constexpr, BT: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr, QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = round(silu(gate)) * up for BT tokens and 128 columns. Grid: ceil(T / BT) * ceil(I / 128).

    gate_up [T, 2I] or FP32 [S, T, 2I]; out DTYPE [T, I], or with QUANTISE E4M3 [T, I] and out_scale [I/128, T].
    """
    begin(PDL)
    blocks: tl.constexpr = (INTER + 127) // 128
    pid = tl.program_id(0)
    group = pid % blocks
    rows = (pid // blocks) * BT + tl.arange(0, BT)
    columns = group * 128 + tl.arange(0, 128)
    mask = (rows < tokens)[:, None] & (columns < INTER)[None, :]
    at = rows.to(tl.int64)[:, None] * (2 * INTER) + columns[None, :]
    plane = tokens.to(tl.int64) * (2 * INTER)
    gate = load_rows(gate_up, at, plane, mask, SPLITS, DTYPE).to(tl.float32)
    up = load_rows(gate_up, at + INTER, plane, mask, SPLITS, DTYPE).to(tl.float32)
    value = ((gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up).to(DTYPE)
    where = rows.to(tl.int64)[:, None] * INTER + columns[None, :]
    if QUANTISE:
        q, scale = quantise(value.to(tl.float32), 1e-10, 1)
        tl.store(out + where, q, mask=mask)
        tl.store(out_scale + group.to(tl.int64) * tokens + rows, scale, mask=rows < tokens)
    else:
        tl.store(out + where, value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def sum_splits_kernel(x, bias, out, tokens, N: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
                      HAS_BIAS: tl.constexpr, PDL: tl.constexpr):
    """out [T, N] = sum over S of FP32 [S, T, N], plus bias, rounded once. Grid: T * ceil(N / BLOCK)."""
    begin(PDL)
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    columns = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    at = (pid // blocks).to(tl.int64) * N + columns
    total = load_rows(x, at, tokens.to(tl.int64) * N, mask, SPLITS, tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
