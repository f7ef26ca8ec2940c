"""Multi-head latent attention over paged latents, and DSA's choice of tokens, as `moe_parity_paged_latent`.

The cache holds what transformers' own cache holds: a compressed latent and one rotated key a token (and DSA's index
keys). A step gathers the latents of each group of `service.attention`'s plan, expands them to keys and values with the
model's own `expand_kv`, and attends as for other models. Nothing is absorbed into the queries, so a result differs from
transformers' by the order of sums only.

transformers' modules stay; three of their calls are led here (`install`): `expand_kv` stores this step's latents, the
attention function expands and attends, and the indexer's `forward` stores its keys and returns a `Selection`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.attention import AttentionPlan, Group, PagedContext, sdpa
from service.engine.kv_cache import PagedLatent

NAME = "moe_parity_paged_latent"
EXPANDED_ELEMENTS = 1 << 26  # keys and values expanded at once: bounds memory, sequences of a group are taken in parts
SCORE_ELEMENTS = 1 << 24  # index scores of all heads held at once


@dataclass(frozen=True, slots=True)
class Selection:
    """What takes the place of DSA's top-k indices: per group of the plan the tokens each query may attend to.

    Bool [sequences, queries, kv_len], or None where all visible tokens are chosen. Travels from layer to layer, since
    "shared" layers use the last choice.
    """

    masks: tuple[Tensor | None, ...]


def latent_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, paged: PagedContext | None = None, indices: Selection | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, heads, T, qk_dim] -> [1, T, heads, v_dim]; key, value unread."""
    if paged is None:
        raise RuntimeError(f"attention '{NAME}' needs a `paged` context: call the model through service.engine")
    kv, plan = paged.kv, paged.plan
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads, tokens = query.shape[1:3]
    rows = query[0].transpose(0, 1)  # [T, heads, qk_dim]
    masks = indices.masks if indices is not None else (None,) * len(plan.groups)
    parts = []
    for group, chosen in zip(plan.groups, masks, strict=True):
        parts += _attend_group(module, kv, layer, rows, group, chosen, scaling, plan.row_multiple)
    if plan.tokens < tokens:
        parts.append(query.new_zeros(tokens - plan.tokens, heads, parts[0].shape[-1]))
    return torch.cat(parts)[None], None


def _attend_group(module: Any, kv: PagedLatent, layer: int, rows: Tensor, group: Group, chosen: Tensor | None,
                  scaling: float, row_multiple: int) -> list[Tensor]:
    """Outputs [queries, heads, v_dim] of a group's packed rows, in parts that bound what is expanded at once."""
    n, count, length = group.sequences, group.queries, group.mask.shape[-1]
    width = length // kv.block
    dims = module.qk_head_dim + module.v_head_dim
    at_once = max(1, EXPANDED_ELEMENTS // (length * module.num_heads * dims))
    out = []
    for first in range(0, n, at_once):
        some = min(at_once, n - first)
        latent, rotated = kv.gather(layer, group.table[first * width : (first + some) * width], some)
        key, value = type(module).expand_kv(module, latent.unsqueeze(1), rotated.unsqueeze(1))
        start = group.start + first * count
        q = rows[start : start + some * count].view(some, count, *rows.shape[1:]).transpose(1, 2)
        mask = group.mask[first : first + some]
        if chosen is not None:
            mask = mask & chosen[first : first + some].unsqueeze(1)
        attended = attend(q, key, value, mask, scaling, row_multiple)
        out.append(attended.transpose(1, 2).reshape(some * count, *attended.shape[1:2], -1))
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, row_multiple: int) -> Tensor:
    """SDPA of q, k [..., qk_dim] and v [..., v_dim]; on a CPU the narrower are padded with zeros.

    torch's fused CPU kernel takes one head size only, and its plain path rounds by batch shape. Zeros change nothing.
    """
    wide, dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    if q.device.type == "cpu":
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    return sdpa(q, k, v, mask, scaling, row_multiple)[..., :dim]


def select(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The `count` visible tokens of highest score, bool [..., length]; equal scores go to the earlier token.

    `torch.topk`, which transformers uses, leaves equal scores open, and would choose by the padded length.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    last = scores.topk(count, dim=-1).values[..., -1:]
    above = scores > last
    tied = (scores == last) & visible
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _indexer_forward(
    self: Any, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None, position_ids: Any = None, cache: Any = None, past_key_values: Any = None,
) -> Selection:
    """GlmMoeDsaIndexer.forward for a packed batch: the same scores, each query against its own sequence."""
    kv: PagedLatent = cache if cache is not None else past_key_values
    plan: AttentionPlan = kv.plan
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_interleave  # type: ignore[attr-defined]
    cos, sin = position_embeddings
    tokens, rope = hidden_states.shape[1], self.qk_rope_head_dim
    q = self.wq_b(q_resid).view(1, tokens, self.n_heads, self.head_dim)
    k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
    q_rot, k_rot = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., rope:]], dim=-1)[0].float()  # [T, heads, dim]
    k = torch.cat([k_rot, k[..., rope:]], dim=-1)[0, :, 0]
    kv.store_index(k, self.layer_idx)
    if all(group.mask.shape[-1] <= self.index_topk for group in plan.groups):
        return Selection((None,) * len(plan.groups))
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))[0].float() * self.n_heads**-0.5
    return Selection(tuple(_select_group(self, kv, group, q, weights) for group in plan.groups))


def _select_group(indexer: Any, kv: PagedLatent, group: Group, q: Tensor, weights: Tensor) -> Tensor | None:
    """Chosen tokens of a group, bool [sequences, queries, kv_len]; None where every one fits."""
    n, count, length = group.sequences, group.queries, group.mask.shape[-1]
    if length <= indexer.index_topk:
        return None
    heads = indexer.n_heads
    keys = kv.gather_index(indexer.layer_idx, group.table, n).float().transpose(1, 2)  # [n, dim, length]
    end = group.start + n * count
    q = q[group.start : end].view(n, count, heads, -1)
    weights = weights[group.start : end].view(n, count, heads, 1)
    visible = group.mask.squeeze(1).expand(n, count, length)
    step = max(1, SCORE_ELEMENTS // (n * heads * length))
    chosen = []
    for first in range(0, count, step):
        some = slice(first, first + step)
        part = q[:, some]
        dots = torch.matmul(part.flatten(1, 2), keys) * indexer.softmax_scale
        dots = F.relu(dots).view(n, part.shape[1], heads, length)
        chosen.append(select((dots * weights[:, some]).sum(2), visible[:, some], indexer.index_topk))
    return torch.cat(chosen, dim=1)


def install(model: Any, kv: PagedLatent) -> None:
    """Lead a model's latents and indexers to `kv`; a later call leads them to another pool."""
    for layer in model.model.layers:
        module = layer.self_attn

        def keep(latent: Tensor, rotated: Tensor, index: int = int(module.layer_idx)) -> tuple[Tensor, Tensor]:
            kv.store(latent[0, 0], rotated[0, 0], index)
            return latent, rotated  # the attention function does not read them

        module.expand_kv = keep
        if getattr(module, "indexer", None) is not None:
            module.indexer.forward = MethodType(_indexer_forward, module.indexer)


def register() -> None:
    """Make the name known to transformers; it builds no mask for names it has no mask function for."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, latent_attention)
