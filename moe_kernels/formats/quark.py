"""AMD Quark's configs (format F): MXFP4, NVFP4, MXFP8 and FP8 as `quant_method: quark` declares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_kernels.formats import encodings as e
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.patterns import Patterns
from moe_kernels.formats.refusals import refuse
from moe_kernels.formats.schemes import QuantScheme
from moe_kernels.records import MX_GROUP, NVFP4_GROUP


def quark_scheme(section: Mapping[str, Any]) -> QuantScheme:
    """The scheme of a Quark section: `global_quant_config`, `layer_quant_config` by shell pattern, `exclude`."""
    stored = (section.get("export") or {}).get("weight_format", "real_quantized")
    if stored != "real_quantized":
        refuse(f"AMD Quark with weight_format '{stored}'", "only 'real_quantized'")
    if section.get("layer_type_quant_config"):
        refuse("AMD Quark with layer_type_quant_config")
    default = _encoding(section.get("global_quant_config"))
    rules, unquantised = [], []
    for pattern, spec in (section.get("layer_quant_config") or {}).items():
        encoding = _encoding(spec)
        if encoding is None:
            unquantised.append(pattern)
        else:
            rules.append((Patterns("quark", (pattern,)), encoding))
    found = tuple(dict.fromkeys([*([default] if default else []), *(x for _, x in rules)]))
    if not found:
        refuse("AMD Quark without quantised weights")
    label = found[0].label if len(found) == 1 else "AMD Quark mixed precision (format F)"
    exclusions = (Patterns("quark", (*(section.get("exclude") or ()), *unquantised)),)
    return QuantScheme(label, default, {}, tuple(rules), exclusions, "declared" if _kv(section) else None)


def _encoding(spec: Any) -> Encoding | None:
    if not isinstance(spec, Mapping) or not spec.get("weight"):
        return None
    weight, inputs = spec["weight"], spec.get("input_tensors")
    if isinstance(weight, list):  # block scales quantised once more under a scalar of the tensor
        if len(weight) != 2 or _is_nvfp4(weight) is False:
            refuse(f"AMD Quark with the weight stages {[w.get('dtype') for w in weight]}")
        encoding = e.QUARK_NVFP4
    else:
        dtype, scheme = str(weight.get("dtype")), weight.get("qscheme")
        mx = scheme == "per_group" and weight.get("group_size") == MX_GROUP and weight.get("scale_format") == "e8m0"
        if dtype == "fp4" and mx:
            encoding = e.QUARK_MXFP4
        elif dtype == "fp8_e4m3" and mx:
            encoding = e.QUARK_MXFP8
        elif dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
            encoding = e.QUARK_TENSOR if scheme == "per_tensor" else e.QUARK_CHANNEL
        else:
            refuse(f"AMD Quark (format F) with dtype {dtype}, {scheme} and group size {weight.get('group_size')}")
    if not inputs:
        return encoding.weight_only()
    first = inputs[0] if isinstance(inputs, list) else inputs
    return replace(encoding, activations="dynamic" if first.get("is_dynamic") else "static")


def _is_nvfp4(weight: list[Any]) -> bool:
    values, scales = weight
    return (
        values.get("dtype") == "fp4" and values.get("group_size") == NVFP4_GROUP
        and scales.get("dtype") == "fp8_e4m3" and scales.get("qscheme") == "per_tensor"
    )  # fmt: skip


def _kv(section: Mapping[str, Any]) -> bool:
    return bool(section.get("kv_cache_quant_config") or (section.get("export") or {}).get("kv_cache_group"))
