"""Faults of activation quantisation: scale layouts, rounding of scales, overflow, zero blocks, padding."""
# mypy: disable-error-code="misc, attr-defined, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.faults.base import Fault, register
from moe_kernels.quant import fp8
from moe_kernels.variants.emulated import Quantized


class TmaRead:
    """TMA-padded column-major scales whose memory is read as dense [K/128, M]: wrong unless M % 4 == 0."""

    def quantize_input(self, hidden: Tensor) -> Quantized:
        q, scale = fp8.quantize_activations(hidden, layout="column_tma")
        groups = scale.shape[1]
        storage = torch.as_strided(scale, (groups * 4 * ((scale.shape[0] + 3) // 4),), (1,))
        return Quantized(q, storage[: scale.numel()].view(groups, scale.shape[0]).clone())


class RowMajorRead:
    """Row-major scales [M, K/128] read as [K/128, M]."""

    def quantize_input(self, hidden: Tensor) -> Quantized:
        q, scale = fp8.quantize_activations(hidden, layout="row")
        return Quantized(q, scale.contiguous().view(scale.shape[1], scale.shape[0]))


class Ue8m0After:
    """Activation scales rounded up to powers of two after they divided."""

    def quantize_input(self, hidden: Tensor) -> Quantized:
        right = super().quantize_input(hidden)
        return Quantized(right.q, fp8.ceil_power_of_two(right.scale))


class OverflowNan:
    """No clamp before the cast: what exceeds E4M3's range becomes NaN. A scale from half the amax makes it happen."""

    def quantize_intermediate(self, intermediate: Tensor, plan) -> Quantized:
        right = super().quantize_intermediate(intermediate, plan)
        scale = right.scale * 0.9  # an amax taken before rounding up
        x = (
            intermediate.float().unflatten(-1, (-1, 128))
            if intermediate.shape[-1] % 128 == 0
            else intermediate[..., None]
        )
        scaled = (x / scale.t().unsqueeze(-1)).flatten(-2)
        q = torch.where(scaled.abs() > 464, torch.nan, scaled.clamp(-448, 448)).to(torch.float8_e4m3fn)
        return Quantized(q, scale)


class ZeroBlockNan:
    """amax of an all-zero group used unclamped: 0/0."""

    def quantize_input(self, hidden: Tensor) -> Quantized:
        right = super().quantize_input(hidden)
        zero = right.scale <= 1e-10 / 448 * 1.001
        return Quantized(right.q, torch.where(zero, torch.nan, right.scale))


class StalePadding:
    """The last, incomplete tile of eight rows takes its amax over stale rows too: a scale 2^14 times too large."""

    def quantize_intermediate(self, intermediate: Tensor, plan) -> Quantized:
        rows = intermediate.shape[0]
        stale = rows - rows % 8
        if stale == rows:
            return super().quantize_intermediate(intermediate, plan)
        right = super().quantize_intermediate(intermediate, plan)
        coarse = right.scale.clone()
        coarse[:, stale:] *= 1 << 14
        x = fp8.dequantize_activations(right.q, right.scale.t()).unflatten(-1, (coarse.shape[0], -1))
        q = (x / coarse.t().unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
        return Quantized(q, coarse)


class Block116:
    """Scales applied in blocks of 116 columns instead of 128."""

    def gemm1(self, x: Quantized, plan) -> Tensor:
        index = (torch.arange(x.q.shape[1], device=x.q.device) // 116).clamp(max=x.scale.shape[0] - 1)
        values = x.q.float() * x.scale.t()[:, index]
        return self.product(values[plan.token], plan, self._w13)


class Fp8GateUp:
    """TRT-LLM's own numerics: gate and up stored as E4M3 between the first product and the SwiGLU."""

    gemm1_output = "fp8"


_FP8 = ("fp8",)
register(
    Fault(
        "scales_tma_read",
        "kernels.md 1.8, 5.5; vLLM #54521, FlashInfer #4419",
        "TMA-padded scales read as dense (odd M)",
        21,
        formats=_FP8,
        layer=TmaRead,
        expected=("kernel",),
    )
)
register(
    Fault(
        "scales_row_major",
        "SGLang #31490, #31617",
        "row-major activation scales read as column-major",
        20,
        formats=_FP8,
        layer=RowMajorRead,
        expected=("kernel",),
    )
)
register(
    Fault(
        "act_ue8m0_after",
        "SGLang #28307, #29956",
        "activation scales rounded to powers of two after quantising",
        25,
        formats=_FP8,
        layer=Ue8m0After,
        expected=("kernel",),
    )
)
register(
    Fault(
        "overflow_nan",
        "torch 2.11 E4M3 cast; slime #2256",
        "E4M3 NaN on overflow, no clamp",
        28,
        formats=_FP8,
        layer=OverflowNan,
        expected=("kernel",),
    )
)
register(
    Fault(
        "zero_block_nan",
        "slime #2256, torchao #4713, ModelOpt #1397",
        "0/0 for an all-zero activation group",
        28,
        formats=_FP8,
        layer=ZeroBlockNan,
        expected=("kernel",),
    )
)
register(
    Fault(
        "stale_padding",
        "vLLM #40047, SGLang #1779",
        "stale pad rows enter the amax",
        29,
        formats=_FP8,
        layer=StalePadding,
        expected=("kernel",),
    )
)
register(
    Fault(
        "block_116",
        "TensorRT-LLM #14793",
        "scale blocks of 116 columns instead of 128",
        39,
        formats=_FP8,
        layer=Block116,
        expected=("kernel",),
    )
)
register(
    Fault(
        "gate_up_fp8",
        "TRT-LLM's batched GEMM writes E4M3 before the SwiGLU",
        "intermediate precision of the real kernel",
        None,
        harmful=False,
        formats=_FP8,
        layer=Fp8GateUp,
    )
)
