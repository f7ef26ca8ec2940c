"""Emulated MX variants: 32 columns share a power of two, in the weights and in the activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_kernels.quant import mx
from moe_kernels.variants.emulated import EmulatedLayer, Quantized
from moe_kernels.variants.grouped import Dispatch, grouped_linear


class MxEmulatedLayer(EmulatedLayer):
    """`mxfp8/emulated` and `mxfp4/emulated`.

    Activations and intermediate in groups of 32 along the columns with E8M0 scales rounded up, so that nothing
    saturates (the rule of FlashInfer's and TRT-LLM's quantisers). `mxfp8`: E4M3 everywhere. `mxfp4`: E2M1 weights, and
    `act=` decides the activations: `mxfp8` as the TRT-LLM kernels take them, `mxfp4` as AMD's W4A4 kernels do, `bf16`
    for weight-only kernels (hidden states as they come, the intermediate rounded to BF16).

    Element times power of two is exact in FP32, so one FP32 product over dequantised operands differs from a kernel's
    per-group sums only by the order of summation. Kernels that need K padded do so with zeros, which changes nothing.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.act = self.spec.option("act") if self.spec.format == "mxfp4" else "mxfp8"

    def quantize_input(self, hidden: Tensor) -> Quantized:
        """E4M3 [T, H] or packed E2M1 [T, H/2] and E8M0 scales [T, H/32]; BF16 has no scale."""
        return self._quantize(hidden)

    def gemm1(self, x: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised tokens, gathered to their experts, times w13."""
        return grouped_linear(self._dequantize(x)[plan.token], plan, self._w13)

    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """The same again for [R, I]."""
        return self._quantize(intermediate)

    def gemm2(self, intermediate: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised intermediate times w2."""
        return grouped_linear(self._dequantize(intermediate), plan, self._w2)

    def _quantize(self, x: Tensor) -> Quantized:
        if self.act == "bf16":
            rounded = x.bfloat16()
            return Quantized(rounded, rounded.new_empty(0))
        encode = mx.quantize_mxfp8 if self.act == "mxfp8" else mx.quantize_mxfp4
        return Quantized(*encode(x, check_finite=False))

    def _dequantize(self, x: Quantized) -> Tensor:
        if self.act == "bf16":
            return x.q.float()
        return (mx.dequantize_mxfp8 if self.act == "mxfp8" else mx.dequantize_mxfp4)(x.q, x.scale)
