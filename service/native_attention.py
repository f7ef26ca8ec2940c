"""The plan of attention by the compiled kernel, known to transformers under the name `moe_parity_native`.

Every packed row is attended on its own, over the blocks of its own sequence and in a fixed order, so its bits cannot
depend on the batch, and a preempted sequence recomputed as a prefill gets the bits it had when decoding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_kernels.native import library
from service.attention import Span
from service.engine.kv_cache import PagedKV

NAME = "moe_parity_native"


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Row t of a step sees the first `lengths[t]` tokens in `blocks[starts[t]...]`, all int32 on the CPU.

    Padding rows have length 0 and get zeros.
    """

    blocks: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int

    def attend(self, kv: PagedKV, query: Tensor, layer: int, scaling: float) -> Tensor:
        """Attention of packed queries [T, heads * head_dim] over the pool of one layer; the same shape comes back."""
        native = library()
        assert native is not None  # or there would be no such plan
        return native.paged_attention(query.contiguous(), kv.k_slots[layer], kv.v_slots[layer], self.blocks,
                                      self.starts, self.lengths, self.longest, kv.block, kv.heads, scaling)


def plan(spans: list[Span], rows: int) -> NativePlan:
    """The plan of a packed batch of `rows` rows, padding included."""
    queries = np.fromiter((span.queries for span in spans), np.int32, len(spans))
    held = (len(span.blocks) for span in spans[:-1])
    first = np.fromiter(itertools.accumulate(held, initial=0), np.int32, len(spans))
    lengths = np.fromiter((span.kv_len for span in spans), np.int32, len(spans))
    longest = int(lengths.max())
    tokens = int(queries.sum())
    starts = np.zeros(rows, dtype=np.int32)
    seen = np.zeros(rows, dtype=np.int32)
    starts[:tokens] = np.repeat(first, queries)
    # A span's last row sees all of it, each row before one token less.
    ends = np.cumsum(queries, dtype=np.int32)
    seen[:tokens] = np.repeat(lengths - ends, queries) + np.arange(1, tokens + 1, dtype=np.int32)
    blocks = np.fromiter(itertools.chain.from_iterable(span.blocks for span in spans), np.int32)
    return NativePlan(torch.from_numpy(blocks), torch.from_numpy(starts), torch.from_numpy(seen), longest)
