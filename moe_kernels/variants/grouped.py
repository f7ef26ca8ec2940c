"""Matrix products over tokens sorted by expert, with rows whose bits do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.batch_invariant import padded_rows
from moe_kernels.native import DTYPES, fits, library
from moe_kernels.records import Routing


class Cost(NamedTuple):
    """Work of the products on a CPU in rows of a bmm; moves speed only, never bits.

    A separate product of n rows costs `ratio` * n + `call`; no product costs less than `floor` rows, since it
    reads its matrix. Fitted to timings on 2 cores (H 512, I 128, E 16, 8 to 64 rows).
    """

    ratio: float
    call: int
    floor: int

    def separate(self, rows: int) -> float:
        """One expert's own product."""
        return self.ratio * max(rows, self.floor) + self.call

    def block(self, experts: int, rows: int) -> float:
        """A bmm over all experts, `rows` each."""
        return experts * max(rows, self.floor) if rows else 0.0


CPU_COST = {torch.float32: Cost(1.4, 4, 8), torch.bfloat16: Cost(1.1, 64, 16)}


@dataclass(frozen=True)
class Layout:
    """Where sorted rows lie in the padded buffer that the products read.

    The first `batched` rows of every expert form one block [E, batched, K] for a single bmm; what exceeds it
    goes to one product per expert. `position` int64 [R]; `rest` (expert, first row, end row) of the latter.
    """

    batched: int
    position: Tensor
    rest: list[tuple[int, int, int]]
    total: int


@dataclass(frozen=True)
class Dispatch:
    """The R = T * k (token, slot) pairs sorted by expert; within an expert by token.

    `token` int64 [R]: token of each sorted row. `expert` int64 [R]: its expert, ascending. `slot_row` int64
    [T, k]: sorted row of each pair. `counts`: rows per expert, E integers on the host (the one
    synchronisation a layer makes). `place` int64 [R], only of plans that `packed.Packed` makes: those keep token order,
    have no counts, and row r is found at `place[r]` among the results of every token with every expert.
    """

    token: Tensor
    expert: Tensor
    slot_row: Tensor
    counts: list[int]
    place: Tensor | None = None
    _layouts: dict[Cost | None, Layout] = field(default_factory=dict)

    def gathered(self) -> Dispatch:
        """The same plan for rows that were gathered to their experts already: row r is its own token."""
        return replace(self, token=torch.arange(self.token.shape[0], device=self.token.device))

    def layout(self, cost: Cost | None) -> Layout:
        """The cheapest layout under `cost`; None: no bmm at all."""
        if cost not in self._layouts:
            self._layouts[cost] = self._place(cheapest_batch(self.counts, cost) if cost else 0)
        return self._layouts[cost]

    def _place(self, batched: int) -> Layout:
        rest, end, first, low, high = [], batched * len(self.counts), 0, [], []
        for expert, count in enumerate(self.counts):
            low.append(expert * batched - first)  # row + low: place in the block; row + high: place after it
            high.append(end - batched - first)
            first += count
            if count > batched:
                rest.append((expert, end, end := end + padded_rows(count - batched)))
        device = self.token.device
        row = torch.arange(self.token.shape[0], device=device)
        if not batched:
            position = row + torch.tensor(high, device=device)[self.expert]
        else:
            in_block = torch.tensor(low, device=device)[self.expert] + row
            position = in_block
            if rest:
                after = torch.tensor(high, device=device)[self.expert] + row
                position = torch.where(in_block < (self.expert + 1) * batched, in_block, after)
        return Layout(batched, position, rest, end)


def cheapest_batch(counts: list[int], cost: Cost) -> int:
    """Rows per expert for the bmm, a multiple of ROW_MULTIPLE or 0, that makes the estimated work least."""
    sizes = sorted((padded_rows(n) for n in counts if n), reverse=True)
    best, least = 0, sum(map(cost.separate, sizes))
    above = 0  # padded rows of the experts before this one
    for i, size in enumerate(sizes):
        # experts above `size` keep a separate product each; their floor is left out of the estimate
        work = cost.block(len(counts), size) + cost.ratio * (above - i * size) + cost.call * i
        if work < least:
            best, least = size, work
        above += size
    return best


def dispatch(routing: Routing, num_experts: int) -> Dispatch:
    """Sort the chosen (token, slot) pairs by expert."""
    tokens, k = routing.ids.shape
    flat = routing.ids.reshape(-1)
    expert, order = flat.sort(stable=True)
    slot_row = torch.empty_like(order)
    slot_row[order] = torch.arange(order.shape[0], device=order.device)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return Dispatch(order // k, expert, slot_row.view(tokens, k), counts)


Matrix = Callable[[int], Tensor]  # expert -> [N, K]


def grouped_linear(x: Tensor, plan: Dispatch, matrices: Tensor | Matrix) -> Tensor:
    """Row r of x [R, K] times the matrix of its expert, transposed: [R, N] in x.dtype.

    `matrices` is [E, N, K], or a function that makes one expert's [N, K] when it is needed; the bits are the
    same. FP32 products accumulate in FP32; BF16 ones accumulate in FP32 and are rounded to BF16.
    """
    stacked = isinstance(matrices, Tensor)
    layout = plan.layout(CPU_COST.get(x.dtype) if stacked and x.device.type == "cpu" else None)
    padded = x.new_zeros(layout.total, x.shape[1])
    padded[layout.position] = x
    out = None
    if layout.batched:
        assert isinstance(matrices, Tensor)
        block = len(plan.counts) * layout.batched
        out = x.new_empty(layout.total, matrices.shape[1])
        torch.bmm(
            padded[:block].view(len(plan.counts), layout.batched, -1), matrices.transpose(1, 2),
            out=out[:block].view(len(plan.counts), layout.batched, -1))
    for expert, start, end in layout.rest:
        weight = matrices[expert] if isinstance(matrices, Tensor) else matrices(expert)
        if out is None:
            out = x.new_empty(layout.total, weight.shape[0])
        torch.mm(padded[start:end], weight.t(), out=out[start:end])
    assert out is not None  # callers return early when there is no row
    return out[layout.position]


def combine(rows: Tensor, routing: Routing, plan: Dispatch, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum over slots of weight * row in FP32, then in `dtype`: [T, H] from rows [R, H]; in slot order, no atomics."""
    kernels = library() if rows.device.type == "cpu" and fits(rows.dtype, rows.shape[-1]) and dtype in DTYPES else None
    if kernels is not None:
        return kernels.combine(rows.contiguous(), plan.slot_row, routing.weights.float().contiguous(), dtype)
    chosen = rows.view(*plan.slot_row.shape, -1) if plan.place is not None else rows[plan.slot_row]
    picked = chosen.float() * routing.weights.float().unsqueeze(-1)  # [T, k, H]
    total = picked[:, 0]
    for slot in range(1, picked.shape[1]):
        total = total + picked[:, slot]
    return total.to(dtype)
