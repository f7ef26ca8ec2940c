"""Writes a checkpoint in another weight format and layout (`formats.targets`), or back in BF16.

Layer by layer: at no time is more in memory than one layer's experts and one output shard.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moe_kernels.convert import EXACT, quantize_record
from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import Checkpoint, dequantize, open_checkpoint
from moe_kernels.formats.architectures import PROJECTIONS
from moe_kernels.formats.calibration import InputScales, default_scale
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.layout import StoredModule
from moe_kernels.formats.targets import Target, Written, find_target, stored_tensors
from moe_kernels.formats.writer import ShardWriter
from moe_kernels.quant import codec
from moe_kernels.records import FP8_BLOCK, ExpertWeights

log = logging.getLogger(__name__)

__all__ = ["dequantize", "quantize", "quantize_record"]

Only = Literal["experts", "linears"]
MAX_SHARD_BYTES = 4 << 30
# Raised whenever the bytes that quantize() writes for the same source change, so that caches are remade.
QUANTIZER_VERSION = 2
# Linears that publishers leave alone: the head, and the sparse indexer's head weights (zai-org's FP8 releases).
_NEVER = ("lm_head.weight", "indexer.weights_proj.weight")
# Everything but weights and their index is copied: tokenizer, generation config, chat template, licence.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
_OWN = ("config.json", "hf_quant_config.json", "moe-parity.json")


def quantize(
    src: str | Path,
    dst: str | Path,
    format: str,
    *,
    only: Only = "experts",
    calibration: str | Path | InputScales | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the checkpoint `src` in `format` into the new folder `dst`; returns `dst`.

    `format` is "bf16" or a name in `formats.targets.TARGETS`; a weight format's own name is its most common layout.
    `only="experts"` quantises the routed experts and nothing else, so that two variants of one model differ in
    the MoE path alone. `only="linears"` also takes attention, dense MLP and shared experts, as zai-org's FP8 files
    do, where the sizes fit (multiples of 128 for block FP8, K a multiple of the group for FP4 and MX). Format
    `nvfp4_mixed` has its dense layers' MLPs in per-tensor FP8 in any case. Router, norms, embeddings, lm_head and the
    sparse indexer's weights_proj always stay as they are. MTP layers are copied unquantised; from a source that is
    quantised itself they are left out and the config says so.

    NVFP4: every expert's gate, up and down projection has its own `weight_scale_2` = amax / (6 * 448).
    `calibration` (a safetensors file, see `formats.calibration`) gives the largest activations seen, from which
    `input_scale` = amax / (6 * 448), or amax / 448 for per-tensor FP8, per expert; without it they are constants
    (`formats.calibration`). Format BF16 dequantises (FP32 product, rounded once). A source in the same weight format
    but another layout keeps its bits, except for reciprocals.

    Raises CheckpointError for a bad source or an existing `dst`, FormatError for a format that is not written.
    """
    source, target = open_checkpoint(src), Path(dst).expanduser()
    layout = None if format == "bf16" else find_target(format)
    same = source.format == "bf16" if layout is None else source.expert_encoding == layout.encoding
    if same and (layout is None or layout.dense is None):
        raise FormatError(f"routed experts of '{src}' are {format} already ({source.scheme.label}): use it as it is")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"'{dst}' exists already: give a new folder, nothing is overwritten")
    exact = layout is not None and (source.format, layout.encoding.format) in EXACT
    if source.format != "bf16" and layout is not None and source.format != layout.encoding.format and not exact:
        log.warning("%s is %s: quantising it again adds its error to the new one", src, source.scheme.label)
    scales = calibration if isinstance(calibration, InputScales) else InputScales.load(calibration, source)
    created = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write(source, target, layout, only, scales, max_shard_bytes)
    except BaseException:  # Ctrl-C and a full disk included: leave nothing half-written
        shutil.rmtree(target, ignore_errors=True)
        if not created:
            target.mkdir(exist_ok=True)
        raise
    return target


def _write(
    source: Checkpoint, target: Path, layout: Target | None, only: Only, scales: InputScales, max_shard_bytes: int
) -> None:
    kept: list[str] = []
    others: dict[str, Encoding] = {}
    experts: list[str] = []
    with ShardWriter(target, max_shard_bytes, {"format": "pt"}) as writer:
        for name, tensor in _plain_tensors(source, layout, only, kept, others):
            writer.add(name, tensor)
        for layer in source.moe_layers:
            record = quantize_record(source.experts(layer), layout.encoding.format if layout else "bf16")
            if layout is None or layout.encoding.activations != "static":
                record = replace(record, w13_input_scale=None, w2_input_scale=None)
            else:
                scales.apply(record, layer)
            for module, tensors in expert_tensors(record, source.architecture.expert, layer, layout):
                experts.append(module)
                for name, tensor in tensors:
                    writer.add(name, tensor)
            del record, tensors, tensor  # before the next layer is read
        if not source.scheme.quantised:
            for info in source.layout.mtp:
                writer.add(info.name, source.read(info))
    _write_configs(source, target, layout, kept, experts, others)
    _copy_others(source.path, target)


def expert_tensors(
    record: ExpertWeights, template: str, layer: int, layout: Target | None
) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Module names of a record's matrices, each with its stored names and tensors."""
    parts = {which: record.parts(which) for which in ("w13", "w2")}
    for expert in range(record.num_experts):
        for half, projection in enumerate(PROJECTIONS):
            which, index = ("w2", (expert,)) if projection == "down_proj" else ("w13", (expert, half))
            module = template.format(layer=layer, expert=expert, projection=projection)
            q, scale, scale_2 = (None if part is None else part[index] for part in parts[which])
            assert q is not None
            if layout is None or scale is None:
                yield module, [(f"{module}.weight", q)]
                continue
            inputs: Tensor | None = getattr(record, f"{which}_input_scale")
            input_scale = None if inputs is None else inputs[index]
            yield module, list(stored_tensors(layout.encoding, module, q, scale, scale_2, input_scale))


def _plain_tensors(
    source: Checkpoint, layout: Target | None, only: Only, kept: list[str], others: dict[str, Encoding]
) -> Iterator[tuple[str, Tensor]]:
    """Everything but the routed experts; weights left unquantised are added to `kept`, the others to `others`."""
    for name, stored in source.layout.modules.items():
        module = name.removesuffix(".weight")
        encoding = _other_encoding(stored, source, layout, only)
        if encoding is not None:
            input_scale = torch.tensor(default_scale(encoding.format, module.endswith("down_proj")))
            if stored.format == encoding.format:  # under other names: the same bits
                read = source.parts(name)
                q, weight_scale, scale_2 = read["weight"].clone(), read["scale"], read.get("scale_2")
                input_scale = read.get("input_scale", input_scale)
            else:
                weight = source.tensor(name, None if stored.format == "bf16" else torch.float32)
                q, weight_scale, scale_2 = codec.encode(encoding.format, weight, name=name)
            static = input_scale if encoding.activations == "static" else None
            yield from stored_tensors(encoding, module, q, weight_scale, scale_2, static)
            others[module] = encoding
            continue
        if len(stored.shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name:
            kept.append(module)
        yield name, source.tensor(name)


def _other_encoding(stored: StoredModule, source: Checkpoint, layout: Target | None, only: Only) -> Encoding | None:
    """How a weight outside the routed experts is to be stored; None: as it is."""
    if layout is None or stored.name not in source.layout.linears or stored.name.endswith(_NEVER):
        return None
    is_dense = ".mlp." in stored.name and "shared_expert" not in stored.name
    if only == "linears":
        encoding = layout.dense or layout.encoding
    elif layout.dense is not None and is_dense:
        encoding = layout.dense
    else:
        return None
    rows, columns = stored.shape
    multiple = codec.COLUMN_MULTIPLE[encoding.format]
    fits = columns % multiple == 0 and (encoding.format != "fp8" or rows % FP8_BLOCK == 0)
    return encoding if fits else None


def _write_configs(
    source: Checkpoint, target: Path, layout: Target | None, kept: list[str], experts: list[str],
    others: dict[str, Encoding],
) -> None:  # fmt: skip
    config: dict[str, Any] = {
        k: v for k, v in source.config.items() if k not in ("quantization_config", "compression_config")
    }
    mtp = sorted({".".join(info.name.split(".")[:3]) for info in source.layout.mtp})
    if mtp and source.scheme.quantised:
        log.warning("MTP layers %s are left out: they are quantised in the source", ", ".join(mtp))
        config["num_nextn_predict_layers"], mtp = 0, []
    if layout is not None:
        written = Written(kept, mtp, experts, others)
        config["quantization_config"] = layout.section(layout, written)
        if layout.modelopt is not None:
            _write_json(target / "hf_quant_config.json", layout.modelopt(layout, written))
    _write_json(target / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_others(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OWN and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, target / file.name)
