"""Our own plain-torch GLM-4-MoE forward in FP64, written from the paper's equations: an oracle of its own.

No transformers, no moe_kernels. Experts are run densely: every expert on every token, then a weighted sum
with a [T, E] matrix of weights. Quantised experts are decoded bit by bit here, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def e4m3(codes: Tensor) -> Tensor:
    """FP64 values of E4M3FN codes, from sign, exponent and mantissa bits."""
    b = codes.view(torch.uint8).long()
    exponent, mantissa = (b >> 3) & 15, (b & 7).double()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * torch.exp2((exponent - 10).double()))
    return torch.where(b >= 128, -value, value)


def e2m1(packed: Tensor) -> Tensor:
    """FP64 [..., 2K] of packed E2M1 pairs [..., K], low nibble first."""
    b = packed.long()
    nibble = torch.stack([b & 15, b >> 4], dim=-1).flatten(-2)
    exponent, mantissa = (nibble >> 1) & 3, (nibble & 1).double()
    value = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.exp2((exponent - 1).double()))
    return torch.where(nibble >= 8, -value, value)


@dataclass
class Weights:
    """All tensors of a checkpoint folder as FP64, quantised ones decoded; `config` as parsed."""

    config: dict
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path) -> Weights:
        """Read every safetensors file of `folder`."""
        raw: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            raw |= load_file(file)
        tensors = {}
        for name, t in raw.items():
            if name.endswith(("_scale", "_scale_inv", "_scale_2")):
                continue
            if t.dtype == torch.float8_e4m3fn:
                s = raw[f"{name}_scale_inv"].double()
                s = s.repeat_interleave(128, 0)[: t.shape[0]].repeat_interleave(128, 1)[:, : t.shape[1]]
                tensors[name] = e4m3(t) * s
            elif t.dtype == torch.uint8:
                s = e4m3(raw[f"{name}_scale"]).repeat_interleave(16, 1)
                tensors[name] = e2m1(t) * s * raw[f"{name}_scale_2"].double()
            else:
                tensors[name] = t.double()
        return cls(json.loads((folder / "config.json").read_text()), tensors)


@dataclass
class Result:
    """Logits [T, V], expert sets as sorted ids [layers, T, k], smallest gap between a chosen and a refused key."""

    logits: Tensor
    experts: Tensor
    tie_gap: float


def forward(w: Weights, ids: Tensor) -> Result:
    """One sequence of token ids [T]."""
    c, t = w.config, w.tensors
    heads, kv_heads, hidden = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    dim = c.get("head_dim") or hidden // heads
    rope = c.get("rope_parameters") or {}
    theta = rope.get("rope_theta", c.get("rope_theta"))
    rotated = int(dim * rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 0.5)))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * t[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ t[f"{name}.weight"].T
        return y + t[f"{name}.bias"] if f"{name}.bias" in t else y

    def mlp(x: Tensor, name: str) -> Tensor:
        gate = linear(x, f"{name}.gate_proj")
        return linear(gate * torch.sigmoid(gate) * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    position = torch.arange(len(ids), dtype=torch.float64)
    angle = position[:, None] * theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # [T, 1, rotated / 2]

    def rotate(x: Tensor) -> Tensor:  # pairs (i, i + rotated / 2) turned as complex numbers
        a, b, rest = x.split([rotated // 2, rotated // 2, dim - rotated], dim=-1)
        z = torch.complex(a, b) * turn
        return torch.cat([z.real, z.imag, rest], dim=-1)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (linear(x, f"{name}.{p}_proj").view(len(ids), -1, dim) for p in "qkv")
        if c.get("use_qk_norm"):
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        score = score.masked_fill(position[None, :] > position[:, None], -torch.inf)
        return linear(torch.einsum("hqk,khd->qhd", score.softmax(-1), v).flatten(1), f"{name}.o_proj")

    chosen, gaps = [], []

    def moe(x: Tensor, name: str) -> Tensor:
        score = torch.sigmoid(x @ t[f"{name}.gate.weight"].T)
        key = score + t[f"{name}.gate.e_score_correction_bias"]
        experts, k, groups = score.shape[1], c["num_experts_per_tok"], c.get("n_group", 1)
        if groups > 1:
            best = key.view(-1, groups, experts // groups).sort(-1, descending=True).values[..., :2].sum(-1)
            order = best.sort(-1, descending=True).values
            kept = c["topk_group"]
            if kept < groups:
                gaps.append((order[:, kept - 1] - order[:, kept]).min().item())
            out = (best < order[:, kept - 1 : kept]).repeat_interleave(experts // groups, 1)
            key = key.masked_fill(out, -torch.inf)
        order = key.sort(-1, descending=True).values
        gaps.append((order[:, k - 1] - order[:, k]).min().item())
        mask = key >= order[:, k - 1 : k]
        chosen.append(mask.nonzero()[:, 1].view(-1, k))
        weight = score * mask
        if c.get("norm_topk_prob", True):
            weight = weight / weight.sum(-1, keepdim=True)
        each = torch.stack([mlp(x, f"{name}.experts.{e}") for e in range(experts)], dim=1)
        routed = torch.einsum("te,teh->th", weight * c["routed_scaling_factor"], each)
        return routed + mlp(x, f"{name}.shared_experts")

    x = t["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        block = moe if i >= c["first_k_dense_replace"] else mlp
        x = x + block(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    head = "lm_head" if "lm_head.weight" in t else "model.embed_tokens"
    return Result(linear(norm(x, "model.norm"), head), torch.stack(chosen), min(gaps))
