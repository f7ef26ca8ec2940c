"""Attention over the paged KV cache, registered with transformers under the name `moe_parity_paged`.

One packed batch holds decoding sequences (one query each), then prefill chunks, then padding. Decoding sequences are
gathered block-wise and run as one batched SDPA per group of similar length; each prefill chunk runs on its own.

Every query's result must depend on its own sequence only, to the bit. Three rules give that, where the kernels allow:
query heads that share a KV head are folded into the rows of one product, rows are never fewer than `min_rows`, and the
KV length is padded (and masked) to a multiple of `kv_tile`. `choose_tiles` finds the smallest tile for which
torch's SDPA really is bit-equal for a head shape and dtype, by trying.
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
GROUP_ELEMENTS = 200_000  # elements of keys read in the time one more group takes to start (2 cores: about 40 us)
FLASH_KV = 512  # KV rows torch's CPU flash kernel takes at a time (kvSplitSize in FlashAttentionKernel.cpp)


@dataclass(frozen=True)
class Tiles:
    """How queries and KV lengths are padded; `invariant` says whether bit-equality was found with them."""

    kv_tile: int
    min_rows: int
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
    min_rows: int


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What travels through the model's keyword arguments to the attention function."""

    kv: Any  # PagedKV here, PagedLatent in service.latent
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's part of the packed batch: `queries` rows, of `kv_len` tokens in `blocks`."""

    queries: int
    kv_len: int
    blocks: list[int]


def plan(
    spans: list[Span], block: int, heads: int, row: int, tiles: Tiles, device: torch.device
) -> AttentionPlan:
    """Group the spans of a packed batch; decoding spans (one query) must come first, shortest first.

    `heads` is the number of query heads that share one KV head, `row` the elements of one token's keys.
    """
    decode = list(itertools.takewhile(lambda span: span.queries == 1, spans))
    groups, start = [], 0
    for members in _similar(decode, tiles.kv_tile, GROUP_ELEMENTS / (tiles.kv_tile * row)):
        groups.append(_decode_group(members, start, block, tiles.kv_tile, device))
        start += len(members)
    for span in spans[len(decode) :]:
        for first in range(0, span.queries, QUERY_TILE):
            count = min(QUERY_TILE, span.queries - first)
            position = span.kv_len - span.queries + first  # of the tile's first query
            groups.append(_prefill_group(span, start, position, count, block, heads, tiles.kv_tile, device))
            start += count
    return AttentionPlan(tuple(groups), start, tiles.min_rows)


def _similar(spans: list[Span], tile: int, group_cost: float) -> list[list[Span]]:
    """Split spans, ordered by length, into the groups of least cost.

    A group costs `group_cost` plus its sequences times its longest member's tiles (all in tiles). Solved exactly over
    the few distinct tile counts.
    """
    buckets = [(size, list(members)) for size, members in itertools.groupby(spans, lambda s: -(-s.kv_len // tile))]
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first j buckets, and where the last group begins
    for j, (size, _) in enumerate(buckets):
        options, sequences = [], 0
        for first in range(j, -1, -1):
            sequences += len(buckets[first][1])
            options.append((best[first][0] + group_cost + sequences * size, first))
        best.append(min(options))
    groups, end = [], len(buckets)
    while end:
        first = best[end][1]
        groups.append([span for _, members in buckets[first:end] for span in members])
        end = first
    return groups[::-1]


def _decode_group(spans: list[Span], start: int, block: int, tile: int, device: torch.device) -> Group:
    length = _ceil(max(span.kv_len for span in spans), tile)
    width = length // block
    table = np.full((len(spans), width), ZERO_BLOCK, dtype=np.int64)
    for row, span in zip(table, spans, strict=True):
        used = -(-span.kv_len // block)
        row[:used] = span.blocks[:used]
    lengths = np.fromiter((span.kv_len for span in spans), np.int64, len(spans))
    mask = np.arange(length)[None, :] < lengths[:, None]
    return Group(start, len(spans), 1, torch.from_numpy(table.ravel()).to(device),
                 torch.from_numpy(mask[:, None, None, :]).to(device))


def _prefill_group(span: Span, start: int, position: int, count: int, block: int, heads: int, tile: int,
                   device: torch.device) -> Group:
    length = _ceil(position + count, tile)
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
        raise RuntimeError(f"attention '{NAME}' needs a `paged` context: call the model through service.engine")
    _, heads, tokens, dim = query.shape
    out = attend(paged, query[0].transpose(0, 1).reshape(tokens, -1), int(module.layer_idx), scaling)  # type: ignore
    return out.view(1, tokens, heads, dim), None


def attend(paged: PagedContext, query: Tensor, layer: int, scaling: float) -> Tensor:
    """Attention of packed queries [T, heads * head_dim] over the pool of one layer; the same shape comes back."""
    kv, steps = paged.kv, paged.plan
    tokens, width = query.shape
    dim = kv.head_dim
    rows = query.view(tokens, kv.heads, -1, dim)
    per_kv = rows.shape[2]
    k_pool, v_pool = kv.k_blocks[layer], kv.v_blocks[layer]
    parts = []
    for group in steps.groups:
        n, q_count = group.sequences, group.queries
        k = k_pool.index_select(0, group.table).view(n, -1, kv.heads, dim).transpose(1, 2)
        v = v_pool.index_select(0, group.table).view(n, -1, kv.heads, dim).transpose(1, 2)
        q = rows[group.start : group.start + n * q_count]
        if q_count == 1:
            out = sdpa(q, k, v, group.mask, scaling, steps.min_rows).reshape(n, width)
        else:
            q = q.transpose(0, 1).reshape(1, kv.heads, q_count * per_kv, dim)
            out = sdpa(q, k, v, group.mask, scaling, steps.min_rows)
            out = out.view(kv.heads, q_count, per_kv, dim).transpose(0, 1).reshape(q_count, width)
        parts.append(out)
    if steps.tokens < tokens:
        parts.append(query.new_zeros(tokens - steps.tokens, width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, min_rows: int) -> Tensor:
    """SDPA with at least `min_rows` query rows: products with fewer take other code paths and round differently."""
    rows = q.shape[2]
    if rows >= min_rows:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    q = F.pad(q, (0, 0, 0, min_rows - rows))
    if mask.shape[2] != 1:
        mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, min_rows - rows, -1)], dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)[:, :, :rows]


@lru_cache(maxsize=32)
def choose_tiles(kv_heads: int, per_kv: int, head_dim: int, dtype: torch.dtype, block: int,
                 device_type: str = "cpu") -> Tiles:
    """The smallest (kv_tile, min_rows) for which SDPA gives the same bits however a query is batched.

    Tried on random data: a lone query padded to its own tile, against the same query padded to every longer length,
    in a batch of several, and as the first and last row of chunks of several sizes. Where nothing holds, `invariant`
    is False and the engine's results agree to rounding only.
    """
    for min_rows, tile in itertools.product((1, 8, 16), (64, 128, 256, FLASH_KV)):
        if tile % block == 0 and _bit_equal(kv_heads, per_kv, head_dim, dtype, tile, min_rows, device_type):
            return Tiles(tile, min_rows, True)
    return Tiles(_ceil(64, block), 8, False)


@torch.inference_mode()
def _bit_equal(kv_heads: int, per_kv: int, dim: int, dtype: torch.dtype, tile: int, min_rows: int,
               device_type: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    longest = FLASH_KV + tile
    shape = (kv_heads, longest, dim)
    k = torch.randn(shape, generator=generator).to(device_type, dtype)
    v = torch.randn(shape, generator=generator).to(device_type, dtype)
    queries = (torch.randn(kv_heads, longest, per_kv, dim, generator=generator) * 2).to(device_type, dtype)
    columns = torch.arange(longest, device=device_type)

    def attend(first: int, count: int, length: int, batch: int = 1) -> Tensor:
        q = queries[:, first : first + count].reshape(1, kv_heads, count * per_kv, dim).expand(batch, -1, -1, -1)
        rows = torch.arange(first, first + count, device=device_type).repeat_interleave(per_kv)
        mask = (columns[:length] <= rows[:, None])[None, None]
        out = sdpa(q, k[None, :, :length].expand(batch, -1, -1, -1), v[None, :, :length].expand(batch, -1, -1, -1),
                    mask, dim**-0.5, min_rows)
        return out[-1].view(kv_heads, count, per_kv, dim)

    for position in (3, tile // 2 + 1, tile - 1, tile + 5, 2 * tile + 7, FLASH_KV - 2, FLASH_KV + 3):
        if position >= longest:
            continue
        own = attend(position, 1, _ceil(position + 1, tile))
        for length in range(_ceil(position + 1, tile), longest + 1, tile):
            if not torch.equal(own, attend(position, 1, length)):
                return False
        if not torch.equal(own, attend(position, 1, _ceil(position + 1, tile), batch=5)):
            return False
        for count in (2, 3, 5, 8, 17, 33, 64, 128):
            first = position - count + 1
            if first >= 0 and not torch.equal(own, attend(first, count, _ceil(position + 1, tile))[:, -1:]):
                return False
            if position + count <= longest and not torch.equal(
                    own, attend(position, count, _ceil(position + count, tile))[:, :1]):
                return False
    return True


def register() -> None:
    """Make the name known to transformers; it builds no mask for names it has no mask function for."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
