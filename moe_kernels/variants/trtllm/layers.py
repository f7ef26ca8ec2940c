"""fp8/trtllm and nvfp4/trtllm: build the call, check the contract, bind it, run it.

SM100/SM103 only: these layers have never run on our machines (no Blackwell GPU); everything up to the kernel
launch is tested on the CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.contract import check_fp4_call, check_fp8_block_call, check_values
from moe_kernels.errors import VariantError
from moe_kernels.quant import fp8 as quant_fp8
from moe_kernels.records import ExpertWeights, MoEShape, Routing, RoutingConfig
from moe_kernels.registry import MoELayer, Support, VariantSpec
from moe_kernels.routing import route
from moe_kernels.variants.trtllm import flashinfer_api as api
from moe_kernels.variants.trtllm.layout import prepare_fp8, prepare_nvfp4


@dataclass(frozen=True)
class KernelCall:
    """One call of a FlashInfer entry point: by keyword only, since positions differ between entry points."""

    name: str
    method: str  # member of RoutingMethodType
    kwargs: dict[str, Any]


class TrtllmLayer(MoELayer):
    """What the two number formats share: routing in or outside the kernel, replay, contract, launch."""

    def __init__(self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec) -> None:
        super().__init__(record, config, bias, spec)
        if config.scoring != "sigmoid" or not config.norm_topk_prob:
            raise VariantError(
                f"{spec.base} implements DeepSeekV3 routing (sigmoid, normalised); this model uses {config}"
            )
        if record.swiglu_limit is not None:
            raise VariantError(
                f"{spec.base} does not pass swiglu_limit={record.swiglu_limit} yet; use {spec.format}/emulated"
            )
        check_values(record)
        # What SGLang did before #28555: one cast at every call of the router; the values are those of one cast
        self.kernel_bias = bias.to(torch.bfloat16) if bias is not None and spec.option("bias") == "bf16" else bias

    @classmethod
    def supports(cls, device: torch.device, shape: MoEShape) -> Support:
        """FlashInfer present, of a version whose semantics are known."""
        try:
            api.require(torch.float32)
        except Exception as error:
            return Support(False, str(error), "fp8/triton")
        return Support(True)

    def route(self, router_logits: Tensor) -> Routing:
        """Host-side routing, as `routing=outside` uses it."""
        return route(router_logits, self.bias, self.config, bias_dtype=_bias_dtype(self.spec))

    @abstractmethod
    def build_call(
        self, hidden: Tensor, router_logits: Tensor | None, routing: Routing | None, replay: Tensor | None
    ) -> KernelCall:
        """Quantise the activations and assemble the keyword arguments."""

    @abstractmethod
    def check_call(self, call: KernelCall) -> None:
        """The contract of this number format."""

    def common(
        self, router_logits: Tensor | None, routing: Routing | None, replay: Tensor | None, tokens: int
    ) -> tuple[str, dict[str, Any]]:
        """(routing method, arguments both number formats take)."""
        c = self.config
        args: dict[str, Any] = dict(
            num_experts=c.num_experts,
            top_k=c.top_k,
            local_expert_offset=0,
            local_num_experts=c.num_experts,
            do_finalize=True,
            tune_max_num_tokens=max(1, 1 << (tokens - 1).bit_length()),
        )
        if router_logits is not None:
            args |= dict(
                routing_logits=router_logits.contiguous(),
                routing_bias=self.kernel_bias,
                n_group=c.n_group,
                topk_group=c.topk_group,
                routed_scaling_factor=c.routed_scaling_factor,
                routing_replay_out=replay,
            )
            return "DeepSeekV3", args
        if routing is None:
            raise VariantError("a routed call needs expert ids and weights")
        # weights already hold the scaling factor, so none is passed; the tuple form keeps them FP32, where the
        # packed int32 form would round them to BF16
        args |= dict(
            topk_ids=(routing.ids.to(torch.int32).contiguous(), routing.weights.float().contiguous()),
            routing_bias=None,
            n_group=None,
            topk_group=None,
            routed_scaling_factor=None,
        )
        return "TopK", args

    def launch(self, call: KernelCall) -> Tensor:
        """Contract, signature, kernel; returns BF16 [T, H]."""
        self.check_call(call)
        fused_moe, _ = api.require(None if self.kernel_bias is None else self.kernel_bias.dtype)
        function = getattr(fused_moe, call.name)
        kwargs = call.kwargs | {"routing_method_type": api.enum_value("RoutingMethodType", call.method)}
        api.bind(function, kwargs)
        out = function(**kwargs)
        return out[0] if isinstance(out, list | tuple) else out

    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """`routing=outside`: ids and weights given to the routed entry point."""
        return self.finish(self.launch(self.build_call(hidden, None, routing, None)), hidden)

    def finish(self, out: Tensor, hidden: Tensor) -> Tensor:
        """Crop padding and return in the caller's dtype."""
        return out[:, : self.shape.hidden_size].to(hidden.dtype)

    def forward(self, hidden: Tensor, router_logits: Tensor) -> tuple[Tensor, Routing]:
        """`routing=inside`: the kernel routes, and its replay buffer says which experts it chose."""
        if self.spec.option("routing") == "outside":
            return super().forward(hidden, router_logits)
        ids = torch.empty(hidden.shape[0], self.config.top_k, dtype=torch.int16, device=hidden.device)
        out = self.finish(self.launch(self.build_call(hidden, router_logits, None, ids)), hidden)
        chosen = ids.long()
        scores = router_logits.float().sigmoid().gather(1, chosen)
        weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        return out, Routing(chosen, weights)

    def resolved(self) -> str:
        """Entry point, version and tuning state, as attested by the fingerprint."""
        inside = self.spec.option("routing") == "inside"
        name = f"trtllm_{'fp8' if self.spec.format == 'fp8' else 'fp4'}_block_scale_{'' if inside else 'routed_'}moe"
        return f"{self.spec} ({name}, flashinfer {api.installed_version()}, {api.tuning_state()['state']})"


def _bias_dtype(spec: VariantSpec) -> torch.dtype:
    return torch.bfloat16 if spec.option("bias") == "bf16" else torch.float32


class Fp8TrtllmLayer(TrtllmLayer):
    """Block FP8 (DeepSeekFp8): activations 1x128, weights 128x128, intermediate re-quantised inside the kernel."""

    def __init__(self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec) -> None:
        super().__init__(record, config, bias, spec)
        self.weights = prepare_fp8(record, blocked=spec.option("layout") == "blockmajork")

    def quantize(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(e4m3 [T, H], scale FP32 [H/128, T] dense): written column-major, or transposed by a copy (scales=copied)."""
        if self.spec.option("scales") == "copied":
            q, scale = quant_fp8.quantize_activations(hidden, layout="row")
            return q, scale.t().contiguous()
        q, scale = quant_fp8.quantize_activations(hidden, layout="column")
        return q, scale.t()

    def build_call(
        self, hidden: Tensor, router_logits: Tensor | None, routing: Routing | None, replay: Tensor | None
    ) -> KernelCall:
        """Arguments of trtllm_fp8_block_scale(_routed)_moe."""
        method, kwargs = self.common(router_logits, routing, replay, hidden.shape[0])
        w = self.weights
        q, scale = self.quantize(hidden)
        kwargs |= dict(
            hidden_states=q,
            hidden_states_scale=scale,
            gemm1_weights=w.w13,
            gemm1_weights_scale=w.w13_scale,
            gemm2_weights=w.w2,
            gemm2_weights_scale=w.w2_scale,
            intermediate_size=self.shape.intermediate_size,
            use_shuffled_weight=w.shuffled,
            weight_layout={"MajorK": 0, "BlockMajorK": 2}[w.layout],
        )
        return KernelCall(f"trtllm_fp8_block_scale_{'' if router_logits is not None else 'routed_'}moe", method, kwargs)

    def check_call(self, call: KernelCall) -> None:
        """See contract.check_fp8_block_call."""
        check_fp8_block_call(call.kwargs, call.method)

    def launch(self, call: KernelCall) -> Tensor:
        """WeightLayout's value is looked up by name in the installed version."""
        layout = api.enum_value("WeightLayout", self.weights.layout)
        return super().launch(KernelCall(call.name, call.method, call.kwargs | {"weight_layout": layout}))


class Fp4TrtllmLayer(TrtllmLayer):
    """NVFP4 weights and activations; gate and up keep their own global scales."""

    def __init__(self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec) -> None:
        super().__init__(record, config, bias, spec)
        self.weights = prepare_nvfp4(record)

    def quantize(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(uint8 [T, H/2], e4m3 [T, H/16] linear): FlashInfer's quantiser on a GPU, ours elsewhere."""
        padded = F.pad(hidden, (0, self.weights.padded_hidden - hidden.shape[-1]))
        if hidden.is_cuda:
            from flashinfer import fp4_quantize

            inverse = torch.tensor([1.0 / self.weights.input_scale], dtype=torch.float32, device=hidden.device)
            q, scale = fp4_quantize(padded, global_scale=inverse, is_sf_swizzled_layout=False)
            return q, scale.view(torch.float8_e4m3fn).view(hidden.shape[0], -1)
        from moe_kernels.quant import nvfp4

        return nvfp4.quantize(padded, torch.tensor(self.weights.input_scale))

    def build_call(
        self, hidden: Tensor, router_logits: Tensor | None, routing: Routing | None, replay: Tensor | None
    ) -> KernelCall:
        """Arguments of trtllm_fp4_block_scale(_routed)_moe."""
        method, kwargs = self.common(router_logits, routing, replay, hidden.shape[0])
        w = self.weights
        q, scale = self.quantize(hidden)
        kwargs |= dict(
            hidden_states=q,
            hidden_states_scale=scale,
            gemm1_weights=w.w13,
            gemm1_weights_scale=w.w13_scale,
            gemm1_bias=None,
            gemm1_alpha=None,
            gemm1_beta=None,
            gemm1_clamp_limit=None,
            gemm2_weights=w.w2,
            gemm2_weights_scale=w.w2_scale,
            gemm2_bias=None,
            output1_scale_scalar=w.output1_scale,
            output1_scale_gate_scalar=w.output1_scale_gate,
            output2_scale_scalar=w.output2_scale,
            intermediate_size=w.padded_intermediate,
        )
        return KernelCall(f"trtllm_fp4_block_scale_{'' if router_logits is not None else 'routed_'}moe", method, kwargs)

    def check_call(self, call: KernelCall) -> None:
        """See contract.check_fp4_call."""
        check_fp4_call(call.kwargs, call.method)
