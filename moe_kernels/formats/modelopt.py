"""NVIDIA ModelOpt's configs (formats C, C', C'', G, H): hf_quant_config.json and config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_kernels.errors import FormatError
from moe_kernels.formats import encodings as e
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.patterns import Patterns
from moe_kernels.formats.refusals import refuse
from moe_kernels.formats.schemes import QuantScheme
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP

_READ = {
    "NVFP4": e.MO_NVFP4,
    "W4A16_NVFP4": e.MO_NVFP4_WO,
    "FP8": e.MO_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": e.MO_CHANNEL,
    "FP8_PB_WO": e.MO_BLOCK,
    "MXFP8": e.MO_MXFP8,
    "MXFP4": e.MO_MXFP4,
    "W4A8_MXFP4_FP8": e.MO_MXFP4,  # MXFP4 weights for kernels that quantise activations to FP8
}
_REFUSED = {
    "NVFP4_AWQ": "ModelOpt NVFP4 with AWQ pre-scales",
    "NVFP4_SVD": "ModelOpt NVFP4 with SVDQuant's low-rank part",
    "NVFP4_SVDQUANT": "ModelOpt NVFP4 with SVDQuant's low-rank part",
    "W4A8_NVFP4_FP8": "ModelOpt NVFP4 weights with FP8 activations",
    "W4A16_AWQ": "ModelOpt INT4 AWQ (like format I)",
    "INT4_AWQ": "ModelOpt INT4 AWQ (like format I)",
    "W4A8_AWQ": "ModelOpt W4A8 AWQ (like format I)",
    "W8A16": "ModelOpt INT8",
    "W8A8_SQ_PER_CHANNEL": "ModelOpt INT8 SmoothQuant",
}
_GROUP = {"nvfp4": NVFP4_GROUP, "mxfp8": MX_GROUP, "mxfp4": MX_GROUP, "fp8": FP8_BLOCK}


def modelopt_scheme(section: Mapping[str, Any]) -> QuantScheme:
    """The scheme of either file's section; the two spell some keys differently."""
    algo = str(section.get("quant_algo") or "").upper()
    left_out = section.get("exclude_modules") or section.get("ignore") or []
    exclusions = (Patterns("modelopt", tuple(left_out)),)
    kv_cache = _kv_cache(section)
    if algo == "MIXED_PRECISION":
        layers = _layers(section)
        label = "ModelOpt mixed precision (format C')"
        exact = {name: _encoding(name, str(one.get("quant_algo") or ""), one) for name, one in layers.items()}
        # hf_quant_config.json of a mixed checkpoint lists what is quantised; patterns are allowed there too
        wild = {name: found for name, found in exact.items() if any(c in name for c in "*?[")}
        rules = tuple((Patterns("modelopt", (name,)), found) for name, found in wild.items())
        return QuantScheme(
            label, None, {n: x for n, x in exact.items() if n not in wild}, rules, exclusions, kv_cache
        )
    encoding = _encoding("this checkpoint", str(section.get("quant_algo") or ""), section)
    groups = [g for g in (section.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    if encoding is e.MO_NVFP4 and groups and all(not g.get("input_activations") for g in groups):
        encoding = e.MO_NVFP4_WO
    return QuantScheme(encoding.label, encoding, exclusions=exclusions, kv_cache=kv_cache)


def _encoding(name: str, algo: str, section: Mapping[str, Any]) -> Encoding:
    encoding = _READ.get(algo.upper())
    if encoding is None:
        refuse(_REFUSED.get(algo.upper(), f"ModelOpt quant_algo '{algo or None}'"))
    sizes = {section.get("group_size")} | {
        (group.get("weights") or {}).get("group_size") for group in (section.get("config_groups") or {}).values()
    }
    sizes -= {None, 0}
    wanted = _GROUP.get(encoding.format)
    if wanted and sizes - {wanted}:
        refuse(f"{algo.upper()} with group size {sizes} in {name}", f"only {wanted}")
    return encoding


def _layers(section: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Module name -> its quant_algo and sizes, from `quantized_layers` or from config_groups that name modules."""
    layers = section.get("quantized_layers")
    if isinstance(layers, Mapping) and all(isinstance(one, Mapping) for one in layers.values()):
        return layers
    found: dict[str, Mapping[str, Any]] = {}
    for group in (section.get("config_groups") or {}).values():
        targets = group.get("targets") or []
        if "Linear" in targets:
            raise FormatError("ModelOpt mixed precision without quantized_layers needs groups that name their modules")
        one = {"quant_algo": _algo(group), **(group.get("weights") or {})}
        found.update((name, one) for name in targets)
    if not found:
        raise FormatError(
            "ModelOpt mixed precision (format C') without quantized_layers: copy hf_quant_config.json of the original"
        )
    return found


def _algo(group: Mapping[str, Any]) -> str:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "float" and bits == 4 and size in (None, NVFP4_GROUP):
        return "NVFP4" if inputs else "W4A16_NVFP4"
    if weights.get("type") == "float" and bits == 8 and size == MX_GROUP:
        return "MXFP8"
    if weights.get("type") == "float" and bits == 8 and size is None:
        return "FP8_PER_CHANNEL_PER_TOKEN" if weights.get("strategy") == "channel" else "FP8"
    return str(group.get("quant_algo") or f"{weights.get('type')}{bits}")


def _kv_cache(section: Mapping[str, Any]) -> str | None:
    declared = section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme")
    if not declared:
        return None
    if isinstance(declared, Mapping):
        return f"{declared.get('type', '')}{declared.get('num_bits', '')}"
    return str(declared)
