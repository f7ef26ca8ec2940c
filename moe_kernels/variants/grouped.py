"""Matrix products over tokens sorted by expert, with rows whose bits do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.records import Routing

# CPU BLAS picks its inner kernel by the number of rows, so a row's last bits can change with its neighbours.
# Measured (torch 2.13, MKL and oneDNN, AVX512, 1 and 2 threads, FP32 and BF16, 13 shapes from 60x100 to
# 4096x2816): rows differ for 1, 2, 3, 5, 6, 7, 9, 10 and 11 rows, and never for a multiple of 4, in
# F.linear and torch.bmm alike, which also agree with each other. tests/kernels/test_variants_batch.py checks
# it where it runs; on a GPU it does not hold and nothing here claims it.
ROW_MULTIPLE = 4


def padded_rows(count: int) -> int:
    """`count` rounded up to a multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x [M, K], weight [N, K]) with rows that on a CPU do not depend on M."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    if not missing:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight)[: x.shape[0]]


@dataclass(frozen=True)
class Dispatch:
    """The R = T * k (token, slot) pairs sorted by expert; within an expert by token.

    `token` int64 [R]: token of each sorted row. `expert` int64 [R]: its expert, ascending. `slot_row` int64
    [T, k]: sorted row of each pair. `counts`: rows per expert, E integers on the host (the one
    synchronisation a layer makes).
    """

    token: Tensor
    expert: Tensor
    slot_row: Tensor
    counts: list[int]

    @cached_property
    def batched(self) -> bool:
        """One padded bmm over all experts (True) or one product per expert that has rows.

        Both give the same bits; measured on 2 cores (H 512, I 128, E 16) bmm takes half to two thirds of the
        loop's time per padded row, so it wins until padding every expert to the fullest one costs more.
        """
        each = [padded_rows(n) for n in self.counts]
        return self.token.device.type == "cpu" and len(each) * max(each, default=0) <= 1.5 * sum(each)

    @cached_property
    def placement(self) -> tuple[Tensor, list[int]]:
        """Where each sorted row lies in the padded buffer, int64 [R], and each expert's first row (E + 1)."""
        if self.batched:
            size = padded_rows(max(self.counts))
            starts = [e * size for e in range(len(self.counts) + 1)]
        else:
            starts = [0]
            for n in self.counts:
                starts.append(starts[-1] + padded_rows(n))
        shift, first = [], 0
        for start, n in zip(starts, self.counts, strict=False):
            shift.append(start - first)
            first += n
        rows = torch.arange(self.token.shape[0], device=self.token.device)
        return rows + torch.tensor(shift, device=rows.device)[self.expert], starts


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
    position, starts = plan.placement
    padded = x.new_zeros(starts[-1], x.shape[1])
    padded[position] = x
    if isinstance(matrices, Tensor) and plan.batched:
        blocks = padded.view(matrices.shape[0], -1, x.shape[1])
        return torch.bmm(blocks, matrices.transpose(1, 2)).flatten(0, 1)[position]
    out = None
    for expert, count in enumerate(plan.counts):
        if not count:
            continue
        weight = matrices[expert] if isinstance(matrices, Tensor) else matrices(expert)
        if out is None:
            out = x.new_empty(starts[-1], weight.shape[0])
        part = slice(starts[expert], starts[expert] + padded_rows(count))
        out[part] = F.linear(padded[part], weight)
    assert out is not None  # callers return early when there is no row
    return out[position]


def combine(rows: Tensor, routing: Routing, plan: Dispatch) -> Tensor:
    """Sum over slots of weight * row, FP32 [T, H] from rows [R, H]: always in slot order, no atomics."""
    picked = rows.float()[plan.slot_row] * routing.weights.float().unsqueeze(-1)  # [T, k, H]
    total = picked[:, 0]
    for slot in range(1, picked.shape[1]):
        total = total + picked[:, slot]
    return total
