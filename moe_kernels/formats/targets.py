"""The layouts that `quantize` writes: each publisher's tensor names and the config that engines know it by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_kernels import __version__
from moe_kernels.errors import FormatError
from moe_kernels.formats import encodings as e
from moe_kernels.formats.encodings import Encoding
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP

# Engines know ModelOpt's formats by the producer's name, so that has to stay; the version tells who wrote the file.
_PRODUCER = {"name": "modelopt", "version": f"0.0.0+moe-parity.{__version__}"}


@dataclass(frozen=True)
class Written:
    """What a writer did: unquantised modules in `kept`, quantised ones outside the experts in `others`."""

    kept: Sequence[str]
    mtp: Sequence[str]  # MTP layers copied unquantised, e.g. "model.layers.46"
    experts: Sequence[str]  # names of the routed experts' modules
    others: Mapping[str, Encoding]


Section = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A layout: how experts (and, if asked for, other linears) are stored, and the config's two sections.

    `dense` is how the dense layers' MLPs are stored whatever is asked for (format C').
    """

    name: str
    encoding: Encoding
    section: Callable[[Target, Written], Section]
    modelopt: Callable[[Target, Written], Section] | None = None  # content of hf_quant_config.json
    dense: Encoding | None = None


def stored_tensors(
    encoding: Encoding, module: str, q: Tensor, scale: Tensor, scale_2: Tensor | None, input_scale: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one matrix [N, K] under an encoding, from canonical parts (scalars 0-d)."""
    yield f"{module}.{encoding.weight}", q
    yield f"{module}.{encoding.scale[0]}", _shaped(encoding, q, scale)
    for name, scalar in ((encoding.scale_2, scale_2), (encoding.input_scale, input_scale)):
        if name is not None and scalar is not None:
            yield f"{module}.{name}", scalar.reshape(1).reciprocal() if encoding.reciprocal else scalar.reshape(())


def find_target(name: str) -> Target:
    """The target of a name, or FormatError listing them."""
    try:
        return TARGETS[name]
    except KeyError:
        raise FormatError(f"cannot write format '{name}'; choose one of: {', '.join(['bf16', *TARGETS])}") from None


def _shaped(encoding: Encoding, q: Tensor, scale: Tensor) -> Tensor:
    if encoding.format == "fp8" and encoding.scale_shape == "4d":
        return scale[:, None, :, None]
    if encoding.format == "fp8_channel" and encoding.scale_shape == "flat":
        return scale.reshape(-1)
    return scale


# ---- format A and Hugging Face's MXFP8


def _block_fp8(target: Target, written: Written) -> Section:
    section: Section = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }  # fmt: skip
    return {**section, "modules_to_not_convert": [*written.kept, *written.mtp]}


def _mxfp8(target: Target, written: Written) -> Section:
    section: Section = {
        "quant_method": "mxfp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [1, MX_GROUP],
        "scale_fmt": "ue8m0",
    }  # fmt: skip
    return {**section, "modules_to_not_convert": [*written.kept, *written.mtp]}


# ---- compressed-tensors


def _compressed(stored: str, weights: Section, inputs: Section | None) -> Callable[[Target, Written], Section]:
    def section(target: Target, written: Written) -> Section:
        ignore = [*written.kept, *(f"re:{layer.replace('.', chr(92) + '.')}{chr(92)}..*" for layer in written.mtp)]
        group = {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None,
            "format": stored,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed",
            "global_compression_ratio": None, "kv_cache_scheme": None, "config_groups": {"group_0": group},
            "ignore": ignore,
        }  # fmt: skip

    return section


def _floats(bits: int, strategy: str, dynamic: bool | str = False, **more: Any) -> Section:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def _group(bits: int, size: int, dynamic: bool | str = False, strategy: str = "group") -> Section:
    dtype = {"scale_dtype": "torch.uint8"} if size == MX_GROUP else {"scale_dtype": "torch.float8_e4m3fn"}
    return _floats(bits, strategy, dynamic, group_size=size, **dtype)


# ---- ModelOpt


def _modelopt_file(algo: str, size: int | None) -> Callable[[Target, Written], Section]:
    def content(target: Target, written: Written) -> Section:
        inner: Section = {"quant_algo": algo, "kv_cache_quant_algo": None}
        if size:
            inner["group_size"] = size
        return {"producer": _PRODUCER, "quantization": {**inner, "exclude_modules": _excluded(written)}}

    return content


def _modelopt(algo: str, weights: Section, inputs: Section | None) -> Callable[[Target, Written], Section]:
    def section(target: Target, written: Written) -> Section:
        group: Section = {"weights": weights, "targets": ["Linear"]}
        if inputs is not None:
            group = {"input_activations": inputs, **group}
        return {
            "quant_method": "modelopt", "quant_algo": algo, "config_groups": {"group_0": group},
            "ignore": _excluded(written), "producer": _PRODUCER,
        }  # fmt: skip

    return section


def _excluded(written: Written) -> list[str]:
    return [*written.kept, *(f"{layer}*" for layer in written.mtp)]


_FP8_STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
_NVFP4_STATIC = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}


def _layers(written: Written) -> dict[str, Section]:
    nvfp4: Section = {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
    fp8: Section = {"quant_algo": "FP8"}
    return dict.fromkeys(written.experts, nvfp4) | dict.fromkeys(written.others, fp8)


def _mixed(target: Target, written: Written) -> Section:
    groups: dict[str, Section] = {
        "group_0": {"input_activations": _NVFP4_STATIC, "weights": _NVFP4_STATIC, "targets": sorted(written.experts)}
    }
    if written.others:
        groups["group_1"] = {
            "input_activations": _FP8_STATIC, "weights": _FP8_STATIC, "targets": sorted(written.others)
        }  # fmt: skip
    return {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": groups,
        "quantized_layers": _layers(written), "ignore": _excluded(written), "producer": _PRODUCER,
    }  # fmt: skip


def _mixed_file(target: Target, written: Written) -> Section:
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": _layers(written)}
    return {"producer": _PRODUCER, "quantization": {**inner, "exclude_modules": _excluded(written)}}


# ---- AMD Quark


def _quark(target: Target, written: Written) -> Section:
    mx = {
        "dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": MX_GROUP, "symmetric": None,
        "round_method": "half_even", "scale_type": "float", "scale_format": "e8m0", "scale_calculation_mode": "even",
        "observer_cls": "PerBlockMXObserver",
    }  # fmt: skip
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {**mx, "is_dynamic": False}, "input_tensors": {**mx, "is_dynamic": True},
            "output_tensors": None, "bias": None,
        },
        "exclude": [*written.kept, *(f"re:{layer.replace('.', chr(92) + '.')}{chr(92)}..*" for layer in written.mtp)],
        "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
        "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
        "quant_mode": "eager_mode", "algo_config": None,
    }  # fmt: skip


_CT_BLOCK = _floats(8, "block", block_structure=[FP8_BLOCK, FP8_BLOCK])
_ALL = (
    Target("fp8", e.BLOCK_FP8, _block_fp8),
    Target("fp8_ct", e.CT_BLOCK, _compressed("float-quantized", _CT_BLOCK, _floats(8, "group", True, group_size=128))),
    Target(
        "fp8_channel", e.CT_CHANNEL, _compressed("float-quantized", _floats(8, "channel"), _floats(8, "token", True))
    ),
    Target(
        "fp8_tensor", e.MO_TENSOR, _modelopt("FP8", _FP8_STATIC, _FP8_STATIC), _modelopt_file("FP8", None)
    ),
    Target(
        "fp8_channel_modelopt", e.MO_CHANNEL,
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN", {**_FP8_STATIC, "strategy": "channel"}, _FP8_STATIC),
        _modelopt_file("FP8_PER_CHANNEL_PER_TOKEN", None),
    ),
    Target(
        "fp8_pb_wo", e.MO_BLOCK, _modelopt("FP8_PB_WO", {**_FP8_STATIC, "group_size": FP8_BLOCK}, None),
        _modelopt_file("FP8_PB_WO", FP8_BLOCK),
    ),
    Target("nvfp4", e.MO_NVFP4, _modelopt("NVFP4", _NVFP4_STATIC, _NVFP4_STATIC), _modelopt_file("NVFP4", NVFP4_GROUP)),
    Target("nvfp4_mixed", e.MO_NVFP4, _mixed, _mixed_file, dense=e.MO_TENSOR),
    Target(
        "nvfp4_w4a16", e.MO_NVFP4_WO, _modelopt("W4A16_NVFP4", _NVFP4_STATIC, None),
        _modelopt_file("W4A16_NVFP4", NVFP4_GROUP),
    ),
    Target(
        "nvfp4_ct", e.CT_NVFP4,
        _compressed(
            "nvfp4-pack-quantized", _group(4, NVFP4_GROUP, strategy="tensor_group"),
            _group(4, NVFP4_GROUP, "local", "tensor_group"),
        ),
    ),
    Target(
        "mxfp4", e.CT_MXFP4, _compressed("mxfp4-pack-quantized", _group(4, MX_GROUP), _group(4, MX_GROUP, True))
    ),
    Target("mxfp4_quark", e.QUARK_MXFP4, _quark),
    Target(
        "mxfp8", e.MO_MXFP8,
        _modelopt("MXFP8", {**_FP8_STATIC, "group_size": MX_GROUP}, {**_FP8_STATIC, "group_size": MX_GROUP}),
        _modelopt_file("MXFP8", MX_GROUP),
    ),
    Target("mxfp8_ct", e.CT_MXFP8, _compressed("mxfp8-quantized", _group(8, MX_GROUP), _group(8, MX_GROUP, True))),
    Target("mxfp8_hf", e.MXFP8_HF, _mxfp8),
)  # fmt: skip
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
