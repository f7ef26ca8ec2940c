"""The same attention by the compiled kernel, registered with transformers under the name `moe_parity_native`.

Every packed row is attended on its own, over the blocks of its own sequence and in a fixed order, so its bits cannot
depend on the batch, and a preempted sequence recomputed as a prefill gets the bits it had when decoding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_kernels.native import Library, library
from service.attention import PagedContext, Span

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


def plan(spans: list[Span], rows: int) -> NativePlan:
    """The plan of a packed batch of `rows` rows, padding included."""
    queries = np.fromiter((span.queries for span in spans), np.int32, len(spans))
    first = np.fromiter(itertools.accumulate((len(span.blocks) for span in spans[:-1]), initial=0), np.int32, len(spans))
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


def attend(native: Library, paged: PagedContext, query: Tensor, layer: int, scaling: float) -> Tensor:
    """Attention of packed queries [T, heads * head_dim] over the pool of one layer; the same shape comes back."""
    kv, steps = paged.kv, paged.plan
    return native.paged_attention(query, kv.k_slots[layer], kv.v_slots[layer], steps.blocks, steps.starts, steps.lengths,
                                  steps.longest, kv.block, kv.heads, scaling)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, paged: PagedContext | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, as `service.attention.paged_attention`."""
    native = library()
    if paged is None or native is None:
        raise RuntimeError(f"attention '{NAME}' needs a `paged` context: call the model through service.engine")
    _, heads, tokens, dim = query.shape
    rows = query[0].transpose(0, 1).reshape(tokens, -1)
    return attend(native, paged, rows, int(module.layer_idx), scaling).view(1, tokens, heads, dim), None  # type: ignore


def register() -> None:
    """Make the name known to transformers; it builds no mask for names it has no mask function for."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
