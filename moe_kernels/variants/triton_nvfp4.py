"""`nvfp4/triton`: NVFP4 checkpoints on GPUs before Blackwell, weights dequantised in the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.records import ExpertWeights, MoEShape, Routing, RoutingConfig
from moe_kernels.registry import MoELayer, Support, VariantSpec
from moe_kernels.variants.triton import nvfp4_pipeline, pipeline
from moe_kernels.variants.triton.config import NvFp4Config, lookup_nvfp4
from moe_kernels.variants.triton_fp8 import check_common, common_support, empty_routing, sm_of

PORTABLE = NvFp4Config(16, 64, 4, 3, 64, 4, 3)  # plain Triton, for the interpreter


class NvFp4TritonLayer(MoELayer):
    """One NVFP4 MoE layer. `act=bf16` (default): W4A16. `act=nvfp4`: activations and the intermediate are rounded
    to NVFP4 first, with the checkpoint's largest input scale or one scalar a token, as `nvfp4/emulated` does.
    """

    def __init__(self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec) -> None:
        super().__init__(record, config, bias, spec)
        check_common(spec.base, config, bias)
        if record.format != "nvfp4" or record.w13_scale is None or record.w2_scale is None:
            raise VariantError(f"'{spec.base}' needs NVFP4 weights, the record is {record.format}")
        if record.w13_scale_2 is None or record.w2_scale_2 is None:
            raise VariantError(f"'{spec.base}' needs weight_scale_2 of every expert")
        support = common_support(self.shape, "nvfp4/emulated")
        if not support.ok:
            raise VariantError(support.reason)
        device = record.w13.device
        self.sm = sm_of(device)
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.weights = nvfp4_pipeline.NvFp4Weights(
            record.w13.contiguous(), record.w13_scale.contiguous(), record.w13_scale_2.float().contiguous(),
            record.w2.contiguous(), record.w2_scale.contiguous(), record.w2_scale_2.float().contiguous(), self.shape,
            limit=record.swiglu_limit or 0.0, asm=device.type == "cuda",
        )
        self.round = spec.option("act") == "nvfp4"
        self.input_scale = None if record.w13_input_scale is None else record.w13_input_scale.float().amax()
        self.intermediate_scale = None if record.w2_input_scale is None else record.w2_input_scale.float().amax()
        self.override: NvFp4Config | None = None  # set by the tuner

    @classmethod
    def supports(cls, device: torch.device, shape: MoEShape) -> Support:
        """No groups, at most 512 experts and top-16."""
        return common_support(shape, "nvfp4/emulated")

    def gemm_config(self, tokens: int) -> NvFp4Config:
        """The launch parameters used for `tokens` rows."""
        if self.sm == 0:
            return PORTABLE
        return self.override or lookup_nvfp4(self.shape, tokens, self.device_name, self.sm)

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
        config = self.gemm_config(hidden.shape[0])
        order = pipeline.sort_by_expert(routing.ids.contiguous(), self.shape.num_experts, config.block_m)
        return self._gemms(hidden, routing, order, config)

    def forward(self, hidden: Tensor, router_logits: Tensor) -> tuple[Tensor, Routing]:
        """Route and run the experts; routing and sort share a launch (two above 32 tokens)."""
        if hidden.shape[0] == 0:
            return torch.empty_like(hidden), empty_routing(router_logits, self.config.top_k)
        config = self.gemm_config(hidden.shape[0])
        routing, order, _, _ = pipeline.route_sort_quantise(
            router_logits.float().contiguous(), self.routing_bias(), None, self.config, config.block_m
        )
        assert order is not None  # for the type checker
        return self._gemms(hidden, routing, order, config), routing

    def _gemms(self, hidden: Tensor, routing: Routing, order: pipeline.Order, config: NvFp4Config) -> Tensor:
        x, x_scalars, h_scalars = hidden.contiguous(), None, None
        if self.round:
            x, x_scalars = nvfp4_pipeline.round_activations(x, self.input_scale)
        h = nvfp4_pipeline.gemm1(self.weights, x.to(torch.bfloat16), x_scalars, order, config)
        if self.round:
            h, h_scalars = nvfp4_pipeline.round_activations(h, self.intermediate_scale)
        y = nvfp4_pipeline.gemm2(self.weights, h, h_scalars, order, config, hidden.dtype)
        return pipeline.combine(y, routing.weights, hidden.dtype)
