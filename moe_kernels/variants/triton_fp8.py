"""`fp8/triton`: the DeepSeek-FP8 MoE numerics in our own Triton kernels, for Hopper and any GPU with FP8 (SM89+)."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.records import FP8_BLOCK, ExpertWeights, MoEShape, Routing, RoutingConfig
from moe_kernels.registry import MoELayer, Support, VariantSpec
from moe_kernels.variants.triton import pipeline
from moe_kernels.variants.triton.config import GemmConfig, lookup

MAX_EXPERTS = 512


def gluon_tested() -> bool:
    """The warp-specialised kernel was built and run with Triton 3.6; 3.9 does not compile it."""
    return triton.__version__.startswith("3.6.")


def check_common(name: str, config: RoutingConfig, bias: Tensor | None) -> None:
    """Refuse what the routing kernel does not do; raises VariantError with what to use instead."""
    if config.scoring != "sigmoid":
        raise VariantError(f"'{name}' routes with sigmoid scores only, the model uses {config.scoring}; "
                           "use the emulated variant")
    if bias is not None and tuple(bias.shape) != (config.num_experts,):
        raise VariantError(f"'{name}': correction bias must be [{config.num_experts}], got {tuple(bias.shape)}")


def common_support(shape: MoEShape, nearest: str) -> Support:
    """Shape rules of the routing kernel."""
    if shape.n_group != 1:
        return Support(False, f"the Triton routing kernel has no expert groups, the model has n_group={shape.n_group}",
                       nearest)
    if shape.num_experts > MAX_EXPERTS or shape.top_k > 16:
        return Support(False, f"the Triton routing kernel takes up to {MAX_EXPERTS} experts and top-16, the model has "
                       f"{shape.num_experts} and top-{shape.top_k}", nearest)
    return Support(True)


class Fp8TritonLayer(MoELayer):
    """One FP8 block-scaled MoE layer; see `variants/triton/pipeline.py` for the launches.

    `bias=bf16` casts the correction bias with a launch of its own before routing and `scales=copied` transposes
    the activation scales with another: the two launches that SGLang #28555 removed.
    """

    switchable = frozenset(("bias", "scales"))

    def __init__(self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec) -> None:
        super().__init__(record, config, bias, spec)
        check_common(spec.base, config, bias)
        if record.format != "fp8" or record.w13_scale is None or record.w2_scale is None:
            raise VariantError(f"'{spec.base}' needs FP8 block-scaled weights, the record is {record.format}")
        support = common_support(self.shape, "fp8/emulated")
        if not support.ok:
            raise VariantError(support.reason)
        device = record.w13.device
        self.sm = sm_of(device)
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.weights = pipeline.Fp8Weights(
            record.w13.contiguous(), record.w13_scale.contiguous(), record.w2.contiguous(),
            record.w2_scale.contiguous(), self.shape, tma=self.sm >= 90, limit=record.swiglu_limit or 0.0,
        )
        self.override: GemmConfig | None = None  # set by the tuner

    @classmethod
    def supports(cls, device: torch.device, shape: MoEShape) -> Support:
        """No groups, at most 512 experts and top-16."""
        return common_support(shape, "fp8/emulated")

    def gemm_config(self, tokens: int) -> GemmConfig:
        """The launch parameters used for `tokens` rows."""
        if self.override:
            return self.override
        config = lookup(self.shape, tokens, self.device_name, self.sm)
        return config if gluon_tested() else replace(config, special1=False, special2=False)  # the same bits

    def resolved(self) -> str:
        """The variant, and that the plain GEMM replaces the warp-specialised one where Gluon is untested."""
        note = "" if gluon_tested() else f" (plain GEMMs: Gluon of Triton {triton.__version__} is untested)"
        return f"{self.spec}{note}"

    def routing_bias(self) -> Tensor | None:
        """The bias as the routing kernel gets it; with `bias=bf16` the cast is a launch, as it was."""
        if self.bias is not None and self.spec.option("bias") == "bf16":
            return self.bias.to(torch.bfloat16)
        return self.bias

    def route(self, router_logits: Tensor) -> Routing:
        """Experts and weights from FP32 logits [T, E], in one launch."""
        if router_logits.shape[0] == 0:
            return empty_routing(router_logits, self.config.top_k)
        logits = router_logits.float().contiguous()
        return pipeline.route_sort_quantise(logits, self.routing_bias(), None, self.config, 16, sort=False)[0]

    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Weighted sum of the chosen experts' outputs, [T, H] in `hidden.dtype`."""
        if hidden.shape[0] == 0:
            return torch.empty_like(hidden)
        hidden = hidden.contiguous()
        config = self.gemm_config(hidden.shape[0])
        order = pipeline.sort_by_expert(routing.ids.contiguous(), self.shape.num_experts, config.block_m)
        direct = self.spec.option("scales") == "direct"
        x_q, x_scale = pipeline.quantise_hidden(hidden, column_major=direct)
        return self._gemms(hidden, routing, order, x_q, x_scale, config)

    def forward(self, hidden: Tensor, router_logits: Tensor) -> tuple[Tensor, Routing]:
        """Route and run the experts; routing, sort and quantisation share a launch (two above 32 tokens)."""
        if hidden.shape[0] == 0:
            return torch.empty_like(hidden), empty_routing(router_logits, self.config.top_k)
        hidden = hidden.contiguous()
        config = self.gemm_config(hidden.shape[0])
        direct = self.spec.option("scales") == "direct"
        routing, order, x_q, x_scale = pipeline.route_sort_quantise(
            router_logits.float().contiguous(), self.routing_bias(), hidden, self.config, config.block_m,
            column_major=direct, overlap=config.overlap,
        )
        assert order is not None and x_q is not None and x_scale is not None  # for the type checker
        return self._gemms(hidden, routing, order, x_q, x_scale, config), routing

    def _gemms(
        self, hidden: Tensor, routing: Routing, order: pipeline.Order, x_q: Tensor, x_scale: Tensor, config: GemmConfig
    ) -> Tensor:
        if self.spec.option("scales") == "copied":
            x_scale = x_scale.t().contiguous()  # the copy the change removed
        h_q, h_scale = pipeline.gemm1(self.weights, x_q, x_scale, order, config)
        y = pipeline.gemm2(self.weights, h_q, h_scale, order, config, hidden.dtype)
        return pipeline.combine(y, routing.weights, hidden.dtype)


def sm_of(device: torch.device) -> int:
    """Compute capability times ten; 0 off CUDA (Triton's interpreter)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def empty_routing(logits: Tensor, top_k: int) -> Routing:
    """The routing of no tokens."""
    return Routing(
        torch.empty(0, top_k, dtype=torch.int64, device=logits.device),
        torch.empty(0, top_k, dtype=torch.float32, device=logits.device),
    )


assert FP8_BLOCK == 128  # the kernels' tile sizes rely on it
