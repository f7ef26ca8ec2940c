"""Matches a checkpoint's tensors with what its config implies: nothing missing, extra, mis-shaped or mis-typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats.architectures import PROJECTIONS, Architecture
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.files import TensorInfo
from moe_kernels.formats.schemes import QuantScheme
from moe_kernels.records import WeightFormat

FLOATS = ("BF16", "F16", "F32")
# scales of the KV cache and of attention's own products, under the names ModelOpt, compressed-tensors, AutoFP8 and
# Quark give them: our caches keep the model's dtype
_IGNORED = re.compile(
    r"\.(k_scale|v_scale|q_scale|kv_scale|k_zero_point|v_zero_point|prob_output_scale|rotary_emb\.inv_freq"
    r"|self_attn\.(?:[kvq]|kv_b|kv_a)_proj\.output_scale|[kv]_bmm_quantizer\.\w+)$"
)


@dataclass(frozen=True)
class StoredModule:
    """A weight and its scales. `name` is the weight's name in the model, whatever its tensor is called in the file.

    `parts` maps `weight`, `scale`, `scale_2` and `input_scale` (those that are there) to stored tensors; what they
    mean is `encoding`'s, None for unquantised weights in any float dtype.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]  # logical [N, K]
    parts: Mapping[str, TensorInfo]
    encoding: Encoding | None = None


@dataclass
class Layout:
    """Every tensor of a checkpoint in its place."""

    modules: dict[str, StoredModule] = field(default_factory=dict)  # by tensor name; everything but routed experts
    linears: set[str] = field(default_factory=set)  # names in `modules` of weights that may be quantised
    experts: dict[int, list[dict[str, StoredModule]]] = field(default_factory=dict)  # [layer][expert][projection]
    format: WeightFormat = "bf16"  # of the routed experts
    mtp: list[TensorInfo] = field(default_factory=list)
    ignored: list[TensorInfo] = field(default_factory=list)


def match(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], architecture: Architecture, scheme: QuantScheme
) -> Layout:
    """Sort `tensors` into a Layout or raise CheckpointError/FormatError naming the first that does not fit."""
    layout, rest = Layout(), dict(tensors)
    mtp = {str(i) for i in architecture.mtp_layers(config)}
    for name in tensors:
        parts = name.split(".", 3)
        if parts[:2] == ["model", "layers"] and parts[2] in mtp:
            layout.mtp.append(rest.pop(name))
        elif _IGNORED.search(name):
            layout.ignored.append(rest.pop(name))
    matcher = _Matcher(rest, scheme)
    for name, shape, row in architecture.expected(config):
        if row.optional and name not in rest:
            continue
        if row.kind == "linear":
            layout.linears.add(name)
            layout.modules[name] = matcher.linear(name, shape)
        else:
            layout.modules[name] = matcher.plain(name, shape)
    shapes = architecture.expert_shapes(config)
    count = architecture.routing(config).num_experts
    template = architecture.expert + ".weight"
    for layer in architecture.moe_layers(config):
        layout.experts[layer] = [
            {p: matcher.linear(template.format(layer=layer, expert=e, projection=p), shapes[p]) for p in PROJECTIONS}
            for e in range(count)
        ]
    if rest:
        raise CheckpointError(_extra(min(rest), rest, config, architecture))
    layout.format = _expert_format(layout, scheme)
    return layout


class _Matcher:
    """Takes expected tensors out of what is there."""

    def __init__(self, rest: dict[str, TensorInfo], scheme: QuantScheme) -> None:
        self.rest = rest
        self.scheme = scheme

    def take(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorInfo:
        info = self.rest.pop(name, None)
        if info is None:
            raise CheckpointError(f"tensor '{name}' is missing; copy or download the checkpoint again")
        if info.dtype not in dtypes:
            raise CheckpointError(f"tensor '{name}' is {info.dtype}, expected {' or '.join(dtypes)} ({info.file.name})")
        if info.shape not in shapes:
            raise CheckpointError(
                f"tensor '{name}' has shape {list(info.shape)}, config.json implies {list(shapes[0])}: "
                "the weights and config.json do not belong together"
            )
        return info

    def plain(self, name: str, shape: tuple[int, ...]) -> StoredModule:
        return StoredModule(name, "bf16", shape, {"weight": self.take(name, FLOATS, shape)})

    def linear(self, name: str, shape: tuple[int, ...]) -> StoredModule:
        """A weight as its config declares it, or unquantised if it is stored so."""
        module = name.removesuffix(".weight")
        encoding = self.scheme.encoding(module)
        stored = self.rest.get(name)
        if encoding is None or (stored is not None and stored.dtype in FLOATS):
            self.refuse_undeclared(name, module)
            return self.plain(name, shape)
        if stored is not None and encoding.weight == "weight" and stored.dtype != encoding.weight_dtype:
            raise CheckpointError(
                f"tensor '{name}' is {stored.dtype} but the config declares {encoding.label}: the quantisation config "
                "and the weights do not belong together"
            )
        rows, columns = shape
        if columns % encoding.group:
            raise CheckpointError(
                f"tensor '{name}': {encoding.label} needs K % {encoding.group} == 0, config implies {columns}"
            )
        parts = {
            "weight": self.take(
                f"{module}.{encoding.weight}", (encoding.weight_dtype,), encoding.weight_shape(rows, columns)
            )
        }
        scale = next((n for n in encoding.scale if f"{module}.{n}" in self.rest), encoding.scale[0])
        parts["scale"] = self.take(f"{module}.{scale}", encoding.scale_dtypes(), *encoding.scale_shapes(rows, columns))
        if encoding.scale_2:
            parts["scale_2"] = self.take(f"{module}.{encoding.scale_2}", ("F32",), (), (1,))
        if encoding.input_scale and f"{module}.{encoding.input_scale}" in self.rest:
            parts["input_scale"] = self.take(f"{module}.{encoding.input_scale}", ("F32", "BF16"), (), (1,))
        return StoredModule(name, encoding.format, shape, parts, encoding)

    def refuse_undeclared(self, name: str, module: str) -> None:
        """CheckpointError if a weight that the config leaves alone is stored quantised after all."""
        for stored, dtypes in ((name, ("F8_E4M3", "U8")), (f"{module}.weight_packed", ("U8", "I32"))):
            info = self.rest.get(stored)
            if info is None or info.dtype not in dtypes:
                continue
            if self.scheme.excludes(module):
                raise CheckpointError(
                    f"tensor '{stored}' is quantised ({info.dtype}) but the config excludes its module: correct the "
                    "exclusion list, engines would load it wrongly"
                )
            what = self.scheme.label if not self.scheme.quantised else f"{self.scheme.label} without this module"
            raise CheckpointError(
                f"tensor '{stored}' is {info.dtype} but the config declares {what}: the quantisation config "
                "and the weights do not belong together"
            )


def expert_modules(layout: Layout) -> Iterator[StoredModule]:
    """All projections of all routed experts."""
    for layer in layout.experts.values():
        for expert in layer:
            yield from expert.values()


def _expert_format(layout: Layout, scheme: QuantScheme) -> WeightFormat:
    """The one format of all routed experts."""
    first = next(expert_modules(layout))
    for stored in expert_modules(layout):
        if stored.format != first.format:
            raise FormatError(
                f"'{stored.name}' is {stored.format} but '{first.name}' is {first.format}: all routed experts need "
                "one weight format (engines demand it within a layer, we in the whole model); take a release that has"
            )
        if stored.format == "bf16":
            if stored.parts["weight"].dtype != "BF16":
                raise CheckpointError(
                    f"tensor '{stored.name}' is {stored.parts['weight'].dtype}: routed experts must be BF16; save "
                    "the checkpoint in bfloat16"
                )
            declared = scheme.encoding(stored.name.removesuffix(".weight"))
            if declared is not None:
                raise CheckpointError(
                    f"tensor '{stored.name}' is BF16 but the config declares {declared.label}: the quantisation "
                    "config and the weights do not belong together"
                )
    has_input = {"input_scale" in stored.parts for stored in expert_modules(layout)}
    if len(has_input) == 2:
        lacking = next(m for m in expert_modules(layout) if "input_scale" not in m.parts)
        raise CheckpointError(
            f"tensor '{lacking.name.removesuffix('weight')}input_scale' is missing while other experts have theirs; "
            "copy or download the checkpoint again"
        )
    return first.format


def _extra(name: str, rest: Mapping[str, TensorInfo], config: Mapping[str, Any], architecture: Architecture) -> str:
    """Why a tensor is not expected."""
    text = f"tensor '{name}' is not expected"
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    layers, count = architecture.sizes(config)["layers"], architecture.routing(config).num_experts
    expert = re.search(r"\.experts\.(\d+)\.", name)
    mtp = architecture.mtp_layers(config)
    if layer and int(layer[1]) >= layers:
        key = architecture.mtp_layers_key[0]
        return f"{text}: config.json has {layers} layers and {len(mtp)} MTP layers; correct {key} or remove the tensor"
    if expert and int(expert[1]) >= count:
        return f"{text}: config.json has {count} routed experts"
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        return f"{text}: experts fused in one tensor are not supported; save one per expert, as save_pretrained does"
    if re.search(r"\.(weight_scale|weight_scale_inv|weight_scale_2|input_scale|(weight|input)_global_scale)$", name):
        return f"{text}: a scale without a quantised weight of this format beside it"
    return f"{text} in '{architecture.model_type}' with this config.json (and {len(rest) - 1} more)"
