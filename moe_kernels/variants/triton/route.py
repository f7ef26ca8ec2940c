"""The first launch of a layer: expert choice, positions in expert order and activation quantisation together.

Programs 0..C-1 route one chunk of tokens each, the rest quantise. A chunk's program keeps every score of its
tokens in registers, so that the choice, the rank of each (token, expert) pair among the pairs of its expert and
the chunk's histogram come out of one pass. With one chunk (few tokens) it also finishes the sort; otherwise
`sort.py` does, from the histograms. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.variants.triton.quant import quantise_tile
from moe_kernels.variants.triton.tiles import write_tiles


@triton.jit
def _sigmoid(x):
    # e^-|x| never overflows, so far negative logits give 0 and not 1/inf through inf
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + e), tl.math.div_rn(e, 1.0 + e))


@triton.jit
def route_chunk(
    logits, bias, ids64, ids, weights, ranks, histogram, sorted_slots, tiles,
    tokens, scaling, chunk,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Route `BT` tokens; ids are stored in order of falling key, the lowest expert first among equals."""
    rows = chunk * BT + tl.arange(0, BT)
    columns = tl.arange(0, E_PAD)
    live = rows < tokens
    inside = columns < E
    mask = live[:, None] & inside[None, :]
    score = _sigmoid(tl.load(logits + rows.to(tl.int64)[:, None] * E + columns[None, :], mask=mask, other=0.0))
    key = score
    if HAS_BIAS:
        key = score + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    key = tl.where(key != key, float("inf"), key)  # NaN is chosen, so that its weight shows it
    key = tl.where(inside[None, :], key, float("-inf"))
    taken = tl.zeros([BT, E_PAD], dtype=tl.int32)
    total = tl.zeros([BT], dtype=tl.float32)
    for _ in tl.static_range(K):
        best = tl.argmax(key, axis=1)
        hit = columns[None, :] == best[:, None]
        total += tl.sum(tl.where(hit, score, 0.0), axis=1)
        key = tl.where(hit, float("-inf"), key)
        taken += (hit & live[:, None]).to(tl.int32)
    counts = tl.sum(taken, axis=0)
    before = tl.cumsum(taken, axis=0) - taken  # pairs of this expert among earlier tokens of the chunk
    if SINGLE:
        offsets = tl.cumsum(counts, axis=0) - counts
        before += offsets[None, :]
        write_tiles(tiles, counts, offsets, BLOCK_M)
    else:
        tl.store(histogram + chunk * E + columns, counts, mask=inside)
    # Second pass over the same keys: the choice again, now with its rank known.
    key = score
    if HAS_BIAS:
        key = score + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    key = tl.where(key != key, float("inf"), key)
    key = tl.where(inside[None, :], key, float("-inf"))
    for j in tl.static_range(K):
        best = tl.argmax(key, axis=1)
        hit = columns[None, :] == best[:, None]
        weight = tl.sum(tl.where(hit, score, 0.0), axis=1)
        rank = tl.sum(tl.where(hit, before, 0), axis=1)
        key = tl.where(hit, float("-inf"), key)
        if NORM:
            weight = tl.math.div_rn(weight, total + 1e-20)
        slot = rows * K + j
        tl.store(ids64 + slot, best.to(tl.int64), mask=live)
        tl.store(weights + slot, weight * scaling, mask=live)
        if SINGLE:
            tl.store(sorted_slots + rank, slot, mask=live)
        else:
            tl.store(ids + slot, best, mask=live)
            tl.store(ranks + slot, rank, mask=live)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def route_quantise_kernel(
    logits, bias, hidden, ids64, ids, weights, ranks, histogram, sorted_slots, tiles, x_q, x_scale,
    tokens, scaling, chunks,
    H: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr, MODE: tl.constexpr, BQ: tl.constexpr,
):
    """MODE 'fp8' quantises, 'none' only routes. Grid: chunks + ceil(T / BQ) * H / 128 programs (or chunks)."""
    pid = tl.program_id(0)
    if pid < chunks:
        route_chunk(
            logits, bias, ids64, ids, weights, ranks, histogram, sorted_slots, tiles, tokens, scaling, pid,
            E, E_PAD, K, BT, HAS_BIAS, NORM, SINGLE, BLOCK_M,
        )
    else:
        if MODE == "fp8":
            quantise_tile(hidden, x_q, x_scale, tokens, pid - chunks, H, BQ, COLUMN_MAJOR)
