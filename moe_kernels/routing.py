"""Chooses experts from router logits, and compares two choices token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.batch_invariant import sigmoid
from moe_kernels.errors import ContractError
from moe_kernels.native import library
from moe_kernels.records import Routing, RoutingConfig

# Added to the sum of the chosen scores before dividing, as Glm4MoeTopkRouter (transformers) and FlashInfer
# since #3803 do: rows whose sigmoids all underflow give zero weights instead of 0/0.
SUM_EPS = 1e-20


def check_routing(config: RoutingConfig) -> None:
    """Refuse a routing configuration that has no meaning, e.g. more experts wanted than groups leave over.

    Raises `ContractError` naming the field.
    """
    if config.n_group < 1 or config.num_experts % config.n_group:
        raise ContractError(
            f"n_group={config.n_group} must divide num_experts={config.num_experts}; check config.json")
    if not 1 <= config.topk_group <= config.n_group:
        raise ContractError(f"topk_group={config.topk_group} must lie in 1..n_group={config.n_group}")
    available = config.num_experts // config.n_group * config.topk_group
    if not 1 <= config.top_k <= available:
        raise ContractError(
            f"top_k={config.top_k} must lie in 1..{available}, the experts of {config.topk_group} groups")


def selection_scores(
    router_logits: Tensor,
    bias: Tensor | None,
    config: RoutingConfig,
    *,
    bias_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Scores and selection keys, both FP32 [T, E], from pre-sigmoid logits [T, E].

    The key is score + bias; experts outside the chosen groups have key -inf. `bias_dtype=torch.bfloat16`
    rounds the FP32 bias to BF16 first and still adds in FP32: that is what SGLang did before its #28555 (the
    host cast the bias, the kernel loads it as float whatever its dtype).
    """
    scores = _scores(router_logits, config)
    bias = _rounded(bias, bias_dtype)
    keys = scores if bias is None else scores + bias
    if config.n_group > 1:
        # DeepSeek-V3: a group's score is the sum of its two best keys; ties go to the lower group.
        grouped = keys.unflatten(-1, (config.n_group, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        chosen = _top(group_scores, config.topk_group)
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, False)
        # -inf, not 0: with negative keys a zeroed expert would win (kernels.md §5.3).
        keys = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores, keys


def _scores(router_logits: Tensor, config: RoutingConfig) -> Tensor:
    logits = router_logits.float()
    return logits.softmax(-1) if config.scoring == "softmax" else sigmoid(logits)


def _rounded(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias in FP32 after rounding it to `dtype`."""
    return None if bias is None else bias.to(dtype).float()


def route(
    router_logits: Tensor,
    bias: Tensor | None,
    config: RoutingConfig,
    *,
    bias_dtype: torch.dtype = torch.float32,
) -> Routing:
    """Experts and weights from router logits [T, E] (pre-sigmoid, computed in FP32).

    GLM and DeepSeek-V3 (`noaux_tc`) as in transformers' Glm4MoeTopkRouter: sigmoid in FP32, bias for the
    choice only, weights from the unbiased sigmoid. Qwen3-MoE: softmax over all experts, no bias. Ids come in
    order of falling key and equal keys go to the lowest expert id; `torch.topk`, which the stock models use,
    leaves the order of equal keys unspecified. Weights stay FP32 (the TRT-LLM kernels store them as BF16).
    NaN logits give NaN weights, so that a non-finite scan still sees them.
    """
    check_routing(config)
    if router_logits.ndim != 2 or router_logits.shape[-1] != config.num_experts:
        shape = tuple(router_logits.shape)
        raise ContractError(f"router_logits must be [T, {config.num_experts}], got {shape}")
    if router_logits.device.type == "cpu" and config.n_group == 1 and (native := library()) is not None:
        scores = _scores(router_logits, config).contiguous()
        return Routing(*native.choose(scores, _rounded(bias, bias_dtype), config.top_k, config.norm_topk_prob, SUM_EPS,
                                      config.routed_scaling_factor))
    scores, keys = selection_scores(router_logits, bias, config, bias_dtype=bias_dtype)
    ids = _top(keys, config.top_k)
    weights = scores.gather(-1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + SUM_EPS)
    if config.routed_scaling_factor != 1.0:
        weights = weights * config.routed_scaling_factor
    return Routing(ids, weights)


def _top(keys: Tensor, k: int) -> Tensor:
    """Indices of the k largest keys, largest first, the lowest index first among equals."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@dataclass(frozen=True)
class RoutingAgreement:
    """Two choices of experts compared row by row.

    `exact` bool [...]: same set. `overlap` int64 [...]: experts in common, 0..k. `k`: set size.
    """

    exact: Tensor
    overlap: Tensor
    k: int

    @property
    def exact_share(self) -> float:
        """Share of rows with the same set, NaN when there are no rows."""
        return self.exact.double().mean().item()

    @property
    def mean_overlap(self) -> float:
        """Mean share of experts in common, 0..1, NaN when there are no rows."""
        return (self.overlap.double() / self.k).mean().item()


def routing_agreement(ids_a: Tensor, ids_b: Tensor) -> RoutingAgreement:
    """Compare two integer tensors of chosen ids [..., k] as sets; leading dimensions are kept.

    Within a row ids must be distinct, as every router's are. Memory: one sorted copy of both inputs.
    """
    if ids_a.shape != ids_b.shape:
        raise ContractError(f"routings differ in shape: {tuple(ids_a.shape)} and {tuple(ids_b.shape)}")
    both = torch.cat([ids_a, ids_b], dim=-1).sort(dim=-1).values
    overlap = (both[..., 1:] == both[..., :-1]).sum(-1)  # an id in both rows stands next to itself once
    k = ids_a.shape[-1]
    return RoutingAgreement(overlap == k, overlap, k)


@dataclass(frozen=True)
class TieGap:
    """How near the k-th and (k+1)-th selection keys are: `gap` and `step`, FP32 [T]; `tie` is gap <= step."""

    gap: Tensor
    step: Tensor

    @property
    def tie(self) -> Tensor:
        """Rows whose choice a rounding of one step of the dtype can flip."""
        return self.gap <= self.step


def near_tie_gap(keys: Tensor, top_k: int, dtype: torch.dtype) -> TieGap:
    """Gap between the last chosen and the first rejected key, against the spacing of `dtype` there.

    `keys` [T, E] as `selection_scores` returns them. The step is the distance between neighbouring values of
    `dtype` at the last chosen key: for a BF16 bias near 7 it is 1/32. FlashInfer's routing test forgives rank
    flips by a like rule. With every expert chosen, or the rejected ones masked to -inf, the gap is +inf.
    """
    ordered = keys.float().sort(dim=-1, descending=True).values
    last = ordered[..., top_k - 1]
    if top_k < keys.shape[-1]:
        gap = last - ordered[..., top_k]
    else:
        gap = torch.full_like(last, float("inf"))
    info = torch.finfo(dtype)
    # 2^floor(log2|x|) * eps; below the smallest normal number the spacing stays constant
    exponent = torch.frexp(last.abs().clamp(min=info.tiny)).exponent - 1
    return TieGap(gap, torch.ldexp(torch.full_like(last, info.eps), exponent))
