"""Attention over the paged KV cache, registered with transformers under the name `moe_parity_paged`.

One packed batch holds decoding sequences (one query each), then prefill chunks, then padding. Decoding sequences are
gathered block-wise and run as one batched SDPA per padded KV length; prefill chunks run on their own.

Every query's result must depend on its own sequence only, to the bit. torch's kernel sums over the KV length in panels
whose size follows from that length, so two lengths round differently even where all that is added is masked. Therefore
the padded KV length is a function of a query's own position (`padded_length`), whoever else is in the batch, and a
prefill chunk is cut where that length changes. Query heads that share a KV head are folded into the rows of one
product, and rows come in multiples of `row_multiple`: a product of two rows rounds differently from one of four, also
as the remainder of a larger one. `choose_tiles` finds by trying whether that is enough.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.engine.kv_cache import ZERO_BLOCK

NAME = "moe_parity_paged"
QUERY_TILE = 128  # queries of a prefill chunk attended at once: bounds the mask's size
KV_TILE = 64  # smallest step of the padded KV length


@dataclass(frozen=True)
class Tiles:
    """Smallest step of KV lengths, multiple of query rows; `invariant`: whether bit-equality was found with them."""

    kv_tile: int
    row_multiple: int
    invariant: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Packed rows [start, start + sequences * queries) attended together.

    `table` int64 [sequences * padded_blocks] picks blocks; `mask` bool, True where visible, broadcasts against
    [sequences, kv_heads, rows, kv_len]; rows = queries * query heads per KV head.
    """

    start: int
    sequences: int
    queries: int
    table: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Made once a step and shared by all layers. Rows from `tokens` on are padding and get zeros."""

    groups: tuple[Group, ...]
    tokens: int
    row_multiple: int

    def attend(self, kv: Any, query: Tensor, layer: int, scaling: float) -> Tensor:
        """Attention of packed queries [T, heads * head_dim] over the pool of one layer; the same shape comes back."""
        tokens, width = query.shape
        dim = kv.head_dim
        rows = query.view(tokens, kv.heads, -1, dim)
        per_kv = rows.shape[2]
        k_pool, v_pool = kv.k_blocks[layer], kv.v_blocks[layer]
        parts = []
        for group in self.groups:
            n, q_count = group.sequences, group.queries
            k = k_pool.index_select(0, group.table).view(n, -1, kv.heads, dim).transpose(1, 2)
            v = v_pool.index_select(0, group.table).view(n, -1, kv.heads, dim).transpose(1, 2)
            q = rows[group.start : group.start + n * q_count]
            if q_count == 1:
                out = sdpa(q, k, v, group.mask, scaling, self.row_multiple).reshape(n, width)
            else:
                q = q.transpose(0, 1).reshape(1, kv.heads, q_count * per_kv, dim)
                out = sdpa(q, k, v, group.mask, scaling, self.row_multiple)
                out = out.view(kv.heads, q_count, per_kv, dim).transpose(0, 1).reshape(q_count, width)
            parts.append(out)
        if self.tokens < tokens:
            parts.append(query.new_zeros(tokens - self.tokens, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What travels through the model's keyword arguments to the attention function."""

    kv: Any  # PagedKV here, PagedLatent in service.latent
    plan: Any  # AttentionPlan here, NativePlan in service.native_attention


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's part of the packed batch: `queries` rows, of `kv_len` tokens in `blocks`."""

    queries: int
    kv_len: int
    blocks: list[int]


def padded_length(visible: int, tile: int) -> int:
    """KV length with which a query that sees `visible` tokens is attended, a multiple of `tile`.

    A step is `tile` up to 8 tiles and an eighth to a quarter of the length beyond, so that few lengths occur.
    """
    step = tile
    while 8 * step < visible:
        step *= 2
    return _ceil(visible, step)


def plan(spans: list[Span], block: int, heads: int, tiles: Tiles, device: torch.device) -> AttentionPlan:
    """Group the spans of a packed batch; decoding spans (one query) must come first, shortest first.

    `heads` is the number of query heads that share one KV head.
    """
    decode = list(itertools.takewhile(lambda span: span.queries == 1, spans))
    groups, start = [], 0
    for length, same in itertools.groupby(decode, lambda span: padded_length(span.kv_len, tiles.kv_tile)):
        members = list(same)
        groups.append(_decode_group(members, start, block, length, device))
        start += len(members)
    for span in spans[len(decode) :]:
        position = span.kv_len - span.queries
        while position < span.kv_len:
            length = padded_length(position + 1, tiles.kv_tile)
            count = min(QUERY_TILE, span.kv_len - position, length - position)
            groups.append(_prefill_group(span, start, position, count, block, heads, length, device))
            start, position = start + count, position + count
    return AttentionPlan(tuple(groups), start, tiles.row_multiple)


def _decode_group(spans: list[Span], start: int, block: int, length: int, device: torch.device) -> Group:
    width = length // block
    table = np.full((len(spans), width), ZERO_BLOCK, dtype=np.int64)
    for row, span in zip(table, spans, strict=True):
        used = -(-span.kv_len // block)
        row[:used] = span.blocks[:used]
    lengths = np.fromiter((span.kv_len for span in spans), np.int64, len(spans))
    mask = np.arange(length)[None, :] < lengths[:, None]
    return Group(start, len(spans), 1, torch.from_numpy(table.ravel()).to(device),
                 torch.from_numpy(mask[:, None, None, :]).to(device))


def _prefill_group(span: Span, start: int, position: int, count: int, block: int, heads: int, length: int,
                   device: torch.device) -> Group:
    table = np.full(length // block, ZERO_BLOCK, dtype=np.int64)
    used = -(-(position + count) // block)
    table[:used] = span.blocks[:used]
    rows = np.repeat(np.arange(position, position + count), heads)
    mask = np.arange(length)[None, :] <= rows[:, None]
    return Group(start, 1, count, torch.from_numpy(table).to(device), torch.from_numpy(mask[None, None]).to(device))


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, paged: PagedContext | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    `key` and `value` are this step's only and already in the pool, so they are not read.
    """
    if paged is None:
        raise RuntimeError("paged attention needs a `paged` context: call the model through service.engine")
    _, heads, tokens, dim = query.shape
    rows = query[0].transpose(0, 1).reshape(tokens, -1)
    out = paged.plan.attend(paged.kv, rows, int(module.layer_idx), scaling)  # type: ignore[arg-type]
    return out.view(1, tokens, heads, dim), None


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, row_multiple: int) -> Tensor:
    """SDPA with query rows padded to a multiple of `row_multiple`."""
    rows = q.shape[2]
    missing = -rows % row_multiple
    if not missing:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    q = F.pad(q, (0, 0, 0, missing))
    if mask.shape[2] != 1:
        mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)[:, :, :rows]


@lru_cache(maxsize=32)
def choose_tiles(kv_heads: int, per_kv: int, head_dim: int, dtype: torch.dtype, block: int,
                 device_type: str = "cpu") -> Tiles:
    """The least multiple of query rows for which SDPA gives the same bits however a query is batched, found by trying.

    Where nothing holds, `invariant` is False and the engine's results agree to rounding only.
    """
    tile = _ceil(KV_TILE, block)
    for row_multiple in (1, 4, 8, 16):
        if _bit_equal(kv_heads, per_kv, head_dim, dtype, tile, row_multiple, device_type):
            return Tiles(tile, row_multiple, True)
    return Tiles(tile, 4, False)


@torch.inference_mode()
def _bit_equal(kv_heads: int, per_kv: int, dim: int, dtype: torch.dtype, tile: int, row_multiple: int,
               device_type: str) -> bool:
    """Whether a query alone equals the same query in a batch of five and first, amid and last in chunks."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = min(kv_heads, 2)  # heads do not meet

    def attend(q: Tensor, k: Tensor, v: Tensor, first: int, batch: int = 1) -> Tensor:
        count, length = q.shape[1], k.shape[1]
        rows = torch.arange(first, first + count, device=device_type).repeat_interleave(per_kv)
        mask = (torch.arange(length, device=device_type) <= rows[:, None])[None, None]
        many = [x[None].expand(batch, -1, -1, -1) for x in (q.reshape(kv_heads, count * per_kv, dim), k, v)]
        return sdpa(many[0], many[1], many[2], mask, dim**-0.5, row_multiple)[-1].view(kv_heads, count, per_kv, dim)

    for length in (tile, 2 * tile, 3 * tile, 5 * tile, 8 * tile, 10 * tile, 12 * tile):
        begin = max(n for n in range(length) if padded_length(n + 1, tile) != length) + 1 if length > tile else 0
        for position in (begin, begin + 5, (begin + length) // 2, length - 1):
            q, k, v = (x.to(device_type, dtype) for x in _sensitive(generator, kv_heads, per_kv, dim, length, position))
            own = attend(q[:, position : position + 1], k, v, position)
            if not torch.equal(own, attend(q[:, position : position + 1], k, v, position, batch=5)):
                return False
            for count in (2, 3, 5, 8, 17, 33, 64, QUERY_TILE):
                for first in {position, position - count // 2, position - count + 1}:
                    if first >= begin and first + count <= length:
                        out = attend(q[:, first : first + count], k, v, first)
                        if not torch.equal(own[:, 0], out[:, position - first]):
                            return False
    return True


def _sensitive(generator: torch.Generator, kv_heads: int, per_kv: int, dim: int, length: int,
               position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [kv_heads, length, per_kv, dim], keys and values whose sums cancel for the query at `position`.

    What is left of them is rounding alone, so that another order of summation shows in nearly every element; on plain
    random data one BF16 result in a thousand tells.
    """
    def wide(*shape: int, spread: int) -> Tensor:
        exponents = torch.randint(0, spread, shape, generator=generator)
        return torch.randn(shape, generator=generator) * 2.0**exponents

    half = (dim + 1) // 2
    q, k = wide(kv_heads, length, per_kv, half, spread=11), wide(kv_heads, length, half, spread=8)
    q, k = torch.cat([q, q], -1)[..., :dim], torch.cat([k, -k], -1)[..., :dim]
    v = wide(kv_heads, length, dim, spread=12)
    seen = torch.randperm(position + 1, generator=generator)
    middle = (position + 1) // 2
    v[:, seen[middle : 2 * middle]] = -v[:, seen[:middle]]
    q[:, position, per_kv // 2 :] = 0.0  # weighs all alike, so that the values cancel; the others' scores do
    return q, k, v


def register(name: str = NAME) -> None:
    """Make a name known to transformers; it builds no mask for names it has no mask function for."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, paged_attention)
