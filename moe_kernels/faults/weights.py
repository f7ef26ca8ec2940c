"""Faults of weight loading and preparation: order of halves, scales, experts, layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.faults.base import Fault, register
from moe_kernels.records import ExpertWeights


def _scale(scale: Tensor | None, name: str) -> Tensor:
    if scale is None:
        raise VariantError(f"the record has no {name}")
    return scale


def _each(r: ExpertWeights, change: Callable[[Tensor | None], Tensor | None], names: tuple[str, ...]) -> ExpertWeights:
    changed: dict[str, Any] = {n: change(getattr(r, n)) for n in names}
    return replace(r, **changed)


def swap_halves(r: ExpertWeights) -> ExpertWeights:
    """[gate; up] handed to a kernel that reads [up; gate], weights and scales alike."""

    def swap(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return torch.cat(list(raw.chunk(2, dim=1))[::-1], dim=1).view(x.dtype)

    return _each(r, swap, ("w13", "w13_scale", "w13_scale_2", "w13_input_scale"))


def ue8m0_weights(r: ExpertWeights) -> ExpertWeights:
    """Weight scales rounded up to powers of two without requantising the weights."""
    up: dict[str, Any] = {
        n: torch.exp2(torch.ceil(torch.log2(_scale(getattr(r, n), n)))) for n in ("w13_scale", "w2_scale")
    }
    return replace(r, **up)


def scales_ignored(r: ExpertWeights) -> ExpertWeights:
    """The scale tensors were never found: 1 everywhere."""
    return replace(
        r,
        w13_scale=torch.ones_like(_scale(r.w13_scale, "w13_scale")),
        w2_scale=torch.ones_like(_scale(r.w2_scale, "w2_scale")),
    )


def w2_blocks_reversed(r: ExpertWeights) -> ExpertWeights:
    """Scale blocks of w2 in reverse order along its rows."""
    return replace(r, w2_scale=_scale(r.w2_scale, "w2_scale").flip(1))


def dead_expert(r: ExpertWeights) -> ExpertWeights:
    """One expert with near-zero block scales, as never-chosen experts in published checkpoints have."""
    scale = _scale(r.w13_scale, "w13_scale").clone()
    scale[0] = 1e-23
    return replace(r, w13_scale=scale)


def one_scalar(r: ExpertWeights) -> ExpertWeights:
    """The gate's global scale used for the up half too."""
    both = _scale(r.w13_scale_2, "w13_scale_2")
    # Our checkpoints' halves differ little; producers that stream shards reach ratios of 10 (vLLM #56095). The fault is
    # the rule, not the ratio, so the ratio is the checkpoint's own.
    return replace(r, w13_scale_2=both[:, :1].expand(-1, 2).clone())


def expert_offset(r: ExpertWeights) -> ExpertWeights:
    """local_expert_offset ignored: the second rank's experts are looked up from the first expert on."""

    def roll(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return raw.roll(r.num_experts // 2, 0).view(x.dtype)

    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "w13_input_scale", "w2_input_scale")
    return _each(r, roll, names)


def shuffled_again(r: ExpertWeights) -> ExpertWeights:
    """New weights loaded over an already shuffled buffer: rows of w2 in the kernel's order, read as plain."""
    from moe_kernels.variants.trtllm.layout import shuffle_index

    index = shuffle_index(r.hidden_size, 64).to(r.w2.device)
    return replace(r, w2=r.w2.view(torch.uint8)[:, index].view(r.w2.dtype))


def shard_misaligned(r: ExpertWeights) -> ExpertWeights:
    """Scales sharded across a block: every w13 block takes the scale of the block beside it."""
    halves = _scale(r.w13_scale, "w13_scale").view(r.num_experts, 2, -1, _scale(r.w13_scale, "w13_scale").shape[-1])
    return replace(r, w13_scale=halves.roll(1, -1).reshape_as(_scale(r.w13_scale, "w13_scale")))


def input_scale_first_expert(r: ExpertWeights) -> ExpertWeights:
    """The scale of an expert that calibration hardly saw, for all: a thousandth, so that activations saturate."""
    if r.w13_input_scale is None or r.w2_input_scale is None:
        return r
    small = float(r.w13_input_scale.min()) / 1000
    return replace(r, w13_input_scale=torch.full_like(r.w13_input_scale, small))


def input_scale_unsliced(r: ExpertWeights) -> ExpertWeights:
    """Another rank's activation scales: eight times too large a range."""
    if r.w13_input_scale is None or r.w2_input_scale is None:
        return r
    return replace(r, w13_input_scale=r.w13_input_scale * 64, w2_input_scale=r.w2_input_scale * 64)


def _add(
    name: str,
    source: str,
    summary: str,
    row: int | None,
    hook: Callable[[ExpertWeights], ExpertWeights],
    formats: tuple[str, ...],
    expected: tuple[str, ...] = ("kernel",),
) -> None:
    register(Fault(name, source, summary, row, formats=formats, record=hook, expected=expected))


_add(
    "w13_swapped", "SGLang #11081, Megatron #6045", "[gate; up] given to an [up; gate] kernel", 6, swap_halves, ("fp8",)
)
_add("w13_swapped_fp4", "SGLang #32430", "the same on compressed NVFP4", 7, swap_halves, ("nvfp4",))
_add(
    "weights_ue8m0",
    "vLLM #38083, #22399",
    "weight scales rounded to powers of two without requantising",
    23,
    ue8m0_weights,
    ("fp8",),
)
_add("scales_ignored", "SGLang #28662, #16622", "weight scales not loaded", 24, scales_ignored, ("fp8",))
_add(
    "w2_blocks_reversed",
    "kernels.md 5.5",
    "w2 scale blocks reversed along the rows",
    None,
    w2_blocks_reversed,
    ("fp8",),
)
_add(
    "dead_expert_scale",
    "FlashInfer #2595, vLLM #34914",
    "near-zero block scales of a dead expert",
    27,
    dead_expert,
    ("fp8",),
    ("contract",),
)
_add(
    "one_scalar",
    "vLLM #54974, #56095, TensorRT-LLM #14199",
    "one NVFP4 global scale for gate and up",
    32,
    one_scalar,
    ("nvfp4",),
)
_add(
    "input_scale_small",
    "vLLM #26135, SGLang #10296",
    "per-expert activation scale where the layer's is meant",
    33,
    input_scale_first_expert,
    ("nvfp4",),
)
_add(
    "input_scale_unsliced",
    "SGLang #23531, #36597",
    "activation scales of other ranks",
    34,
    input_scale_unsliced,
    ("nvfp4",),
)
_add(
    "expert_offset", "FlashInfer #3547, vLLM #28377", "local_expert_offset ignored", 35, expert_offset, ("fp8", "nvfp4")
)
_add("shuffled_again", "miles #1477", "weights updated over shuffled ones", 36, shuffled_again, ("fp8",))
_add("shard_misaligned", "vLLM #48173, #41511", "block scales sharded across a block", 37, shard_misaligned, ("fp8",))
