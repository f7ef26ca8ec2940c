"""The training forward of a small GLM-4-MoE: FP32 master weights, BF16 matrix products, dropless grouped experts.

The architecture is `transformers`' Glm4MoeForCausalLM (tests compare their logits): pre-norm blocks, grouped-query
attention with biased q/k/v, per-head q/k RMSNorm, RoPE on half of each head, one dense layer, then sigmoid-routed
experts (selection by score + bias, weights by score, normalised and scaled) beside a shared expert.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.mini.experts import Combine, Dispatch, Scatter, grouped_linear, plan_groups

BIAS_OFFSET = 6.94  # GLM-5.2 publishes e_score_correction_bias in [6.82, 7.06]; selection does not depend on the offset
BIAS_LIMIT = 0.12  # furthest a bias may move from its centre: the half width of that range
# Spread of the router's logits: longest row of its matrix, the norm's weight multiplied in. Unbounded rows saturate the
# sigmoid, and a favoured expert then scores near 1 for every token, beyond what a small bias can correct. For the same
# reason rows keep nothing of the direction all tokens share. (First GPU run, unbounded: one expert took every token in
# three layers. Runs that bounded the plain row at 0.1: four experts took nearly all, since the norm's weight grew.)
ROUTER_ROW_NORM = 0.6


@dataclass(frozen=True)
class MiniConfig:
    """Sizes of the model; the defaults are the shipped one (19.6 M parameters, 5.6 M active a token)."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    dense_intermediate: int = 640
    experts: int = 32
    top_k: int = 4
    moe_intermediate: int = 128
    scaling: float = 2.5
    rope_theta: float = 10_000.0
    partial_rotary: float = 0.5
    eps: float = 1e-5
    max_positions: int = 2048


TOY = MiniConfig(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, dense_intermediate=256, experts=8, top_k=2)


def compiled(function: Callable[..., Any], enabled: bool) -> Callable[..., Any]:
    """`torch.compile` of a pure function where asked, else the function itself."""
    backend = os.environ.get("MINI_COMPILE_BACKEND", "inductor")
    return torch.compile(function, dynamic=False, backend=backend) if enabled else function


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in FP32, result in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_tables(config: MiniConfig, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin, FP32 [length, rotary/2]."""
    rotary = int(config.head_dim * config.partial_rotary)
    inverse = config.rope_theta ** (-torch.arange(0, rotary, 2, device=device, dtype=torch.float32) / rotary)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest.to(cos.dtype)), -1).to(x.dtype)


def attention_block(x: Tensor, p: dict[str, Tensor], cos: Tensor, sin: Tensor, config: MiniConfig) -> Tensor:
    """x + attention(norm(x)); x BF16 (or FP32 on a CPU) [B, T, H]."""
    rows, length, _ = x.shape
    d, dtype = config.head_dim, x.dtype
    h = rms_norm(x, p["ln1"], config.eps)
    q = F.linear(h, p["q"].to(dtype), p["q_b"].to(dtype)).view(rows, length, config.heads, d)
    k = F.linear(h, p["k"].to(dtype), p["k_b"].to(dtype)).view(rows, length, config.kv_heads, d)
    v = F.linear(h, p["v"].to(dtype), p["v_b"].to(dtype)).view(rows, length, config.kv_heads, d)
    q = _rotate(rms_norm(q, p["q_norm"], config.eps).transpose(1, 2), cos, sin)
    k = _rotate(rms_norm(k, p["k_norm"], config.eps).transpose(1, 2), cos, sin)
    group = config.heads // config.kv_heads
    k, v = k.repeat_interleave(group, 1), v.transpose(1, 2).repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + F.linear(out.transpose(1, 2).reshape(rows, length, -1), p["o"].to(dtype))


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The plain gated MLP."""
    dtype = x.dtype
    return F.linear(F.silu(F.linear(x, gate.to(dtype))) * F.linear(x, up.to(dtype)), down.to(dtype))


def dense_block(x: Tensor, p: dict[str, Tensor], config: MiniConfig) -> Tensor:
    """x + MLP(norm(x))."""
    return x + swiglu(rms_norm(x, p["ln2"], config.eps), p["gate"], p["up"], p["down"])


def route(
    x: Tensor, p: dict[str, Tensor], bias: Tensor, config: MiniConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised input h [T, H], chosen experts int64 [T, k], weights FP32 [T, k] (all arithmetic FP32), mean h [H]."""
    h = rms_norm(x, p["ln2"], config.eps).flatten(0, 1)
    scores = torch.sigmoid(h.float() @ p["router"].t())
    ids = torch.topk(scores.detach() + bias, config.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    mean = h.detach().float().mean(0)
    return h, ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.scaling, mean


def add_shared(x: Tensor, h: Tensor, routed: Tensor, p: dict[str, Tensor]) -> Tensor:
    """x + routed experts + shared expert."""
    return x + (routed + swiglu(h, p["s_gate"], p["s_up"], p["s_down"])).view_as(x)


def activate(h: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * routing weight, on rows [gate; up] of width 2I."""
    gate, up = h.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * weights[:, None]).to(h.dtype)


def head_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Weighted mean cross entropy over the vocabulary; targets int64 [N], weights FP32 [N]."""
    logits = F.linear(rms_norm(x, norm, eps).flatten(0, 1), head.to(x.dtype)).float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    return (loss * weights).sum() / weights.sum()


class MiniNetwork(nn.Module):
    """Parameters and the loss. `biases` (FP32 [E] a MoE layer) are centred on 0 here; export adds BIAS_OFFSET."""

    embed: nn.Parameter
    head: nn.Parameter
    norm: nn.Parameter
    biases: Tensor

    def __init__(self, config: MiniConfig, *, compile_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        c = config
        qd, kd = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {"norm": (c.hidden,)}
        shapes |= {"embed": (c.vocab, c.hidden), "head": (c.vocab, c.hidden)}
        for i in range(c.layers):
            block: dict[str, tuple[int, ...]] = {
                "ln1": (c.hidden,), "ln2": (c.hidden,), "q_norm": (c.head_dim,), "k_norm": (c.head_dim,),
                "q": (qd, c.hidden), "k": (kd, c.hidden), "v": (kd, c.hidden), "o": (c.hidden, qd),
                "q_b": (qd,), "k_b": (kd,), "v_b": (kd,),
            }  # fmt: skip
            if i == 0:
                d = c.dense_intermediate
                block |= {"gate": (d, c.hidden), "up": (d, c.hidden), "down": (c.hidden, d)}
            else:
                e, m = c.experts, c.moe_intermediate
                block |= {
                    "router": (e, c.hidden), "w1": (e, m, c.hidden), "w3": (e, m, c.hidden), "w2": (e, c.hidden, m),
                    "s_gate": (m, c.hidden), "s_up": (m, c.hidden), "s_down": (c.hidden, m),
                }  # fmt: skip
            shapes |= {f"layers_{i}_{name}": shape for name, shape in block.items()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.register_buffer("biases", torch.zeros(c.layers - 1, c.experts))
        self.blocks = [
            {n[len(start) :]: p for n, p in self.named_parameters() if n.startswith(start)}
            for start in (f"layers_{i}_" for i in range(c.layers))
        ]  # the parameters themselves, by layer and short name
        self.attention = compiled(attention_block, compile_blocks)
        self.dense = compiled(dense_block, compile_blocks)
        self.router = compiled(route, compile_blocks)
        self.activation = compiled(activate, compile_blocks)
        self.finish = compiled(add_shared, compile_blocks)
        self.loss = compiled(head_loss, compile_blocks)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights from a seed, drawn on the CPU so that every device starts alike."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            kind = name.rsplit("_", 1)[-1]
            if p.ndim == 1:
                p.copy_(torch.zeros(p.shape) if kind == "b" else torch.ones(p.shape))
                continue
            std = {"embed": 0.3, "head": 0.02, "router": 0.02}.get(kind, 1 / math.sqrt(p.shape[-1]))
            if kind in ("o", "down", "w2"):
                std /= math.sqrt(2 * self.config.layers)
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        self.biases.zero_()

    def hidden_states(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Last hidden states [B, T, H] before the final norm; of every MoE layer the expert loads and mean input.

        Loads are int64 [MoE layers, E], mean inputs FP32 [MoE layers, H].
        """
        c = self.config
        cos, sin = rope_tables(c, tokens.shape[1], tokens.device)
        x = F.embedding(tokens, self.embed).to(dtype)
        loads, means = [], []
        for i in range(c.layers):
            p = self.blocks[i]
            attn = {k: p[k] for k in ("ln1", "q", "q_b", "k", "k_b", "v", "v_b", "o", "q_norm", "k_norm")}
            x = self.attention(x, attn, cos, sin, c)
            if i == 0:
                x = self.dense(x, {k: p[k] for k in ("ln2", "gate", "up", "down")}, c)
                continue
            h, ids, weights, mean = self.router(x, {k: p[k] for k in ("ln2", "router")}, self.biases[i - 1], c)
            plan = plan_groups(ids, c.experts)
            grouped = Dispatch.apply(h, plan.source, plan.place)
            both = grouped_linear(grouped, torch.cat((p["w1"], p["w3"]), 1), plan.ends)
            scale = Scatter.apply(weights.flatten(), plan.place, both.shape[0])
            out = grouped_linear(self.activation(both, scale), p["w2"], plan.ends)
            routed = Combine.apply(out, plan.source, plan.place, h.shape[0])
            x = self.finish(x, h, routed, {k: p[k] for k in ("s_gate", "s_up", "s_down")})
            loads.append(plan.counts)
            means.append(mean)
        return x, torch.stack(loads), torch.stack(means)

    def forward(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (scalar), expert loads and mean inputs."""
        x, loads, means = self.hidden_states(tokens, dtype)
        loss = self.loss(x, self.norm, self.head, targets.flatten(), weights.flatten(), self.config.eps)
        return loss, loads, means

    def logits(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits FP32 [B, T, V]."""
        x, _, _ = self.hidden_states(tokens, dtype)
        return F.linear(rms_norm(x, self.norm, self.config.eps), self.head.to(dtype)).float()

    @torch.no_grad()
    def balance(self, loads: Tensor, means: Tensor, rate: float) -> None:
        """Auxiliary-loss-free balancing: `rate` up for under-loaded experts, down for the others, then re-centre.

        Also keeps the router's rows short (ROUTER_ROW_NORM) and orthogonal to the layer's mean input.
        """
        for block, mean_input in zip(self.blocks[1:], means, strict=True):
            row = block["router"]
            along = mean_input / (mean_input.norm() + 1e-12)
            row.sub_(torch.outer(row @ along, along))
            row.mul_((ROUTER_ROW_NORM / (row * block["ln2"]).norm(dim=1, keepdim=True)).clamp_max(1.0))
        mean = loads.float().mean(1, keepdim=True)
        updated = self.biases + rate * torch.sign(mean - loads.float())
        updated -= updated.mean(1, keepdim=True)
        self.biases.copy_(updated.clamp(-BIAS_LIMIT, BIAS_LIMIT))


def config_dict(config: MiniConfig) -> dict[str, Any]:
    """The sizes as plain JSON."""
    return dataclasses.asdict(config)
