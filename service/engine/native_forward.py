"""The packed forward with compiled kernels between the products: norms, head norms, rotary, KV store, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.native import Library, fits
from service import attention
from service.engine.forward import PackedForward
from service.engine.kv_cache import PagedKV

TABLE_LIMIT = 2**26  # bytes of cosines and sines kept for all positions at most


def fitting(model: Any, kv: PagedKV) -> bool:
    """Whether the kernels take this model's sizes."""
    rotary = model.model.rotary_emb
    turning = 2 * rotary.inv_freq.shape[0]
    return fits(kv.dtype, kv.head_dim, model.config.hidden_size, turning // 2) and turning <= kv.head_dim


class NativeForward(PackedForward):
    """See the module; bits are those of the packed forward with the same attention."""

    def __init__(self, model: Any, heads: int, kv: PagedKV, native: Library, positions: int) -> None:
        super().__init__(model, heads, kv.heads, kv.head_dim)
        self.native, self.kv, self.heads = native, kv, heads
        layers = self.model.layers
        self._pairs: list[tuple[Any, Any]] = list(zip(layers, self.attention, strict=True))
        self._norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._norms.append(self.model.norm)
        self._table = self._angles(positions)

    def _angles(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [positions, rotated dimensions] where they depend on the position alone."""
        rotary = self.model.rotary_emb
        if getattr(rotary, "rope_type", "") != "default" or positions * rotary.inv_freq.shape[0] * 8 > TABLE_LIMIT:
            return None
        probe = torch.empty(0, dtype=self.kv.dtype)
        cos, sin = rotary(probe, torch.arange(positions)[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def forward(self, ids: Tensor, positions: Tensor, paged: attention.PagedContext) -> Tensor:
        """[T, H] from ids and positions [1, T]."""
        native, kv = self.native, self.kv
        hidden = self.model.embed_tokens(ids)[0]
        if self._table is not None:
            cos, sin = (table.index_select(0, positions[0]) for table in self._table)
        else:
            cos, sin = (x[0].contiguous() for x in self.model.rotary_emb(hidden[None], positions))
        slots = kv.slots
        assert slots is not None  # the runner has set them
        delta: Tensor | None = None
        norms = iter(self._norms)
        for layer, attend in self._pairs:
            hidden, normed = self._add_norm(hidden, delta, next(norms))
            q = native.qk_norm_rope_store(attend.qkv(normed), attend.norm_weight, attend.eps, cos, sin, slots,
                                          self.heads, kv.heads, kv.k_slots[attend.layer], kv.v_slots[attend.layer])
            attended = paged.plan.attend(kv, q, attend.layer, attend.scaling)
            hidden, normed = self._add_norm(hidden, attend.out(attended), next(norms))
            delta = layer.mlp(normed)
        return self._add_norm(hidden, delta, next(norms))[1]

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        return self.native.add_rms_norm(hidden, norm.weight, norm.variance_epsilon, delta)
