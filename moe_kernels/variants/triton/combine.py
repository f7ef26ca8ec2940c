"""Weighted sum of each token's expert outputs in a fixed order, so that no run differs from another."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(y, weights, out, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over j of weights[t, j] * y[t * K + j] in FP32. Grid: T * ceil(H / BLOCK)."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (pid // blocks).to(tl.int64)
    columns = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(weights + token * K + j)
        total += weight * tl.load(y + (token * K + j) * H + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=mask)
