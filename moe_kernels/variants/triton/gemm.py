"""Grouped FP8 GEMMs over tiles of sorted rows: 1x128 activation scales, 128x128 weight scales, FP32 sums.

Every 128 columns of K are one tensor-core product into a fresh accumulator, which is then scaled and added in
FP32: the scales demand it, and Hopper's FP8 accumulator would lose bits over a long K. SWAP puts the weights on
the tensor core's M side (128 rows of a weight tile fill it) and the tokens on its N side, which may be as narrow
as 16: for few tokens per expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.variants.triton.quant import quantise


@triton.jit
def _product(w, x, SWAP: tl.constexpr):
    """x [BM, 128] times w [BN, 128] transposed: [BN, BM] with SWAP, else [BM, BN]."""
    if SWAP:
        return tl.dot(w, tl.trans(x))
    else:
        return tl.dot(x, tl.trans(w))


@triton.jit
def _per_token(v, SWAP: tl.constexpr):
    if SWAP:
        return v[None, :]
    else:
        return v[:, None]


@triton.jit
def _weight_tile(w, row, column, K: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return w.load([row, column])
    else:
        rows = row.to(tl.int64) + tl.arange(0, BN)
        return tl.load(w + rows[:, None] * K + column + tl.arange(0, 128)[None, :])


@triton.jit(do_not_specialize=["tokens", "pairs"])
def gemm1_kernel(
    x_q, x_scale, w13, w13_scale, h_q, h_scale, sorted_slots, tiles, tokens, pairs,
    H: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
):
    """h = quantise(silu(x Wg) * (x Wu)) for one tile of rows and one block of 128 intermediate columns.

    x_q E4M3 [T, H], x_scale [H/128, T]; w13 E4M3 [E * 2I, H] = [gate; up] per expert, w13_scale [E, 2I/128,
    H/128]; h_q E4M3 [pairs, INTER] in sorted order, h_scale [INTER/128, pairs]. The tile holds gate and up of the same
    128 columns, so the amax of the re-quantisation is local.
    """
    NB: tl.constexpr = INTER // 128
    KB: tl.constexpr = H // 128
    pid = tl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= tl.load(tiles + 3):
        return
    expert = tl.load(tiles + 4 * tile)
    first = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 2)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < end
    token = tl.load(sorted_slots + tl.minimum(rows, end - 1)) // TOP_K
    x_row = x_q + token.to(tl.int64)[:, None] * H + tl.arange(0, 128)[None, :]
    gate_row = expert * (2 * INTER) + block * 128
    up_row = gate_row + INTER
    ws = w13_scale + (expert.to(tl.int64) * (2 * NB) + block) * KB
    # Scales are loaded one step ahead: they are too small for the asynchronous pipeline.
    s_x = tl.load(x_scale + token)
    s_gate = tl.load(ws)
    s_up = tl.load(ws + NB * KB)
    if SWAP:
        gate = tl.zeros([128, BLOCK_M], dtype=tl.float32)
        up = tl.zeros([128, BLOCK_M], dtype=tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, 128], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, 128], dtype=tl.float32)
    for kb in tl.range(0, KB, num_stages=STAGES):
        x = tl.load(x_row + kb * 128)
        w_gate = _weight_tile(w13, gate_row, kb * 128, H, 128, TMA)
        w_up = _weight_tile(w13, up_row, kb * 128, H, 128, TMA)
        ahead = tl.minimum(kb + 1, KB - 1)
        s_x_next = tl.load(x_scale + ahead.to(tl.int64) * tokens + token)
        s_gate_next = tl.load(ws + ahead)
        s_up_next = tl.load(ws + NB * KB + ahead)
        gate += _product(w_gate, x, SWAP) * _per_token(s_x * s_gate, SWAP)
        up += _product(w_up, x, SWAP) * _per_token(s_x * s_up, SWAP)
        s_x = s_x_next
        s_gate = s_gate_next
        s_up = s_up_next
    h = swiglu(gate, up, LIMIT)
    columns = block * 128 + tl.arange(0, 128)
    if SWAP:
        q, scale = quantise(h, 1e-10, 0)
        where = rows.to(tl.int64)[None, :] * INTER + columns[:, None]
        tl.store(h_q + where, q, mask=live[None, :])
    else:
        q, scale = quantise(h, 1e-10, 1)
        where = rows.to(tl.int64)[:, None] * INTER + columns[None, :]
        tl.store(h_q + where, q, mask=live[:, None])
    tl.store(h_scale + block.to(tl.int64) * pairs + rows, scale, mask=live)


@triton.jit
def swiglu(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up in FP32; LIMIT > 0 clamps gate from above and up from both sides first (as GPT-OSS)."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["pairs"])
def gemm2_kernel(
    h_q, h_scale, w2, w2_scale, y, sorted_slots, tiles, pairs,
    H: tl.constexpr, INTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):
    """y[slot] = h W2 for one tile of rows and BLOCK_N output columns; y BF16 [T * top_k, H] in slot order."""
    NB: tl.constexpr = H // BLOCK_N
    KB: tl.constexpr = INTER // 128
    pid = tl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= tl.load(tiles + 3):
        return
    expert = tl.load(tiles + 4 * tile)
    first = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 2)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < end
    rows = tl.minimum(rows, end - 1)
    h_row = h_q + rows.to(tl.int64)[:, None] * INTER + tl.arange(0, 128)[None, :]
    w_row = expert * H + block * BLOCK_N
    ws = w2_scale + (expert.to(tl.int64) * (H // 128) + (block * BLOCK_N) // 128) * KB
    s_h = tl.load(h_scale + rows)
    s_w = tl.load(ws)
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for kb in tl.range(0, KB, num_stages=STAGES):
        h = tl.load(h_row + kb * 128)
        w = _weight_tile(w2, w_row, kb * 128, INTER, BLOCK_N, TMA)
        ahead = tl.minimum(kb + 1, KB - 1)
        s_h_next = tl.load(h_scale + ahead.to(tl.int64) * pairs + rows)
        s_w_next = tl.load(ws + ahead)
        total += _product(w, h, SWAP) * _per_token(s_h * s_w, SWAP)
        s_h = s_h_next
        s_w = s_w_next
    slots = tl.load(sorted_slots + rows).to(tl.int64)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if SWAP:
        where = slots[None, :] * H + columns[:, None]
        tl.store(y + where, total.to(y.dtype.element_ty), mask=live[None, :])
    else:
        where = slots[:, None] * H + columns[None, :]
        tl.store(y + where, total.to(y.dtype.element_ty), mask=live[:, None])
