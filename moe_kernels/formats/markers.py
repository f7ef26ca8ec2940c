"""Which quantisation format a checkpoint declares, and which modules it leaves out.

Letters are ours: A block FP8 and C ModelOpt NVFP4 are read; every other format is refused by its name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.records import FP8_BLOCK, NVFP4_GROUP, WeightFormat

_REMEDY = (
    "supported are BF16, block FP8 (format A) and ModelOpt NVFP4 (format C): take the BF16 original and run "
    "`moe-kernels quantize SRC DST --format fp8|nvfp4`"
)
_BLOCK = [FP8_BLOCK, FP8_BLOCK]

# quant_algo of ModelOpt -> name of the format
_MODELOPT = {
    "MIXED_PRECISION": "ModelOpt mixed precision (format C')",
    "W4A16_NVFP4": "ModelOpt weight-only NVFP4, W4A16 (format C'')",
    "NVFP4_AWQ": "ModelOpt NVFP4 with AWQ pre-scales",
    "MXFP4": "ModelOpt MXFP4 (format E)",
    "W4A8_MXFP4_FP8": "ModelOpt MXFP4 with FP8 activations (format E)",
    "MXFP8": "ModelOpt MXFP8 (format G)",
    "FP8": "ModelOpt per-tensor FP8 (format H)",
    "FP8_PER_CHANNEL_PER_TOKEN": "ModelOpt per-channel FP8 (format H)",
    "FP8_PB_WO": "ModelOpt weight-only block FP8 (format H)",
    "W4A16_AWQ": "ModelOpt INT4 AWQ (like format I)",
    "INT4_AWQ": "ModelOpt INT4 AWQ (like format I)",
    "W4A8_AWQ": "ModelOpt W4A8 AWQ (like format I)",
}
# format of compressed-tensors -> name of the format
_COMPRESSED = {
    "nvfp4-pack-quantized": "compressed-tensors NVFP4 (format D; its global scales are reciprocals)",
    "nvfp4a16-pack-quantized": "compressed-tensors weight-only NVFP4 (format D)",
    "mxfp4-pack-quantized": "compressed-tensors MXFP4 (format E)",
    "mxfp8-quantized": "compressed-tensors MXFP8 (format G)",
    "pack-quantized": "compressed-tensors packed INT4, W4A16 (format I)",
    "int-quantized": "compressed-tensors INT8",
    "mixed-precision": "compressed-tensors mixed precision",
}
# quant_method -> name of the format
_METHODS = {
    "quark": "AMD Quark (format F)",
    "mxfp8": "MXFP8 (format G)",
    "mxfp4": "MXFP4 (format E)",
    "fbgemm_fp8": "FBGEMM per-channel FP8 (like format B)",
    "awq": "AWQ INT4 (like format I)",
    "gptq": "GPTQ INT4 (like format I)",
    "bitsandbytes": "bitsandbytes",
}


@dataclass(frozen=True)
class QuantScheme:
    """What the config declares: the format of quantised modules and the patterns of modules left out."""

    format: WeightFormat
    label: str
    excluded: tuple[str, ...] = ()

    def excludes(self, module: str) -> bool:
        """Whether the config leaves `module` (a full name without `.weight`) unquantised.

        ModelOpt: shell wildcards over the whole name, or a name that covers all below it. Format A: a name, a
        part of it between dots (so `mlp.gate` does not cover `mlp.gate_proj`) or transformers' regular expression.
        """
        if self._pattern is not None and self._pattern.match(module):
            return True
        parts = module.split(".")
        starts = range(1 if self.format == "nvfp4" else len(parts))
        return any(
            ".".join(parts[start:stop]) in self._names for start in starts for stop in range(start + 1, len(parts) + 1)
        )

    # Lists have thousands of entries and checkpoints tens of thousands of modules: look names up, match the rest once.
    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(p for p in self.excluded if _PLAIN.fullmatch(p))

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        found = []
        for pattern in self.excluded:
            if _PLAIN.fullmatch(pattern):
                continue
            expression = fnmatch.translate(pattern) if self.format == "nvfp4" else rf"(?:{pattern})(?:\.|$)"
            try:
                re.compile(expression)
            except re.error:
                continue  # names nothing
            found.append(expression)
        return re.compile("|".join(found)) if found else None


_PLAIN = re.compile(r"[\w.\-]*")


def declared_scheme(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> QuantScheme:
    """The scheme from `config.json` and the content of `hf_quant_config.json` (None where absent)."""
    section = config.get("quantization_config") or config.get("compression_config")
    if section and not isinstance(section, dict):
        raise CheckpointError("config.json: quantization_config must be an object; copy the checkpoint again")
    if modelopt is not None:
        inner = modelopt.get("quantization")
        if not isinstance(inner, dict):
            raise CheckpointError("hf_quant_config.json has no 'quantization' entry; copy the checkpoint again")
        scheme = _modelopt_scheme(inner)
        if section:
            other = _config_scheme(section)
            if other.format != scheme.format:
                raise CheckpointError(
                    f"hf_quant_config.json declares {scheme.label} but config.json declares {other.label}; "
                    "remove the one that does not belong to these weights"
                )
            scheme = QuantScheme(scheme.format, scheme.label, scheme.excluded + other.excluded)
        return scheme
    return _config_scheme(section) if section else QuantScheme("bf16", "BF16")


def _config_scheme(section: Mapping[str, Any]) -> QuantScheme:
    method = str(section.get("quant_method", "")).lower()
    if method == "fp8":
        return _block_fp8_scheme(section)
    if method.startswith("modelopt"):
        return _modelopt_scheme(section)
    if method == "compressed-tensors":
        raise FormatError(f"{_compressed_name(section)} is not supported; {_REMEDY}")
    name = _METHODS.get(method, f"quantization_config.quant_method '{method}'")
    raise FormatError(f"{name} is not supported; {_REMEDY}")


def _block_fp8_scheme(section: Mapping[str, Any]) -> QuantScheme:
    block = section.get("weight_block_size")
    if block is None:
        raise FormatError(f"per-tensor FP8 (quant_method fp8 without weight_block_size) is not supported; {_REMEDY}")
    if list(block) != _BLOCK:
        raise FormatError(f"block FP8 with weight_block_size {block} is not supported, only {_BLOCK}; {_REMEDY}")
    wanted = {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float", "expert_dtype": "fp8"}
    for key, value in wanted.items():
        if str(section.get(key, value)).lower() != value:
            raise FormatError(f"block FP8 with {key} '{section[key]}' is not supported, only '{value}'; {_REMEDY}")
    left_out = section.get("modules_to_not_convert") or section.get("ignored_layers") or []
    return QuantScheme("fp8", "block FP8 (format A)", tuple(left_out))


def _modelopt_scheme(section: Mapping[str, Any]) -> QuantScheme:
    algo = str(section.get("quant_algo") or "").upper()
    if algo != "NVFP4":
        name = _MODELOPT.get(algo, f"ModelOpt quant_algo '{section.get('quant_algo')}'")
        raise FormatError(f"{name} is not supported; {_REMEDY}")
    sizes = {section.get("group_size")} | {
        (group.get("weights") or {}).get("group_size") for group in (section.get("config_groups") or {}).values()
    }
    if sizes - {None, NVFP4_GROUP}:
        raise FormatError(f"NVFP4 with group size {sizes - {None}} is not supported, only {NVFP4_GROUP}; {_REMEDY}")
    for group in (section.get("config_groups") or {}).values():
        if "input_activations" in group and group["input_activations"] is None:
            raise FormatError(f"{_MODELOPT['W4A16_NVFP4']} is not supported; {_REMEDY}")
    left_out = section.get("exclude_modules") or section.get("ignore") or []
    return QuantScheme("nvfp4", "ModelOpt NVFP4 (format C)", tuple(left_out))


def _compressed_name(section: Mapping[str, Any]) -> str:
    groups = (section.get("config_groups") or {}).values()
    strategies = {(group.get("weights") or {}).get("strategy") for group in groups}
    fmt = str(section.get("format", ""))
    if fmt == "float-quantized" or fmt == "naive-quantized":
        if "block" in strategies:
            return "compressed-tensors block FP8 (format B')"
        if "channel" in strategies:
            return "compressed-tensors channel FP8 (format B)"
        return "compressed-tensors per-tensor FP8 (like format B)"
    return _COMPRESSED.get(fmt, f"compressed-tensors format '{fmt}'")
