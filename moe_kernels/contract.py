"""Checks before a TRT-LLM MoE call: what FlashInfer's launcher checks in C++, and what it silently does not.

Every check reads shapes, dtypes and strides only, so it costs microseconds and stays on; `check_values`
(finite, non-zero scales; declared w13 order) reads tensors and runs once, at load. The launcher's rules are those of
flashinfer 0.6.18.post1 and 0.7.4 (`trtllm_fused_moe_kernel_launcher.cu`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from moe_kernels.errors import ContractError
from moe_kernels.records import FP8_BLOCK, NVFP4_GROUP, ExpertWeights, MoEShape

FP8 = torch.float8_e4m3fn
BIAS_FP32_SINCE = Version("0.6.18")  # earlier kernels read the bias as BF16 whatever its dtype (vLLM #38989)
TESTED_VERSIONS = ("0.6.18.post1", "0.7.4")
OLDEST = Version("0.6.8")  # BF16 router logits are accepted from here on
NEXT_BREAKING = Version("0.8.0.dev0")  # do_finalize=True returns a list from here on


def _fail(tensor: str, found: object, wanted: object, remedy: str = "") -> None:
    raise ContractError(f"{tensor} is {found}, the kernel needs {wanted}{'; ' + remedy if remedy else ''}")


def _expect(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if t.dtype not in dtypes:
        _fail(f"{name}.dtype", t.dtype, " or ".join(str(d) for d in dtypes))
    if tuple(t.shape) != shape:
        _fail(f"{name}.shape", tuple(t.shape), shape)


def _dense(name: str, t: Tensor, remedy: str) -> None:
    # The block-scale launcher reads data_ptr() as a dense row-major array and never looks at strides, so
    # a padded or transposed tensor is read wrongly without an error (relative L2 0.9 at T=5, 0 at T=64).
    if not t.is_contiguous():
        _fail(f"{name}.stride()", t.stride(), f"dense row-major {tuple(t.shape)}", remedy)


def check_version(version: str, bias_dtype: torch.dtype | None) -> list[str]:
    """Refuse FlashInfer versions whose semantics differ; returns warnings for untested ones.

    Raises ContractError for an FP32 bias below 0.6.18 (read as BF16 there) and for 0.8 and later.
    """
    found = Version(version)
    if bias_dtype == torch.float32 and found < BIAS_FP32_SINCE:
        raise ContractError(
            f"flashinfer {version} reads an FP32 routing bias as BF16 (DeepSeek-R1 GSM8K 0.02 instead of 0.96); "
            "install >= 0.6.18, or run the variant with bias=bf16"
        )
    if found < OLDEST or found >= NEXT_BREAKING:
        raise ContractError(f"flashinfer {version} is not supported; install one of {', '.join(TESTED_VERSIONS)}")
    if found.public not in TESTED_VERSIONS:
        return [f"flashinfer {version} is untested; tested signatures: {', '.join(TESTED_VERSIONS)}"]
    return []


@dataclass(frozen=True)
class RoutingLimits:
    """Limits of one routing method: groups allowed, and the largest top_k."""

    grouped: bool
    max_top_k: int


ROUTING_LIMITS = {
    "DeepSeekV3": RoutingLimits(True, 8),  # 22 above 384 experts
    "Renormalize": RoutingLimits(False, 32),
    "RenormalizeNaive": RoutingLimits(False, 32),
    "Default": RoutingLimits(False, 8),
    "TopK": RoutingLimits(False, 32),
    "SigmoidRenorm": RoutingLimits(False, 32),
    "Llama4": RoutingLimits(False, 1),
}


def check_routing(
    method: str,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
) -> None:
    """The launcher's check_routing, plus the missing one: a scaling factor must be given (None means 1.0)."""
    limits = ROUTING_LIMITS.get(method)
    if limits is None:
        _fail("routing_method_type", method, f"one of {', '.join(ROUTING_LIMITS)}")
        return
    groups, kept = n_group or 0, topk_group or 0
    if num_experts % 4 or num_experts <= top_k:
        _fail("num_experts", num_experts, f"a multiple of 4 above top_k={top_k}")
    max_k = 22 if limits.grouped and num_experts > 384 else limits.max_top_k
    if top_k > max_k:
        _fail("top_k", top_k, f"at most {max_k} for {method} with {num_experts} experts")
    if limits.grouped:
        if groups < 1 or kept < 1:
            _fail("n_group/topk_group", (n_group, topk_group), "1 and 1 where the model has no groups, never 0 or None")
        if num_experts % groups or kept > 4 or kept > groups:
            _fail("n_group/topk_group", (groups, kept), f"a divisor of {num_experts} and at most min(4, n_group)")
        if top_k >= kept * num_experts // groups:
            _fail("top_k", top_k, f"less than topk_group * experts per group = {kept * num_experts // groups}")
        if routed_scaling_factor is None:
            _fail(
                "routed_scaling_factor",
                None,
                "the model's value",
                "None means 1.0 to the kernel and is not an error there",
            )
        elif not math.isfinite(routed_scaling_factor) or routed_scaling_factor <= 0:
            _fail("routed_scaling_factor", routed_scaling_factor, "a positive number")
    elif groups > 1 or kept > 1:
        _fail("n_group/topk_group", (n_group, topk_group), f"at most 1 for {method}")
    if local_expert_offset < 0 or local_num_experts < 1 or local_expert_offset + local_num_experts > num_experts:
        _fail("local experts", (local_expert_offset, local_num_experts), f"a range inside {num_experts} experts")


def check_shard(shape: MoEShape, tp: int, block: int = FP8_BLOCK) -> None:
    """Block scales can be sharded only on whole blocks: GLM-4.5-Air's 1408 / TP2 = 704 is no multiple of 128."""
    if tp < 1 or shape.intermediate_size % tp:
        _fail("moe_intermediate_size", shape.intermediate_size, f"divisible by TP={tp}")
    shard = shape.intermediate_size // tp
    if shard % block:
        fits = [t for t in (1, 2, 4, 8, 16) if shape.intermediate_size % (t * block) == 0]
        _fail(
            f"moe_intermediate_size / TP{tp}",
            shard,
            f"a multiple of the block size {block}",
            f"use TP in {fits}, expert parallelism, or pad the weights",
        )


def _routing_inputs(kwargs: Mapping[str, Any], tokens: int) -> None:
    experts, top_k = kwargs["num_experts"], kwargs["top_k"]
    if "routing_logits" in kwargs:
        _expect("routing_logits", kwargs["routing_logits"], (torch.float32, torch.bfloat16), (tokens, experts))
        _dense("routing_logits", kwargs["routing_logits"], "call .contiguous()")
    else:
        ids = kwargs["topk_ids"]
        if isinstance(ids, tuple):
            _expect("topk_ids[0]", ids[0], (torch.int32,), (tokens, top_k))
            _expect("topk_ids[1]", ids[1], (torch.bfloat16, torch.float32), (tokens, top_k))
            for part in ids:
                _dense("topk_ids", part, "call .contiguous()")
        else:
            _expect("topk_ids", ids, (torch.int32,), (tokens, top_k))
    bias = kwargs.get("routing_bias")
    if bias is not None:
        _expect("routing_bias", bias, (torch.float32, torch.bfloat16), (experts,))
        _dense("routing_bias", bias, "call .contiguous()")
    replay = kwargs.get("routing_replay_out")
    if replay is not None and (replay.dtype != torch.int16 or replay.shape[0] < tokens or replay.shape[1] != top_k):
        _fail("routing_replay_out", (replay.dtype, tuple(replay.shape)), f"int16 [>= {tokens}, {top_k}]")


def _call_routing(kwargs: Mapping[str, Any], method: str) -> None:
    check_routing(
        method,
        kwargs["num_experts"],
        kwargs["top_k"],
        kwargs["n_group"],
        kwargs["topk_group"],
        kwargs["local_expert_offset"],
        kwargs["local_num_experts"],
        kwargs["routed_scaling_factor"],
    )


def check_fp8_block_call(kwargs: Mapping[str, Any], method: str) -> None:
    """Check the keyword arguments of trtllm_fp8_block_scale(_routed)_moe, DeepSeekFp8.

    `hidden_states` e4m3 [T, H]; `hidden_states_scale` FP32 [H/128, T], **dense**: the token index is fastest.
    """
    hidden, scale = kwargs["hidden_states"], kwargs["hidden_states_scale"]
    if hidden.ndim != 2 or hidden.dtype != FP8:
        _fail("hidden_states", (hidden.dtype, tuple(hidden.shape)), "float8_e4m3fn [T, H]")
    tokens, width = hidden.shape
    inter, local = kwargs["intermediate_size"], kwargs["local_num_experts"]
    if width % FP8_BLOCK or inter % FP8_BLOCK:
        _fail(
            "hidden/intermediate size",
            (width, inter),
            f"multiples of {FP8_BLOCK}",
            "pad the weights or use fp8/emulated",
        )
    _dense("hidden_states", hidden, "call .contiguous()")
    _expect("hidden_states_scale", scale, (torch.float32,), (width // FP8_BLOCK, tokens))
    _dense("hidden_states_scale", scale, "quantise with layout='column', not the TMA-padded one, and pass scale.t()")
    if kwargs["weight_layout"] == 2:  # BlockMajorK
        w13: tuple[int, ...] = (local, width // 128, 2 * inter, 128)
        w2: tuple[int, ...] = (local, inter // 128, width, 128)
    else:
        w13, w2 = (local, 2 * inter, width), (local, width, inter)
    _expect("gemm1_weights", kwargs["gemm1_weights"], (FP8,), w13)
    _expect("gemm2_weights", kwargs["gemm2_weights"], (FP8,), w2)
    _expect(
        "gemm1_weights_scale", kwargs["gemm1_weights_scale"], (torch.float32,), (local, 2 * inter // 128, width // 128)
    )
    _expect("gemm2_weights_scale", kwargs["gemm2_weights_scale"], (torch.float32,), (local, width // 128, inter // 128))
    for name in ("gemm1_weights", "gemm2_weights", "gemm1_weights_scale", "gemm2_weights_scale"):
        _dense(name, kwargs[name], "call .contiguous() when preparing the weights")
    _call_routing(kwargs, method)
    _routing_inputs(kwargs, tokens)


def check_fp4_call(kwargs: Mapping[str, Any], method: str) -> None:
    """Check the keyword arguments of trtllm_fp4_block_scale(_routed)_moe with NVFP4 weights and activations."""
    hidden, scale = kwargs["hidden_states"], kwargs["hidden_states_scale"]
    if hidden.ndim != 2 or hidden.dtype != torch.uint8:
        _fail("hidden_states", (hidden.dtype, tuple(hidden.shape)), "uint8 [T, H/2], two E2M1 a byte")
    tokens, width = hidden.shape[0], hidden.shape[1] * 2
    inter, local = kwargs["intermediate_size"], kwargs["local_num_experts"]
    if scale is None:
        _fail("hidden_states_scale", None, "float8_e4m3fn [T, H/16] for E2M1 activations")
    _dense("hidden_states", hidden, "call .contiguous()")
    _expect("hidden_states_scale", scale, (FP8,), (tokens, width // NVFP4_GROUP))
    _dense("hidden_states_scale", scale, "use the linear layout, not the swizzled one")
    _expect("gemm1_weights", kwargs["gemm1_weights"], (torch.uint8,), (local, 2 * inter, width // 2))
    _expect("gemm2_weights", kwargs["gemm2_weights"], (torch.uint8,), (local, width, inter // 2))
    _expect("gemm1_weights_scale", kwargs["gemm1_weights_scale"], (FP8,), (local, 2 * inter, width // NVFP4_GROUP))
    _expect("gemm2_weights_scale", kwargs["gemm2_weights_scale"], (FP8,), (local, width, inter // NVFP4_GROUP))
    for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
        if kwargs[name] is None:
            _fail(name, None, f"float32 [{local}], all three are required with E2M1 activations")
        _expect(name, kwargs[name], (torch.float32,), (local,))
    for name in ("gemm1_weights", "gemm2_weights", "gemm1_weights_scale", "gemm2_weights_scale"):
        _dense(name, kwargs[name], "call .contiguous() when preparing the weights")
    _call_routing(kwargs, method)
    _routing_inputs(kwargs, tokens)


def check_values(record: ExpertWeights, layer: int | str = "?") -> None:
    """Once per layer at load: every scale finite and positive, and far from FP32's smallest normal.

    Near-zero block scales of dead experts (1e-23) give NaN in some SM90 kernels (FlashInfer #2595); zero
    scales give 0/0. E4M3 block scales of NVFP4 may be zero: an all-zero group is legal there.
    """
    for name in ("w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "w13_input_scale", "w2_input_scale"):
        scale = getattr(record, name)
        if scale is None:
            continue
        if scale.dtype == torch.uint8:  # E8M0 of MX formats: 0 is 2^-127, the scale of an all-zero group; 255 is NaN
            if (scale == 255).any():
                _fail(f"layer {layer} {name}{(scale == 255).nonzero()[0].tolist()}", "NaN (255)", "finite")
            continue
        value = scale.float()
        if not torch.isfinite(value).all():
            where = (~torch.isfinite(value)).nonzero()[0].tolist()
            _fail(f"layer {layer} {name}{where}", float(value[tuple(where)]), "finite")
        floor = 0.0 if scale.dtype == FP8 else 1e-10
        bad = value < 0 if scale.dtype == FP8 else value < floor
        if bad.any():
            where = bad.nonzero()[0].tolist()
            _fail(
                f"layer {layer} {name}{where}",
                float(value[tuple(where)]),
                f">= {floor}",
                "clamp it to 1e-10 (the weights of that block are zero)",
            )
    if record.w13.dtype == FP8:
        for name in ("w13", "w2"):
            # E4M3 has one NaN pattern per sign, 0x7f and 0xff, and no infinity
            if ((getattr(record, name).view(torch.uint8) & 0x7F) == 0x7F).any():
                _fail(
                    f"layer {layer} {name}",
                    "NaN (0x7f)",
                    "finite",
                    "the quantiser overflowed: clamp to ±448 before the cast",
                )
