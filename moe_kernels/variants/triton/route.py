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
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BT: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Route `BT` tokens; ids are stored in order of falling key, the lowest expert first among equals."""
    rows = chunk * BT + tl.arange(0, BT)
    columns = tl.arange(0, E_PAD)
    place = tl.arange(0, K_PAD)
    live = rows < tokens
    inside = columns < E
    at = logits + rows.to(tl.int64)[:, None] * E
    key = _sigmoid(tl.load(at + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0))
    if HAS_BIAS:
        key += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    key = tl.where(key != key, float("inf"), key)  # NaN is chosen, so that its weight shows it
    key = tl.where(inside[None, :], key, float("-inf"))
    chosen = tl.zeros([BT, K_PAD], dtype=tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(key, axis=1)
        key = tl.where(columns[None, :] == best[:, None], float("-inf"), key)
        chosen = tl.where(place[None, :] == j, best[:, None], chosen)
    wanted = live[:, None] & (place < K)[None, :]
    # The unbiased score of the chosen, computed again from the logits: the key has lost bits to the bias.
    weight = _sigmoid(tl.load(at + chosen, mask=wanted, other=0.0))
    weight = tl.where(wanted, weight, 0.0)
    if NORM:
        total = tl.sum(weight, axis=1) + 1e-20
        weight = tl.math.div_rn(weight, tl.broadcast_to(total[:, None], weight.shape))
    slot = rows[:, None] * K + place[None, :]
    tl.store(ids64 + slot, chosen.to(tl.int64), mask=wanted)
    tl.store(weights + slot, weight * scaling, mask=wanted)
    if SINGLE and BT == 1:
        # One token: its experts differ, so an expert's position is the number of chosen experts below it.
        mine = tl.reshape(chosen, [K_PAD])
        valid = place < K
        below = ((mine[None, :] < mine[:, None]) & valid[None, :]).to(tl.int32)
        position = tl.sum(below, axis=1)
        tl.store(sorted_slots + position, place, mask=valid)
        tl.store(tiles + 4 * position, mine, mask=valid)
        tl.store(tiles + 4 * position + 1, position, mask=valid)
        tl.store(tiles + 4 * position + 2, position + 1, mask=valid)
        tl.store(tiles + 3, K)
    else:
        taken = ((key == float("-inf")) & inside[None, :] & live[:, None]).to(tl.int32)
        counts = tl.sum(taken, axis=0)
        before = tl.cumsum(taken, axis=0) - taken  # pairs of this expert among earlier tokens of the chunk
        if SINGLE:
            offsets = tl.cumsum(counts, axis=0) - counts
            before += offsets[None, :]
            write_tiles(tiles, counts, offsets, BLOCK_M)
            tl.store(sorted_slots + tl.gather(before, chosen, axis=1), slot, mask=wanted)
        else:
            tl.store(histogram + chunk * E + columns, counts, mask=inside)
            tl.store(ids + slot, chosen, mask=wanted)
            tl.store(ranks + slot, tl.gather(before, chosen, axis=1), mask=wanted)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def route_quantise_kernel(
    logits, bias, hidden, ids64, ids, weights, ranks, histogram, sorted_slots, tiles, x_q, x_scale,
    tokens, scaling, chunks,
    H: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    BT: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr, MODE: tl.constexpr, BQ: tl.constexpr,
):
    """MODE 'fp8' quantises, 'none' only routes. Grid: chunks + ceil(T / BQ) * H / 128 programs (or chunks)."""
    pid = tl.program_id(0)
    if pid < chunks:
        route_chunk(
            logits, bias, ids64, ids, weights, ranks, histogram, sorted_slots, tiles, tokens, scaling, pid,
            E, E_PAD, K, K_PAD, BT, HAS_BIAS, NORM, SINGLE, BLOCK_M,
        )
    else:
        if MODE == "fp8":
            quantise_tile(hidden, x_q, x_scale, tokens, pid - chunks, H, BQ, COLUMN_MAJOR)
