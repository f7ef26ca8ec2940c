"""Which quantisation formats a checkpoint declares: reads config.json's and ModelOpt's sections into a QuantScheme.

Letters are ours (docs/formats.md): A block FP8, B compressed-tensors FP8, C ModelOpt NVFP4, D compressed-tensors
NVFP4, E MXFP4, F AMD Quark, G MXFP8, H ModelOpt FP8. Every other format is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_kernels.errors import CheckpointError
from moe_kernels.formats import encodings as e
from moe_kernels.formats.compressed import compressed_scheme
from moe_kernels.formats.modelopt import modelopt_scheme
from moe_kernels.formats.patterns import Patterns
from moe_kernels.formats.quark import quark_scheme
from moe_kernels.formats.refusals import refuse
from moe_kernels.formats.schemes import UNQUANTISED, QuantScheme
from moe_kernels.records import FP8_BLOCK, MX_GROUP

__all__ = ["QuantScheme", "declared_scheme"]

_BLOCK = [FP8_BLOCK, FP8_BLOCK]
# quant_method -> name of a format that is not read
_METHODS = {
    "mxfp4": "MXFP4 with fused expert blocks (quant_method mxfp4, as gpt-oss stores it)",
    "fbgemm_fp8": "FBGEMM per-channel FP8 (like format B)",
    "awq": "AWQ INT4 (like format I)",
    "gptq": "GPTQ INT4 (like format I)",
    "bitsandbytes": "bitsandbytes",
}


def declared_scheme(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> QuantScheme:
    """The scheme from `config.json` and the content of `hf_quant_config.json` (None where absent).

    ModelOpt writes either or both; the file of its own comes first, exclusions of both count.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section and not isinstance(section, dict):
        raise CheckpointError("config.json: quantization_config must be an object; copy the checkpoint again")
    if modelopt is None:
        return _config_scheme(section) if section else UNQUANTISED
    inner = modelopt.get("quantization")
    if not isinstance(inner, dict):
        raise CheckpointError("hf_quant_config.json has no 'quantization' entry; copy the checkpoint again")
    scheme = modelopt_scheme(inner)
    if not section:
        return scheme
    other = _config_scheme(section)
    if other.format != scheme.format:
        raise CheckpointError(
            f"hf_quant_config.json declares {scheme.label} but config.json declares {other.label}; "
            "remove the one that does not belong to these weights"
        )
    weight_only = scheme.default is e.MO_NVFP4 and other.default is e.MO_NVFP4_WO
    kept = other if weight_only else scheme  # only config.json's groups can say that activations stay
    return replace(
        kept, exclusions=scheme.exclusions + other.exclusions, kv_cache=scheme.kv_cache or other.kv_cache
    )


def _config_scheme(section: Mapping[str, Any]) -> QuantScheme:
    method = str(section.get("quant_method", "")).lower()
    if method == "fp8":
        return _fp8_scheme(section)
    if method == "mxfp8":
        return _mxfp8_scheme(section)
    if method.startswith("modelopt"):
        return modelopt_scheme(section)
    if method in ("compressed-tensors", "compressed_tensors"):
        return compressed_scheme(section)
    if method == "quark":
        return quark_scheme(section)
    refuse(_METHODS.get(method, f"quantization_config.quant_method '{method}'"))


def _fp8_scheme(section: Mapping[str, Any]) -> QuantScheme:
    """`quant_method: fp8`: blocks (format A), or one scale a tensor where no block size is given."""
    block = section.get("weight_block_size")
    allowed = {"fmt": ("e4m3",), "activation_scheme": ("dynamic",), "expert_dtype": ("fp8",),
               "scale_fmt": ("float", "ue8m0")}  # fmt: skip
    if block is None:
        allowed["activation_scheme"] = ("dynamic", "static")
    elif list(block) == [1, MX_GROUP]:
        return _mxfp8_scheme(section)
    elif list(block) != _BLOCK:
        refuse(f"block FP8 with weight_block_size {block}", f"only {_BLOCK}")
    for key, values in allowed.items():
        if str(section.get(key) or values[0]).lower() not in values:
            refuse(f"block FP8 with {key} '{section[key]}'", f"only {' or '.join(values)}")
    if block is None:
        static = str(section.get("activation_scheme") or "dynamic").lower() == "static"
        encoding = replace(e.TENSOR_FP8_HF, activations="static" if static else "dynamic")
    else:
        encoding = replace(e.BLOCK_FP8, e8m0=str(section.get("scale_fmt")).lower() == "ue8m0")
    return QuantScheme(encoding.label, encoding, exclusions=(_left_out(section),))


def _mxfp8_scheme(section: Mapping[str, Any]) -> QuantScheme:
    block = section.get("weight_block_size") or section.get("group_size")
    if block not in (None, MX_GROUP, [1, MX_GROUP], [MX_GROUP]):
        refuse(f"MXFP8 with block size {block}", f"only {MX_GROUP} columns")
    return QuantScheme(e.MXFP8_HF.label, e.MXFP8_HF, exclusions=(_left_out(section),))


def _left_out(section: Mapping[str, Any]) -> Patterns:
    return Patterns(
        "transformers", tuple(section.get("modules_to_not_convert") or section.get("ignored_layers") or ())
    )
