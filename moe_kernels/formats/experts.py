"""Fills one canonical expert record from stored tensors, expert by expert, and dequantises records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.files import ShardReader
from moe_kernels.formats.layout import StoredModule
from moe_kernels.quant import fp8, nvfp4
from moe_kernels.quant.blocks import ceil_div, slices
from moe_kernels.records import FP8_BLOCK, NVFP4_GROUP, ExpertWeights, WeightFormat

_BAD = "replace the damaged file; a kernel would spread it over every token"


def read_experts(
    reader: ShardReader, experts: Sequence[dict[str, StoredModule]], swiglu_limit: float | None = None
) -> ExpertWeights:
    """Copy the tensors of one layer's experts from their mapped files into one preallocated record."""
    rows, columns = experts[0]["gate_proj"].shape
    fmt = experts[0]["gate_proj"].format
    has_input = "input_scale" in experts[0]["gate_proj"].parts
    record = _allocate(fmt, len(experts), columns, rows, has_input, swiglu_limit)
    places = dict(_places(record, experts))
    by_info = {info.name: info for expert in experts for m in expert.values() for info in m.parts.values()}
    for info, tensor in reader.read_many(by_info.values()):
        place = places.pop(info.name)
        place.copy_(tensor.view(place.shape))
    _check(record, experts)
    return record


def dequantize(record: ExpertWeights, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """The record as `format="bf16"` with weights in `dtype` (BF16, or FP32 for oracles); FP32 product, rounded once.

    A record that is BF16 already is returned as it is when `dtype` is BF16.
    """
    e, i, h = record.num_experts, record.intermediate_size, record.hidden_size
    if record.format == "bf16":
        w13, w2 = record.w13.to(dtype), record.w2.to(dtype)
    elif record.format == "fp8":
        scale13, scale2 = _need(record.w13_scale, "w13_scale"), _need(record.w2_scale, "w2_scale")
        halves = scale13.unflatten(1, (2, ceil_div(i, FP8_BLOCK)))
        w13 = fp8.dequantize_weight_blocks(record.w13.view(e, 2, i, h), halves, dtype).view(e, 2 * i, h)
        w2 = fp8.dequantize_weight_blocks(record.w2, scale2, dtype)
    elif record.format == "nvfp4":
        scale13, scale2 = _need(record.w13_scale, "w13_scale"), _need(record.w2_scale, "w2_scale")
        half = _need(record.w13_scale_2, "w13_scale_2").repeat_interleave(i, dim=1).unsqueeze(-1)  # [E, 2I, 1]
        w13 = nvfp4.dequantize(record.w13, scale13, half, dtype)
        w2 = nvfp4.dequantize(record.w2, scale2, _need(record.w2_scale_2, "w2_scale_2").view(e, 1, 1), dtype)
    else:
        raise CheckpointError(f"cannot dequantise a record of format '{record.format}'")
    return ExpertWeights("bf16", w13, w2, swiglu_limit=record.swiglu_limit)


def bad_value(tensor: Tensor) -> float | None:
    """The first NaN or infinity of a float tensor (E4M3 included), or None; bounded extra memory."""
    if tensor.dtype == fp8.E4M3:
        flat = tensor.view(torch.uint8).flatten()
        for part in slices(flat.shape[0], 1, flat.device):
            if bool(((flat[part] & 0x7F) == 0x7F).any()):
                return math.nan
        return None
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    low, high = (float(x) for x in torch.aminmax(tensor))
    return next((x for x in (low, high) if not math.isfinite(x)), None)


def check_finite(name: str, tensor: Tensor) -> None:
    """CheckpointError naming the tensor if it holds NaN or infinity."""
    bad = bad_value(tensor)
    if bad is not None:
        raise CheckpointError(f"tensor '{name}' holds {bad}; {_BAD}")


def check_scale(name: str, tensor: Tensor) -> None:
    """CheckpointError naming a scale that holds NaN, infinity or a negative number."""
    check_finite(name, tensor)
    values = fp8.decode_e4m3(tensor) if tensor.dtype == fp8.E4M3 else tensor
    if values.numel() and float(values.min()) < 0:
        raise CheckpointError(f"scale '{name}' holds {float(values.min())}, scales are never negative; {_BAD}")


def _allocate(
    fmt: WeightFormat, e: int, h: int, i: int, has_input: bool, swiglu_limit: float | None
) -> ExpertWeights:
    """An empty record. Scalars start as NaN, so that a slot never filled is found by the check."""

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, math.nan)

    if fmt == "bf16":
        return ExpertWeights(
            fmt, torch.empty(e, 2 * i, h, dtype=torch.bfloat16), torch.empty(e, h, i, dtype=torch.bfloat16),
            swiglu_limit=swiglu_limit,
        )  # fmt: skip
    if fmt == "fp8":
        rows, columns = ceil_div(i, FP8_BLOCK), ceil_div(h, FP8_BLOCK)
        return ExpertWeights(
            fmt, torch.empty(e, 2 * i, h, dtype=fp8.E4M3), torch.empty(e, h, i, dtype=fp8.E4M3),
            nan(e, 2 * rows, columns), nan(e, columns, rows), swiglu_limit=swiglu_limit,
        )  # fmt: skip
    return ExpertWeights(
        fmt,
        torch.empty(e, 2 * i, h // 2, dtype=torch.uint8),
        torch.empty(e, h, i // 2, dtype=torch.uint8),
        torch.empty(e, 2 * i, h // NVFP4_GROUP, dtype=fp8.E4M3),
        torch.empty(e, h, i // NVFP4_GROUP, dtype=fp8.E4M3),
        nan(e, 2),
        nan(e),
        nan(e, 2) if has_input else None,
        nan(e) if has_input else None,
        swiglu_limit,
    )


# part of a stored module -> (field of the record for gate and up, for down)
_FIELDS = {
    "weight": ("w13", "w2"),
    "weight_scale_inv": ("w13_scale", "w2_scale"),
    "weight_scale": ("w13_scale", "w2_scale"),
    "weight_scale_2": ("w13_scale_2", "w2_scale_2"),
    "input_scale": ("w13_input_scale", "w2_input_scale"),
}


def _places(record: ExpertWeights, experts: Sequence[dict[str, StoredModule]]) -> Iterator[tuple[str, Tensor]]:
    """The view of the record that each stored tensor belongs in."""
    for index, expert in enumerate(experts):
        for half, projection in enumerate(("gate_proj", "up_proj")):
            for part, info in expert[projection].parts.items():
                whole = getattr(record, _FIELDS[part][0])[index]
                rows = whole.shape[0] // 2
                yield info.name, whole[half * rows : (half + 1) * rows] if whole.ndim > 1 else whole[half]
        for part, info in expert["down_proj"].parts.items():
            yield info.name, getattr(record, _FIELDS[part][1])[index]


def _check(record: ExpertWeights, experts: Sequence[dict[str, StoredModule]]) -> None:
    """One fast pass over the whole layer; only if it finds something, a search for the tensor's name."""
    try:
        for name in {field for pair in _FIELDS.values() for field in pair}:
            tensor = getattr(record, name)
            if tensor is not None:
                (check_finite if name in ("w13", "w2") else check_scale)(name, tensor)
    except CheckpointError:
        for name, place in _places(record, experts):
            (check_finite if name.endswith(".weight") else check_scale)(name, place)
        raise


def _need(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise CheckpointError(f"the record has no {name}, which its format needs")
    return tensor
