"""A small random block-FP8 / NVFP4 MoE layer and an interpreter of FlashInfer calls, shared by the TRT-LLM tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.quant import fp8, nvfp4
from moe_kernels.records import ExpertWeights, Routing, RoutingConfig

CONFIG = RoutingConfig(num_experts=8, top_k=2, routed_scaling_factor=2.5)


def weights(seed: int, e: int = 8, h: int = 256, i: int = 128) -> tuple[Tensor, Tensor]:
    """FP32 w13 [E, 2I, H] and w2 [E, H, I]; experts and halves differ in size so that swaps show."""
    g = torch.Generator().manual_seed(seed)
    size = torch.linspace(0.5, 2.0, e)[:, None, None]
    w13 = torch.randn(e, 2 * i, h, generator=g) / h**0.5 * size
    w13[:, i:] *= 3.0
    return w13, torch.randn(e, h, i, generator=g) / i**0.5 * size


def fp8_record(seed: int, **shape: int) -> ExpertWeights:
    """Quantised with 128x128 blocks, each half of w13 on its own."""
    w13, w2 = weights(seed, **shape)
    gate, up = (fp8.quantize_weight_blocks(half) for half in w13.chunk(2, dim=1))
    q2, s2 = fp8.quantize_weight_blocks(w2)
    return ExpertWeights("fp8", torch.cat([gate[0], up[0]], 1), q2, torch.cat([gate[1], up[1]], 1), s2)


def nvfp4_record(seed: int, **shape: int) -> ExpertWeights:
    """NVFP4 with different global scales for gate and up of every expert."""
    w13, w2 = weights(seed, **shape)
    e, i2, _ = w13.shape
    halves = w13.view(e, 2, i2 // 2, -1)
    gs13 = halves.abs().amax((-1, -2)) / (6 * 448)
    gs2 = w2.abs().amax((-1, -2)) / (6 * 448)
    q13, s13 = nvfp4.quantize(halves, gs13[..., None, None])
    q2, s2 = nvfp4.quantize(w2, gs2[:, None, None])
    return ExpertWeights(
        "nvfp4",
        q13.flatten(1, 2),
        q2,
        s13.flatten(1, 2),
        s2,
        gs13,
        gs2,
        torch.full((e, 2), 4.0 / (6 * 448)),
        torch.full((e,), 2.0 / (6 * 448)),
    )


def raw(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`shape` read densely from a tensor's memory, blind to its strides, as the C++ launcher reads data_ptr()."""
    return torch.as_strided(t, shape, torch.empty(shape).stride())


def run_fp8_call(kwargs: dict[str, Any], routing: Routing) -> Tensor:
    """What trtllm_fp8_block_scale_moe computes from MajorK [up; gate] weights, per token, straightforwardly."""
    q = kwargs["hidden_states"]
    t, h = q.shape
    scale = raw(kwargs["hidden_states_scale"], (h // 128, t))
    x = q.float() * scale.t().repeat_interleave(128, 1)
    w13 = fp8.dequantize_weight_blocks(kwargs["gemm1_weights"], kwargs["gemm1_weights_scale"])
    w2 = fp8.dequantize_weight_blocks(kwargs["gemm2_weights"], kwargs["gemm2_weights_scale"])
    out = torch.zeros(t, h)
    for row in range(t):
        for expert, weight in zip(routing.ids[row].tolist(), routing.weights[row].tolist(), strict=True):
            up, gate = (w13[expert] @ x[row]).chunk(2)
            mid_q, mid_s = fp8.quantize_activations((F.silu(gate) * up)[None])
            out[row] += weight * (w2[expert] @ fp8.dequantize_activations(mid_q, mid_s)[0])
    return out
