"""Dropless experts for training: tokens grouped by expert, grouped products, and gathers that are deterministic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_ALIGN = 16  # rows of each expert's group are padded to this many: 16-byte aligned for grouped BF16 products


@dataclass
class Plan:
    """Where each (token, choice) sits among rows grouped by expert and padded; all int64 but `ends` int32."""

    source: Tensor  # [R] token of each grouped row; T (a zero row) for padding
    place: Tensor  # [T*k] grouped row of each (token, choice)
    ends: Tensor  # [E] end of each expert's group; the last one's takes the unused tail
    counts: Tensor  # [E] true loads


def plan_groups(ids: Tensor, experts: int) -> Plan:
    """Group the choices ids [T, k] by expert with no synchronisation and a fixed number of rows."""
    tokens, k = ids.shape
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    by_expert = flat[order]
    until = torch.searchsorted(by_expert, torch.arange(experts, device=ids.device), right=True)
    counts = torch.diff(until, prepend=until.new_zeros(1))  # (torch.bincount would wait for the GPU)
    padded = (counts + GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN
    ends = padded.cumsum(0)
    starts = ends - padded
    first = until - counts
    total = tokens * k + experts * GROUP_ALIGN
    rows = torch.arange(tokens * k, device=ids.device) - first[by_expert] + starts[by_expert]
    source = torch.full((total,), tokens, dtype=torch.int64, device=ids.device)
    source[rows] = order // k
    place = torch.empty_like(order)
    place[order] = rows
    ends = torch.cat((ends[:-1], ends.new_full((1,), total)))
    return Plan(source, place, ends.to(torch.int32), counts)


class Dispatch(torch.autograd.Function):
    """x [T, H] to grouped rows [R, H]. Gathers only, forward and backward, so that results are deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = x.shape[0]
        return torch.cat((x, x.new_zeros(1, x.shape[1])))[source]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return grad[place].view(ctx.tokens, -1, grad.shape[1]).sum(1), None, None


class Combine(torch.autograd.Function):
    """Grouped rows [R, H] to sums over each token's choices [T, H]: the transpose of Dispatch."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, place: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(source)
        return y[place].view(tokens, -1, y.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (source,) = ctx.saved_tensors
        return torch.cat((grad, grad.new_zeros(1, grad.shape[1])))[source], None, None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, K] by weight [E, N, K], group by group: a grouped product on CUDA, a loop elsewhere."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight.to(x.dtype).transpose(-2, -1), offs=ends)
    edges = [0, *ends.tolist()]
    return torch.cat([F.linear(x[a:b], weight[e].to(x.dtype)) for e, (a, b) in enumerate(itertools.pairwise(edges))])


class Scatter(torch.autograd.Function):
    """Routing weights [T*k] to their grouped rows [R], zero on padding rows."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, place: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place)
        out = weights.new_zeros(rows)
        out[place] = weights
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return grad[place], None, None
