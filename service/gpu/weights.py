"""The weights of a GLM-4-MoE model as the GPU forward uses them, taken from a loaded transformers model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.ops import Bf16Linear, Fp8Linear
from moe_kernels.registry import MoELayer
from service.engine.forward import stacked

Linear = Bf16Linear | Fp8Linear


@dataclass
class LayerWeights:
    """One decoder layer. `gate_up` and `down` are the dense MLP, or in a MoE layer the shared experts."""

    index: int
    input_norm: Tensor
    qkv: Linear
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    router: Tensor | None = None  # FP32 [E, H]
    moe: MoELayer | None = None


@dataclass
class ModelWeights:
    """Everything the forward needs. `rotary(x, positions)` is transformers' module, cosines and sines of `x.dtype`."""

    config: Any
    layers: list[LayerWeights]
    embed: Tensor
    norm: Tensor
    head: Linear
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    heads: int
    kv_heads: int
    head_dim: int
    formats: dict[str, str] = field(default_factory=dict)  # what each part's weights are stored as

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embed.device

    @property
    def eps(self) -> float:
        """Of every RMSNorm."""
        return float(self.config.rms_norm_eps)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def bytes(self) -> dict[str, int]:
        """Bytes of weights by part: what one token can read at least, and what the card holds."""
        out = {"embed": size(self.embed), "head": size(self.head), "attention": 0, "dense": 0, "shared": 0,
               "router": 0, "experts": 0}
        for layer in self.layers:
            out["attention"] += size(layer.qkv) + size(layer.out)
            out["shared" if layer.moe is not None else "dense"] += size(layer.gate_up) + size(layer.down)
            if layer.moe is not None:
                out["router"] += size(layer.router)
                out["experts"] += size(layer.moe)
        return out


def size(holder: Any) -> int:
    """Bytes of the tensors that an object holds, one level of plain objects deep; storage counted once."""
    if isinstance(holder, Tensor):
        return holder.numel() * holder.element_size()
    if holder is None or not hasattr(holder, "__dict__"):
        return 0
    tensors: dict[int, int] = {}
    for value in vars(holder).values():
        inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, Tensor) else (value,)
        for item in inner:
            if isinstance(item, Tensor):
                where = item.data_ptr() if item.layout == torch.strided else id(item)  # packed ones have no pointer
                tensors[where] = item.numel() * item.element_size()
    return sum(tensors.values())


def from_transformers(model: Any) -> ModelWeights:
    """Views of a loaded Glm4MoeForCausalLM's weights; projections that read the same rows become one product.

    The model's own parameters become views of the stacked ones, so nothing is held twice.
    Raises VariantError where a MoE block has no variant's layer.
    """
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers = []
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        moe, router, dense = None, None, mlp
        if hasattr(mlp, "shared_experts"):
            dense, router, moe = mlp.shared_experts, mlp.gate.weight.data, getattr(mlp, "layer", None)
            if moe is None:
                raise VariantError(f"MoE layer {index} has no variant's layer: load the model with moe_kernels.hf")
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if config.use_qk_norm else (None, None)
        layers.append(LayerWeights(
            index, layer.input_layernorm.weight.data,
            Bf16Linear(stacked([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]),
                       stacked([p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
                       if attention.q_proj.bias is not None else None),
            Bf16Linear(attention.o_proj.weight.data), None if q_norm is None else q_norm.weight.data,
            None if k_norm is None else k_norm.weight.data,
            layer.post_attention_layernorm.weight.data,
            Bf16Linear(stacked([dense.gate_proj.weight, dense.up_proj.weight])),
            Bf16Linear(dense.down_proj.weight.data), router, moe,
        ))
    name = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    return ModelWeights(
        config, layers, model.model.embed_tokens.weight.data, model.model.norm.weight.data,
        Bf16Linear(model.lm_head.weight.data), model.model.rotary_emb, heads, kv_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        {"attention": name, "dense": name, "shared": name, "head": name},
    )
