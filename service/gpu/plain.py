"""Every operation of the forward in plain torch: the reference on a CPU, and what runs where no kernel is at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.quant import fp8
from service.gpu.spans import Spans


class PlainLinear:
    """x @ weight.T + bias in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return F.linear(x, self.weight, self.bias)


class PlainFp8Linear:
    """The same with E4M3 weights in 128x128 blocks and activations quantised 1x128; products in FP32.

    Slow: the weight is dequantised at each call.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        q, scale = fp8.quantize_activations(x)
        wide = fp8.dequantize_activations(q, scale)
        y = F.linear(wide, fp8.dequantize_weight_blocks(self.weight, self.scale))
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as transformers does it: FP32 inside, rounded before the weight multiplies."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normalised, sum) of residual + (x + x2), rounded after each sum as transformers does."""
    total = residual + (x if x2 is None else x + x2)
    return rms_norm(total, weight, eps), total


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 [T, E]."""
    return F.linear(x.float(), weight)


def qk_norm_rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, kv_heads: int,
) -> Tensor:
    """Head norms, rotary embedding and storing of keys and values; gives the queries [T, heads, head_dim].

    `qkv` [T, (heads + 2 kv_heads) * head_dim]; `cos`, `sin` FP32 [positions, rotating / 2].
    """
    tokens, dim = qkv.shape[0], k_cache.shape[-1]
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    c, s = cos[positions][:, None].to(qkv.dtype), sin[positions][:, None].to(qkv.dtype)
    q, k = _rotate(q, c, s), _rotate(k, c, s)
    row = kv_heads * dim
    k_cache.view(-1, row).index_copy_(0, slots, k.reshape(tokens, row))
    v_cache.view(-1, row).index_copy_(0, slots, v.reshape(tokens, row))
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query a sequence: q [B, heads, d], table [B, blocks], lengths [B] -> [B, heads, d]. Reads whole tables."""
    sequences, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    k = k_cache[table.long()].view(sequences, -1, kv_heads, dim).transpose(1, 2)
    v = v_cache[table.long()].view(sequences, -1, kv_heads, dim).transpose(1, 2)
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    v = v.masked_fill(~seen[:, None, :, None], 0)  # unwritten entries may be anything, and 0 x NaN is NaN
    grouped = q.view(sequences, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.reshape(sequences, heads, dim)


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Spans, scale: float) -> Tensor:
    """Causal attention of each span's queries over its tokens so far: q [T, heads, d] -> the same; padding gets 0."""
    heads, dim = q.shape[1:]
    kv_heads, block = k_cache.shape[2], k_cache.shape[1]
    out = torch.zeros_like(q)
    for i, (start, count, length) in enumerate(zip(spans.starts, spans.counts, spans.lengths, strict=True)):
        blocks = spans.table[i, : -(-length // block)].long()
        k = k_cache[blocks].view(-1, kv_heads, dim)[:length].transpose(0, 1)
        v = v_cache[blocks].view(-1, kv_heads, dim)[:length].transpose(0, 1)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        rows = torch.arange(length - count, length, device=q.device)
        mask = torch.arange(length, device=q.device) <= rows[:, None]
        part = q[start : start + count].transpose(0, 1)
        out[start : start + count] = F.scaled_dot_product_attention(
            part[None], k[None], v[None], attn_mask=mask, scale=scale)[0].transpose(0, 1)
    return out
