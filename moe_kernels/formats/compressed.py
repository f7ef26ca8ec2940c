"""compressed-tensors' configs (formats B, B', D, E, G): groups of targets, `re:` patterns, one scheme a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_kernels.errors import FormatError
from moe_kernels.formats import encodings as e
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.patterns import Patterns
from moe_kernels.formats.refusals import refuse
from moe_kernels.formats.schemes import QuantScheme
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP

_CLASSES = ("Linear",)  # every module that we ask about is one


def compressed_scheme(section: Mapping[str, Any]) -> QuantScheme:
    """The scheme of a `quantization_config` with quant_method compressed-tensors.

    A module's group is the one that names it, else the one whose pattern fits it, else the one that names its class.
    """
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise FormatError("compressed-tensors config without config_groups; copy config.json of the original again")
    if section.get("sparsity_config") and (section["sparsity_config"] or {}).get("format") not in (None, "dense"):
        refuse("compressed-tensors with sparsity")
    exact: dict[str, Encoding] = {}
    rules: list[tuple[Patterns, Encoding]] = []
    default: Encoding | None = None
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise FormatError(f"compressed-tensors config_groups.{name} must be an object with targets and weights")
        if not group.get("weights"):
            continue  # KV cache or activations alone
        encoding = _encoding(section, group)
        for target in group.get("targets") or _CLASSES:
            if target in _CLASSES:
                if default is not None and default != encoding:
                    raise FormatError("compressed-tensors: two config_groups target 'Linear'; engines could not tell")
                default = encoding
            elif target.startswith("re:"):
                rules.append((Patterns("compressed", (target,)), encoding))
            else:
                exact[target] = encoding
    found = tuple(dict.fromkeys([*([default] if default else []), *exact.values(), *(x for _, x in rules)]))
    if not found:
        refuse("compressed-tensors without quantised weights")
    label = found[0].label if len(found) == 1 else f"compressed-tensors mixed precision ({_kinds(found)})"
    kv = section.get("kv_cache_scheme")
    return QuantScheme(
        label, default, exact, tuple(rules), (Patterns("compressed", tuple(section.get("ignore") or ())),),
        f"{kv.get('type')}{kv.get('num_bits')}" if isinstance(kv, Mapping) else None,
    )  # fmt: skip


def _kinds(found: tuple[Encoding, ...]) -> str:
    return ", ".join(x.label.removeprefix("compressed-tensors ") for x in found)


def _encoding(section: Mapping[str, Any], group: Mapping[str, Any]) -> Encoding:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind = weights.get("num_bits"), str(weights.get("type", "int")).lower()
    strategy, size = weights.get("strategy"), weights.get("group_size")
    stored = str(group.get("format") or section.get("format") or "")
    if stored == "pack-quantized" or (kind == "int" and bits == 4):
        refuse("compressed-tensors packed INT4, W4A16 (format I)")
    if kind != "float":
        refuse(f"compressed-tensors INT{bits}")
    if weights.get("symmetric") is False:
        refuse("compressed-tensors with zero points")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        refuse(f"compressed-tensors with actorder '{weights['actorder']}'")
    if bits == 8 and (size == MX_GROUP or stored == "mxfp8-quantized"):
        encoding = e.CT_MXFP8
    elif bits == 8 and strategy == "block":
        block = weights.get("block_structure")
        if block not in ([FP8_BLOCK, FP8_BLOCK], f"{FP8_BLOCK}x{FP8_BLOCK}"):
            refuse(f"compressed-tensors block FP8 with block_structure {block}", f"only [{FP8_BLOCK}, {FP8_BLOCK}]")
        encoding = e.CT_BLOCK
    elif bits == 8 and strategy in ("channel", "tensor"):
        encoding = e.CT_CHANNEL if strategy == "channel" else e.CT_TENSOR
    elif bits == 4 and size == NVFP4_GROUP and strategy == "tensor_group":
        encoding = e.CT_NVFP4
    elif bits == 4 and size == MX_GROUP and strategy == "group":
        encoding = e.CT_MXFP4
    else:
        refuse(f"compressed-tensors float{bits} with strategy {strategy} and group size {size} ('{stored}')")
    if not inputs:
        return encoding.weight_only()
    return replace(encoding, activations="dynamic" if inputs.get("dynamic") is True else "static")
