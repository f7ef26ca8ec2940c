"""Paged KV cache: a pool of blocks, a free list, and the object transformers' attention calls as its cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ZERO_BLOCK = 0  # never written and never given to a sequence: what block tables are padded with


class BlockPool:
    """Free list of block numbers 1..blocks; the lowest free number goes first, so memory stays dense."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(1, blocks + 1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and no change) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; releasing a block twice is a bug and raises."""
        for block in blocks:
            self._used.remove(block)
            heapq.heappush(self._free, block)


class PagedKV:
    """Keys and values of all layers, [layers, blocks + 1, block, kv_heads, head_dim] each, zero at the start.

    `update` is the one method transformers' attention modules call: it writes this step's keys and values to the
    slots of the current plan and returns them unchanged, because `service.attention` reads the pool itself.
    """

    def __init__(self, layers: int, blocks: int, block: int, heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.block, self.heads, self.head_dim, self.dtype, self.device = block, heads, head_dim, dtype, device
        shape = (layers, blocks + 1, block, heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        row = heads * head_dim
        # Views made once: indexing a tensor costs microseconds, and there are layers x steps of them.
        self.k_slots = [layer.view(-1, row) for layer in self.k]
        self.v_slots = [layer.view(-1, row) for layer in self.v]
        self.k_blocks = [layer.view(blocks + 1, -1) for layer in self.k]
        self.v_blocks = [layer.view(blocks + 1, -1) for layer in self.v]
        self.slots: Tensor | None = None  # int64 [tokens without padding], set by the runner before each forward

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store key and value [1, kv_heads, T, head_dim] of the packed tokens; padding rows are not stored."""
        self.store(key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1), layer_idx)
        return key, value

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        """The same from rows [T, kv_heads * head_dim]."""
        slots = self.slots
        if slots is None:
            raise RuntimeError("the KV pool has no slots set: call the model through service.engine")
        tokens = slots.shape[0]
        self.k_slots[layer].index_copy_(0, slots, key[:tokens])
        self.v_slots[layer].index_copy_(0, slots, value[:tokens])

    def zero(self, blocks: list[int]) -> None:
        """Wipe blocks that may hold NaN: attention multiplies masked values by 0, and 0 x NaN is NaN."""
        index = torch.tensor(blocks, device=self.device)
        self.k.index_fill_(1, index, 0)
        self.v.index_fill_(1, index, 0)


class PagedLatent:
    """What multi-head latent attention caches: [layers, blocks + 1, block, latent + rope], zero at the start.

    A row is a token's compressed latent and its rotated shared key. Layers with an indexer (DSA) have a second pool of
    index keys. transformers hands both over at other places in other releases, so `service.latent` stores them;
    `update` is only called.
    """

    def __init__(self, layers: int, blocks: int, block: int, latent: int, rope: int, dtype: torch.dtype,
                 device: torch.device, index_layers: Iterable[int] = (), index_dim: int = 0) -> None:
        self.block, self.latent, self.rope, self.dtype, self.device = block, latent, rope, dtype, device
        self.pool = torch.zeros(layers, blocks + 1, block, latent + rope, dtype=dtype, device=device)
        self.index_keys = {i: torch.zeros(blocks + 1, block, index_dim, dtype=dtype, device=device)
                           for i in index_layers}
        self.slots: Tensor | None = None  # as PagedKV's
        self.plan: Any = None  # the step's attention plan, for the indexer

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Nothing: see the class."""
        return key, value

    def store(self, latent: Tensor, rotated: Tensor, layer: int) -> None:
        """Rows [T, latent] and [T, rope] of the packed tokens; padding rows are not stored."""
        self._write(self.pool[layer], torch.cat([latent, rotated], dim=-1))

    def store_index(self, key: Tensor, layer: int) -> None:
        """Rows [T, index_dim]."""
        self._write(self.index_keys[layer], key)

    def _write(self, pool: Tensor, rows: Tensor) -> None:
        if self.slots is None:
            raise RuntimeError("the KV pool has no slots set: call the model through service.engine")
        pool.view(-1, pool.shape[-1]).index_copy_(0, self.slots, rows[: self.slots.shape[0]])

    def gather(self, layer: int, table: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Latents [sequences, length, latent] and rotated keys [sequences, length, rope] of the blocks in `table`."""
        rows = self.pool[layer].index_select(0, table).view(sequences, -1, self.latent + self.rope)
        latent, rotated = rows.split([self.latent, self.rope], dim=-1)
        return latent, rotated

    def gather_index(self, layer: int, table: Tensor, sequences: int) -> Tensor:
        """Index keys [sequences, length, index_dim]."""
        pool = self.index_keys[layer]
        return pool.index_select(0, table).view(sequences, -1, pool.shape[-1])

    def zero(self, blocks: list[int]) -> None:
        """Wipe blocks that may hold NaN, as PagedKV.zero."""
        index = torch.tensor(blocks, device=self.device)
        self.pool.index_fill_(1, index, 0)
        for pool in self.index_keys.values():
            pool.index_fill_(0, index, 0)
