"""FP8 E4M3 quantisers: activations in groups of 1x128, weights in 128x128 blocks, FP32 scales that multiply.

The rule is DeepSeek-V3's: scale = max(amax, eps) / 448; q = clamp(x / scale, -448, 448), half to even.
Casting without the clamp would give NaN above 464 in torch. The scale layouts of the activations are those of
SGLang's per_token_group_quant_fp8.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from moe_kernels.errors import ContractError, QuantizationError
from moe_kernels.native import Library, fits, library
from moe_kernels.quant.blocks import ceil_div, constant, require_finite, require_float, slices
from moe_kernels.records import FP8_BLOCK

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Weight scales never go below this; a zero block gets it and comes back as zeros. Smaller scales of dead
# experts (1e-23 was seen in the wild) underflow in kernels that multiply two scales. vLLM clamps likewise.
MIN_WEIGHT_SCALE = 1e-10

ScaleLayout = Literal["row", "column", "column_tma"]


def quantize_activations(
    x: Tensor,
    group: int = FP8_BLOCK,
    *,
    layout: ScaleLayout = "row",
    ue8m0: bool = False,
    eps: float = 1e-10,
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise x [M, K] (any float dtype) per token and group of `group` columns.

    Returns q E4M3 [M, K] (contiguous) and the scales, [M, G] with G = ceil(K / group):

    | layout | ue8m0 | dtype | storage | strides |
    |---|---|---|---|---|
    | row | no | fp32 | (M, G) | (G, 1) |
    | column | no | fp32 | (G, M), so `.t()` is dense | (1, M) |
    | column_tma | no | fp32 | (G, ceil4(M)), so `.t()` is dense only if M % 4 == 0 | (1, ceil4(M)) |
    | row | yes | fp32 powers of two | (M, G) | (G, 1) |
    | column_tma | yes | int32 [M, ceil(G/4)], four exponents each | (ceil(G/4), ceil4(M)) | (1, ceil4(M)) |

    Column layouts are written in place by the division, not transposed afterwards; padding is zero.
    A ragged last group (K % group != 0) has a scale of its own over the columns that exist. An all-zero group
    has scale eps / 448 and comes back as zeros. With `ue8m0` the scale is rounded up to a power of two
    *before* it divides. NaN or infinity in a group makes it NaN after dequantisation, so that it cannot
    vanish; `check_finite=True` raises QuantizationError instead (this synchronises a GPU).
    """
    if x.ndim != 2:
        raise ContractError(f"activations must be [tokens, hidden], got shape {tuple(x.shape)}")
    if group < 1:
        raise ContractError(f"group must be positive, got {group}")
    if ue8m0 and layout == "column":
        raise ContractError("ue8m0 scales exist as layout='row' or 'column_tma', not as 'column'")
    require_float(x, "activations")
    if check_finite:
        require_finite(x, "activations")
    tokens, columns = x.shape
    groups = ceil_div(columns, group)
    q = torch.empty(tokens, columns, dtype=E4M3, device=x.device)
    scale = _scale_storage(tokens, groups, "row" if ue8m0 else layout, x.device)
    kernels = _kernels(x.dtype, x.device, columns, group)
    if kernels is not None and not ue8m0:
        kernels.quantise_fp8(x.contiguous(), q, scale, group, eps)
        return q, scale
    for part in slices(tokens, columns, x.device):
        values = _grouped(x[part], groups, group)
        amax = values.abs().amax(-1).clamp_(min=eps) if columns else scale[part]
        if ue8m0:
            scale[part] = ceil_power_of_two(amax / constant(amax, E4M3_MAX))
        else:
            torch.div(amax, constant(amax, E4M3_MAX), out=scale[part])
        values.div_(scale[part].unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
        q[part] = values.flatten(1)[:, :columns]
    return q, _pack_exponents(scale) if ue8m0 and layout == "column_tma" else scale


def dequantize_activations(q: Tensor, scale: Tensor, group: int = FP8_BLOCK) -> Tensor:
    """FP32 [M, K] from E4M3 q [M, K] and scales of any layout above (read through their strides)."""
    tokens, columns = q.shape
    groups = ceil_div(columns, group)
    if scale.dtype == torch.int32:
        scale = _unpack_exponents(scale, groups)
    if tuple(scale.shape) != (tokens, groups):
        raise ContractError(
            f"scale must be [{tokens}, {groups}] for q [{tokens}, {columns}], got {list(scale.shape)}"
        )
    kernels = _kernels(torch.float32, q.device, columns, group)
    if kernels is not None and scale.dtype == torch.float32 and q.dtype == E4M3:
        return kernels.dequantise_fp8(q.contiguous(), scale, group)
    out = torch.empty(tokens, columns, device=q.device)
    for part in slices(tokens, columns, q.device):
        values = _grouped(decode_e4m3(q[part]), groups, group).mul_(scale[part].unsqueeze(-1))
        out[part] = values.flatten(1)[:, :columns]
    return out


def _kernels(dtype: torch.dtype, device: torch.device, columns: int, group: int) -> Library | None:
    """The compiled kernels where they take rows of this kind; same bits."""
    return library() if device.type == "cpu" and fits(dtype, columns, group) and columns % group == 0 else None


def quantize_weight_blocks(
    w: Tensor, block: int = FP8_BLOCK, *, name: str = "weight"
) -> tuple[Tensor, Tensor]:
    """Quantise w [..., N, K] in blocks of `block` x `block`.

    Returns q E4M3 [..., N, K] and FP32 scales [..., ceil(N/block), ceil(K/block)], w ~ q * scale. Ragged last
    blocks have scales over the elements that exist. A zero block gets the smallest scale, 1e-10, and zeros.
    NaN or infinity raises QuantizationError with `name` and position. Extra memory on a CPU: a few MiB.
    """
    require_float(w, name)
    if w.ndim < 2:
        raise QuantizationError(f"{name} must be [..., N, K], got shape {tuple(w.shape)}")
    require_finite(w, name)
    *lead, rows, columns = w.shape
    row_blocks, column_blocks = ceil_div(rows, block), ceil_div(columns, block)
    q = torch.empty(w.shape, dtype=E4M3, device=w.device)
    scale = torch.empty(*lead, row_blocks, column_blocks, device=w.device)
    all_w, all_q = w.reshape(-1, rows, columns), q.view(-1, rows, columns)
    all_scales = scale.view(-1, row_blocks, column_blocks)
    for matrix, matrix_q, matrix_scale in zip(all_w, all_q, all_scales, strict=True):
        for band in slices(row_blocks, block * columns, w.device):
            part = slice(band.start * block, min(rows, band.stop * block))
            values = _blocked(matrix[part], block)
            step = (values.abs().amax((1, 3)) / constant(values, E4M3_MAX)).clamp_(min=MIN_WEIGHT_SCALE)
            values.div_(step[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
            matrix_scale[band] = step
            matrix_q[part] = _unblocked(values, part.stop - part.start, columns)
    return q, scale


def dequantize_weight_blocks(
    q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, block: int = FP8_BLOCK
) -> Tensor:
    """`dtype` [..., N, K] from E4M3 q [..., N, K] and scales [..., ceil(N/block), ceil(K/block)].

    The product is FP32 and then rounded once to `dtype`.
    """
    *lead, rows, columns = q.shape
    row_blocks, column_blocks = ceil_div(rows, block), ceil_div(columns, block)
    if list(scale.shape) != [*lead, row_blocks, column_blocks]:
        raise QuantizationError(
            f"scale must be {[*lead, row_blocks, column_blocks]} for weights {list(q.shape)}, "
            f"got {list(scale.shape)}"
        )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    all_q, all_out = q.reshape(-1, rows, columns), out.view(-1, rows, columns)
    all_scales = scale.reshape(-1, row_blocks, column_blocks).float()
    for matrix, matrix_out, matrix_scale in zip(all_q, all_out, all_scales, strict=True):
        for band in slices(row_blocks, block * columns, q.device):
            part = slice(band.start * block, min(rows, band.stop * block))
            values = _blocked(decode_e4m3(matrix[part]), block).mul_(matrix_scale[band][:, None, :, None])
            matrix_out[part] = _unblocked(values, part.stop - part.start, columns)
    return out


def decode_e4m3(q: Tensor) -> Tensor:
    """FP32 values of an E4M3 tensor; on a CPU by table, measured 5 times faster than `q.float()` there."""
    if q.device.type != "cpu":
        return q.to(torch.float32)
    index = q.contiguous().view(torch.uint8).to(torch.int32).flatten()
    return torch.index_select(_e4m3_table(), 0, index).view(q.shape)


@cache
def _e4m3_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float32)


def ceil_power_of_two(scale: Tensor) -> Tensor:
    """Positive FP32 scale rounded up to a power of two, exactly (through its exponent, no logarithm)."""
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.where(mantissa > 0.5, 1.0, mantissa), exponent)  # NaN stays NaN


def _scale_storage(tokens: int, groups: int, layout: ScaleLayout, device: torch.device) -> Tensor:
    """An FP32 [M, G] tensor laid out as `layout` asks; only its padding is initialised."""
    if layout == "row":
        return torch.empty(tokens, groups, device=device)
    if layout == "column":
        return torch.empty(groups, tokens, device=device).t()
    if layout == "column_tma":
        storage = torch.empty(groups, 4 * ceil_div(tokens, 4), device=device)
        storage[:, tokens:] = 0
        return storage.t()[:tokens]
    raise ContractError(f"scale layout must be 'row', 'column' or 'column_tma', got '{layout}'")


def _pack_exponents(scale: Tensor) -> Tensor:
    """Biased exponents of power-of-two scales [M, G], four groups to an int32, the first group lowest."""
    tokens, groups = scale.shape
    exponents = torch.zeros(
        4 * ceil_div(tokens, 4), 4 * ceil_div(groups, 4), dtype=torch.uint8, device=scale.device
    )
    exponents[:tokens, :groups] = scale.view(torch.int32) >> 23
    return exponents.view(torch.int32).t().contiguous().t()[:tokens]


def _unpack_exponents(packed: Tensor, groups: int) -> Tensor:
    exponents = packed.contiguous().view(torch.uint8)[:, :groups]
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _grouped(x: Tensor, groups: int, group: int) -> Tensor:
    """An FP32 copy [M, G, group] of x [M, K], the last group filled up with zeros."""
    missing = groups * group - x.shape[1]
    copy = torch.empty(x.shape[0], groups * group, device=x.device)
    copy[:, : x.shape[1]] = x
    if missing:
        copy[:, x.shape[1] :] = 0
    return copy.view(x.shape[0], groups, group)


def _blocked(x: Tensor, block: int) -> Tensor:
    """An FP32 copy [row blocks, block, column blocks, block] of x [N, K], filled up with zeros."""
    rows, columns = x.shape
    row_blocks, column_blocks = ceil_div(rows, block), ceil_div(columns, block)
    full = rows % block == 0 and columns % block == 0
    copy = (torch.empty if full else torch.zeros)(row_blocks * block, column_blocks * block, device=x.device)
    copy[:rows, :columns] = x
    return copy.view(row_blocks, block, column_blocks, block)


def _unblocked(values: Tensor, rows: int, columns: int) -> Tensor:
    return values.flatten(2).flatten(0, 1)[:rows, :columns]
