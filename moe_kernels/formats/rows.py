"""How a model type names and sizes its tensors: `Row` and `Architecture`, which the model types are data for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_kernels.errors import CheckpointError
from moe_kernels.records import MoEShape, RoutingConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One tensor name or a family of them; `shape` names sizes; `when` names a config flag it depends on.

    `kind` is "linear" for weights a checkpoint may quantise, "plain" for everything else.
    """

    template: str
    shape: tuple[str, ...]
    layers: Literal["none", "every", "dense", "moe", "indexer"] = "every"
    kind: Literal["linear", "plain"] = "linear"
    when: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """How a model type names its parts. Templates take {layer}, {expert} and {projection}.

    `attention`: "gqa" caches keys and values of each KV head; "mla" one latent and one rotated key a token, shared by
    all heads; "dsa" is "mla" with an indexer (on `indexer_layers`) that picks the tokens to attend to.
    """

    model_type: str
    sizes: Callable[[Config], dict[str, int]]
    flags: Callable[[Config], dict[str, bool]]
    moe_layers: Callable[[Config], tuple[int, ...]]
    routing: Callable[[Config], RoutingConfig]
    rows: tuple[Row, ...]
    expert: str
    router_weight: str
    router_bias: str | None
    router_norm: str  # weight of the RMSNorm before the MoE block
    mtp_layers_key: tuple[str, ...]
    mtp_layers_default: int
    attention: Literal["gqa", "mla", "dsa"] = "gqa"
    indexer_layers: Callable[[Config], tuple[int, ...]] = lambda config: ()

    def expected(self, config: Config) -> Iterator[tuple[str, tuple[int, ...], Row]]:
        """Name, shape and row of every tensor but the routed experts' weights."""
        sizes, flags = self.sizes(config), self.flags(config)
        moe = set(self.moe_layers(config))
        layers: dict[str, list[int]] = {
            "none": [-1],
            "every": list(range(sizes["layers"])),
            "dense": [i for i in range(sizes["layers"]) if i not in moe],
            "moe": sorted(moe),
            "indexer": list(self.indexer_layers(config)),
        }
        for row in self.rows:
            if row.when is None or flags[row.when]:
                shape = tuple(sizes[s] for s in row.shape)
                for layer in layers[row.layers]:
                    yield row.template.format(layer=layer), shape, row

    def expert_shapes(self, config: Config) -> dict[str, tuple[int, int]]:
        """[out, in] of each projection of a routed expert."""
        sizes = self.sizes(config)
        wide = (sizes["moe_intermediate"], sizes["hidden"])
        return {"gate_proj": wide, "up_proj": wide, "down_proj": (wide[1], wide[0])}

    def shape(self, config: Config) -> MoEShape:
        """Sizes that kernels' `supports` rules look at."""
        sizes, routing = self.sizes(config), self.routing(config)
        return MoEShape(
            sizes["hidden"], sizes["moe_intermediate"], routing.num_experts, routing.top_k,
            routing.n_group, routing.topk_group,
        )  # fmt: skip

    def kv_elements(self, config: Config) -> int:
        """Elements cached per token, all layers together."""
        sizes = self.sizes(config)
        if self.attention == "gqa":
            return sizes["layers"] * 2 * sizes["kv"]
        latent = sizes["layers"] * (sizes["kv_lora"] + sizes["rope"])
        return latent + len(self.indexer_layers(config)) * sizes.get("index_dim", 0)

    def mtp_layers(self, config: Config) -> range:
        """Indices of multi-token-prediction layers: those after the last decoder layer."""
        first = self.sizes(config)["layers"]
        for key in self.mtp_layers_key:
            if key in config:
                return range(first, first + int(config[key] or 0))
        return range(first, first + self.mtp_layers_default)


def number(config: Config, key: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer of the config, or CheckpointError naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no '{key}'; copy config.json from the original model")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config.json: {key} must be an integer >= {minimum}, got {value!r}")
    return value
