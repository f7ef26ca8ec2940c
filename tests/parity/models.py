"""Tiny models of varied configurations, in every weight format, for the parity tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moe_kernels.quantize import quantize
from tests.parity import naive
from tests.tiny import glm4_moe

SEEDS = range(20)
# Routing keys nearer than this can be ordered either way by FP32 arithmetic; such inputs are drawn again.
MIN_GAP = 2e-5
TOKENS = (1, 3, 5, 7)


@dataclass
class Case:
    """One seed: folders by format, the decoded weights by format, and one input per length."""

    seed: int
    folders: dict[str, Path]
    weights: dict[str, naive.Weights]
    results: dict[tuple[str, int], tuple[torch.Tensor, naive.Result]]


def config_of(seed: int) -> dict[str, object]:
    """A configuration that varies heads, groups, sizes (ragged ones too), experts and options with the seed."""
    hidden = (128, 192, 256)[seed % 3]
    groups = (1, 1, 2, 4)[seed % 4]
    return dict(
        vocab_size=192, hidden_size=hidden, intermediate_size=160, head_dim=(32, 16)[seed % 2],
        moe_intermediate_size=(128, 96, 144, 64)[seed // 2 % 4], num_hidden_layers=2 + seed % 2,
        num_attention_heads=4, num_key_value_heads=(2, 1, 4)[seed % 3],
        n_routed_experts=(8, 16)[seed // 3 % 2], num_experts_per_tok=2 + seed % 3 if groups < 4 else 2,
        n_group=groups, topk_group=max(1, groups // 2), n_shared_experts=1 + seed // 7 % 2,
        routed_scaling_factor=(1.0, 2.5, 1.8)[seed % 3], norm_topk_prob=seed % 5 != 0,
        use_qk_norm=seed % 2 == 0, attention_bias=seed % 4 != 1, first_k_dense_replace=(1, 0)[seed % 6 == 5],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": (0.5, 1.0)[seed % 2]},
    )


def build(seed: int, root: Path) -> Case:
    """Save, quantise, and find inputs whose routing is clear in every format."""
    plain = glm4_moe(root / f"{seed}-bf16", seed, **config_of(seed))
    folders = {"bf16": plain}
    for fmt in ("fp8", "nvfp4"):
        folders[fmt] = quantize(plain, root / f"{seed}-{fmt}", fmt)
    case = Case(seed, folders, {f: naive.Weights.load(p) for f, p in folders.items()}, {})
    g = torch.Generator().manual_seed(seed)
    for fmt, weights in case.weights.items():
        for tokens in TOKENS:
            for _ in range(50):
                ids = torch.randint(2, 192, (tokens,), generator=g)
                result = naive.forward(weights, ids)
                if result.tie_gap > MIN_GAP:
                    break
            else:
                raise AssertionError(f"seed {seed}: no input with clear routing in 50 draws")
            case.results[fmt, tokens] = ids, result
    return case
