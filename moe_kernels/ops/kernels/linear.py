"""Linear layers with one order of sums for every number of rows, so that a row's bits do not depend on the others.

K runs in blocks of 128. FP8: each block is one tensor-core product into a fresh accumulator, scaled and added in FP32.
BF16: the blocks accumulate. K is cut into SPLITS parts of ceil(blocks / SPLITS) blocks, each summed from zero, and the
parts are added in order: by whoever reads the split sums, or (`linear_many_kernel`) here. SPLITS depends on the
weight's shape alone. Few rows: weights on the tensor core's M side, tokens on its narrow N side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.ops.kernels.common import begin


@triton.jit
def _weight_tile(w, row, column, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return w.load([row, column])
    else:
        rows = tl.minimum(row + tl.arange(0, BN), N - 1).to(tl.int64)
        return tl.load(w + rows[:, None] * K + column + tl.arange(0, 128)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def linear_few_kernel(
    x, x_scale, w, w_scale, bias, out, tokens,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """Grid: ceil(N / BN) * SPLITS * ceil(T / BT). out BF16 [T, N], or FP32 [SPLITS, T, N] when SPLITS > 1.

    x E4M3 or BF16 [T, K], x_scale FP32 [K/128, T]; w [N, K], w_scale FP32 [ceil(N/128), K/128]; BN 64 or 128.
    """
    begin(PDL)
    NB: tl.constexpr = (N + BN - 1) // BN
    KB: tl.constexpr = K // 128
    PART: tl.constexpr = (KB + SPLITS - 1) // SPLITS
    pid = tl.program_id(0)
    block = pid % NB
    split = (pid // NB) % SPLITS
    rows = (pid // (NB * SPLITS)) * BT + tl.arange(0, BT)
    live = rows < tokens
    kept = tl.minimum(rows, tokens - 1)
    x_row = x + kept.to(tl.int64)[:, None] * K + tl.arange(0, 128)[None, :]
    first = split * PART
    last = tl.minimum(first + PART, KB)
    total = tl.zeros([BN, BT], dtype=tl.float32)
    if FP8:
        ws = w_scale + ((block * BN) // 128) * KB
        # Scales are loaded one step ahead: they are too small for the asynchronous pipeline.
        start = tl.minimum(first, KB - 1)  # the last parts may be empty
        s_x = tl.load(x_scale + start.to(tl.int64) * tokens + kept)
        s_w = tl.load(ws + start)
        for kb in tl.range(first, last, num_stages=STAGES):
            x_tile = tl.load(x_row + kb * 128)
            w_tile = _weight_tile(w, block * BN, kb * 128, N, K, BN, TMA)
            ahead = tl.minimum(kb + 1, KB - 1)
            s_x_next = tl.load(x_scale + ahead.to(tl.int64) * tokens + kept)
            s_w_next = tl.load(ws + ahead)
            total += tl.dot(w_tile, tl.trans(x_tile)) * (s_x * s_w)[None, :]
            s_x = s_x_next
            s_w = s_w_next
    else:
        for kb in tl.range(first, last, num_stages=STAGES):
            x_tile = tl.load(x_row + kb * 128)
            w_tile = _weight_tile(w, block * BN, kb * 128, N, K, BN, TMA)
            total = tl.dot(w_tile, tl.trans(x_tile), total)
    columns = block * BN + tl.arange(0, BN)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    where = (split.to(tl.int64) * tokens + rows)[None, :] * N + columns[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=live[None, :] & (columns < N)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def linear_many_kernel(
    x, x_scale, w, w_scale, bias, out, tokens,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """out BF16 [T, N] for BT tokens by BN columns. Grid: ceil(T / BT) * ceil(N / BN), GROUP token tiles together.

    With TMA x and w are descriptors of [BT, 128] and [BN, 128] tiles.
    """
    begin(PDL)
    NB: tl.constexpr = (N + BN - 1) // BN
    KB: tl.constexpr = K // 128
    PART: tl.constexpr = (KB + SPLITS - 1) // SPLITS
    pid = tl.program_id(0)
    tiles = (tokens + BT - 1) // BT
    group = pid // (GROUP * NB)
    here = tl.minimum(tiles - group * GROUP, GROUP)
    tile = group * GROUP + (pid % (GROUP * NB)) % here
    block = (pid % (GROUP * NB)) // here
    rows = tile * BT + tl.arange(0, BT)
    kept = tl.minimum(rows, tokens - 1)
    x_row = kept.to(tl.int64)[:, None] * K + tl.arange(0, 128)[None, :]
    total = tl.zeros([BT, BN], dtype=tl.float32)
    part = tl.zeros([BT, BN], dtype=tl.float32)
    if FP8:
        ws = w_scale + ((block * BN) // 128) * KB
        s_x = tl.load(x_scale + kept)
        s_w = tl.load(ws)
    for kb in tl.range(0, KB, num_stages=STAGES):
        if TMA:
            x_tile = x.load([tile * BT, kb * 128])
        else:
            x_tile = tl.load(x + x_row + kb * 128)
        w_tile = _weight_tile(w, block * BN, kb * 128, N, K, BN, TMA)
        if FP8:
            ahead = tl.minimum(kb + 1, KB - 1)
            s_x_next = tl.load(x_scale + ahead.to(tl.int64) * tokens + kept)
            s_w_next = tl.load(ws + ahead)
            part += tl.dot(x_tile, tl.trans(w_tile)) * (s_x * s_w)[:, None]
            s_x = s_x_next
            s_w = s_w_next
        else:
            part = tl.dot(x_tile, tl.trans(w_tile), part)
        if SPLITS > 1:  # noqa: SIM102 - the outer one is decided when compiling
            if (kb + 1) % PART == 0:
                total += part
                part = tl.zeros([BT, BN], dtype=tl.float32)
    if SPLITS > 1:
        if KB % PART != 0:
            part = total + part
        else:
            part = total
    columns = block * BN + tl.arange(0, BN)
    if HAS_BIAS:
        part += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    where = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + where, part.to(out.dtype.element_ty), mask=(rows < tokens)[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def router_kernel(x, w, out, tokens, E, H: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
                  PDL: tl.constexpr):
    """out FP32 [T, E] = x [T, H] times w FP32 [E, H], on the ordinary cores. Grid: ceil(E / BE) * ceil(T / BT).

    BT tokens share each weight; their [BE, BK] partial sums are laid out alike for every BT, so bits do not differ.
    """
    begin(PDL)
    pid = tl.program_id(0)
    blocks = (E + BE - 1) // BE
    experts = (pid % blocks) * BE + tl.arange(0, BE)
    token0 = (pid // blocks) * BT
    columns = tl.arange(0, BK)
    w_row = w + tl.minimum(experts, E - 1).to(tl.int64)[:, None] * H + columns[None, :]
    sums = ()  # type: ignore[var-annotated]
    for _ in tl.static_range(BT):
        sums = sums + (tl.zeros([BE, BK], dtype=tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, H, BK, loop_unroll_factor=4 if BT <= 2 else 1):
        mask = start + columns < H
        weight = tl.load(w_row + start, mask=mask[None, :], other=0.0)
        more = ()  # type: ignore[var-annotated]
        for t in tl.static_range(BT):
            token = tl.minimum(token0 + t, tokens - 1).to(tl.int64)
            value = tl.load(x + token * H + start + columns, mask=mask, other=0.0).to(tl.float32)
            wide = tl.broadcast_to(value[None, :], [BE, BK])
            more = more + (tl.fma(weight, wide, sums[t]),)  # type: ignore[assignment]
        sums = more
    for t in tl.static_range(BT):
        token = token0 + t
        total = tl.sum(sums[t], axis=1)
        tl.store(out + token.to(tl.int64) * E + experts, total, mask=(experts < E) & (token < tokens))
