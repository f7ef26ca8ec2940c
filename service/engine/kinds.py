"""Which paged attention a model needs, found from its own attention modules, and the pool that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_kernels import native
from service import attention, latent, native_attention
from service.attention import Span, Tiles
from service.config import ConfigError
from service.engine.batch import Planner
from service.engine.kv_cache import PagedKV, PagedLatent


@dataclass(frozen=True)
class AttentionKind:
    """`name` as registered with transformers; `plan` makes what it needs to know of a step.

    `invariant`: whether a query's bits do not depend on the batch. `inputs` go to the model's forward beside the packed
    batch. `sparse_from`: context length from which not every token is attended to (DSA), None: never.
    """

    name: str
    kv: PagedKV | PagedLatent
    plan: Planner
    invariant: bool
    dtype: torch.dtype
    inputs: Mapping[str, Any] = field(default_factory=dict)
    sparse_from: int | None = None


def attention_kind(model: Any, blocks: int, block: int) -> AttentionKind:
    """The kind of a transformers causal language model, with an empty pool of `blocks`; sets its attention function.

    ConfigError for attention that no pool here can hold.
    """
    module = model.model.layers[0].self_attn
    if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
        kind = _latent(model, blocks, block)
    elif all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj")):
        kind = _grouped(model, blocks, block)
    else:
        raise ConfigError(f"model_type '{model.config.model_type}': the paged cache cannot hold what "
                          f"{type(module).__name__} caches; supported: grouped-query, MLA and DSA attention")
    if model.config._attn_implementation != kind.name:
        model.set_attn_implementation(kind.name)
    return kind


def _grouped(model: Any, blocks: int, block: int) -> AttentionKind:
    attention.register()
    config, weight = model.config, model.model.layers[0].self_attn.k_proj.weight
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = PagedKV(config.num_hidden_layers, blocks, block, kv_heads, head_dim, weight.dtype, weight.device)
    if weight.device.type == "cpu" and native.fits(weight.dtype, head_dim) and native.library() is not None:
        attention.register(native_attention.NAME)
        return AttentionKind(native_attention.NAME, kv, native_attention.plan, True, weight.dtype)
    tiles = attention.choose_tiles(kv_heads, heads // kv_heads, head_dim, weight.dtype, block, weight.device.type)
    plan = _planner(block, heads // kv_heads, tiles, weight.device)
    return AttentionKind(attention.NAME, kv, plan, tiles.invariant, weight.dtype)


def _planner(block: int, heads_per_kv: int, tiles: Tiles, device: torch.device) -> Planner:
    def plan(spans: list[Span], rows: int) -> attention.AttentionPlan:
        return attention.plan(spans, block, heads_per_kv, tiles, device)

    return plan


def _latent(model: Any, blocks: int, block: int) -> AttentionKind:
    latent.register()
    config, modules = model.config, [layer.self_attn for layer in model.model.layers]
    first = modules[0]
    weight = first.kv_b_proj.weight
    indexers = {i: m.indexer for i, m in enumerate(modules) if getattr(m, "indexer", None) is not None}
    # attended as one KV head per query head; on a CPU padded to one head size, see latent.attend
    wide = max(first.qk_head_dim, first.v_head_dim)
    tiles = attention.choose_tiles(first.num_heads, 1, wide, weight.dtype, block, weight.device.type)
    kv = PagedLatent(config.num_hidden_layers, blocks, block, first.kv_lora_rank, first.qk_rope_head_dim,
                     weight.dtype, weight.device, indexers, config.index_head_dim if indexers else 0)
    latent.install(model, kv)
    inputs: dict[str, Any] = {}
    if indexers:
        # Given as a dict, the mask is taken as it is: transformers builds none. The paged indexer does not read it.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weight.device)
        inputs["attention_mask"] = dict.fromkeys({*config.layer_types, "indexed_attention"}, mask)
    plan = _planner(block, 1, tiles, weight.device)
    return AttentionKind(latent.NAME, kv, plan, tiles.invariant, weight.dtype, inputs,
                         config.index_topk if indexers else None)
