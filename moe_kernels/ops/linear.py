"""Linear layers of BF16 activations: block-FP8 weights, BF16 weights, and the FP32 router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.errors import ContractError
from moe_kernels.ops import reference
from moe_kernels.ops.reference import Quantised
from moe_kernels.quant.fp8 import E4M3
from moe_kernels.records import FP8_BLOCK


class Fp8Linear:
    """x @ weight.T + bias: weight E4M3 [N, K] in 128x128 blocks, activations 1x128, FP32 sums, BF16 result.

    `weight_scale_inv` FP32 [ceil(N/128), K/128] multiplies; bias BF16 or FP32 [N] is added to the FP32 sum before it
    is rounded. K must be a multiple of 128.
    """

    def __init__(self, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None) -> None:
        rows, columns = weight.shape
        if weight.dtype != E4M3 or columns % FP8_BLOCK:
            raise ContractError(f"an FP8 linear needs E4M3 [N, K] with K a multiple of {FP8_BLOCK}, got "
                                f"{weight.dtype} {tuple(weight.shape)}; keep this layer in BF16")
        wanted = (-(-rows // FP8_BLOCK), columns // FP8_BLOCK)
        if weight_scale_inv.dtype != torch.float32 or tuple(weight_scale_inv.shape) != wanted:
            raise ContractError(f"weight_scale_inv must be FP32 {wanted}, got {weight_scale_inv.dtype} "
                                f"{tuple(weight_scale_inv.shape)}")
        self.weight, self.scale = weight.contiguous(), weight_scale_inv.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        """BF16 [T, N] from BF16 [T, K] or what an `..._quantised` function made of it."""
        quantised = x if isinstance(x, Quantised) else reference.quantise(x)
        return reference.linear_fp8(quantised, self.weight, self.scale, self.bias, torch.bfloat16)

    def split(self, x: Tensor | Quantised) -> Tensor:
        """As the call, or split sums FP32 [S, T, N] where that is faster; only without bias."""
        return self(x)


class Bf16Linear:
    """x @ weight.T + bias in BF16 with FP32 sums: weight [N, K]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] from [T, K]."""
        return F.linear(x, self.weight, self.bias)

    def split(self, x: Tensor) -> Tensor:
        """As the call, or split sums FP32 [S, T, N] where that is faster; only without bias."""
        return self(x)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 [T, E] from x [T, H] and weight FP32 [E, H]: exact products, FP32 sums, no TF32."""
    return reference.router_logits(x, weight)
