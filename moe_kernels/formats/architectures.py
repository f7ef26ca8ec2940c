"""Model types that can be read, as data: sizes from the config, and the name and shape of every tensor.

Adding a type means adding an `Architecture`: rows of (name template, shape in size names, layers, condition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_kernels.errors import CheckpointError
from moe_kernels.records import MoEShape, RoutingConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Row:
    """One tensor name or a family of them; `shape` names sizes; `when` names a config flag it depends on.

    `kind` is "linear" for weights a checkpoint may quantise, "plain" for everything else.
    """

    template: str
    shape: tuple[str, ...]
    layers: Literal["none", "every", "dense", "moe"] = "every"
    kind: Literal["linear", "plain"] = "linear"
    when: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """How a model type names its parts. Templates take {layer}, {expert} and {projection}."""

    model_type: str
    sizes: Callable[[Mapping[str, Any]], dict[str, int]]
    flags: Callable[[Mapping[str, Any]], dict[str, bool]]
    moe_layers: Callable[[Mapping[str, Any]], tuple[int, ...]]
    routing: Callable[[Mapping[str, Any]], RoutingConfig]
    rows: tuple[Row, ...]
    expert: str
    router_weight: str
    router_bias: str | None
    router_norm: str  # weight of the RMSNorm before the MoE block
    mtp_layers_key: tuple[str, ...]
    mtp_layers_default: int

    def expected(self, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Row]]:
        """Name, shape and row of every tensor but the routed experts' weights."""
        sizes, flags = self.sizes(config), self.flags(config)
        moe = set(self.moe_layers(config))
        layers: dict[str, list[int]] = {
            "none": [-1],
            "every": list(range(sizes["layers"])),
            "dense": [i for i in range(sizes["layers"]) if i not in moe],
            "moe": sorted(moe),
        }
        for row in self.rows:
            if row.when is None or flags[row.when]:
                shape = tuple(sizes[s] for s in row.shape)
                for layer in layers[row.layers]:
                    yield row.template.format(layer=layer), shape, row

    def expert_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """[out, in] of each projection of a routed expert."""
        sizes = self.sizes(config)
        wide = (sizes["moe_intermediate"], sizes["hidden"])
        return {"gate_proj": wide, "up_proj": wide, "down_proj": (wide[1], wide[0])}

    def shape(self, config: Mapping[str, Any]) -> MoEShape:
        """Sizes that kernels' `supports` rules look at."""
        sizes, routing = self.sizes(config), self.routing(config)
        return MoEShape(
            sizes["hidden"], sizes["moe_intermediate"], routing.num_experts, routing.top_k,
            routing.n_group, routing.topk_group,
        )  # fmt: skip

    def mtp_layers(self, config: Mapping[str, Any]) -> range:
        """Indices of multi-token-prediction layers: those after the last decoder layer."""
        first = self.sizes(config)["layers"]
        for key in self.mtp_layers_key:
            if key in config:
                return range(first, first + int(config[key] or 0))
        return range(first, first + self.mtp_layers_default)


def number(config: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer of the config, or CheckpointError naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no '{key}'; copy config.json from the original model")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config.json: {key} must be an integer >= {minimum}, got {value!r}")
    return value


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config, or CheckpointError saying whether it lacks MoE or support."""
    model_type = config.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if model_type in ARCHITECTURES:
        architecture = ARCHITECTURES[str(model_type)]
        if not config.get("n_routed_experts", config.get("num_local_experts")):
            raise CheckpointError(f"model without MoE: config.json of '{model_type}' has no routed experts")
        if not architecture.moe_layers(config):
            raise CheckpointError("model without MoE: config.json makes every layer dense")
        return architecture
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'; give the folder of a Hugging Face model")
    sections = [config, *(v for k, v in config.items() if k == "text_config" and isinstance(v, dict))]
    if any(s.get(k) for s in sections for k in ("n_routed_experts", "num_local_experts", "num_experts")):
        raise CheckpointError(f"model_type '{model_type}' is not supported yet; supported: {known}")
    raise CheckpointError(f"model without MoE: model_type '{model_type}' has no routed experts; supported: {known}")


def _experts(config: Mapping[str, Any]) -> int:
    # transformers' attribute map: num_local_experts is another name of n_routed_experts
    return number(config, "n_routed_experts" if "n_routed_experts" in config else "num_local_experts")


def _glm4_moe_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head_dim = number(config, "head_dim", hidden // heads)
    moe = number(config, "moe_intermediate_size")
    return {
        "vocab": number(config, "vocab_size"),
        "layers": number(config, "num_hidden_layers"),
        "hidden": hidden,
        "dense_intermediate": number(config, "intermediate_size"),
        "moe_intermediate": moe,
        "shared_intermediate": moe * number(config, "n_shared_experts", 1, minimum=0),
        "experts": _experts(config),
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": number(config, "num_key_value_heads", heads) * head_dim,
    }


def _glm4_moe_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "attention_bias": bool(config.get("attention_bias", False)),
        "use_qk_norm": bool(config.get("use_qk_norm", False)),
        "untied": not config.get("tie_word_embeddings", False),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "shared": bool(config.get("n_shared_experts", 1)),
    }


def _glm4_moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(range(number(config, "first_k_dense_replace", 1, 0), number(config, "num_hidden_layers")))


def _noaux_tc(config: Mapping[str, Any]) -> RoutingConfig:
    """DeepSeek-V3's routing with the defaults of transformers' Glm4MoeConfig."""
    factor = config.get("routed_scaling_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        raise CheckpointError(f"config.json: routed_scaling_factor must be a positive number, got {factor!r}")
    routing = RoutingConfig(
        num_experts=_experts(config),
        top_k=number(config, "num_experts_per_tok"),
        n_group=number(config, "n_group", 1),
        topk_group=number(config, "topk_group", 1),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        routed_scaling_factor=float(factor),
        scoring="sigmoid",
    )
    if routing.top_k > routing.num_experts or routing.num_experts % routing.n_group:
        raise CheckpointError(
            f"config.json: {routing.num_experts} experts do not fit num_experts_per_tok {routing.top_k} and "
            f"n_group {routing.n_group}"
        )
    return routing


_L, _A, _M = "model.layers.{layer}.", "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."

GLM4_MOE = Architecture(
    model_type="glm4_moe",
    sizes=_glm4_moe_sizes,
    flags=_glm4_moe_flags,
    moe_layers=_glm4_moe_layers,
    routing=_noaux_tc,
    rows=(
        Row("model.embed_tokens.weight", ("vocab", "hidden"), "none", "plain"),
        Row(_L + "input_layernorm.weight", ("hidden",), kind="plain"),
        Row(_A + "q_proj.weight", ("q", "hidden")),
        Row(_A + "k_proj.weight", ("kv", "hidden")),
        Row(_A + "v_proj.weight", ("kv", "hidden")),
        Row(_A + "q_proj.bias", ("q",), kind="plain", when="attention_bias"),
        Row(_A + "k_proj.bias", ("kv",), kind="plain", when="attention_bias"),
        Row(_A + "v_proj.bias", ("kv",), kind="plain", when="attention_bias"),
        Row(_A + "q_norm.weight", ("head_dim",), kind="plain", when="use_qk_norm"),
        Row(_A + "k_norm.weight", ("head_dim",), kind="plain", when="use_qk_norm"),
        Row(_A + "o_proj.weight", ("hidden", "q")),
        Row(_L + "post_attention_layernorm.weight", ("hidden",), kind="plain"),
        Row(_M + "gate_proj.weight", ("dense_intermediate", "hidden"), "dense"),
        Row(_M + "up_proj.weight", ("dense_intermediate", "hidden"), "dense"),
        Row(_M + "down_proj.weight", ("hidden", "dense_intermediate"), "dense"),
        Row(_M + "gate.weight", ("experts", "hidden"), "moe", "plain"),
        Row(_M + "gate.e_score_correction_bias", ("experts",), "moe", "plain"),
        Row(_M + "shared_experts.gate_proj.weight", ("shared_intermediate", "hidden"), "moe", when="shared"),
        Row(_M + "shared_experts.up_proj.weight", ("shared_intermediate", "hidden"), "moe", when="shared"),
        Row(_M + "shared_experts.down_proj.weight", ("hidden", "shared_intermediate"), "moe", when="shared"),
        Row("model.norm.weight", ("hidden",), "none", "plain"),
        Row("lm_head.weight", ("vocab", "hidden"), "none", when="untied"),
        Row("lm_head.weight", ("vocab", "hidden"), "none", when="tied", optional=True),
    ),
    expert=_M + "experts.{expert}.{projection}",
    router_weight=_M + "gate.weight",
    router_bias=_M + "gate.e_score_correction_bias",
    router_norm=_L + "post_attention_layernorm.weight",
    mtp_layers_key=("num_nextn_predict_layers", "num_mtp_layers"),
    mtp_layers_default=1,
)

ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (GLM4_MOE,)}
