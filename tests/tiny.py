"""Builds tiny random GLM MoE checkpoints with stock transformers, for tests that need a model but no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_unlike_zero(model: Any, out: Path) -> Path:
    """Save a fresh model with weights, biases and norms far from degenerate: BF16, the router FP32."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim >= 2:
                param.mul_(5.0)  # std 0.02 gives near-constant logits
            if "norm" in name:
                param.add_(torch.randn_like(param) * 0.1)
            if not name.endswith("mlp.gate.weight"):
                param.data = param.data.to(torch.bfloat16)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)  # zeros would hide every bias bug
    model.save_pretrained(out)
    return out


def glm4_moe(out: Path, seed: int = 0, **overrides: object) -> Path:
    """A 1.3 M-parameter BF16 `glm4_moe` checkpoint whose logits, biases and norms are far from degenerate."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields: dict[str, object] = dict(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        use_qk_norm=True, attention_bias=True, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        num_mtp_layers=0, eos_token_id=[1], pad_token_id=0, bos_token_id=None,
    )
    fields.update(overrides)
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**fields)).eval()
    return save_unlike_zero(model, out)
