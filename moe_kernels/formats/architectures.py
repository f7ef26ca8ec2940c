"""Model types that can be read, as data: sizes from the config, and the name and shape of every tensor.

Adding a type means adding an `Architecture`: rows of (name template, shape in size names, layers, condition). Names and
defaults are those of transformers' configuration and modelling files of the same model type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.layer_kinds import full_indexer_layers, leading_dense, listed_mlp_types, qwen3_moe_layers
from moe_kernels.formats.rows import PROJECTIONS, Architecture, Config, Row, number
from moe_kernels.records import RoutingConfig

__all__ = ["ARCHITECTURES", "PROJECTIONS", "Architecture", "Row", "find_architecture", "number"]


def find_architecture(config: Config) -> Architecture:
    """The architecture of a config, or CheckpointError saying whether it lacks MoE or support."""
    model_type = config.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if model_type in ARCHITECTURES:
        architecture = ARCHITECTURES[str(model_type)]
        if not any(config.get(key) for key in EXPERT_KEYS):
            raise CheckpointError(f"model without MoE: config.json of '{model_type}' has no routed experts")
        if not architecture.moe_layers(config):
            raise CheckpointError("model without MoE: config.json makes every layer dense")
        return architecture
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'; give the folder of a Hugging Face model")
    if model_type in REFUSED:
        raise CheckpointError(f"model_type '{model_type}' is not supported: {REFUSED[model_type]}; supported: {known}")
    sections = [config, *(v for k, v in config.items() if k == "text_config" and isinstance(v, dict))]
    if any(s.get(k) for s in sections for k in EXPERT_KEYS):
        raise CheckpointError(f"model_type '{model_type}' is not supported yet; supported: {known}")
    raise CheckpointError(f"model without MoE: model_type '{model_type}' has no routed experts; supported: {known}")


EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_NEXT = ("its linear-attention layers keep a recurrent state and its residual is several streams (MHC), which the "
         "engine's paged cache does not hold")
REFUSED = {
    "glm5_next": _NEXT,
    "glm5_next_text": _NEXT,
    "glm4v_moe": "it takes images, and this service takes text",
    "deepseek_v32": "its indexer rotates dimensions in another order than GLM's",
}


def _experts(config: Config) -> int:
    # transformers' attribute maps: the three are names of one field
    return number(config, next((key for key in EXPERT_KEYS if key in config), EXPERT_KEYS[0]))


def _common(config: Config) -> dict[str, int]:
    moe = number(config, "moe_intermediate_size")
    return {
        "vocab": number(config, "vocab_size"),
        "layers": number(config, "num_hidden_layers"),
        "hidden": number(config, "hidden_size"),
        "dense_intermediate": number(config, "intermediate_size"),
        "moe_intermediate": moe,
        "shared_intermediate": moe * number(config, "n_shared_experts", 1, minimum=0),
        "experts": _experts(config),
    }


def _gqa_sizes(config: Config) -> dict[str, int]:
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head_dim = number(config, "head_dim", hidden // heads)
    kv = number(config, "num_key_value_heads", heads) * head_dim
    return {**_common(config), "head_dim": head_dim, "q": heads * head_dim, "kv": kv}


def _mla_sizes(config: Config) -> dict[str, int]:
    heads = number(config, "num_attention_heads")
    rope, nope = number(config, "qk_rope_head_dim"), number(config, "qk_nope_head_dim")
    value, kv_lora = number(config, "v_head_dim"), number(config, "kv_lora_rank")
    return {
        **_common(config), "q_lora": number(config, "q_lora_rank", 0, minimum=0), "kv_lora": kv_lora, "rope": rope,
        "q": heads * (nope + rope), "kv_a": kv_lora + rope, "kv_b": heads * (nope + value), "o": heads * value,
    }  # fmt: skip


def _dsa_sizes(config: Config) -> dict[str, int]:
    heads, dim = number(config, "index_n_heads"), number(config, "index_head_dim")
    return {**_mla_sizes(config), "index_heads": heads, "index_dim": dim, "index_q": heads * dim}


def _flags(config: Config) -> dict[str, bool]:
    tied = bool(config.get("tie_word_embeddings", False))
    return {
        "attention_bias": bool(config.get("attention_bias", False)),
        "use_qk_norm": bool(config.get("use_qk_norm", False)),
        "untied": not tied,
        "tied": tied,
        "shared": bool(config.get("n_shared_experts", 1)),
        "q_lora": bool(config.get("q_lora_rank")),
        "no_q_lora": not config.get("q_lora_rank"),
    }


def _noaux_tc(**defaults: Any) -> Callable[[Config], RoutingConfig]:
    """DeepSeek-V3's routing with the defaults of a model type's config class in transformers."""

    def read(config: Config) -> RoutingConfig:
        config = defaults | dict(config)
        for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if config.get(key, only) != only:
                raise CheckpointError(f"config.json: {key} '{config[key]}' is not supported for this model type, "
                                      f"only '{only}'")
        factor = config.get("routed_scaling_factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise CheckpointError(f"config.json: routed_scaling_factor must be a positive number, got {factor!r}")
        return _checked(RoutingConfig(
            num_experts=_experts(config),
            top_k=number(config, "num_experts_per_tok"),
            n_group=number(config, "n_group", 1),
            topk_group=number(config, "topk_group", 1),
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            routed_scaling_factor=float(factor),
            scoring="sigmoid",
        ))

    return read


def _softmax(config: Config) -> RoutingConfig:
    """Qwen3-MoE: softmax over all experts, the chosen ones' weights renormalised if `norm_topk_prob` (default off)."""
    return _checked(RoutingConfig(
        num_experts=_experts(config), top_k=number(config, "num_experts_per_tok"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)), scoring="softmax",
    ))


def _checked(routing: RoutingConfig) -> RoutingConfig:
    if routing.top_k > routing.num_experts or routing.num_experts % routing.n_group:
        raise CheckpointError(
            f"config.json: {routing.num_experts} experts do not fit num_experts_per_tok {routing.top_k} and "
            f"n_group {routing.n_group}"
        )
    return routing


_L, _A, _M = "model.layers.{layer}.", "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."

_BEFORE = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "none", "plain"),
    Row(_L + "input_layernorm.weight", ("hidden",), kind="plain"),
)
_AFTER = (
    Row(_L + "post_attention_layernorm.weight", ("hidden",), kind="plain"),
    Row(_M + "gate_proj.weight", ("dense_intermediate", "hidden"), "dense"),
    Row(_M + "up_proj.weight", ("dense_intermediate", "hidden"), "dense"),
    Row(_M + "down_proj.weight", ("hidden", "dense_intermediate"), "dense"),
    Row(_M + "gate.weight", ("experts", "hidden"), "moe", "plain"),
    Row("model.norm.weight", ("hidden",), "none", "plain"),
    Row("lm_head.weight", ("vocab", "hidden"), "none", when="untied"),
    Row("lm_head.weight", ("vocab", "hidden"), "none", when="tied", optional=True),
)
_BIAS_AND_SHARED = (
    Row(_M + "gate.e_score_correction_bias", ("experts",), "moe", "plain"),
    Row(_M + "shared_experts.gate_proj.weight", ("shared_intermediate", "hidden"), "moe", when="shared"),
    Row(_M + "shared_experts.up_proj.weight", ("shared_intermediate", "hidden"), "moe", when="shared"),
    Row(_M + "shared_experts.down_proj.weight", ("hidden", "shared_intermediate"), "moe", when="shared"),
)


def _gqa(norms: str | None, output_bias: bool) -> tuple[Row, ...]:
    """Attention with q, k, v projections; `norms` is the flag of per-head norms (None: always there)."""
    return (
        Row(_A + "q_proj.weight", ("q", "hidden")),
        Row(_A + "k_proj.weight", ("kv", "hidden")),
        Row(_A + "v_proj.weight", ("kv", "hidden")),
        Row(_A + "q_proj.bias", ("q",), kind="plain", when="attention_bias"),
        Row(_A + "k_proj.bias", ("kv",), kind="plain", when="attention_bias"),
        Row(_A + "v_proj.bias", ("kv",), kind="plain", when="attention_bias"),
        *([Row(_A + "o_proj.bias", ("hidden",), kind="plain", when="attention_bias")] if output_bias else []),
        Row(_A + "q_norm.weight", ("head_dim",), kind="plain", when=norms),
        Row(_A + "k_norm.weight", ("head_dim",), kind="plain", when=norms),
        Row(_A + "o_proj.weight", ("hidden", "q")),
    )


_MLA = (
    Row(_A + "q_proj.weight", ("q", "hidden"), when="no_q_lora"),
    Row(_A + "q_a_proj.weight", ("q_lora", "hidden"), when="q_lora"),
    Row(_A + "q_a_layernorm.weight", ("q_lora",), kind="plain", when="q_lora"),
    Row(_A + "q_b_proj.weight", ("q", "q_lora"), when="q_lora"),
    Row(_A + "kv_a_proj_with_mqa.weight", ("kv_a", "hidden")),
    Row(_A + "kv_a_layernorm.weight", ("kv_lora",), kind="plain"),
    Row(_A + "kv_b_proj.weight", ("kv_b", "kv_lora")),
    Row(_A + "o_proj.weight", ("hidden", "o")),
    Row(_A + "q_a_proj.bias", ("q_lora",), kind="plain", when="attention_bias"),
    Row(_A + "kv_a_proj_with_mqa.bias", ("kv_a",), kind="plain", when="attention_bias"),
    Row(_A + "o_proj.bias", ("hidden",), kind="plain", when="attention_bias"),
)
_INDEXER = (
    Row(_A + "indexer.wq_b.weight", ("index_q", "q_lora"), "indexer"),
    Row(_A + "indexer.wk.weight", ("index_dim", "hidden"), "indexer"),
    Row(_A + "indexer.k_norm.weight", ("index_dim",), "indexer", "plain"),
    Row(_A + "indexer.k_norm.bias", ("index_dim",), "indexer", "plain"),
    Row(_A + "indexer.weights_proj.weight", ("index_heads", "hidden"), "indexer"),
)
_NAMES: dict[str, Any] = dict(
    flags=_flags,
    expert=_M + "experts.{expert}.{projection}",
    router_weight=_M + "gate.weight",
    router_bias=_M + "gate.e_score_correction_bias",
    router_norm=_L + "post_attention_layernorm.weight",
    mtp_layers_key=("num_nextn_predict_layers", "num_mtp_layers"),
    mtp_layers_default=1,
)

GLM4_MOE = Architecture(
    model_type="glm4_moe", sizes=_gqa_sizes, moe_layers=leading_dense(1),
    routing=_noaux_tc(), rows=(*_BEFORE, *_gqa("use_qk_norm", False), *_AFTER, *_BIAS_AND_SHARED), **_NAMES,
)
GLM4_MOE_LITE = Architecture(
    model_type="glm4_moe_lite", sizes=_mla_sizes, moe_layers=listed_mlp_types(1), attention="mla",
    routing=_noaux_tc(routed_scaling_factor=1.8), rows=(*_BEFORE, *_MLA, *_AFTER, *_BIAS_AND_SHARED), **_NAMES,
)
GLM_MOE_DSA = Architecture(
    model_type="glm_moe_dsa", sizes=_dsa_sizes, moe_layers=listed_mlp_types(3), attention="dsa",
    indexer_layers=full_indexer_layers, routing=_noaux_tc(routed_scaling_factor=2.5),
    rows=(*_BEFORE, *_MLA, *_INDEXER, *_AFTER, *_BIAS_AND_SHARED), **_NAMES,
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3", sizes=_mla_sizes, moe_layers=leading_dense(3), attention="mla",
    routing=_noaux_tc(routed_scaling_factor=2.5, n_group=8, topk_group=4),
    rows=(*_BEFORE, *_MLA, *_AFTER, *_BIAS_AND_SHARED), **_NAMES,
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe", sizes=_gqa_sizes, moe_layers=qwen3_moe_layers, routing=_softmax,
    rows=(*_BEFORE, *_gqa(None, True), *_AFTER), **(_NAMES | dict(router_bias=None, mtp_layers_default=0)),
)

ARCHITECTURES: dict[str, Architecture] = {
    a.model_type: a for a in (GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA, DEEPSEEK_V3, QWEN3_MOE)
}
