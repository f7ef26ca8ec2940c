"""Paged attention: split-KV decoding, its combination, and causal prefill of chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.ops.kernels.common import begin
from moe_kernels.variants.triton.quant import quantise


@triton.jit
def split_size(length, CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """KV tokens of one split: CHUNK, or for long sequences the multiple of it that needs at most MAX_SPLITS splits."""
    return tl.maximum((length + CHUNK * MAX_SPLITS - 1) // (CHUNK * MAX_SPLITS), 1) * CHUNK


@triton.jit
def _tile_offsets(table, tokens, end, head, PAGE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """int64 offsets of the KV rows `tokens` (those from `end` on are clamped) in a pool [blocks, PAGE, HKV, D].

    With ASM the table is read by inline assembly: the pipeliner would make a stage of its own of a load that feeds
    addresses, and leave one tile in flight. `end` comes from a load behind the dependency wait, so this does too.
    """
    kept = tl.minimum(tokens, end - 1)
    at = table + kept // PAGE
    if ASM:
        block = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
                                          is_pure=True, pack=1)
    else:
        block = tl.load(at)
    return ((block.to(tl.int64) * PAGE + kept % PAGE) * HKV + head) * D


@triton.jit
def _attend_tile(queries, k, v, scale, mask, most, weight, acc, MASKED: tl.constexpr):
    """Online softmax over one KV tile. Multiply-adds are explicit, so that both forms give a visible token's bits."""
    raw = tl.dot(queries, tl.trans(k))
    if MASKED:
        peak = tl.max(tl.where(mask, raw, float("-inf")), axis=1)
    else:
        peak = tl.max(raw, axis=1)
    new = tl.maximum(most, peak * scale)
    p = tl.exp2(tl.fma(raw, tl.full(raw.shape, 1.0, tl.float32) * scale, tl.broadcast_to(-new[:, None], raw.shape)))
    if MASKED:
        p = tl.where(mask, p, 0.0)
    old = tl.exp2(most - new)
    weight = tl.fma(weight, old, tl.sum(p, axis=1))
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None])
    return new, weight, acc


@triton.jit(do_not_specialize=["scale", "max_blocks"])
def decode_kernel(
    q, k_pool, v_pool, block_table, seq_lens, part, part_lse, scale, max_blocks,
    HKV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one KV head's GROUP query heads. Grid: (splits, HKV, B); `scale` is scaling * log2(e).

    part FP32 [B, HKV * GROUP, splits, D] holds normalised outputs, part_lse FP32 [B, HKV * GROUP, splits] the log2 of
    their weight. A split's KV range depends on its own sequence's length only; splits beyond it return.
    """
    begin(PDL)
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    splits = tl.num_programs(0)
    length = tl.load(seq_lens + row)
    size = split_size(length, CHUNK, MAX_SPLITS)
    first = split * size
    end = tl.minimum(first + size, length)
    if first >= end:
        return
    group = tl.arange(0, GROUP_PAD)
    live = group < GROUP
    heads = row.to(tl.int64) * (HKV * GROUP) + head * GROUP + group
    dims = tl.arange(0, D)
    queries = tl.load(q + heads[:, None] * D + dims[None, :], mask=live[:, None], other=0.0)
    table = block_table + row.to(tl.int64) * max_blocks
    most = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([GROUP_PAD], dtype=tl.float32)
    acc = tl.zeros([GROUP_PAD, D], dtype=tl.float32)
    for start in tl.range(first, end, BN, num_stages=STAGES):
        tokens = start + tl.arange(0, BN)
        at = _tile_offsets(table, tokens, end, head, PAGE, HKV, D, ASM)[:, None] + dims[None, :]
        k, v = tl.load(k_pool + at), tl.load(v_pool + at)
        seen = (tokens < end)[None, :]
        most, weight, acc = _attend_tile(queries, k, v, scale, seen, most, weight, acc, True)
    where = heads * splits + split
    tl.store(part + where[:, None] * D + dims[None, :], acc / weight[:, None], mask=live[:, None])
    tl.store(part_lse + where, most + tl.log2(weight), mask=live)


@triton.jit(do_not_specialize=["batch", "splits"])
def combine_splits_kernel(
    part, part_lse, seq_lens, out, out_scale, batch, splits,
    HQ: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    HB: tl.constexpr, DTYPE: tl.constexpr, QUANTISE: tl.constexpr, PDL: tl.constexpr,
):
    """Weighted sum of a row's splits in order; zeros for a length of 0. Grid: B * HQ / HB.

    out [B, HQ, D] in DTYPE, or with QUANTISE (D = 128) E4M3 and out_scale FP32 [HQ, B].
    """
    begin(PDL)
    pid = tl.program_id(0)
    row = pid // (HQ // HB)
    heads = (pid % (HQ // HB)) * HB + tl.arange(0, HB)
    length = tl.load(seq_lens + row)
    size = split_size(length, CHUNK, MAX_SPLITS)
    used = (length + size - 1) // size
    index = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, D)
    base = (row.to(tl.int64) * HQ + heads) * splits
    lse = tl.load(part_lse + base[:, None] + index[None, :], mask=(index < used)[None, :], other=float("-inf"))
    most = tl.max(lse, axis=1)
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros([HB, D], dtype=tl.float32)
    weight = tl.zeros([HB], dtype=tl.float32)
    for s in tl.static_range(SPLITS_PAD):  # all loads at once; an absent split adds zero
        lse_s = tl.load(part_lse + base + s, mask=s < used, other=float("-inf"))
        value_s = tl.load(part + (base + s)[:, None] * D + dims[None, :], mask=s < used, other=0.0)
        share = tl.exp2(lse_s - most)
        weight += share
        total = tl.fma(tl.broadcast_to(share[:, None], [HB, D]), value_s, total)
    value = (total / tl.where(weight == 0, 1.0, weight)[:, None]).to(DTYPE)
    where = (row.to(tl.int64) * HQ + heads)[:, None] * D + dims[None, :]
    if QUANTISE:
        quantised, scale = quantise(value.to(tl.float32), 1e-10, 1)
        tl.store(out + where, quantised)
        tl.store(out_scale + heads.to(tl.int64) * batch + row, scale)
    else:
        tl.store(out + where, value)


@triton.jit(do_not_specialize=["scale", "max_blocks", "total_rows", "sequences"])
def prefill_kernel(
    q, k_pool, v_pool, block_table, query_start, seq_lens, out, scale, max_blocks, total_rows, sequences,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):
    """BM query rows of one head and sequence. Grid: (HQ, ceil(max_query / BM), S + 1); the last plane zeros padding.

    q, out [T, HQ, D]; KV tiles of BN start at token 0, so a row's sums do not depend on how its prompt was cut.
    """
    begin(PDL)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    sequence = tl.program_id(2)
    dims = tl.arange(0, D)
    offsets = tl.arange(0, BM)
    q_first = tl.load(query_start + sequence)
    if sequence == sequences:
        for start in range(q_first + tile * BM, total_rows, tl.num_programs(1) * BM):
            padding = start + offsets
            at = (padding.to(tl.int64)[:, None] * HQ + head) * D + dims[None, :]
            tl.store(out + at, tl.zeros([BM, D], dtype=out.dtype.element_ty), mask=(padding < total_rows)[:, None])
        return
    count = tl.load(query_start + sequence + 1) - q_first
    if tile * BM >= count:
        return
    length = tl.load(seq_lens + sequence)
    rows = tile * BM + offsets
    live = rows < count
    position = length - count + rows
    at = ((q_first + rows).to(tl.int64)[:, None] * HQ + head) * D + dims[None, :]
    queries = tl.load(q + at, mask=live[:, None], other=0.0)
    table = block_table + sequence.to(tl.int64) * max_blocks
    kv_head = head // (HQ // HKV)
    most = tl.full([BM], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    end = tl.minimum(length - count + (tile + 1) * BM, length)  # tokens that some row of this tile sees
    whole = (length - count + tile * BM + 1) // BN * BN  # tokens in tiles that every row sees wholly
    for start in tl.range(0, whole, BN, num_stages=STAGES):
        kv = _tile_offsets(table, start + tl.arange(0, BN), end, kv_head, PAGE, HKV, D, ASM)[:, None] + dims[None, :]
        k, v = tl.load(k_pool + kv), tl.load(v_pool + kv)
        most, weight, acc = _attend_tile(queries, k, v, scale, live[:, None], most, weight, acc, False)
    for start in tl.range(whole, end, BN, num_stages=STAGES):
        tokens = start + tl.arange(0, BN)
        kv = _tile_offsets(table, tokens, end, kv_head, PAGE, HKV, D, ASM)[:, None] + dims[None, :]
        k, v = tl.load(k_pool + kv), tl.load(v_pool + kv)
        seen = tokens[None, :] <= position[:, None]
        most, weight, acc = _attend_tile(queries, k, v, scale, seen, most, weight, acc, True)
    tl.store(out + at, (acc / weight[:, None]).to(out.dtype.element_ty), mask=live[:, None])
