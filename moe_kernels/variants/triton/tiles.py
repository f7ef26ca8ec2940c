"""The tile table: which expert and which sorted rows each GEMM tile covers, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl

# The table is int32 [max_tiles, 4]: expert, first sorted row, the row after the expert's last; the fourth column
# of the first line holds the number of tiles.


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """An upper bound of the number of tiles, known without looking at the routing."""
    return min(pairs, experts + pairs // block_m)


@triton.jit
def write_tiles(tiles, counts, offsets, BLOCK_M: tl.constexpr):
    """Write the table from per-expert counts and offsets, both int32 [E_PAD]."""
    experts = tl.arange(0, counts.shape[0])
    wanted = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(wanted, axis=0) - wanted
    most = tl.max(wanted, axis=0)
    for i in range(0, most):
        mask = i < wanted
        where = 4 * (first + i)
        tl.store(tiles + where, experts, mask=mask)
        tl.store(tiles + where + 1, offsets + i * BLOCK_M, mask=mask)
        tl.store(tiles + where + 2, offsets + counts, mask=mask)
    tl.store(tiles + 3, tl.sum(wanted, axis=0))
