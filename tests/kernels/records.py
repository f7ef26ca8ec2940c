"""Random expert records of every format for tests of the variants."""

from __future__ import annotations

import torch

from moe_kernels.convert import quantize_record
from moe_kernels.quant import fp8, nvfp4
from moe_kernels.records import ExpertWeights, RoutingConfig, WeightFormat
from moe_kernels.registry import MoELayer, layer_class, parse


def bf16_record(experts: int, hidden: int, inter: int, seed: int = 0, limit: float | None = None) -> ExpertWeights:
    """Weights of standard deviation 1/sqrt(K), every expert at a magnitude of its own."""
    g = torch.Generator().manual_seed(seed)
    size = torch.rand(experts, 1, 1, generator=g) * 2 + 0.5
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g) * size / hidden**0.5
    w13[:, inter:] *= 3  # gate and up differ in scale, so that mixing up their scalars shows
    w2 = torch.randn(experts, hidden, inter, generator=g) * size / inter**0.5
    return ExpertWeights("bf16", w13.bfloat16(), w2.bfloat16(), swiglu_limit=limit)


def quantised(record: ExpertWeights, fmt: WeightFormat) -> ExpertWeights:
    """The record in another format; NVFP4 and per-tensor FP8 with different input scales per expert and half."""
    if fmt == "bf16":
        return record
    e, limit = record.num_experts, record.swiglu_limit
    gate, up = (h.contiguous() for h in record.w13.chunk(2, dim=1))
    if fmt == "fp8":
        (qg, sg), (qu, su), (q2, s2) = (fp8.quantize_weight_blocks(w) for w in (gate, up, record.w2))
        return ExpertWeights("fp8", torch.cat([qg, qu], 1), q2, torch.cat([sg, su], 1), s2, swiglu_limit=limit)
    spread = torch.linspace(0.5, 1.0, 2 * e)
    if fmt != "nvfp4":
        made = quantize_record(record, fmt)
        if fmt == "fp8_tensor":
            made.w13_input_scale, made.w2_input_scale = (spread * 6.0 / 448).view(e, 2), spread[e:] * 80.0 / 448
        return made
    scalars = [nvfp4.global_scale(w, 1) for w in (gate, up, record.w2)]
    (qg, sg), (qu, su), (q2, s2) = (
        nvfp4.quantize(w, s.view(e, 1, 1)) for w, s in zip((gate, up, record.w2), scalars, strict=True))
    return ExpertWeights(
        "nvfp4", torch.cat([qg, qu], 1), q2, torch.cat([sg, su], 1), s2, torch.stack(scalars[:2], 1), scalars[2],
        (spread * 6.0 / (6 * 448)).view(e, 2), spread[e:] * 80.0 / (6 * 448), limit)


def make_layer(
    variant: str, record: ExpertWeights, config: RoutingConfig, bias: torch.Tensor | None = None
) -> MoELayer:
    """The variant's layer over a record."""
    spec = parse(variant)
    if bias is None:
        bias = torch.linspace(6.8, 7.0, config.num_experts)
    return layer_class(spec)(record, config, bias, spec)
