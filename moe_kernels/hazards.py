"""What in a checkpoint is known to go wrong in engines and kernels: warnings of `moe-kernels inspect`.

Every rule stands for a fault that was shipped somewhere; docs/formats.md names the reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_kernels.formats.encodings import Encoding
    from moe_kernels.inspect import Fp8Report, Inspection, Nvfp4Report

SPREAD = 4.0  # largest over smallest input_scale of a layer from which one scalar a layer costs two bits and more


@dataclass(frozen=True)
class Hazard:
    """A warning: `code` is stable, `message` says what was found and what to mind."""

    code: str
    message: str


def hazards(found: Inspection, encoding: Encoding | None) -> Iterator[Hazard]:
    """Warnings for an inspected checkpoint, the gravest first; `encoding` is that of its routed experts."""
    yield from _gate_up(found)
    yield from _dead(found)
    yield from _e8m0(found)
    if encoding is not None:
        yield from _input_scales(found, encoding)
    yield from _bias(found)
    if found.swiglu_limit is not None:
        yield Hazard(
            "swiglu-limit",
            f"the experts' SwiGLU is clamped at {found.swiglu_limit:g}: a kernel that is not given the limit is wrong",
        )
    if found.kv_cache or found.ignored_tensors:
        declared = f"the config declares a {found.kv_cache} KV cache" if found.kv_cache else "KV cache not declared"
        yield Hazard(
            "kv-scales",
            f"{declared}, {found.ignored_tensors} scales of it ignored: the cache keeps the model's dtype here",
        )


def _gate_up(found: Inspection) -> Iterator[Hazard]:
    if found.nvfp4:
        pairs, different = sum(n.experts for n in found.nvfp4), sum(n.mismatched for n in found.nvfp4)
        name, worst = "weight_scale_2", max(n.max_ratio for n in found.nvfp4)
    else:
        pairs, different = found.num_experts * len(found.fp8), sum(n.mismatched for n in found.fp8)
        name, worst = "weight_scale", max((n.max_ratio for n in found.fp8), default=1.0)
    if different:
        yield Hazard(
            "gate-up-scale",
            f"gate and up have different {name} in {different} of {pairs} experts ({different / pairs:.1%}), by up to "
            f"{worst:.3f}x: a kernel that takes one scalar for both halves is off by that ratio",
        )


def _dead(found: Inspection) -> Iterator[Hazard]:
    reports: list[Nvfp4Report | Fp8Report] = [*found.nvfp4, *found.fp8]
    places = [f"layer {x.layer}: experts {_list(x.tiny_experts)}" for x in reports if x.tiny_experts]
    if places:
        yield Hazard(
            "dead-experts",
            f"scales below 1e-10 ({'; '.join(places[:4])}{'; ...' if len(places) > 4 else ''}): products of two such "
            "scales underflow and gave NaN in kernels; clamp them to 1e-10",
        )


def _e8m0(found: Inspection) -> Iterator[Hazard]:
    if found.expert_format != "fp8" or not found.fp8:
        return
    dtypes = {x.dtype for x in found.fp8}
    if dtypes & {"U8", "F8_E8M0"}:
        yield Hazard(
            "e8m0-scales",
            f"block scales are stored as E8M0 exponents ({', '.join(sorted(dtypes))}), where FP32 is usual: they are "
            "decoded here, but a kernel that reads them as FP32 or as numbers is wrong by orders of magnitude",
        )
    elif all(x.powers_of_two for x in found.fp8):
        yield Hazard(
            "e8m0-scales",
            "every FP32 block scale is a power of two: made for kernels with E8M0 scales, whose activations are scaled "
            "by powers of two as well; fp8 variants here scale activations in FP32",
        )


def _input_scales(found: Inspection, encoding: Encoding) -> Iterator[Hazard]:
    reports: Sequence[Nvfp4Report | Fp8Report] = found.nvfp4
    if found.expert_format == "fp8_tensor":
        reports = found.fp8
    ranges = [(x.layer, x.input_scale_low, x.input_scale_high) for x in reports]
    if encoding.activations == "none":
        yield Hazard(
            "weight-only",
            f"{encoding.label}: made for kernels that leave activations alone; an emulation that quantises them "
            f"measures something else, {found.expert_format}/reference does not",
        )
    elif encoding.activations == "static" and ranges and any(low is None for _, low, _ in ranges):
        yield Hazard(
            "no-input-scale",
            f"{encoding.label} without input_scale: kernels with static scales would use 1 or garbage; here every "
            "token gets its own",
        )
    zero = [str(layer) for layer, low, _ in ranges if low is not None and low <= 0]
    if zero:
        yield Hazard("no-input-scale", f"input_scale is 0 in layers {', '.join(zero)}: experts never calibrated")
    widest = max(reports, key=lambda x: x.input_spread, default=None)
    if widest is not None and widest.input_spread > SPREAD:
        yield Hazard(
            "input-scale-spread",
            f"input_scale differs by up to {widest.input_spread:.1f}x between experts (layer {widest.layer}): engines "
            "that take the layer's largest and those that take each expert's own give different results "
            "(nvfp4/emulated:input_scale=max|expert)",
        )


def _bias(found: Inspection) -> Iterator[Hazard]:
    lossy = [b for b in found.bias if b.distinct_bf16 < b.distinct]
    if lossy:
        worst = max(lossy, key=lambda b: b.sets_changed)
        spread = worst.high - worst.low
        yield Hazard(
            "bias-step",
            f"e_score_correction_bias must stay FP32: in layer {worst.layer} BF16's step {worst.bf16_step:g} stands "
            f"against a spread of {spread:.3g} ({worst.distinct} values become {worst.distinct_bf16}), which changes "
            f"the experts of {worst.sets_changed:.0%} of synthetic tokens ({len(lossy)} of {len(found.bias)} layers "
            "lose values)",
        )


def _list(numbers: Iterable[int]) -> str:
    every = [str(n) for n in numbers]
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
