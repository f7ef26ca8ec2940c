"""Which rows of a packed forward belong to which sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """Span i has `counts[i]` queries from row `starts[i]` on, the last of `lengths[i]` tokens of its sequence.

    `table` int32 [spans, blocks], `cumulative` int32 [spans + 1] and `kv_lengths` int32 [spans] are on the device.
    """

    starts: list[int]
    counts: list[int]
    lengths: list[int]
    table: Tensor
    cumulative: Tensor
    kv_lengths: Tensor

    @property
    def tokens(self) -> int:
        """Rows that are no padding."""
        return self.starts[-1] + self.counts[-1]
