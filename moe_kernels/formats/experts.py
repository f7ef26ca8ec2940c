"""Fills one canonical expert record from stored tensors, expert by expert, and dequantises records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.files import ShardReader
from moe_kernels.formats.layout import StoredModule
from moe_kernels.quant import codec, fp8, mx
from moe_kernels.quant.blocks import ceil_div, slices
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP, ExpertWeights, WeightFormat

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
    owners = {
        info.name: (m, part) for expert in experts for m in expert.values() for part, info in m.parts.items()
    }
    for info, tensor in reader.read_many(m.parts[part] for m, part in owners.values()):
        module, part = owners[info.name]
        place = places.pop(info.name)
        place.copy_(canonical(module, part, tensor).view(place.shape))
    _check(record, experts)
    return record


def dequantize(record: ExpertWeights, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """The record as `format="bf16"` with weights in `dtype` (BF16, or FP32 for oracles); FP32 product, rounded once.

    A record that is BF16 already is returned as it is when `dtype` is BF16.
    """
    w13 = codec.decode(record.format, *record.parts("w13"), dtype).flatten(1, 2)
    w2 = codec.decode(record.format, *record.parts("w2"), dtype)
    return ExpertWeights("bf16", w13, w2, swiglu_limit=record.swiglu_limit)


def canonical(stored: StoredModule, part: str, tensor: Tensor) -> Tensor:
    """A stored tensor in the record's terms: E8M0 as bytes (FP32 for FP8 scales), scalars FP32 and not reciprocal.

    Raises CheckpointError for a reciprocal of zero.
    """
    encoding = stored.encoding
    if encoding is None or part == "weight" or tensor.dtype == fp8.E4M3:
        return tensor
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        byte = tensor.view(torch.uint8)
        if bool((byte == mx.E8M0_NAN).any()):
            raise CheckpointError(f"scale '{stored.parts[part].name}' holds nan (E8M0 byte 255); {_BAD}")
        return byte if encoding.format in ("mxfp8", "mxfp4") else mx.decode_e8m0(byte)
    tensor = tensor.to(torch.float32)
    if encoding.reciprocal and part in ("scale_2", "input_scale"):
        if not bool((tensor > 0).all()):
            raise CheckpointError(
                f"scale '{stored.parts[part].name}' holds {float(tensor.min())}; {encoding.label} stores reciprocals, "
                f"which are positive; {_BAD}"
            )
        return tensor.reciprocal()
    return tensor


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
    if tensor.dtype == torch.float8_e8m0fnu:
        return  # never negative; NaN is found where the bytes are decoded
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
    u8, half = torch.uint8, 2 if fmt in ("nvfp4", "mxfp4") else 1
    element = u8 if half == 2 else fp8.E4M3
    w13 = torch.empty(e, 2 * i, h // half, dtype=element)
    w2 = torch.empty(e, h, i // half, dtype=element)
    if fmt == "fp8":
        rows, columns = ceil_div(i, FP8_BLOCK), ceil_div(h, FP8_BLOCK)
        scales = nan(e, 2 * rows, columns), nan(e, columns, rows)
    elif fmt == "fp8_channel":
        scales = nan(e, 2 * i, 1), nan(e, h, 1)
    elif fmt == "fp8_tensor":
        scales = nan(e, 2), nan(e)
    else:
        group, dtype = (NVFP4_GROUP, fp8.E4M3) if fmt == "nvfp4" else (MX_GROUP, u8)
        scales = torch.empty(e, 2 * i, h // group, dtype=dtype), torch.empty(e, h, i // group, dtype=dtype)
    record = ExpertWeights(fmt, w13, w2, *scales, swiglu_limit=swiglu_limit)
    if fmt == "nvfp4":
        record.w13_scale_2, record.w2_scale_2 = nan(e, 2), nan(e)
    if has_input:
        record.w13_input_scale, record.w2_input_scale = nan(e, 2), nan(e)
    return record


# part of a stored module -> (field of the record for gate and up, for down)
_FIELDS = {
    "weight": ("w13", "w2"),
    "scale": ("w13_scale", "w2_scale"),
    "scale_2": ("w13_scale_2", "w2_scale_2"),
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
            (check_finite if name.endswith((".weight", ".weight_packed")) else check_scale)(name, place)
        raise
