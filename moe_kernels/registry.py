"""Variant names, their options, and the registry that imports a variant's module only when it is asked for."""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.records import ExpertWeights, MoEShape, Routing, RoutingConfig, WeightFormat

# One physical difference per option; the first value is the default, i.e. the optimised path.
OPTIONS: dict[str, tuple[str, ...]] = {
    "bias": ("fp32", "bf16"),
    "scales": ("direct", "copied"),
    "routing": ("outside", "inside"),
    "layout": ("majork", "blockmajork"),  # as SGLang and as vLLM prepare block-FP8 weights
    "act": ("bf16", "nvfp4"),  # activations in BF16, or rounded as an NVFP4 kernel would
    "input_scale": ("max", "expert"),  # NVFP4 activations: one scalar a layer (vLLM), or every expert's own
}


@dataclass(frozen=True)
class VariantSpec:
    """A parsed variant name, `FORMAT/BACKEND[:key=value,...]`; `str()` gives the canonical spelling."""

    format: str
    backend: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Name without options, e.g. `fp8/emulated`."""
        return f"{self.format}/{self.backend}"

    def option(self, key: str) -> str:
        """The value asked for, or the default."""
        return self.options.get(key) or info(self.base).options[key][0]

    def __str__(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in sorted(self.options.items()))
        return f"{self.base}:{given}" if given else self.base

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class Support:
    """Whether a variant can run here; `reason` says what is missing and `nearest` what runs instead."""

    ok: bool
    reason: str = ""
    nearest: str | None = None


@dataclass(frozen=True)
class VariantInfo:
    """What a variant declares about itself, known without importing its module.

    `min_sm`/`max_sm` are compute capabilities times ten (90 = Hopper), None on the CPU as well.
    `deterministic` says run-to-run; batch invariance is probed by the service, not declared.
    """

    name: str
    weight_format: WeightFormat
    activation_format: str
    target: str  # "module:Class"
    summary: str
    min_sm: int | None = None
    max_sm: int | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deterministic: bool = True
    hidden_multiple: int = 1
    intermediate_multiple: int = 1


class MoELayer(ABC):
    """One MoE layer of one variant, prepared and ready to run.

    Subclasses lay weights out in `__init__` once; `forward` must not change its inputs.
    """

    switchable: frozenset[str] = frozenset()  # options looked up at each call, on which prepared weights do not depend

    def sibling(self, spec: VariantSpec) -> MoELayer:
        """The same prepared weights under other options; VariantError where more than `switchable` ones differ."""
        def fixed(s: VariantSpec) -> dict[str, str]:
            return {k: v for k, v in s.options.items() if k not in self.switchable}

        if spec.base != self.spec.base or fixed(spec) != fixed(self.spec):
            known = " and ".join(sorted(self.switchable)) or "none"
            raise VariantError(f"'{spec}' cannot share the prepared weights of '{self.spec}'; options that can differ: "
                               f"{known}")
        other = copy.copy(self)
        other.spec = spec
        return other

    def __init__(
        self,
        record: ExpertWeights,
        config: RoutingConfig,
        bias: Tensor | None,
        spec: VariantSpec,
    ) -> None:
        self.config = config
        self.bias = bias  # FP32 [E] e_score_correction_bias, or None for softmax routers
        self.spec = spec
        self.shape = MoEShape(
            record.hidden_size,
            record.intermediate_size,
            record.num_experts,
            config.top_k,
            config.n_group,
            config.topk_group,
        )

    @classmethod
    def supports(cls, device: torch.device, shape: MoEShape) -> Support:
        """Rules beyond the declared ones; override where the kernel has any."""
        return Support(True)

    @abstractmethod
    def route(self, router_logits: Tensor) -> Routing:
        """Choose experts from FP32 router logits [T, E] (pre-sigmoid)."""

    @abstractmethod
    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Weighted sum of the chosen experts' outputs: [T, H] in, [T, H] out, in `hidden.dtype`."""

    def forward(self, hidden: Tensor, router_logits: Tensor) -> tuple[Tensor, Routing]:
        """Route and run the experts; returns the output [T, H] and the routing used."""
        routing = self.route(router_logits)
        return self.experts(hidden, routing), routing

    def resolved(self) -> str:
        """The kernel that really runs, for the fingerprint; a layer that falls back must say so here."""
        return str(self.spec)


_VARIANTS: dict[str, VariantInfo] = {}


def register(variant: VariantInfo) -> None:
    """Add a variant; a second registration of a name is an error."""
    if variant.name in _VARIANTS:
        raise VariantError(f"variant '{variant.name}' is already registered")
    _VARIANTS[variant.name] = variant


def names() -> list[str]:
    """Registered variant names, in order of registration."""
    return list(_VARIANTS)


def info(name: str) -> VariantInfo:
    """Declaration of a variant by its name without options."""
    try:
        return _VARIANTS[name]
    except KeyError:
        raise VariantError(f"unknown variant '{name}'; known: {', '.join(_VARIANTS)}") from None


def parse(text: str) -> VariantSpec:
    """Parse `fp8/emulated:bias=bf16,scales=copied`; unknown names, options or values are refused by name."""
    base, _, tail = text.strip().partition(":")
    declared = info(base)
    options: dict[str, str] = {}
    for part in filter(None, tail.split(",")):
        key, eq, value = part.partition("=")
        allowed = declared.options.get(key)
        if not eq or allowed is None:
            known = ", ".join(declared.options) or "none"
            raise VariantError(f"variant '{base}' has no option '{key}'; its options: {known}")
        if value not in allowed:
            raise VariantError(f"option {key}={value} of '{base}' must be one of: {', '.join(allowed)}")
        if key in options:
            raise VariantError(f"option '{key}' is given twice in '{text}'")
        if value != allowed[0]:  # a default spelled out is the same variant
            options[key] = value
    fmt, _, backend = base.partition("/")
    return VariantSpec(fmt, backend, options)


def layer_class(spec: VariantSpec) -> type[MoELayer]:
    """Import and return the class behind a variant."""
    module, _, cls = info(spec.base).target.partition(":")
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise VariantError(f"variant '{spec.base}' needs a package that is not installed: {error}") from error


def supports(spec: VariantSpec, device: torch.device, shape: MoEShape) -> Support:
    """Check declared SM range, shape multiples, then the class's own rules. Never falls back by itself."""
    declared = info(spec.base)
    nearest = f"{declared.weight_format}/emulated" if declared.weight_format != "bf16" else "bf16/reference"
    if declared.min_sm is not None:
        if device.type != "cuda":
            return Support(False, f"'{spec.base}' needs a CUDA GPU, the device is {device.type}", nearest)
        major, minor = torch.cuda.get_device_capability(device)
        sm = major * 10 + minor
        if sm < declared.min_sm or (declared.max_sm is not None and sm > declared.max_sm):
            upper = f"-{declared.max_sm}" if declared.max_sm else "+"
            return Support(False, f"'{spec.base}' needs SM{declared.min_sm}{upper}, this GPU is SM{sm}", nearest)
    for label, size, multiple in (
        ("hidden_size", shape.hidden_size, declared.hidden_multiple),
        ("moe_intermediate_size", shape.intermediate_size, declared.intermediate_multiple),
    ):
        if size % multiple:
            return Support(False, f"'{spec.base}' needs {label} % {multiple} == 0, got {size}", nearest)
    return layer_class(spec).supports(device, shape)


def _option(*keys: str) -> dict[str, tuple[str, ...]]:
    return {k: OPTIONS[k] for k in keys}


def _builtin() -> None:
    ref, emu = "moe_kernels.variants.reference:ReferenceLayer", "moe_kernels.variants.emulated"
    register(
        VariantInfo(
            "bf16/reference",
            "bf16",
            "bf16",
            ref,
            "weights in BF16, matrix products in the model's dtype",
            options=_option("bias"),
        )
    )
    register(
        VariantInfo(
            "fp8/reference",
            "fp8",
            "none",
            ref,
            "dequantised weights, FP32 maths, activations not quantised: the oracle",
            options=_option("bias"),
        )
    )
    register(
        VariantInfo(
            "fp8/emulated",
            "fp8",
            "fp8 1x128",
            f"{emu}:Fp8EmulatedLayer",
            "numerics of the DeepSeek-FP8 TRT-LLM path on any device",
            options=_option("bias", "scales"),
        )
    )
    register(
        VariantInfo(
            "nvfp4/reference",
            "nvfp4",
            "none",
            ref,
            "dequantised weights, FP32 maths: the oracle",
            options=_option("bias"),
        )
    )
    register(
        VariantInfo(
            "nvfp4/emulated",
            "nvfp4",
            "nvfp4 1x16",
            f"{emu}:NvFp4EmulatedLayer",
            "numerics of the NVFP4 TRT-LLM path on any device",
            options=_option("bias", "input_scale"),
            hidden_multiple=16,
            intermediate_multiple=16,
        )
    )
    for fmt, activations, target, summary in (
        ("mxfp8", "mxfp8 1x32", f"{emu}_mx:MxEmulatedLayer", "numerics of the MXFP8 TRT-LLM path on any device"),
        ("mxfp4", "mxfp8 1x32", f"{emu}_mx:MxEmulatedLayer", "MXFP4 weights; activations as act= says"),
        ("fp8_channel", "fp8 per token", f"{emu}_fp8:Fp8ChannelEmulatedLayer", "W8A8 of compressed-tensors' FP8"),
        ("fp8_tensor", "fp8 static", f"{emu}_fp8:Fp8TensorEmulatedLayer", "W8A8 of ModelOpt's per-tensor FP8"),
    ):
        weights = cast(WeightFormat, fmt)
        multiple = 32 if fmt.startswith("mx") else 1
        oracle = "dequantised weights, FP32 maths: the oracle"
        register(VariantInfo(
            f"{fmt}/reference", weights, "none", ref, oracle, options=_option("bias"),
            hidden_multiple=multiple, intermediate_multiple=multiple,
        ))  # fmt: skip
        options = _option("bias") | ({"act": ("mxfp8", "mxfp4", "bf16")} if fmt == "mxfp4" else {})
        register(VariantInfo(
            f"{fmt}/emulated", weights, activations, target, summary, options=options,
            hidden_multiple=multiple, intermediate_multiple=multiple,
        ))  # fmt: skip
    tri = "moe_kernels.variants.triton"
    register(
        VariantInfo(
            "fp8/triton",
            "fp8",
            "fp8 1x128",
            f"{tri}_fp8:Fp8TritonLayer",
            "our own kernels with the same numerics, Hopper first",
            min_sm=89,
            options=_option("bias", "scales"),
            hidden_multiple=128,
            intermediate_multiple=128,
        )
    )
    register(
        VariantInfo(
            "nvfp4/triton",
            "nvfp4",
            "bf16",
            f"{tri}_nvfp4:NvFp4TritonLayer",
            "NVFP4 weights dequantised in the kernel, for GPUs before Blackwell",
            min_sm=80,
            options=_option("bias", "act"),
            hidden_multiple=128,
            intermediate_multiple=128,
        )
    )
    trt = "moe_kernels.variants.trtllm.layers"
    register(
        VariantInfo(
            "fp8/trtllm",
            "fp8",
            "fp8 1x128",
            f"{trt}:Fp8TrtllmLayer",
            "trtllm_fp8_block_scale_moe through FlashInfer",
            min_sm=100,
            max_sm=103,
            options=_option("bias", "scales", "routing", "layout"),
            hidden_multiple=128,
            intermediate_multiple=128,
        )
    )
    register(
        VariantInfo(
            "nvfp4/trtllm",
            "nvfp4",
            "nvfp4 1x16",
            f"{trt}:Fp4TrtllmLayer",
            "trtllm_fp4_block_scale_moe through FlashInfer",
            min_sm=100,
            max_sm=103,
            options=_option("bias", "routing"),
            hidden_multiple=16,
            intermediate_multiple=16,
        )
    )


_builtin()
