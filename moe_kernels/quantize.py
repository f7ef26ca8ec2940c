"""Writes a checkpoint in another weight format: block FP8 (format A), ModelOpt NVFP4 (format C) or BF16.

Layer by layer: at no time is more in memory than one layer's experts and one output shard.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moe_kernels import __version__
from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import Checkpoint, dequantize, open_checkpoint
from moe_kernels.formats.calibration import DEFAULT_INPUT_SCALE, DEFAULT_INTERMEDIATE_SCALE, InputScales
from moe_kernels.formats.layout import StoredModule
from moe_kernels.formats.writer import ShardWriter
from moe_kernels.quant import fp8, nvfp4
from moe_kernels.records import FP8_BLOCK, NVFP4_GROUP, ExpertWeights, WeightFormat

log = logging.getLogger(__name__)

__all__ = ["dequantize", "quantize", "quantize_record"]

Only = Literal["experts", "linears"]
MAX_SHARD_BYTES = 4 << 30
# Raised whenever the bytes that quantize() writes for the same source change, so that caches are remade.
QUANTIZER_VERSION = 2
_WRITTEN = ("bf16", "fp8", "nvfp4")
# Everything but weights and their index is copied: tokenizer, generation config, chat template, licence.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
_OWN = ("config.json", "hf_quant_config.json", "moe-parity.json")


def quantize(
    src: str | Path,
    dst: str | Path,
    format: WeightFormat,
    *,
    only: Only = "experts",
    calibration: str | Path | InputScales | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the checkpoint `src` in `format` into the new folder `dst`; returns `dst`.

    `only="experts"` quantises the routed experts and nothing else, so that two variants of one model differ in
    the MoE path alone. `only="linears"` also takes attention, dense MLP and shared experts, as zai-org's FP8 files
    do, where the sizes fit (multiples of 128 for FP8, K a multiple of 16 for NVFP4). Router, norms, embeddings and
    lm_head always stay as they are. MTP layers are copied unquantised; from a source that is quantised itself they
    are left out and the config says so.

    NVFP4: every expert's gate, up and down projection has its own `weight_scale_2` = amax / (6 * 448).
    `calibration` (a safetensors file, see `formats.calibration`) gives the largest activations seen, from which
    `input_scale` = amax / (6 * 448) per expert; without it input_scale is 1/4 for gate and up and 1 for down (why:
    `formats.calibration.DEFAULT_INPUT_SCALE`). Format BF16 dequantises (FP32 product, rounded once).

    Raises CheckpointError for a bad source or an existing `dst`, FormatError for a format that is not written.
    """
    source, target = open_checkpoint(src), Path(dst).expanduser()
    if format not in _WRITTEN:
        raise FormatError(f"cannot write format '{format}'; choose one of: {', '.join(_WRITTEN)}")
    if source.format == format:
        raise FormatError(f"routed experts of '{src}' are {format} already ({source.scheme.label}): use it as it is")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"'{dst}' exists already: give a new folder, nothing is overwritten")
    if source.scheme.format != "bf16" and format != "bf16":
        log.warning("%s is %s: quantising it again adds its error to the new one", src, source.scheme.label)
    scales = calibration if isinstance(calibration, InputScales) else InputScales.load(calibration, source)
    created = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write(source, target, format, only, scales, max_shard_bytes)
    except BaseException:  # Ctrl-C and a full disk included: leave nothing half-written
        shutil.rmtree(target, ignore_errors=True)
        if not created:
            target.mkdir(exist_ok=True)
        raise
    return target


def _write(
    source: Checkpoint, target: Path, format: WeightFormat, only: Only, scales: InputScales, max_shard_bytes: int
) -> None:
    kept: list[str] = []
    with ShardWriter(target, max_shard_bytes, {"format": "pt"}) as writer:
        for name, tensor in _plain_tensors(source, format, only, kept):
            writer.add(name, tensor)
        for layer in source.moe_layers:
            record = quantize_record(source.experts(layer), format)
            scales.apply(record, layer)
            for name, tensor in expert_tensors(record, source.architecture.expert, layer):
                writer.add(name, tensor)
        if source.scheme.format == "bf16":
            for info in source.layout.mtp:
                writer.add(info.name, source.read(info))
    _write_configs(source, target, format, kept)
    _copy_others(source.path, target)


def quantize_record(record: ExpertWeights, format: WeightFormat) -> ExpertWeights:
    """One layer's experts in another format; a quantised record is dequantised to FP32 first.

    The FP8 halves have their own block rows (a ragged I never shares a block), the NVFP4 halves their own scale_2.
    """
    if record.format == format:
        return record
    if format == "bf16":
        return dequantize(record)
    if record.format != "bf16":
        record = dequantize(record, torch.float32)
    e, i, h = record.num_experts, record.intermediate_size, record.hidden_size
    if format == "fp8":
        w13, w13_scale = fp8.quantize_weight_blocks(record.w13.view(e, 2, i, h), name="w13 [E, half, I, H]")
        w2, w2_scale = fp8.quantize_weight_blocks(record.w2, name="w2 [E, H, I]")
        return ExpertWeights(
            "fp8", w13.view(e, 2 * i, h), w2, w13_scale.flatten(1, 2), w2_scale, swiglu_limit=record.swiglu_limit
        )
    if format != "nvfp4":
        raise FormatError(f"cannot quantise to '{format}'; choose one of: {', '.join(_WRITTEN)}")
    halves = record.w13.view(e, 2, i, h)
    w13_scale_2, w2_scale_2 = nvfp4.global_scale(halves, 2), nvfp4.global_scale(record.w2, 1)
    w13, w13_scale = nvfp4.quantize(halves, w13_scale_2[..., None, None], name="w13 [E, half, I, H]")
    w2, w2_scale = nvfp4.quantize(record.w2, w2_scale_2[:, None, None], name="w2 [E, H, I]")
    return ExpertWeights(
        "nvfp4", w13.flatten(1, 2), w2, w13_scale.flatten(1, 2), w2_scale, w13_scale_2, w2_scale_2,
        swiglu_limit=record.swiglu_limit,
    )  # fmt: skip


def expert_tensors(record: ExpertWeights, template: str, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and tensors of a record: format A's, C's or plain ones."""
    scale = "weight_scale_inv" if record.format == "fp8" else "weight_scale"
    fields = (
        ("weight", record.w13, record.w2),
        (scale, record.w13_scale, record.w2_scale),
        ("weight_scale_2", record.w13_scale_2, record.w2_scale_2),
        ("input_scale", record.w13_input_scale, record.w2_input_scale),
    )
    for expert in range(record.num_experts):
        for half, projection in enumerate(("gate_proj", "up_proj", "down_proj")):
            module = template.format(layer=layer, expert=expert, projection=projection)
            for part, wide, down in fields:
                if wide is None or down is None:
                    continue
                if projection == "down_proj":
                    yield f"{module}.{part}", down[expert]
                else:
                    yield f"{module}.{part}", wide[expert].unflatten(0, (2, -1))[half].reshape(
                        () if wide.ndim == 2 else (-1, wide.shape[-1])
                    )


def _plain_tensors(
    source: Checkpoint, format: WeightFormat, only: Only, kept: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Everything but the routed experts; names of weights left unquantised are added to `kept`."""
    for name, stored in source.layout.modules.items():
        if format != "bf16" and only == "linears" and _may_quantise(stored, source, format):
            module = name.removesuffix(".weight")
            weight = source.tensor(name, None if stored.format == "bf16" else torch.float32)
            if format == "fp8":
                yield from zip((name, f"{name}_scale_inv"), fp8.quantize_weight_blocks(weight, name=name), strict=True)
            else:
                scale_2 = nvfp4.global_scale(weight)
                packed, scale = nvfp4.quantize(weight, scale_2, name=name)
                yield from ((name, packed), (f"{name}_scale", scale), (f"{name}_scale_2", scale_2))
                down = module.endswith("down_proj")
                default = DEFAULT_INTERMEDIATE_SCALE if down else DEFAULT_INPUT_SCALE
                yield f"{module}.input_scale", torch.tensor(default)
            continue
        if len(stored.shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name:
            kept.append(name.removesuffix(".weight"))
        yield name, source.tensor(name)


def _may_quantise(stored: StoredModule, source: Checkpoint, format: WeightFormat) -> bool:
    if stored.name not in source.layout.linears or stored.name == "lm_head.weight":
        return False
    rows, columns = stored.shape
    return (rows % FP8_BLOCK == columns % FP8_BLOCK == 0) if format == "fp8" else columns % NVFP4_GROUP == 0


def _write_configs(source: Checkpoint, target: Path, format: WeightFormat, kept: list[str]) -> None:
    config: dict[str, Any] = {
        k: v for k, v in source.config.items() if k not in ("quantization_config", "compression_config")
    }
    mtp = sorted({".".join(info.name.split(".")[:3]) for info in source.layout.mtp})
    if mtp and source.scheme.format != "bf16":
        log.warning("MTP layers %s are left out: they are quantised in the source", ", ".join(mtp))
        config["num_nextn_predict_layers"], mtp = 0, []
    if format == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": kept + mtp,
        }
    elif format == "nvfp4":
        # Engines know the format by the producer's name, so that has to stay; the version tells who wrote it.
        producer = {"name": "modelopt", "version": f"0.0.0+moe-parity.{__version__}"}
        excluded = kept + [f"{layer}*" for layer in mtp]
        four_bit = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {
                "group_0": {"weights": four_bit, "input_activations": four_bit, "targets": ["Linear"]}
            },
            "ignore": excluded,
            "producer": producer,
        }
        _write_json(
            target / "hf_quant_config.json",
            {
                "producer": producer,
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": None,
                    "group_size": NVFP4_GROUP,
                    "exclude_modules": excluded,
                },
            },
        )
    _write_json(target / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_others(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OWN and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, target / file.name)
