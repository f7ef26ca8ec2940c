"""Builds tiny random checkpoints of every supported model type with stock transformers, and finds oracles for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny import save_unlike_zero

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_COMMON: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
    eos_token_id=[1], pad_token_id=0, bos_token_id=None,
)  # fmt: skip
_ROUTED: dict[str, Any] = dict(
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True,
)  # fmt: skip
_MLA: dict[str, Any] = dict(
    kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=32,
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "glm4_moe": dict(
        head_dim=16, first_k_dense_replace=1, routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True,
        num_mtp_layers=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **(_ROUTED | dict(num_key_value_heads=2)),
    ),
    "glm4_moe_lite": dict(
        routed_scaling_factor=1.8, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **_ROUTED, **_MLA),
    # 32 indexer heads: with few, ReLU scores tie at exactly 0 and the choice is not defined
    "glm_moe_dsa": dict(
        routed_scaling_factor=2.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_hidden_layers=5, first_k_dense_replace=1, index_topk=12, index_n_heads=32, index_head_dim=24,
        indexer_types=["full", "full", "shared", "full", "shared"], **_ROUTED, **_MLA),
    "deepseek_v3": dict(
        routed_scaling_factor=2.5, rope_parameters=YARN, first_k_dense_replace=1, num_mtp_layers=0,
        **(_ROUTED | dict(n_routed_experts=16, n_group=8, topk_group=4, num_experts_per_tok=3)), **_MLA),
    "qwen3_moe": dict(
        head_dim=16, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}
MODEL_TYPES = tuple(FIELDS)


def varied(model_type: str, seed: int) -> dict[str, Any]:
    """Fields that change with the seed: ragged sizes, layer kinds, biases, groups, RoPE, renormalisation."""
    fields: dict[str, Any] = dict(
        moe_intermediate_size=(48, 32, 40)[seed % 3], attention_bias=seed % 2 == 1,
        routed_scaling_factor=(2.5, 1.0, 1.8)[seed % 3], norm_topk_prob=seed % 4 != 3,
    )  # fmt: skip
    if model_type == "qwen3_moe":
        del fields["routed_scaling_factor"]
        fields |= dict(mlp_only_layers=([], [1], [0, 2])[seed % 3], decoder_sparse_step=(1, 1, 1, 2)[seed % 4])
        if seed % 12 == 7:
            fields["mlp_only_layers"] = [0]  # the other two settings together would leave no MoE layer
    else:
        fields["n_shared_experts"] = 1 + seed % 5 // 4
    if model_type in ("glm4_moe_lite", "deepseek_v3"):
        fields |= dict(q_lora_rank=(48, None)[seed % 4 == 2], rope_interleave=seed % 5 != 1,
                       rope_parameters=(YARN, {"rope_type": "default", "rope_theta": 1e4})[seed % 2])
    if model_type in ("glm4_moe_lite", "glm_moe_dsa") and seed % 3 == 1:
        layers = FIELDS[model_type].get("num_hidden_layers", 3)
        fields["mlp_layer_types"] = ["sparse", "dense", *["sparse"] * (layers - 2)]
    if model_type == "glm_moe_dsa":
        fields |= dict(index_topk=(12, 7, 20, 64)[seed % 4])
        if seed % 2:
            fields |= dict(indexer_types=None, index_topk_freq=2, index_skip_topk_offset=1 + seed % 3)
    if model_type == "deepseek_v3":
        fields |= dict(n_group=(8, 4, 2)[seed % 3], topk_group=(4, 2, 1)[seed % 3])
    return fields


def tiny(model_type: str, out: Path, seed: int = 0, **overrides: Any) -> Path:
    """A tiny BF16 checkpoint whose logits, biases and norms are far from degenerate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(_COMMON | FIELDS[model_type] | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    return save_unlike_zero(model, out)


def stock(path: Path, attention: str = "sdpa") -> Any:
    """Stock transformers' model in FP32, the oracle."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager").eval()
