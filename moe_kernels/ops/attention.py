"""Attention over the paged KV cache: one query a sequence, or chunks of queries."""

from __future__ import annotations

from torch import Tensor

from moe_kernels.ops import reference
from moe_kernels.ops.reference import Quantised


def paged_decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float
) -> Tensor:
    """One query a sequence: q [B, Hq, D] -> [B, Hq, D].

    k_pool, v_pool [blocks, block_size, Hkv, D] of one layer; block_table int32 [B, max_blocks] (entries beyond a
    sequence's blocks are not read); seq_lens int32 [B], the new token included, 0 for a padding row (gives zeros).
    The KV length is split at places that depend on the row's own length only.
    """
    return reference.paged_decode(q, k_pool, v_pool, block_table, seq_lens, scaling)


def paged_decode_quantised(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float
) -> Quantised:
    """`paged_decode` as [B, Hq * D] quantised for an `Fp8Linear`; D must be 128."""
    return reference.quantise(paged_decode(q, k_pool, v_pool, block_table, seq_lens, scaling).flatten(1))


def paged_prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor,
    scaling: float, max_query: int,
) -> Tensor:
    """Causal attention of chunks: q [T, Hq, D] packed -> [T, Hq, D].

    query_start int32 [S + 1]: sequence s has rows query_start[s] to query_start[s + 1], the last tokens of its
    seq_lens[s] (these included); rows from query_start[S] on are padding and give zeros. `max_query` is the largest
    number of rows of a sequence (a host number, it sets the grid). Pools and block_table as in `paged_decode`.
    """
    return reference.paged_prefill(q, k_pool, v_pool, block_table, query_start, seq_lens, scaling)
