"""Every serving operation in plain torch: what the kernels are checked against, and what runs on a CPU.

Roundings are those of transformers' `glm4_moe` modules (modeling_glm4_moe.py): a norm is computed in FP32 and rounded
before its weight multiplies; each residual addition, SiLU, product and half of a rotation rounds to the activations'
dtype. Quantisation is `quant.fp8.quantize_activations` of the rounded value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.quant import fp8


class Quantised(NamedTuple):
    """Activations as an FP8 linear reads them: `q` E4M3 [T, K] and `scale` FP32 [K/128, T] (column-major)."""

    q: Tensor
    scale: Tensor


def quantise(x: Tensor) -> Quantised:
    """Per token and 128 columns: x [T, K] -> Quantised."""
    q, scale = fp8.quantize_activations(x, layout="column")
    return Quantised(q, scale.t())


def dequantise(x: Quantised) -> Tensor:
    """FP32 [T, K]."""
    return fp8.dequantize_activations(x.q, x.scale.t())


def summed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] in `dtype` from itself, or from split sums FP32 [S, T, N] added in order of S and rounded once."""
    if x.ndim == 2:
        return x
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * round(x / rms(x)) over the last dimension, as Glm4MoeRMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(r), r) with r = residual + x, or residual + (x + x2): routed plus shared experts round first."""
    dtype = residual.dtype
    x = summed(x, dtype)
    if x2 is not None:
        x = x + summed(x2, dtype)
    new = residual + x
    return rms_norm(new, weight, eps), new


def swiglu(gate_up: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """round(silu(gate)) * up, [T, I] from [T, 2I] (gate first) or split sums FP32 [S, T, 2I]."""
    gate, up = summed(gate_up, dtype).chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_fp8(x: Quantised, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias of block-FP8 weight [N, K]: FP32 on the dequantised values, rounded once."""
    out = dequantise(x) @ fp8.dequantize_weight_blocks(weight, scale).t()
    return (out if bias is None else out + bias.float()).to(dtype)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 [T, E] as Glm4MoeTopkRouter: x widened, FP32 products."""
    return F.linear(x.float(), weight.float())


def rope_table(
    theta: float, rotary_dim: int, positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos, sin FP32 [positions, rotary_dim / 2] of the default RoPE: angle = position * theta^(-2i / rotary_dim)."""
    inverse = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim))
    angles = torch.arange(positions).float()[:, None] * inverse[None, :]
    return angles.cos().to(device), angles.sin().to(device)


def qk_norm_rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    q_heads: int, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:
    """See `ops.qk_norm_rope_store`."""
    kv_heads, dim = k_pool.shape[-2:]
    tokens = qkv.shape[0]
    heads = summed(qkv, k_pool.dtype).view(tokens, q_heads + 2 * kv_heads, dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    at = positions.long()
    c, s = cos[at].to(q.dtype)[:, None], sin[at].to(q.dtype)[:, None]
    k_pool.view(-1, kv_heads, dim)[slots.long()] = rotate(k, c, s)
    v_pool.view(-1, kv_heads, dim)[slots.long()] = v
    return rotate(q, c, s)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of the first 2 * cos.shape[-1] dimensions of x [T, heads, D]; the rest passes."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos + -second * sin, second * cos + first * sin, rest], dim=-1)


def paged_decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, seq_lens: Tensor, scaling: float
) -> Tensor:
    """See `ops.paged_decode`; FP32 inside."""
    out = torch.zeros_like(q)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            out[row : row + 1] = _attend(q[row : row + 1], k_pool, v_pool, block_table[row], length, scaling)
    return out


def paged_prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor,
    scaling: float,
) -> Tensor:
    """See `ops.paged_prefill`; FP32 inside."""
    out = torch.zeros_like(q)
    starts = query_start.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if rows.start < rows.stop:
            out[rows] = _attend(q[rows], k_pool, v_pool, block_table[index], length, scaling)
    return out


def _attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, length: int, scaling: float) -> Tensor:
    """Causal attention of the last q.shape[0] of `length` tokens."""
    count, heads, _ = q.shape
    block, kv_heads = k_pool.shape[1:3]
    blocks = table[: -(-length // block)].long()
    k, v = (p[blocks].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1) for p in (k_pool, v_pool))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scaling
    visible = torch.arange(length, device=q.device) <= torch.arange(length - count, length, device=q.device)[:, None]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def greedy_argmax(logits: Tensor) -> Tensor:
    """int64 [B], the lowest index among equals."""
    return logits.argmax(-1)
