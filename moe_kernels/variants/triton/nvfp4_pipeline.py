"""Launches the NVFP4 kernels of one layer: weights dequantised in the kernel, activations BF16 or rounded to NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.records import MoEShape
from moe_kernels.variants.triton.config import NvFp4Config
from moe_kernels.variants.triton.nvfp4_act import nvfp4_round_kernel
from moe_kernels.variants.triton.nvfp4_gemm import gemm1_nvfp4_kernel, gemm2_nvfp4_kernel
from moe_kernels.variants.triton.pipeline import Order


@dataclass(frozen=True)
class NvFp4Weights:
    """Weights of one layer as the kernels read them (`nvfp4_layout.py`)."""

    w13: Tensor  # uint8 [E, H/128, 2I, 64], [gate; up]
    w13_scale: Tensor  # E4M3 [E, H/128, 2I, 8]
    w13_scale_2: Tensor  # FP32 [E, 2]
    w2: Tensor  # uint8 [E, I/128, H, 64]
    w2_scale: Tensor  # E4M3 [E, I/128, H, 8]
    w2_scale_2: Tensor  # FP32 [E]
    shape: MoEShape
    limit: float = 0.0
    asm: bool = True  # False in Triton's interpreter, which cannot run inline PTX


def round_activations(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """BF16 [M, N] of e2m1 * block scale and FP32 [M] scalars; `scale` 0-d is the layer's, None one per row."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    scalars = torch.empty(rows, dtype=torch.float32, device=x.device)
    nvfp4_round_kernel[(rows,)](
        x, out, scalars, scale if scale is not None else scalars, N=width, BLOCK=1024, HAS_SCALE=scale is not None,
        num_warps=4,
    )
    return out, scalars


def gemm1(w: NvFp4Weights, x: Tensor, scalars: Tensor | None, order: Order, config: NvFp4Config) -> Tensor:
    """h BF16 [pairs, I] in sorted order (FP32 if it will be rounded to NVFP4 next)."""
    pairs, width = order.slots.numel(), w.shape.intermediate_size
    h = torch.empty(pairs, width, dtype=torch.bfloat16 if scalars is None else torch.float32, device=x.device)
    gemm1_nvfp4_kernel[(order.tiles.shape[0] * (width // config.block_n1),)](
        x, scalars if scalars is not None else w.w13_scale_2, w.w13, w.w13_scale, w.w13_scale_2, h, order.slots,
        order.tiles, H=w.shape.hidden_size, I=width, TOP_K=w.shape.top_k, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n1, STAGES=config.stages1, LIMIT=w.limit, ASM=w.asm, HAS_ROW_SCALE=scalars is not None,
        num_warps=config.warps1, num_stages=config.stages1,
    )
    return h


def gemm2(
    w: NvFp4Weights, h: Tensor, scalars: Tensor | None, order: Order, config: NvFp4Config, dtype: torch.dtype
) -> Tensor:
    """y `dtype` [T * k, H]: the experts' outputs in slot order, not yet weighted."""
    width = w.shape.hidden_size
    y = torch.empty(order.slots.numel(), width, dtype=dtype, device=h.device)
    gemm2_nvfp4_kernel[(order.tiles.shape[0] * (width // config.block_n2),)](
        h, scalars if scalars is not None else w.w2_scale_2, w.w2, w.w2_scale, w.w2_scale_2, y, order.slots,
        order.tiles, H=width, I=w.shape.intermediate_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n2,
        STAGES=config.stages2, ASM=w.asm, HAS_ROW_SCALE=scalars is not None,
        num_warps=config.warps2, num_stages=config.stages2,
    )
    return y
