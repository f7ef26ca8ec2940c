"""The paged KV pool of the GPU forward, and the block tables of running sequences on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from service.engine.sequence import Sequence


class GpuKV:
    """Keys and values of all layers, [layers, blocks + 2, block, kv_heads, head_dim] each.

    Block 0 is never written, as on the CPU; the last block takes what padding rows write.
    """

    def __init__(self, layers: int, blocks: int, block: int, heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.block, self.heads, self.head_dim, self.dtype, self.device = block, heads, head_dim, dtype, device
        self.pad_block = blocks + 1
        shape = (layers, blocks + 2, block, heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(k, v) for k, v in zip(self.k, self.v, strict=True)]

    @property
    def pad_slot(self) -> int:
        """Where padding rows write."""
        return self.pad_block * self.block

    def zero(self, blocks: list[int]) -> None:
        """Wipe blocks that may hold NaN."""
        index = to_device(np.asarray(blocks, dtype=np.int64), self.device)
        self.k.index_fill_(1, index, 0)
        self.v.index_fill_(1, index, 0)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device that never waits for it: through pinned memory, which torch keeps until it is read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


class Rows:
    """Gives every running sequence a row: of the block table, and of the tokens that only the device knows yet.

    Row `pad` belongs to nobody; its table names the pad block. A row is free again once its sequence holds no blocks.
    """

    def __init__(self, count: int, width: int, pad_block: int, device: torch.device) -> None:
        self.pad, self.width, self.device = count, width, device
        self.table = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
        self.table[count, 0] = pad_block
        self.last_token = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self._free = list(range(count - 1, -1, -1))
        self._rows: dict[Sequence, int] = {}
        self._known: list[tuple[list[int] | None, int]] = [(None, 0)] * count  # the blocks' list, and how many are up

    def __getitem__(self, sequence: Sequence) -> int:
        return self._rows[sequence]

    def update(self, sequences: list[Sequence]) -> None:
        """Rows for all of them, and their new blocks on the device."""
        where: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            row = self._rows.get(sequence)
            if row is None:
                row = self._rows[sequence] = self._take()
            known, count = self._known[row]
            if known is not sequence.blocks:
                count = 0
            elif count == len(known):
                continue
            fresh = sequence.blocks[count:]
            if fresh:
                first = row * self.width + count
                where.extend(range(first, first + len(fresh)))
                blocks.extend(fresh)
                self._known[row] = (sequence.blocks, count + len(fresh))
        if where:
            both = to_device(np.asarray([where, blocks], dtype=np.int64), self.device)
            self.table.view(-1).index_copy_(0, both[0], both[1].int())

    def _take(self) -> int:
        if not self._free:
            for sequence in [s for s in self._rows if not s.blocks]:
                self._free.append(self._rows.pop(sequence))
        return self._free.pop()
