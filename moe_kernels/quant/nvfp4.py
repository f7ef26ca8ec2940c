"""NVFP4: E2M1 values in pairs, an E4M3 scale per 16 columns, one FP32 `scale_2` per tensor or expert half.

value = e2m1 * scale * scale_2 with scale_2 = amax / (6 * 448), ModelOpt's convention (compressed-tensors
stores the reciprocal). Two values share a byte, the even column in the low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.errors import QuantizationError
from moe_kernels.quant.blocks import constant, require_finite, require_float, slices
from moe_kernels.quant.fp8 import E4M3, E4M3_MAX, decode_e4m3
from moe_kernels.records import NVFP4_GROUP

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code & 7; bit 3 is the sign


def global_scale(x: Tensor, batch_dims: int = 0) -> Tensor:
    """FP32 amax / (6 * 448) over all but the first `batch_dims` dimensions, shape x.shape[:batch_dims].

    A zero tensor gets 1.0 (any value would do: its block scales are zero). NaN or infinity raises
    QuantizationError.
    """
    require_float(x, "tensor")
    require_finite(x, "tensor")
    rest = tuple(range(batch_dims, x.ndim))
    return scale_from_amax(torch.maximum(x.amax(rest), -x.amin(rest)))  # no copy for |x|


def scale_from_amax(amax: Tensor) -> Tensor:
    """FP32 amax / (6 * 448), never subnormal; 1.0 where amax is 0."""
    scale = (amax.to(torch.float32) / constant(amax, E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize(
    x: Tensor, scale_2: Tensor, *, name: str = "tensor", check_finite: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantise x [..., K] (any float dtype, K % 16 == 0) with FP32 `scale_2`, 0-d or broadcast to [..., 1].

    Returns packed uint8 [..., K/2] and E4M3 scales [..., K/16]. Scale = amax / 6 / scale_2, clamped to 448
    and rounded half to even; values round to the nearest E2M1 number, ties to the even code as the hardware's
    `cvt.rn.satfinite` does, and saturate at 6. A group whose scale rounds to zero becomes zeros
    (amax <= 6 * 2^-10 * scale_2). NaN or infinity raises QuantizationError; with `check_finite=False` (no GPU
    synchronisation) NaN makes its group NaN through the scale, and infinity saturates as any value above
    6 * 448 * scale_2 does.
    """
    require_float(x, name)
    columns = x.shape[-1]
    if columns % NVFP4_GROUP:
        raise QuantizationError(f"{name} has {columns} columns, no multiple of {NVFP4_GROUP}: pad it")
    if check_finite:
        require_finite(x, name)
    rows = x.reshape(-1, columns)
    row_scale_2 = _row_scale_2(scale_2, x.shape[:-1])
    packed = torch.empty(rows.shape[0], columns // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], columns // NVFP4_GROUP, dtype=E4M3, device=x.device)
    for part in slices(rows.shape[0], columns, x.device):
        values = rows[part].to(torch.float32)
        amax = torch.nn.functional.max_pool1d(values.abs(), NVFP4_GROUP)  # a CPU's amax(-1) is slow for 16
        scale[part] = amax.div_(constant(amax, E2M1_MAX)).div_(row_scale_2[part]).clamp_(max=E4M3_MAX)
        step = decode_e4m3(scale[part]).mul_(row_scale_2[part])
        step.masked_fill_(step == 0, torch.inf)  # x / inf = 0
        code = encode_e2m1(values.unflatten(-1, (-1, NVFP4_GROUP)) / step.unsqueeze(-1))
        packed[part] = pack_codes(code.flatten(-2))
    return packed.view(*x.shape[:-1], columns // 2), scale.view(*x.shape[:-1], columns // NVFP4_GROUP)


def dequantize(
    packed: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`dtype` [..., K] from packed uint8 [..., K/2], E4M3 scales [..., K/16] and `scale_2` as in `quantize`.

    e2m1 * scale is exact in FP32, so the FP32 result is the true product rounded once.
    """
    columns = 2 * packed.shape[-1]
    if packed.dtype != torch.uint8 or tuple(scale.shape) != (*packed.shape[:-1], columns // NVFP4_GROUP):
        raise QuantizationError(
            f"NVFP4 needs uint8 [..., K/2] and scales [..., K/16], got {packed.dtype} {list(packed.shape)} "
            f"and {list(scale.shape)}"
        )
    rows, row_scale = packed.reshape(-1, columns // 2), scale.reshape(-1, columns // NVFP4_GROUP)
    row_scale_2 = _row_scale_2(scale_2, packed.shape[:-1])
    out = torch.empty(rows.shape[0], columns, dtype=dtype, device=packed.device)
    for part in slices(rows.shape[0], columns, packed.device):
        values = decode_e2m1(rows[part])
        groups = values.unflatten(-1, (-1, NVFP4_GROUP))
        groups.mul_(decode_e4m3(row_scale[part]).unsqueeze(-1)).mul_(row_scale_2[part].unsqueeze(-1))
        out[part] = values
    return out.view(*packed.shape[:-1], columns)


def encode_e2m1(x: Tensor) -> Tensor:
    """uint8 codes of the E2M1 numbers nearest to FP32 x: ties to the even code, saturating; NaN becomes 6.

    The spacing is 1/2 up to 2, 1 up to 4 and 2 above: the code is the least of three half-to-even roundings.
    """
    magnitude = x.abs().nan_to_num_(nan=E2M1_MAX).clamp_(max=E2M1_MAX)
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(8)
    return code.to(torch.uint8).bitwise_or_(sign.to(torch.uint8))


def pack_codes(code: Tensor) -> Tensor:
    """uint8 [..., K/2] from codes uint8 [..., K] (contiguous), the even column in the low nibble."""
    pairs = code.view(torch.int16)  # little-endian
    return (pairs | (pairs >> 4)).to(torch.uint8)


def decode_e2m1(packed: Tensor) -> Tensor:
    """FP32 values [..., K] of packed codes [..., K/2]."""
    return torch.nn.functional.embedding(packed.to(torch.int32), _pairs(packed.device)).flatten(-2)


def _pairs(device: torch.device) -> Tensor:
    """FP32 [256, 2]: the even and the odd column's value of every byte."""
    half = torch.tensor(E2M1_VALUES, device=device)
    values = torch.cat([half, -half])
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


def _row_scale_2(scale_2: Tensor, lead: torch.Size) -> Tensor:
    """`scale_2` as FP32 [rows, 1]."""
    try:
        return scale_2.to(torch.float32).expand(*lead, 1).reshape(-1, 1)
    except RuntimeError:
        raise QuantizationError(
            f"scale_2 {list(scale_2.shape)} does not broadcast to {[*lead, 1]}: give one value per leading "
            "index, e.g. [E, 1, 1] for x [E, N, K]"
        ) from None
