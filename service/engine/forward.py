"""The model's forward over packed rows with fewer, larger products than transformers' own loop, and the same bits.

transformers' modules are called as they are, except attention and the dense MLPs: there the projections that read the
same rows are one product, rotary embedding and head norms run once over queries and keys together, and on a CPU with
BF16 the weights are kept in oneDNN's own layout. Every output column of a product is computed as before, so nothing
changes; `ModelRunner` checks that on start and uses transformers' forward where a bit differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.hf_blocks import Silu
from moe_kernels.variants.reference import swiglu
from service import attention

PACK_ROWS = 64  # rows the packed layout is chosen for; any number works with it
PACK_LIMIT = 2**30  # bytes of weights held twice at most: the packed copy comes beside the original


class Product(nn.Module):
    """x @ weight.T + bias of one or more linear layers stacked, [..., K] -> [..., sum N].

    The layers' own parameters become views of the stacked ones, so nothing is held twice but the packed copy.
    """

    def __init__(self, layers: Sequence[nn.Linear], packed: bool) -> None:
        super().__init__()
        self.weight = stacked([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers]
        self.bias = stacked(biases) if biases[0] is not None else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_ROWS) if packed else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the parameters become views of it, so nothing is held twice."""
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([p.data for p in parameters])
    first = 0
    for parameter in parameters:
        parameter.data = whole[first : first + parameter.shape[0]]
        first += parameter.shape[0]
    return whole


class GatedMLP(nn.Module):
    """act(gate(x)) * up(x) -> down, in place of a transformers MLP with those three linear layers."""

    def __init__(self, mlp: Any, packed: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self.gate_up = Product([mlp.gate_proj, mlp.up_proj], packed)
        self.down = Product([mlp.down_proj], packed)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        gate_up = self.gate_up(x)
        if isinstance(self.act_fn, Silu):
            return self.down(swiglu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.act_fn(gate) * up)


class Rotary:
    """Cosines and signed sines of one step for whole heads: identity on the dimensions that do not rotate."""

    def __init__(self, cos: Tensor, sin: Tensor, head_dim: int) -> None:
        tokens, self.turning = cos.shape
        half = self.turning // 2
        self.half = half
        rest = head_dim - self.turning
        self.cos = torch.cat([cos, cos.new_ones(tokens, rest)], dim=-1)[:, None]
        # rotate_half puts (-x2, x1) where (x1, x2) was; the sign moves to the sine, which is exact.
        self.sin = torch.cat([-sin[:, :half], sin[:, half:], sin.new_zeros(tokens, rest)], dim=-1)[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [T, heads, head_dim]."""
        half, turning = self.half, self.turning
        turned = torch.cat([x[..., half:turning], x[..., :half], x[..., turning:]], dim=-1)
        return x * self.cos + turned * self.sin


class Attention(nn.Module):
    """Attention of one layer with one product for q, k and v."""

    def __init__(self, module: Any, heads: int, kv_heads: int, head_dim: int, packed: bool) -> None:
        super().__init__()
        self.layer: int = module.layer_idx
        self.heads, self.kv_heads, self.head_dim, self.scaling = heads, kv_heads, head_dim, module.scaling
        self.qkv = Product([module.q_proj, module.k_proj, module.v_proj], packed)
        self.out = Product([module.o_proj], packed)
        self.norm_weight: Tensor | None = None
        self.eps = 0.0
        if getattr(module, "q_norm", None) is not None:
            self.norm_weight = torch.cat([module.q_norm.weight.data.expand(heads, -1),
                                          module.k_norm.weight.data.expand(kv_heads, -1)])
            self.eps = module.q_norm.variance_epsilon

    def forward(self, x: Tensor, rotary: Rotary, paged: attention.PagedContext) -> Tensor:
        """[1, T, H] -> [1, T, H]; stores this step's keys and values."""
        tokens = x.shape[1]
        qkv = self.qkv(x)[0]
        turning = self.heads + self.kv_heads
        qk = qkv[:, : turning * self.head_dim].view(tokens, turning, self.head_dim)
        if self.norm_weight is not None:
            # The model's RMSNorm, step by step: FP32 inside, rounded before the weight multiplies.
            wide = qk.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            qk = self.norm_weight * wide.to(qk.dtype)
        qk = rotary(qk).view(tokens, -1)
        width = self.heads * self.head_dim
        paged.kv.store(qk[:, width:], qkv[:, turning * self.head_dim :], self.layer)
        return self.out(paged.plan.attend(paged.kv, qk[:, :width], self.layer, self.scaling))[None]


class PackedForward(nn.Module):
    """Final hidden states of a packed batch."""

    def __init__(self, model: Any, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.model = model.model
        self.head_dim = head_dim
        weight = self.model.layers[0].self_attn.q_proj.weight
        size = sum(p.numel() * p.element_size() for p in self.model.layers.parameters())
        packed = (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and size <= PACK_LIMIT
                  and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self.attention = nn.ModuleList(
            Attention(layer.self_attn, heads, kv_heads, head_dim, packed) for layer in self.model.layers)
        self._replaced: list[tuple[Any, str, Any]] = []
        for layer in self.model.layers:
            owner, name = (layer.mlp, "shared_experts") if hasattr(layer.mlp, "shared_experts") else (layer, "mlp")
            self._replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, GatedMLP(getattr(owner, name), packed))

    def undo(self) -> None:
        """Put transformers' own MLP modules back."""
        for owner, name, module in self._replaced:
            setattr(owner, name, module)

    def forward(self, ids: Tensor, positions: Tensor, paged: attention.PagedContext) -> Tensor:
        """[T, H] from ids and positions [1, T]."""
        hidden = self.model.embed_tokens(ids)
        cos, sin = self.model.rotary_emb(hidden, positions)
        rotary = Rotary(cos[0], sin[0], self.head_dim)
        for layer, attend in zip(self.model.layers, self.attention, strict=True):
            hidden = hidden + attend(layer.input_layernorm(hidden), rotary, paged)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.norm(hidden)[0]
