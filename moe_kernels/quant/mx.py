"""MXFP8 and MXFP4 (OCP Microscaling 1.0): E4M3 or E2M1 elements, one E8M0 exponent per 32 columns.

Scale = the smallest power of two not below amax / 448 (E4M3) or amax / 6 (E2M1), so nothing saturates: what NVIDIA's
activation quantisers and ModelOpt do. OCP's own rule (floor of log2 amax, less the element's largest exponent) and
llm-compressor's (nearest) give scales half as large for some groups and cut their largest values. E8M0 byte b means
2^(b - 127), 255 is NaN. Two E2M1 values share a byte, the even column in the low nibble.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_kernels.errors import QuantizationError
from moe_kernels.quant.blocks import constant, require_finite, require_float, slices
from moe_kernels.quant.fp8 import E4M3, E4M3_MAX, decode_e4m3
from moe_kernels.quant.nvfp4 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_codes
from moe_kernels.records import MX_GROUP

E8M0_BIAS = 127
E8M0_NAN = 255


def quantize_mxfp8(x: Tensor, *, name: str = "tensor", check_finite: bool = True) -> tuple[Tensor, Tensor]:
    """E4M3 [..., K] and E8M0 bytes [..., K/32] of x [..., K] (any float dtype, K % 32 == 0).

    A zero group has byte 0. NaN or infinity raises QuantizationError, or makes its group NaN (`check_finite=False`).
    """
    rows = _rows(x, name, check_finite)
    q = torch.empty(rows.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(rows.shape[0], rows.shape[1] // MX_GROUP, dtype=torch.uint8, device=x.device)
    for part in slices(rows.shape[0], rows.shape[1], x.device):
        values, scale[part] = _scaled(rows[part], E4M3_MAX)
        q[part] = values.clamp_(-E4M3_MAX, E4M3_MAX).flatten(-2)
    return q.view(x.shape), scale.view(*x.shape[:-1], -1)


def dequantize_mxfp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` [..., K] from E4M3 [..., K] and E8M0 bytes [..., K/32]; exact in FP32 unless it underflows."""
    _check(q, scale, q.shape[-1], E4M3)
    rows, row_scale = q.reshape(-1, q.shape[-1]), scale.reshape(-1, scale.shape[-1])
    out = torch.empty(rows.shape, dtype=dtype, device=q.device)
    for part in slices(rows.shape[0], rows.shape[1], q.device):
        values = decode_e4m3(rows[part]).unflatten(-1, (-1, MX_GROUP))
        out[part] = values.mul_(decode_e8m0(row_scale[part]).unsqueeze(-1)).flatten(-2)
    return out.view(q.shape)


def quantize_mxfp4(x: Tensor, *, name: str = "tensor", check_finite: bool = True) -> tuple[Tensor, Tensor]:
    """Packed E2M1 uint8 [..., K/2] and E8M0 bytes [..., K/32] of x [..., K]; otherwise as `quantize_mxfp8`."""
    rows = _rows(x, name, check_finite)
    packed = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], rows.shape[1] // MX_GROUP, dtype=torch.uint8, device=x.device)
    for part in slices(rows.shape[0], rows.shape[1], x.device):
        values, scale[part] = _scaled(rows[part], E2M1_MAX)
        packed[part] = pack_codes(encode_e2m1(values).flatten(-2))
    return packed.view(*x.shape[:-1], -1), scale.view(*x.shape[:-1], -1)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` [..., K] from packed E2M1 uint8 [..., K/2] and E8M0 bytes [..., K/32]; exact in FP32."""
    columns = 2 * packed.shape[-1]
    _check(packed, scale, columns, torch.uint8)
    rows, row_scale = packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1])
    out = torch.empty(rows.shape[0], columns, dtype=dtype, device=packed.device)
    for part in slices(rows.shape[0], columns, packed.device):
        values = decode_e2m1(rows[part]).unflatten(-1, (-1, MX_GROUP))
        out[part] = values.mul_(decode_e8m0(row_scale[part]).unsqueeze(-1)).flatten(-2)
    return out.view(*packed.shape[:-1], columns)


def decode_e8m0(scale: Tensor) -> Tensor:
    """FP32 2^(b - 127) of uint8 b (or float8_e8m0fnu); 255 is NaN. 2^-127 is an FP32 subnormal."""
    index = scale.contiguous().view(torch.uint8).to(torch.int32)
    return torch.index_select(_e8m0_table(scale.device), 0, index.flatten()).view(scale.shape)


@cache
def _e8m0_table(device: torch.device) -> Tensor:
    values = 2.0 ** (torch.arange(256, dtype=torch.float64) - E8M0_BIAS)
    values[E8M0_NAN] = torch.nan
    return values.to(torch.float32).to(device)


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """FP32 values [R, G, 32] divided by their group's scale, and the scales' bytes [R, G]."""
    values = rows.to(torch.float32).unflatten(-1, (-1, MX_GROUP))
    amax = values.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / constant(amax, largest))  # mantissa in [0.5, 1); 0.5 is a power of two
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    byte = torch.where(amax > 0, exponent + E8M0_BIAS, 0).clamp_(0, E8M0_NAN - 1).to(torch.uint8)
    byte = torch.where(amax.isfinite(), byte, torch.full_like(byte, E8M0_NAN))
    # a power of two divides exactly; 2^-127 is subnormal, so divide instead of multiplying with its reciprocal
    return values / decode_e8m0(byte).unsqueeze(-1), byte


def _rows(x: Tensor, name: str, check_finite: bool) -> Tensor:
    require_float(x, name)
    if x.shape[-1] % MX_GROUP:
        raise QuantizationError(f"{name} has {x.shape[-1]} columns, no multiple of {MX_GROUP}: pad it")
    if check_finite:
        require_finite(x, name)
    return x.reshape(-1, x.shape[-1])


def _check(q: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> None:
    if q.dtype != dtype or scale.element_size() != 1 or list(scale.shape) != [*q.shape[:-1], columns // MX_GROUP]:
        raise QuantizationError(
            f"MX needs {dtype} weights and E8M0 bytes [..., K/{MX_GROUP}], got {q.dtype} {list(q.shape)} and "
            f"{scale.dtype} {list(scale.shape)}"
        )
