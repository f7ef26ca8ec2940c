"""Sorts (token, expert) pairs by expert on the device: a counting sort without atomics, stable in the token."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.variants.triton.tiles import write_tiles


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(
    ids64, ids, ranks, histogram, sorted_slots, tiles, tokens,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Histogram and ranks of one chunk for ids that came from outside (`route_chunk` makes them itself)."""
    chunk = tl.program_id(0)
    rows = chunk * BT + tl.arange(0, BT)
    columns = tl.arange(0, E_PAD)
    live = rows < tokens
    taken = tl.zeros([BT, E_PAD], dtype=tl.int32)
    for j in tl.static_range(K):
        best = tl.load(ids64 + rows * K + j, mask=live, other=-1).to(tl.int32)
        taken += (columns[None, :] == best[:, None]).to(tl.int32)
    counts = tl.sum(taken, axis=0)
    before = tl.cumsum(taken, axis=0) - taken
    if SINGLE:
        offsets = tl.cumsum(counts, axis=0) - counts
        before += offsets[None, :]
        write_tiles(tiles, counts, offsets, BLOCK_M)
    else:
        tl.store(histogram + chunk * E + columns, counts, mask=columns < E)
    for j in tl.static_range(K):
        slot = rows * K + j
        best = tl.load(ids64 + slot, mask=live, other=-1).to(tl.int32)
        rank = tl.sum(tl.where(columns[None, :] == best[:, None], before, 0), axis=1)
        if SINGLE:
            tl.store(sorted_slots + rank, slot, mask=live)
        else:
            tl.store(ids + slot, best, mask=live)
            tl.store(ranks + slot, rank, mask=live)


@triton.jit(do_not_specialize=["chunks"])
def prefix_kernel(histogram, before, totals, chunks, E: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr):
    """Per expert: pairs in earlier chunks (int32 [C, E]) and in all (int32 [E]). Grid: ceil(E / BE)."""
    columns = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = columns < E
    carry = tl.zeros([BE], dtype=tl.int32)
    for start in range(0, chunks, BC):
        rows = start + tl.arange(0, BC)
        where = rows[:, None] * E + columns[None, :]
        mask = (rows < chunks)[:, None] & inside[None, :]
        part = tl.load(histogram + where, mask=mask, other=0)
        tl.store(before + where, tl.cumsum(part, axis=0) - part + carry[None, :], mask=mask)
        carry += tl.sum(part, axis=0)
    tl.store(totals + columns, carry, mask=inside)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def scatter_kernel(
    ids, ranks, histogram, before, totals, sorted_slots, tiles, tokens, chunks,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, BLOCK_M: tl.constexpr, PREFIX: tl.constexpr,
):
    """Place the pairs of one chunk: position = expert's offset + pairs in earlier chunks + rank in the chunk.

    With few chunks every program sums the histograms [C, E] itself, which costs less than the launch of
    `prefix_kernel` (PREFIX), whose results it reads otherwise.
    """
    chunk = tl.program_id(0)
    columns = tl.arange(0, E_PAD)
    inside = columns < E
    if PREFIX:
        counts = tl.load(totals + columns, mask=inside, other=0)
        earlier = tl.load(before + chunk * E + columns, mask=inside, other=0)
    else:
        counts = tl.zeros([E_PAD], dtype=tl.int32)
        earlier = tl.zeros([E_PAD], dtype=tl.int32)
        for start in range(0, chunks, BC):
            rows = start + tl.arange(0, BC)
            part = tl.load(
                histogram + rows[:, None] * E + columns[None, :],
                mask=(rows < chunks)[:, None] & inside[None, :], other=0,
            )
            counts += tl.sum(part, axis=0)
            earlier += tl.sum(tl.where((rows < chunk)[:, None], part, 0), axis=0)
    offsets = tl.cumsum(counts, axis=0) - counts
    if chunk == 0:
        write_tiles(tiles, counts, offsets, BLOCK_M)
    pairs = tl.arange(0, BP)
    slots = chunk * (BT * K) + pairs
    live = (pairs < BT * K) & (slots < tokens * K)
    expert = tl.load(ids + slots, mask=live, other=0)
    position = tl.gather(offsets + earlier, expert, axis=0) + tl.load(ranks + slots, mask=live, other=0)
    tl.store(sorted_slots + position, slots, mask=live)
