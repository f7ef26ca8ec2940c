"""The forward of GLM-4-MoE over packed rows: `moe_kernels.ops` for all but the routed experts, a variant for those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import ops
from moe_kernels.ops import Fp8Linear, Quantised
from service.gpu.kv import GpuKV
from service.gpu.weights import LayerWeights, ModelWeights

SIDE_ROWS = 256  # up to so many rows the shared experts run beside the routed ones: neither fills the GPU alone


@dataclass(frozen=True)
class DecodeRows:
    """One query a row: `table` int32 [B, blocks]; `lengths` int32 [B], 0 for padding."""

    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class ChunkRows:
    """Chunks: rows [start[s], start[s + 1]) are the last of `lengths[s]` tokens; rows from start[-1] on are padding."""

    table: Tensor
    start: Tensor
    lengths: Tensor
    longest: int


Rows = DecodeRows | ChunkRows
Watch = Callable[[str, Tensor], None]


class Forward:
    """Weights and KV pool, called with packed rows. Captures in a CUDA graph where the MoE layers do."""

    def __init__(self, weights: ModelWeights, kv: GpuKV, positions: int) -> None:
        self.weights, self.kv = weights, kv
        where = torch.arange(positions, device=weights.device)[None]
        cos, sin = weights.rotary(torch.empty(0, device=weights.device), where)
        half = cos.shape[-1] // 2
        self.cos, self.sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self.scaling = weights.head_dim**-0.5
        self.side = torch.cuda.Stream(weights.device) if weights.device.type == "cuda" else None
        self.observe: Callable[[int, Tensor, Tensor, Any], None] | None = None

    def __call__(self, ids: Tensor, positions: Tensor, slots: Tensor, rows: Rows, watch: Watch | None = None) -> Tensor:
        """Final hidden states [T, H] of ids, positions, slots int64 [T]; writes keys and values to the slots.

        `watch` is called with the name and output of every part (to find where a NaN comes from).
        """
        w, eps = self.weights, self.weights.eps
        residual = F.embedding(ids, w.embed)
        if watch:
            watch("model.embed_tokens", residual)
        y, quantised = self._first_norm(residual)
        for layer, following in zip(w.layers, [*w.layers[1:], None], strict=True):
            name = f"model.layers.{layer.index}"
            qkv = layer.qkv(_input(layer.qkv, y, quantised))
            k_pool, v_pool = self.kv.layers[layer.index]
            q = ops.qk_norm_rope_store(qkv, positions, self.cos, self.sin, slots, k_pool, v_pool, w.heads,
                                       layer.q_norm, layer.k_norm, eps)
            attended = layer.out.split(self._attend(q, layer, rows))  # type: ignore[arg-type]
            if watch:
                watch(f"{name}.self_attn", attended)
            y, residual, quantised = _add_norm(attended, residual, layer.post_norm, eps, None, layer.gate_up)
            routed, dense = self._mlp(layer, y, quantised)
            if watch:
                watch(f"{name}.mlp", dense)
                if routed is not None:
                    watch(f"{name}.mlp", routed)
            first, second = (dense, None) if routed is None else (routed, dense)
            norm, consumer = (w.norm, None) if following is None else (following.input_norm, following.qkv)
            y, residual, quantised = _add_norm(first, residual, norm, eps, second, consumer)
        if watch:
            watch("model.norm", y)
        return y

    def _first_norm(self, residual: Tensor) -> tuple[Tensor, Quantised | None]:
        first = self.weights.layers[0]
        if isinstance(first.qkv, Fp8Linear):
            return ops.rms_norm_quantised(residual, first.input_norm, self.weights.eps)
        return ops.rms_norm(residual, first.input_norm, self.weights.eps), None

    def _attend(self, q: Tensor, layer: LayerWeights, rows: Rows) -> Tensor | Quantised:
        k_pool, v_pool = self.kv.layers[layer.index]
        if isinstance(rows, ChunkRows):
            return ops.paged_prefill(q, k_pool, v_pool, rows.table, rows.start, rows.lengths, self.scaling,
                                     rows.longest).flatten(1)
        if isinstance(layer.out, Fp8Linear) and self.weights.head_dim == 128:
            return ops.paged_decode_quantised(q, k_pool, v_pool, rows.table, rows.lengths, self.scaling)
        return ops.paged_decode(q, k_pool, v_pool, rows.table, rows.lengths, self.scaling).flatten(1)

    def _mlp(self, layer: LayerWeights, y: Tensor, quantised: Quantised | None) -> tuple[Tensor | None, Tensor]:
        """(routed experts or None, shared experts or dense MLP)."""
        if layer.moe is None:
            return None, self._dense(layer, y, quantised)
        aside = self.side if y.shape[0] <= SIDE_ROWS else None
        if aside is not None:
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                shared = self._dense(layer, y, quantised)
        assert layer.router is not None  # for the type checker: MoE layers have one
        logits = ops.router_logits(y, layer.router)
        routed, routing = layer.moe.forward(y, logits)
        if self.observe is not None:
            self.observe(layer.index, y, logits, routing)
        if aside is None:
            shared = self._dense(layer, y, quantised)
        else:
            torch.cuda.current_stream().wait_stream(aside)
        return routed, shared

    @staticmethod
    def _dense(layer: LayerWeights, y: Tensor, quantised: Quantised | None) -> Tensor:
        gate_up = layer.gate_up.split(_input(layer.gate_up, y, quantised))
        if isinstance(layer.down, Fp8Linear):
            return layer.down.split(ops.swiglu_quantised(gate_up))
        return layer.down.split(ops.swiglu(gate_up))

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [R, vocab]."""
        return self.weights.head(hidden).float()


def _input(linear: object, y: Tensor, quantised: Quantised | None) -> Any:
    return quantised if isinstance(linear, Fp8Linear) else y


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None, consumer: object
) -> tuple[Tensor, Tensor, Quantised | None]:
    """(normalised, new residual, normalised and quantised where the consumer is an FP8 linear)."""
    if isinstance(consumer, Fp8Linear):
        return ops.add_rms_norm_quantised(x, residual, weight, eps, x2)
    y, new = ops.add_rms_norm(x, residual, weight, eps, x2)
    return y, new, None
