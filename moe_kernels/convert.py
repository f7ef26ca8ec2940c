"""Expert records from one weight format to another: exactly where that is possible, else by quantising again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moe_kernels.formats.experts import dequantize
from moe_kernels.quant import codec, fp8, nvfp4
from moe_kernels.quant.blocks import ceil_div
from moe_kernels.records import FP8_BLOCK, ExpertWeights, WeightFormat


def quantize_record(record: ExpertWeights, format: WeightFormat) -> ExpertWeights:
    """One layer's experts in another format.

    The pairs in `EXACT` keep every value; anything else is dequantised to FP32 first and quantised again. The FP8
    halves have their own block rows (a ragged I never shares a block), the scalars of gate and up are their own.
    """
    if record.format == format:
        return record
    if format == "bf16":
        return dequantize(record)
    if (record.format, format) in EXACT:
        return EXACT[record.format, format](record)
    if record.format != "bf16":
        record = dequantize(record, torch.float32)
    w13, w13_scale, w13_scale_2 = codec.encode(format, record.parts("w13")[0], name="w13 [E, half, I, H]")
    w2, w2_scale, w2_scale_2 = codec.encode(format, record.w2, name="w2 [E, H, I]")
    return ExpertWeights(
        format, w13.flatten(1, 2), w2, w13_scale if w13_scale.ndim == 2 else w13_scale.flatten(1, 2), w2_scale,
        w13_scale_2, w2_scale_2, swiglu_limit=record.swiglu_limit,
    )  # fmt: skip


def _tensor_to_block(record: ExpertWeights) -> ExpertWeights:
    """One scale a matrix is the same scale in all of its blocks."""
    assert record.w13_scale is not None and record.w2_scale is not None
    e, i, h = record.num_experts, record.intermediate_size, record.hidden_size
    rows, columns = ceil_div(i, FP8_BLOCK), ceil_div(h, FP8_BLOCK)
    return ExpertWeights(
        "fp8", record.w13, record.w2,
        record.w13_scale[:, :, None, None].expand(e, 2, rows, columns).reshape(e, 2 * rows, columns),
        record.w2_scale[:, None, None].expand(e, columns, rows).contiguous(), swiglu_limit=record.swiglu_limit,
    )  # fmt: skip


def _tensor_to_channel(record: ExpertWeights) -> ExpertWeights:
    """One scale a matrix is the same scale in all of its rows."""
    assert record.w13_scale is not None and record.w2_scale is not None
    rows = record.w13_scale.repeat_interleave(record.intermediate_size, dim=1).unsqueeze(-1)
    down = record.w2_scale[:, None, None].expand(-1, record.hidden_size, 1).contiguous()
    return ExpertWeights("fp8_channel", record.w13, record.w2, rows, down, swiglu_limit=record.swiglu_limit)


def _mxfp4_to_mxfp8(record: ExpertWeights) -> ExpertWeights:
    """Every E2M1 number is an E4M3 number; the scales stay."""
    w13, w2 = (nvfp4.decode_e2m1(w).to(fp8.E4M3) for w in (record.w13, record.w2))
    return replace(record, format="mxfp8", w13=w13, w2=w2)


EXACT: dict[tuple[WeightFormat, WeightFormat], Callable[[ExpertWeights], ExpertWeights]] = {
    ("fp8_tensor", "fp8"): _tensor_to_block,
    ("fp8_tensor", "fp8_channel"): _tensor_to_channel,
    ("mxfp4", "mxfp8"): _mxfp4_to_mxfp8,
}


def conversion(source: WeightFormat, needed: WeightFormat) -> str | None:
    """None where a variant that needs `needed` may be given a converted `source`; else why not.

    BF16 is what quantisers start from. Block FP8 is how GLM-5.3 and the embedded model ship: its exact dequantisation
    is their BF16 original. The pairs in `EXACT` keep every value. Any other pair would add a second quantisation's
    error to the first and blame the kernel for it.
    """
    if source == needed or source in ("bf16", "fp8") or needed == "bf16" or (source, needed) in EXACT:
        return None
    return (
        f"quantising {source} weights again to {needed} would add an error that is no kernel's; give a {needed}, block "
        f"FP8 or BF16 checkpoint, or use '{source}/emulated', '{source}/reference' or bf16/reference"
    )
