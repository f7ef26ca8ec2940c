"""Emulated FP8 variants with coarser scales than blocks: one a row of the weights, or one a matrix."""

from __future__ import annotations

from torch import Tensor

from moe_kernels.quant import fp8
from moe_kernels.quant.fp8_rows import quantize_static
from moe_kernels.records import ExpertWeights, RoutingConfig
from moe_kernels.registry import VariantSpec
from moe_kernels.variants.emulated import EmulatedLayer, Quantized
from moe_kernels.variants.grouped import Dispatch, grouped_linear


class Fp8ChannelEmulatedLayer(EmulatedLayer):
    """`fp8_channel/emulated`: a scale per output row of the weights, one per token of the activations (W8A8 dynamic).

    compressed-tensors' FP8_DYNAMIC and ModelOpt's FP8_PER_CHANNEL_PER_TOKEN, as vLLM's and SGLang's kernels run them:
    scale = amax of the token / 448, again for the intermediate.
    """

    def quantize_input(self, hidden: Tensor) -> Quantized:
        """E4M3 [T, H], FP32 scale [T, 1]."""
        return Quantized(*fp8.quantize_activations(hidden, group=max(1, hidden.shape[-1])))

    def gemm1(self, x: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised tokens, gathered to their experts, times w13."""
        return grouped_linear(_dequantize(x)[plan.token], plan, self._w13)

    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """E4M3 [R, I], one scale a row."""
        return Quantized(*fp8.quantize_activations(intermediate, group=max(1, intermediate.shape[-1])))

    def gemm2(self, intermediate: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised intermediate times w2."""
        return grouped_linear(_dequantize(intermediate), plan, self._w2)


class Fp8TensorEmulatedLayer(Fp8ChannelEmulatedLayer):
    """`fp8_tensor/emulated`: a scale per weight matrix, gate and up each their own, and static activation scales.

    The activation scale is the largest of the layer's `input_scale`s (as vLLM and TRT-LLM take it); beyond 448 times
    that, activations saturate. Where the checkpoint has none, each token has its own as in `fp8_channel`. Not emulated:
    engines that requantise gate and up to one scale when loading.
    """

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        self.input_scale = None if record.w13_input_scale is None else record.w13_input_scale.amax()
        self.intermediate_scale = None if record.w2_input_scale is None else record.w2_input_scale.amax()

    def quantize_input(self, hidden: Tensor) -> Quantized:
        """E4M3 [T, H] under the layer's scale, 0-d."""
        if self.input_scale is None:
            return super().quantize_input(hidden)
        return Quantized(quantize_static(hidden, self.input_scale), self.input_scale)

    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """E4M3 [R, I] under w2's scale."""
        if self.intermediate_scale is None:
            return super().quantize_intermediate(intermediate, plan)
        return Quantized(quantize_static(intermediate, self.intermediate_scale), self.intermediate_scale)


def _dequantize(x: Quantized) -> Tensor:
    return fp8.decode_e4m3(x.q) * x.scale
