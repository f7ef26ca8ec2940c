"""Attention over the paged KV cache: one query a sequence, or chunks of queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels.ops import reference
from moe_kernels.ops.elementwise import triton_dtype
from moe_kernels.ops.reference import Quantised
from moe_kernels.ops.runtime import ceil_div, kernels_run, launch_options, next_power_of_2

CHUNK = 256  # KV tokens of one split; sequences of more than CHUNK * MAX_SPLITS tokens get larger splits
MAX_SPLITS = 32
DECODE = {"BN": 128, "STAGES": 2, "num_warps": 4}  # the fastest in the first run of benchmarks/h200_ops.py
PREFILL = {"BM": 128, "BN": 64, "STAGES": 3, "num_warps": 8}


def paged_decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float
) -> Tensor:
    """One query a sequence: q [B, Hq, D] -> [B, Hq, D].

    k_pool, v_pool [blocks, block_size, Hkv, D] of one layer, D a power of two; block_table int32 [B, max_blocks]
    (entries beyond a sequence's blocks are not read); seq_lens int32 [B], the new token included, 0 for a padding row
    (gives zeros). The KV length is split at places that depend on the row's own length only.
    """
    if not kernels_run(q):
        return reference.paged_decode(q, k_pool, v_pool, block_table, seq_lens, scaling)
    return _decode(q, k_pool, v_pool, block_table, seq_lens, scaling, quantise=False).q


def paged_decode_quantised(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float
) -> Quantised:
    """`paged_decode` as [B, Hq * D] quantised for an `Fp8Linear`; one launch less where D is 128."""
    if not kernels_run(q) or q.shape[-1] != 128:
        from moe_kernels.ops.linear import quantise

        return quantise(paged_decode(q, k_pool, v_pool, block_table, seq_lens, scaling).flatten(1))
    return _decode(q, k_pool, v_pool, block_table, seq_lens, scaling, quantise=True)


def _decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float, *, quantise: bool
) -> Quantised:
    from moe_kernels.ops.kernels.attention import combine_splits_kernel, decode_kernel

    batch, heads, dim = q.shape
    page, kv_heads = k_pool.shape[1:3]
    max_blocks = block_table.shape[1]
    splits = min(MAX_SPLITS, ceil_div(max_blocks * page, CHUNK))
    part = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    scale = q.new_empty(0)
    out = torch.empty_like(q)
    if quantise:
        out = torch.empty(batch, heads * dim, dtype=torch.float8_e4m3fn, device=q.device)
        scale = torch.empty(heads, batch, dtype=torch.float32, device=q.device)
    if not batch:
        return Quantised(out, scale)
    group = heads // kv_heads
    options = launch_options(q)
    decode_kernel[(splits, kv_heads, batch)](
        q, k_pool, v_pool, block_table, seq_lens, part, lse, scaling * math.log2(math.e), max_blocks,
        HKV=kv_heads, GROUP=group, GROUP_PAD=max(16, next_power_of_2(group)), D=dim, PAGE=page, CHUNK=CHUNK,
        MAX_SPLITS=MAX_SPLITS, ASM=q.is_cuda, **DECODE, **options,
    )
    per_program = 1 if batch <= 4 else min(4, heads & -heads)
    combine_splits_kernel[(batch * heads // per_program,)](
        part, lse, seq_lens, out, scale, batch, splits, HQ=heads, D=dim, CHUNK=CHUNK, MAX_SPLITS=MAX_SPLITS,
        SPLITS_PAD=next_power_of_2(splits), HB=per_program, DTYPE=triton_dtype(q.dtype), QUANTISE=quantise,
        num_warps=max(1, per_program // 2), **options,
    )
    return Quantised(out, scale)


def paged_prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor,
    scaling: float, max_query: int,
) -> Tensor:
    """Causal attention of chunks: q [T, Hq, D] packed -> [T, Hq, D].

    query_start int32 [S + 1]: sequence s has rows query_start[s] to query_start[s + 1], the last tokens of its
    seq_lens[s] (these included); rows from query_start[S] on are padding and give zeros. `max_query` is the largest
    number of rows of a sequence (a host number, it sets the grid). Pools and block_table as in `paged_decode`.
    """
    if not kernels_run(q):
        return reference.paged_prefill(q, k_pool, v_pool, block_table, query_start, seq_lens, scaling)
    from moe_kernels.ops.kernels.attention import prefill_kernel

    tokens, heads, dim = q.shape
    page, kv_heads = k_pool.shape[1:3]
    sequences = seq_lens.shape[0]
    out = torch.empty_like(q)
    if tokens:
        prefill_kernel[(heads, max(1, ceil_div(max_query, PREFILL["BM"])), sequences + 1)](
            q, k_pool, v_pool, block_table, query_start, seq_lens, out, scaling * math.log2(math.e),
            block_table.shape[1], tokens, sequences, HQ=heads, HKV=kv_heads, D=dim, PAGE=page, ASM=q.is_cuda, **PREFILL,
            **launch_options(q),
        )
    return out
