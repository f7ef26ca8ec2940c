"""FP8 weights with one FP32 scale a row (compressed-tensors' channel FP8) or one a matrix (ModelOpt's FP8).

scale = max(amax / 448, 1e-10); q = clamp(x / scale, -448, 448), half to even, as for blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.errors import QuantizationError
from moe_kernels.quant.blocks import constant, require_finite, require_float, slices
from moe_kernels.quant.fp8 import E4M3, E4M3_MAX, MIN_WEIGHT_SCALE, decode_e4m3


def quantize_weight_rows(w: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """E4M3 [..., N, K] and FP32 scales [..., N, 1] of w [..., N, K]; NaN or infinity raises QuantizationError."""
    _require_matrix(w, name)
    amax = torch.maximum(w.amax(-1, keepdim=True), -w.amin(-1, keepdim=True)).to(torch.float32)
    scale = _scale(amax)
    return _divide(w, scale), scale


def quantize_weight_tensor(w: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """E4M3 [..., N, K] and FP32 scales [...] of w [..., N, K], one a matrix."""
    _require_matrix(w, name)
    scale = _scale(torch.maximum(w.amax((-2, -1)), -w.amin((-2, -1))).to(torch.float32))
    return _divide(w, scale[..., None, None].expand(*w.shape[:-1], 1)), scale


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 [..., K] of x under a given FP32 scale, 0-d or broadcast to [..., 1]; saturates at ±448, keeps NaN."""
    return (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantize_weight_rows(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` [..., N, K] from E4M3 [..., N, K] and FP32 scales [..., N, 1]; the FP32 product rounded once."""
    if list(scale.shape) != [*q.shape[:-1], 1]:
        wanted = [*q.shape[:-1], 1]
        raise QuantizationError(f"scale must be {wanted} for weights {list(q.shape)}, got {list(scale.shape)}")
    rows, row_scale = q.reshape(-1, q.shape[-1]), scale.reshape(-1, 1).float()
    out = torch.empty(rows.shape, dtype=dtype, device=q.device)
    for part in slices(rows.shape[0], rows.shape[1], q.device):
        out[part] = decode_e4m3(rows[part]).mul_(row_scale[part])
    return out.view(q.shape)


def dequantize_weight_tensor(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` [..., N, K] from E4M3 [..., N, K] and FP32 scales [...], one a matrix."""
    if scale.shape != q.shape[:-2]:
        wanted = list(q.shape[:-2])
        raise QuantizationError(f"scale must be {wanted} for weights {list(q.shape)}, got {list(scale.shape)}")
    return dequantize_weight_rows(q, scale[..., None, None].expand(*q.shape[:-1], 1), dtype)


def _scale(amax: Tensor) -> Tensor:
    return (amax / constant(amax, E4M3_MAX)).clamp_(min=MIN_WEIGHT_SCALE)


def _divide(w: Tensor, scale: Tensor) -> Tensor:
    rows, row_scale = w.reshape(-1, w.shape[-1]), scale.reshape(-1, 1)
    q = torch.empty(rows.shape, dtype=E4M3, device=w.device)
    for part in slices(rows.shape[0], rows.shape[1], w.device):
        q[part] = (rows[part].to(torch.float32) / row_scale[part]).clamp_(-E4M3_MAX, E4M3_MAX)
    return q.view(w.shape)


def _require_matrix(w: Tensor, name: str) -> None:
    require_float(w, name)
    if w.ndim < 2:
        raise QuantizationError(f"{name} must be [..., N, K], got shape {tuple(w.shape)}")
    require_finite(w, name)
