"""Inputs of the serving-operation tests: a paged cache whose every byte outside the sequences is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 16


def paged(
    lengths: list[int], q_heads: int, kv_heads: int, dim: int, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k_pool, v_pool, block_table, seq_lens): blocks scattered, unused table entries far out of the pool."""
    g = torch.Generator().manual_seed(seed + sum(lengths))
    counts = [-(-n // PAGE) for n in lengths]
    total = sum(counts) + 1
    order = (torch.randperm(total - 1, generator=g) + 1).tolist()
    pools = [torch.full((total, PAGE, kv_heads, dim), float("nan")) for _ in range(2)]
    table = torch.full((len(lengths), max(1, max(counts))), 10**6, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for page in range(count):
            block = order.pop()
            table[row, page] = block
            here = min(PAGE, length - page * PAGE)
            for pool in pools:
                pool[block, :here] = torch.randn(here, kv_heads, dim, generator=g)
    q = torch.randn(len(lengths), q_heads, dim, generator=g).bfloat16()
    k, v = (pool.bfloat16().to(device) for pool in pools)
    return q.to(device), k, v, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
