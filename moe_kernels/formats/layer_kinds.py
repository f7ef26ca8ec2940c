"""Which layers are dense or sparse and which have an indexer, from the several keys that configs say it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.rows import Config, number


def leading_dense(default: int) -> Callable[[Config], tuple[int, ...]]:
    """MoE from layer `first_k_dense_replace` on, in every layer."""

    def moe_layers(config: Config) -> tuple[int, ...]:
        step = number(config, "moe_layer_freq", 1)
        if step != 1:
            raise CheckpointError(f"config.json: moe_layer_freq {step} is not supported, only 1 (every layer)")
        return tuple(range(number(config, "first_k_dense_replace", default, 0), number(config, "num_hidden_layers")))

    return moe_layers


def listed_mlp_types(default: int) -> Callable[[Config], tuple[int, ...]]:
    """MoE where `mlp_layer_types` says "sparse"; without that list, as `first_k_dense_replace` says."""
    fallback = leading_dense(default)

    def moe_layers(config: Config) -> tuple[int, ...]:
        types = config.get("mlp_layer_types")
        if types is None:
            return fallback(config)
        _check_list("mlp_layer_types", types, number(config, "num_hidden_layers"), ("dense", "sparse"))
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")

    return moe_layers


def mlp_layer_types(config: Config, moe_layers: Sequence[int]) -> list[str]:
    """The list that says the same, for config classes whose own default differs from `first_k_dense_replace`."""
    return ["sparse" if i in moe_layers else "dense" for i in range(number(config, "num_hidden_layers"))]


def qwen3_moe_layers(config: Config) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name (Qwen3MoeDecoderLayer)."""
    step, dense = number(config, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(number(config, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0)


def full_indexer_layers(config: Config) -> tuple[int, ...]:
    """Layers that pick tokens themselves; the others reuse the last choice (GlmMoeDsaConfig.__post_init__).

    From `indexer_types`, else `index_topk_pattern` ("FSSF..."), else every `index_topk_freq`-th layer counted from
    `index_skip_topk_offset` - 1, with all layers before it.
    """
    layers = number(config, "num_hidden_layers")
    kinds = config.get("indexer_types")
    if kinds is None and (pattern := config.get("index_topk_pattern")) is not None:
        kinds = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    if kinds is None:
        step, offset = max(number(config, "index_topk_freq", 1, 0), 1), number(config, "index_skip_topk_offset", 2, 0)
        return tuple(i for i in range(layers) if max(i - offset + 1, 0) % step == 0)
    _check_list("indexer_types", kinds, layers, ("full", "shared"))
    if kinds[0] != "full":
        raise CheckpointError("config.json: layer 0 shares an indexer's choice, but no layer before it made one")
    return tuple(i for i, kind in enumerate(kinds) if kind == "full")


def _check_list(key: str, values: object, layers: int, allowed: tuple[str, str]) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != layers or set(values) - set(allowed):
        raise CheckpointError(f"config.json: {key} must list {allowed[0]} or {allowed[1]} for each of {layers} layers")
