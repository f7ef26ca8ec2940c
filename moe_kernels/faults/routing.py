"""Faults of the router: bias, scoring, normalisation, scaling."""
# mypy: disable-error-code="misc, attr-defined, no-any-return"

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.faults.base import Fault, register
from moe_kernels.records import Routing
from moe_kernels.routing import route, selection_scores


class BiasBf16:
    """The bias rounded to BF16 before it is added."""

    def route(self, router_logits: Tensor) -> Routing:
        return route(router_logits, self.bias, self.config, bias_dtype=torch.bfloat16)


class BiasMisread:
    """A kernel that expects BF16 reads the first half of the FP32 buffer as twice as many values."""

    def route(self, router_logits: Tensor) -> Routing:
        misread = self.bias.contiguous().view(torch.bfloat16)[: self.bias.numel()].float()
        return route(router_logits, misread, self.config)


class BiasDropped:
    """Selection by the scores alone."""

    def route(self, router_logits: Tensor) -> Routing:
        return route(router_logits, None, self.config)


class BiasInWeights:
    """Weights from score + bias instead of the score."""

    def route(self, router_logits: Tensor) -> Routing:
        ids = super().route(router_logits).ids
        keys = (router_logits.float().sigmoid() + self.bias).gather(-1, ids)
        return Routing(ids, keys / (keys.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor)


class WeightsByCancellation:
    """Weights recovered as (score + bias) - bias, and divided by their sum without an epsilon."""

    def route(self, router_logits: Tensor) -> Routing:
        _, keys = selection_scores(router_logits, self.bias, self.config)
        ids = super().route(router_logits).ids
        recovered = (keys - self.bias).gather(-1, ids)
        return Routing(ids, recovered / recovered.sum(-1, keepdim=True) * self.config.routed_scaling_factor)


class GateBf16:
    """Router logits and scores carried in BF16 all the way to the choice."""

    def route(self, router_logits: Tensor) -> Routing:
        keys = router_logits.bfloat16().sigmoid() + self.bias.bfloat16()
        ids = keys.float().sort(dim=-1, descending=True, stable=True).indices[..., : self.config.top_k]
        weights = router_logits.sigmoid().gather(-1, ids)
        return Routing(ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor)


class LogitsBf16:
    """Logits rounded to BF16 on their way into the kernel, as every TRT-LLM caller may do."""

    def route(self, router_logits: Tensor) -> Routing:
        return super().route(router_logits.bfloat16().float())


class ScalingMissing:
    """routed_scaling_factor never applied."""

    def route(self, router_logits: Tensor) -> Routing:
        return route(router_logits, self.bias, replace(self.config, routed_scaling_factor=1.0))


class NotNormalised:
    """top-k weights not renormalised."""

    def route(self, router_logits: Tensor) -> Routing:
        return route(router_logits, self.bias, replace(self.config, norm_topk_prob=False))


class SoftmaxForSigmoid:
    """The wrong routing method: softmax scores."""

    def route(self, router_logits: Tensor) -> Routing:
        return route(router_logits, self.bias, replace(self.config, scoring="softmax"))


class ZeroIsNegative:
    """Selection starts from logit 0: experts with negative logits are found only by position."""

    def route(self, router_logits: Tensor) -> Routing:
        broken = torch.where((router_logits < 0).all(-1, keepdim=True), torch.zeros_like(router_logits), router_logits)
        return route(broken, torch.zeros_like(self.bias) if bool((router_logits < 0).all()) else self.bias, self.config)


class TopKMinusOne:
    """The last chosen expert dropped, the others renormalised."""

    def route(self, router_logits: Tensor) -> Routing:
        full = super().route(router_logits)
        weights = full.weights.clone()
        weights[:, -1] = 0
        total = full.weights.sum(-1, keepdim=True)
        return Routing(full.ids, weights / weights.sum(-1, keepdim=True) * total)


class WeightsMisread:
    """BF16 weights labelled FP32: a reader takes pairs of them for one value."""

    def route(self, router_logits: Tensor) -> Routing:
        right = super().route(router_logits)
        half = right.weights.bfloat16().contiguous()
        flat = torch.cat([half.flatten(), half.flatten()]).view(torch.float32)
        return Routing(right.ids, flat[: half.numel()].view_as(right.weights).nan_to_num(0.0, 0.0, 0.0))


class StaleBias:
    """Now and then the bias is read before the previous kernel wrote it: zeros instead."""

    def route(self, router_logits: Tensor) -> Routing:
        self.calls = getattr(self, "calls", 0) + 1
        return route(router_logits, None if self.calls % 3 == 0 else self.bias, self.config)


ROUTING = ("kernel", "routing")
register(
    Fault("bias_bf16", "SGLang #28555, #31213", "correction bias rounded to BF16", 3, layer=BiasBf16, expected=ROUTING)
)
register(
    Fault(
        "bias_misread",
        "vLLM #38989",
        "FP32 bias read as BF16 by an older kernel",
        1,
        layer=BiasMisread,
        expected=ROUTING,
    )
)
register(
    Fault(
        "bias_dropped",
        "kernels.md 5.5; vLLM #22143",
        "correction bias not added",
        4,
        layer=BiasDropped,
        expected=ROUTING,
    )
)
register(
    Fault(
        "bias_in_weights",
        "vLLM #12002",
        "bias included in the expert weights",
        41,
        layer=BiasInWeights,
        expected=("kernel",),
    )
)
register(
    Fault(
        "weights_cancel",
        "SGLang #30989, FlashInfer #3803, #3875",
        "(s + b) - b cancels and the sum has no epsilon",
        2,
        layer=WeightsByCancellation,
        expected=("kernel",),
    )
)
register(
    Fault("gate_bf16", "vLLM #47777, #50761", "gate scores and bias kept in BF16", 4, layer=GateBf16, expected=ROUTING)
)
register(
    Fault(
        "scaling_missing",
        "vLLM #43769, SGLang #8333",
        "routed_scaling_factor not applied",
        9,
        layer=ScalingMissing,
        expected=("kernel",),
    )
)
register(
    Fault(
        "not_normalised", "vLLM #43223", "top-k weights not renormalised", 13, layer=NotNormalised, expected=("kernel",)
    )
)
register(
    Fault(
        "softmax_routing",
        "vLLM #33620",
        "softmax routing for a sigmoid model",
        14,
        layer=SoftmaxForSigmoid,
        expected=ROUTING,
    )
)
register(
    Fault(
        "negative_logits",
        "vLLM #37605, FlashInfer #2822",
        "routing wrong when all logits are negative",
        15,
        layer=ZeroIsNegative,
        expected=("kernel",),
    )
)
register(
    Fault("top_k_minus_one", "issue 3's table", "one expert fewer", None, layer=TopKMinusOne, expected=("kernel",))
)
register(
    Fault(
        "weights_misread",
        "FlashInfer #3595, #3925",
        "BF16 expert weights labelled FP32",
        19,
        layer=WeightsMisread,
        expected=("kernel",),
    )
)
register(
    Fault(
        "stale_bias",
        "TensorRT-LLM #15729, FlashInfer #3835",
        "bias loaded before the dependent launch waited",
        31,
        layer=StaleBias,
        expected=("kernel",),
    )
)
register(
    Fault(
        "logits_bf16",
        "FlashInfer's launcher accepts BF16 logits",
        "router logits rounded to BF16",
        None,
        harmful=False,
        layer=LogitsBf16,
    )
)
