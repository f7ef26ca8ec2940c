"""Looks into a checkpoint without running it: tensors by family, quantisation scales, router biases."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels.formats import Checkpoint, open_checkpoint
from moe_kernels.formats.checkpoint import swiglu_limit
from moe_kernels.formats.experts import canonical, check_scale
from moe_kernels.formats.files import TensorInfo
from moe_kernels.formats.layout import StoredModule
from moe_kernels.hazards import Hazard, hazards
from moe_kernels.kinds import KindReport, kinds
from moe_kernels.quant import mx
from moe_kernels.quant.fp8 import MIN_WEIGHT_SCALE
from moe_kernels.routing import route

FLIP_TOKENS = 1024


@dataclass(frozen=True)
class Family:
    """Tensors whose names differ only in numbers."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    note: str = ""  # "MTP, skipped", "ignored"


@dataclass(frozen=True)
class BiasReport:
    """A layer's e_score_correction_bias and what rounding it to BF16 would do.

    `bf16_step` is the distance of neighbouring BF16 numbers at the largest |bias|. `sets_changed` is the share of
    tokens that get another set of experts, for FLIP_TOKENS synthetic tokens (normal hidden states of unit RMS through
    the layer's norm and router weights). It needs no text and gives the order of magnitude only: on the mini
    checkpoint it is 8 to 17 %, real text gives 18 to 57 %.
    """

    layer: int
    low: float
    high: float
    bf16_step: float
    distinct: int
    distinct_bf16: int
    sets_changed: float


@dataclass(frozen=True)
class Nvfp4Report:
    """A layer's NVFP4 scalars. A kernel that takes gate's scale_2 for both halves is off by the ratio.

    `mismatched` counts experts whose gate and up scale_2 differ; `max_ratio` is larger / smaller.
    """

    layer: int
    experts: int
    mismatched: int
    max_ratio: float
    scale_2_low: float
    scale_2_high: float
    zero_scales: int
    input_scale_low: float | None
    input_scale_high: float | None
    tiny_experts: tuple[int, ...] = ()  # some scale_2 below 1e-10
    input_spread: float = 1.0  # largest over smallest input_scale, of gate and up or of down


@dataclass(frozen=True)
class Fp8Report:
    """A layer's scales in FP8 and MX formats. `tiny` counts scales below 1e-10, which underflow in some kernels.

    `dtype` is the stored one; `powers_of_two` says that every scale is one, as E8M0 scales are. `mismatched` and
    `max_ratio` compare gate's scale with up's where each matrix has one (per-tensor FP8), else 0 and 1.
    """

    layer: int
    low: float
    high: float
    tiny: int
    tiny_experts: tuple[int, ...]
    dtype: str = "F32"
    powers_of_two: bool = False
    mismatched: int = 0
    max_ratio: float = 1.0
    input_scale_low: float | None = None
    input_scale_high: float | None = None
    input_spread: float = 1.0


@dataclass(frozen=True)
class Inspection:
    """Everything `moe-kernels inspect` shows."""

    path: str
    model_type: str
    format: str
    expert_format: str
    num_layers: int
    moe_layers: tuple[int, ...]
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    files: int
    nbytes: int
    parameters: int  # MTP not counted
    mtp_layers: tuple[int, ...]
    mtp_tensors: int
    weights_sha256: str | None
    families: tuple[Family, ...]
    bias: tuple[BiasReport, ...]
    nvfp4: tuple[Nvfp4Report, ...]
    fp8: tuple[Fp8Report, ...]  # of every format but NVFP4
    kinds: tuple[KindReport, ...] = ()
    kv_cache: str | None = None  # declared; ignored
    ignored_tensors: int = 0
    swiglu_limit: float | None = None
    warnings: tuple[Hazard, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; infinity (a ratio with zero) becomes the string "inf"."""
        return _plain(asdict(self))


def inspect_checkpoint(path: str | Path, *, with_hash: bool = False) -> Inspection:
    """Open a checkpoint, read its scales and routers (not its expert weights), and describe it."""
    checkpoint = open_checkpoint(path)
    layout, routing, shape = checkpoint.layout, checkpoint.routing, checkpoint.shape
    stored = [*layout.modules.values(), *(m for x in checkpoint.moe_layers for m in _projections(checkpoint, x))]
    found = Inspection(
        path=str(path),
        model_type=checkpoint.model_type,
        format=checkpoint.scheme.label,
        expert_format=checkpoint.format,
        num_layers=checkpoint.num_layers,
        moe_layers=checkpoint.moe_layers,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        n_group=shape.n_group,
        topk_group=shape.topk_group,
        norm_topk_prob=routing.norm_topk_prob,
        routed_scaling_factor=routing.routed_scaling_factor,
        files=len(checkpoint.files()),
        nbytes=sum(info.nbytes for info in checkpoint.tensor_table()),
        parameters=sum(math.prod(m.shape) for m in stored),
        mtp_layers=tuple(sorted({int(info.name.split(".")[2]) for info in layout.mtp})),
        mtp_tensors=len(layout.mtp),
        weights_sha256=checkpoint.sha256() if with_hash else None,
        families=tuple(families(checkpoint)),
        bias=tuple(_bias_reports(checkpoint)),
        nvfp4=tuple(_nvfp4_reports(checkpoint)) if checkpoint.format == "nvfp4" else (),
        fp8=tuple(_fp8_reports(checkpoint)) if checkpoint.format not in ("bf16", "nvfp4") else (),
        kinds=tuple(kinds(checkpoint)),
        kv_cache=checkpoint.scheme.kv_cache,
        ignored_tensors=len(layout.ignored),
        swiglu_limit=swiglu_limit(checkpoint.config),
    )
    return replace(found, warnings=tuple(hazards(found, checkpoint.expert_encoding)))


def families(checkpoint: Checkpoint) -> Iterator[Family]:
    """Stored tensors grouped by name without numbers, dtype and shape, in order of appearance."""
    notes = {i.name: "MTP, skipped" for i in checkpoint.layout.mtp} | {
        i.name: "ignored" for i in checkpoint.layout.ignored
    }
    groups: dict[tuple[str, str, tuple[int, ...], str], list[TensorInfo]] = {}
    for info in checkpoint.tensor_table():
        note = notes.get(info.name, "")
        pattern = info.name if note.startswith("MTP") else re.sub(r"(?<=\.)\d+(?=\.)", "*", info.name)
        groups.setdefault((pattern, info.dtype, info.shape, note), []).append(info)
    for (pattern, dtype, shape, note), infos in groups.items():
        yield Family(pattern, len(infos), dtype, shape, sum(i.nbytes for i in infos), note)


def bf16_step(value: float) -> float:
    """Distance between neighbouring BF16 numbers (8 significant bits) around `value`."""
    return 2.0 ** (math.frexp(abs(value))[1] - 8) if value else 0.0


def _bias_reports(checkpoint: Checkpoint) -> Iterator[BiasReport]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(FLIP_TOKENS, checkpoint.shape.hidden_size, generator=generator)
    for layer in checkpoint.moe_layers:
        weight, bias = checkpoint.router(layer)
        if bias is None:
            continue
        norm = checkpoint.tensor(checkpoint.architecture.router_norm.format(layer=layer), torch.float32)
        logits = (hidden * norm) @ weight.T
        exact = route(logits, bias, checkpoint.routing).ids
        rounded = route(logits, bias, checkpoint.routing, bias_dtype=torch.bfloat16).ids
        changed = (exact.sort(-1).values != rounded.sort(-1).values).any(-1)
        yield BiasReport(
            layer, float(bias.min()), float(bias.max()), bf16_step(float(bias.abs().max())),
            bias.unique().numel(), bias.to(torch.bfloat16).unique().numel(), float(changed.float().mean()),
        )  # fmt: skip


def _nvfp4_reports(checkpoint: Checkpoint) -> Iterator[Nvfp4Report]:
    for layer in checkpoint.moe_layers:
        scalars = _read_parts(checkpoint, layer, "scale_2")
        count = checkpoint.shape.num_experts
        scale_2 = torch.stack([x.reshape(()) for x in scalars]).view(count, 3)  # gate, up, down
        halves = scale_2[:, :2]
        ratio = halves.amax(1) / halves.amin(1)
        inputs = _read_parts(checkpoint, layer, "input_scale")
        input_scale = torch.stack([x.reshape(()) for x in inputs]) if inputs else None
        yield Nvfp4Report(
            layer, count, int((halves[:, 0] != halves[:, 1]).sum()),
            float(torch.where(halves.amax(1) == 0, 1.0, ratio).max()),
            float(scale_2.min()), float(scale_2.max()), int((scale_2 == 0).sum()),
            None if input_scale is None else float(input_scale.min()),
            None if input_scale is None else float(input_scale.max()),
            tuple((scale_2 < MIN_WEIGHT_SCALE).any(1).nonzero().flatten().tolist()), _spread(inputs),
        )  # fmt: skip


def _fp8_reports(checkpoint: Checkpoint) -> Iterator[Fp8Report]:
    for layer in checkpoint.moe_layers:
        dtype = next(iter(_projections(checkpoint, layer))).parts["scale"].dtype
        scales = _read_parts(checkpoint, layer, "scale")  # three to an expert
        scales = [mx.decode_e8m0(s) if s.dtype == torch.uint8 else s for s in scales]
        tiny = [int((s < MIN_WEIGHT_SCALE * (1 - 1e-6)).sum()) for s in scales]
        mismatched, ratio = 0, 1.0
        if checkpoint.format == "fp8_tensor":
            halves = torch.stack([s.reshape(()) for s in scales]).view(-1, 3)[:, :2]
            mismatched = int((halves[:, 0] != halves[:, 1]).sum())
            ratio = float((halves.amax(1) / halves.amin(1).clamp(min=MIN_WEIGHT_SCALE)).max())
        inputs = _read_parts(checkpoint, layer, "input_scale")
        yield Fp8Report(
            layer, min(float(s.min()) for s in scales), max(float(s.max()) for s in scales), sum(tiny),
            tuple(sorted({i // 3 for i, n in enumerate(tiny) if n})), dtype,
            all(bool((torch.frexp(s)[0].abs() == 0.5).all()) for s in scales), mismatched, ratio,
            min(map(float, inputs), default=None), max(map(float, inputs), default=None), _spread(inputs),
        )  # fmt: skip


def _spread(inputs: list[Tensor]) -> float:
    """Largest over smallest input_scale, of gate and up or of down, three tensors to an expert; 1 without any."""
    if not inputs:
        return 1.0
    scales = torch.stack([x.reshape(()) for x in inputs]).view(-1, 3)
    return max(float(part.max() / part.min()) for part in (scales[:, :2], scales[:, 2]))


def _projections(checkpoint: Checkpoint, layer: int) -> Iterable[StoredModule]:
    return (module for expert in checkpoint.expert_tensors(layer) for module in expert.values())


def _read_parts(checkpoint: Checkpoint, layer: int, part: str) -> list[Tensor]:
    """One part of every projection, in the order gate, up, down of expert 0, 1, ...; empty if the file has none."""
    found = []
    for module in _projections(checkpoint, layer):
        if part in module.parts:
            tensor = checkpoint.read(module.parts[part])
            check_scale(module.parts[part].name, tensor)
            found.append(canonical(module, part, tensor))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
