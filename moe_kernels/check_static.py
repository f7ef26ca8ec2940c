"""What can be checked of a loaded model without running it: scales, routing parameters, RoPE frequencies."""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels import contract
from moe_kernels.errors import MoeParityError
from moe_kernels.records import ExpertWeights
from moe_kernels.registry import MoELayer


def layer_fault(index: int, record: ExpertWeights, layer: MoELayer) -> str | None:
    """Why a layer's weights or routing parameters break what the kernels' launchers demand, or None."""
    config = layer.config
    try:
        contract.check_values(record, index)
        if config.scoring == "sigmoid" and layer.spec.backend in ("trtllm", "emulated"):
            contract.check_routing(
                "DeepSeekV3", record.num_experts, config.top_k, config.n_group, config.topk_group, 0,
                record.num_experts, config.routed_scaling_factor,
            )  # fmt: skip
    except MoeParityError as error:
        return " ".join(str(error).split())
    return None


def rope_fault(model: Any) -> str | None:
    """Why a transformers model's RoPE frequencies are not those of its config in FP32, or None.

    `.to(bfloat16)` on a loaded model rounds them; at position 2,000 the fastest affected one is then off by radians.
    """
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=model.config).inv_freq
    found = rotary.inv_freq
    if found.dtype != torch.float32:
        return f"RoPE inv_freq is {found.dtype}; keep it float32 (never .to(dtype) a loaded model)"
    worst = ((found.cpu() - fresh.cpu()) / fresh.cpu()).abs().max().item()
    return f"RoPE inv_freq differs from the config's by up to {worst:.2g} (relative)" if worst > 1e-6 else None
