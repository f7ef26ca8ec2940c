"""The canonical records every format is read into and every variant is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

WeightFormat = Literal["bf16", "fp8", "fp8_channel", "fp8_tensor", "nvfp4", "mxfp8", "mxfp4"]

FP8_BLOCK = 128  # rows and columns of one weight scale; columns of one activation scale (DeepSeek-V3)
NVFP4_GROUP = 16  # columns of one E4M3 block scale
MX_GROUP = 32  # columns of one E8M0 scale (OCP Microscaling Formats 1.0)


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one MoE layer, all that `supports` needs to know of a model."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1


@dataclass(frozen=True)
class RoutingConfig:
    """How ids and weights follow from router logits.

    GLM and DeepSeek-V3 (`noaux_tc`): s = sigmoid(logits); top-k of s + bias with groups masked to -inf;
    weights = s / (sum s + 1e-20) if `norm_topk_prob`, times `routed_scaling_factor`.
    `scoring="softmax"` is Qwen3-MoE's: softmax over experts, no bias.
    """

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"


@dataclass(frozen=True)
class Routing:
    """Chosen experts: `ids` int64 [T, top_k] (order unspecified), `weights` FP32 [T, top_k]."""

    ids: Tensor
    weights: Tensor


@dataclass
class ExpertWeights:
    """Routed experts of one MoE layer, as stored, in Hugging Face order.

    E experts, H hidden, I intermediate. `w13` holds [gate; up] along dim 1.

    | format | w13 | w2 | w13_scale | w2_scale |
    |---|---|---|---|---|
    | bf16 | bf16 [E, 2I, H] | bf16 [E, H, I] | None | None |
    | fp8 | e4m3 [E, 2I, H] | e4m3 [E, H, I] | fp32 [E, 2 ⌈I/128⌉, ⌈H/128⌉] | fp32 [E, ⌈H/128⌉, ⌈I/128⌉] |
    | fp8_channel | e4m3 [E, 2I, H] | e4m3 [E, H, I] | fp32 [E, 2I, 1] | fp32 [E, H, 1] |
    | fp8_tensor | e4m3 [E, 2I, H] | e4m3 [E, H, I] | fp32 [E, 2] (gate, up) | fp32 [E] |
    | nvfp4 | u8 [E, 2I, H/2] | u8 [E, H, I/2] | e4m3 [E, 2I, H/16] | e4m3 [E, H, I/16] |
    | mxfp8 | e4m3 [E, 2I, H] | e4m3 [E, H, I] | u8 [E, 2I, H/32] | u8 [E, H, I/32] |
    | mxfp4 | u8 [E, 2I, H/2] | u8 [E, H, I/2] | u8 [E, 2I, H/32] | u8 [E, H, I/32] |

    FP8 scales multiply (despite the checkpoint name `weight_scale_inv`); gate and up have their own block
    rows, so a ragged I never shares a block between the halves. NVFP4 value = e2m1 * scale * scale_2, even
    column in the low nibble; `w13_scale_2` is [E, 2] (gate, up), `w2_scale_2` [E], and likewise the activation
    scales `w13_input_scale` [E, 2] and `w2_input_scale` [E] (None where the checkpoint has none; also for
    fp8_tensor). MX scales are E8M0 exponents, value = element * 2^(u8 - 127). Scalars that compressed-tensors
    stores as reciprocals are inverted once, when they are read.
    """

    format: WeightFormat
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_scale_2: Tensor | None = None
    w2_scale_2: Tensor | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    swiglu_limit: float | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.w13.shape[1] // 2

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w2.shape[1]

    def parts(self, which: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(weights, scale, scale_2) of "w13" or "w2" with gate and up apart: leading dimensions (E, 2) or (E,)."""
        q, scale = getattr(self, which), getattr(self, f"{which}_scale")
        scale_2 = getattr(self, f"{which}_scale_2")
        if which == "w13":
            q = q.unflatten(1, (2, -1))
            scale = scale if scale is None or scale.ndim == 2 else scale.unflatten(1, (2, -1))
        return q, scale, scale_2

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same record with every tensor on `device` (dtypes are never changed)."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)
