"""One entry to every weight format: `encode` quantises matrices, `decode` gives them back."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.errors import FormatError
from moe_kernels.quant import fp8, fp8_rows, mx, nvfp4
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP, WeightFormat

# columns must be a multiple of this (rows too, for the only format with row blocks that kernels require whole)
COLUMN_MULTIPLE: dict[WeightFormat, int] = {
    "bf16": 1, "fp8": FP8_BLOCK, "fp8_channel": 1, "fp8_tensor": 1,
    "nvfp4": NVFP4_GROUP, "mxfp8": MX_GROUP, "mxfp4": MX_GROUP,
}  # fmt: skip


def encode(fmt: WeightFormat, w: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights, scale, scale_2) of w [*lead, N, K] in any float dtype.

    scale is [*lead, ...] as `records.ExpertWeights` has it per matrix, scale_2 [*lead] for NVFP4 and else None.
    """
    if fmt == "fp8":
        return *fp8.quantize_weight_blocks(w, name=name), None
    if fmt == "fp8_channel":
        return *fp8_rows.quantize_weight_rows(w, name=name), None
    if fmt == "fp8_tensor":
        return *fp8_rows.quantize_weight_tensor(w, name=name), None
    if fmt == "nvfp4":
        scale_2 = nvfp4.global_scale(w, w.ndim - 2)
        return *nvfp4.quantize(w, scale_2[..., None, None], name=name), scale_2
    if fmt == "mxfp8":
        return *mx.quantize_mxfp8(w, name=name), None
    if fmt == "mxfp4":
        return *mx.quantize_mxfp4(w, name=name), None
    known = ", ".join(f for f in COLUMN_MULTIPLE if f != "bf16")
    raise FormatError(f"cannot quantise to '{fmt}'; choose one of: {known}")


def decode(
    fmt: WeightFormat, q: Tensor, scale: Tensor | None, scale_2: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`dtype` [*lead, N, K] from the parts that `encode` gives; the FP32 product rounded once to `dtype`."""
    if fmt == "bf16":
        return q.to(dtype)
    if scale is None or (fmt == "nvfp4" and scale_2 is None):
        raise FormatError(f"weights in format '{fmt}' need their {'scale_2' if scale is not None else 'scale'}")
    if fmt == "fp8":
        return fp8.dequantize_weight_blocks(q, scale, dtype)
    if fmt == "fp8_channel":
        return fp8_rows.dequantize_weight_rows(q, scale, dtype)
    if fmt == "fp8_tensor":
        return fp8_rows.dequantize_weight_tensor(q, scale, dtype)
    if fmt == "nvfp4":
        assert scale_2 is not None
        return nvfp4.dequantize(q, scale, scale_2[..., None, None], dtype)
    if fmt == "mxfp8":
        return mx.dequantize_mxfp8(q, scale, dtype)
    if fmt == "mxfp4":
        return mx.dequantize_mxfp4(q, scale, dtype)
    raise FormatError(f"weights in format '{fmt}' cannot be dequantised")
