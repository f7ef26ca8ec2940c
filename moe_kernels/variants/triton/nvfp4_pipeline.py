"""Launches the NVFP4 kernels of one layer: weights dequantised in the kernel, activations BF16 or rounded to NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_kernels.records import MoEShape
from moe_kernels.variants.triton.config import NvFp4Config
from moe_kernels.variants.triton.nvfp4_act import nvfp4_round_kernel
from moe_kernels.variants.triton.nvfp4_gemm import gemm1_nvfp4_kernel, gemm2_nvfp4_kernel
from moe_kernels.variants.triton.nvfp4_layout import (
    fragment_scales,
    fragment_weights,
    tile_scales,
    tile_weights,
)
from moe_kernels.variants.triton.pipeline import Order


@dataclass
class NvFp4Weights:
    """Weights of one layer: as stored, and as the kernels read them (`nvfp4_layout.py`), laid out at first use."""

    w13: Tensor  # uint8 [E, 2I, H/2], [gate; up]
    w13_scale: Tensor  # E4M3 [E, 2I, H/16]
    w13_scale_2: Tensor  # FP32 [E, 2]
    w2: Tensor  # uint8 [E, H, I/2]
    w2_scale: Tensor  # E4M3 [E, H, I/16]
    w2_scale_2: Tensor  # FP32 [E]
    shape: MoEShape
    limit: float = 0.0
    asm: bool = True  # False in Triton's interpreter, which cannot run inline PTX

    @cached_property
    def tiled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w13, its scales, w2, its scales for `nvfp4_gemm.py`."""
        return (tile_weights(self.w13), tile_scales(self.w13_scale),
                tile_weights(self.w2), tile_scales(self.w2_scale))

    @cached_property
    def fragments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w13, its scales, w2, its scales for `nvfp4_decode.py`."""
        return (fragment_weights(self.w13, self.w13_scale), fragment_scales(self.w13_scale),
                fragment_weights(self.w2, self.w2_scale), fragment_scales(self.w2_scale))


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
    row_scale = scalars if scalars is not None else w.w13_scale_2
    if config.decode:
        from moe_kernels.variants.triton.nvfp4_decode import gemm1_decode_kernel  # Gluon only where it runs

        words, scales, _, _ = w.fragments
        gemm1_decode_kernel[(order.tiles.shape[0] * (width // (16 * config.warps1)),)](
            x, row_scale, words, scales, w.w13_scale_2, h, order.slots, order.tiles, H=w.shape.hidden_size, INTER=width,
            TOP_K=w.shape.top_k, BLOCK_M=config.block_m, LIMIT=w.limit, HAS_ROW_SCALE=scalars is not None,
            AHEAD=config.stages1, num_warps=config.warps1,
        )
        return h
    packed, scales, _, _ = w.tiled
    gemm1_nvfp4_kernel[(order.tiles.shape[0] * (width // config.block_n1),)](
        x, row_scale, packed, scales, w.w13_scale_2, h, order.slots, order.tiles,
        H=w.shape.hidden_size, INTER=width, TOP_K=w.shape.top_k, BLOCK_M=config.block_m,
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
    row_scale = scalars if scalars is not None else w.w2_scale_2
    if config.decode:
        from moe_kernels.variants.triton.nvfp4_decode import gemm2_decode_kernel

        _, _, words, scales = w.fragments
        gemm2_decode_kernel[(order.tiles.shape[0] * (width // (16 * config.warps2)),)](
            h, row_scale, words, scales, w.w2_scale_2, y, order.slots, order.tiles, H=width,
            INTER=w.shape.intermediate_size, BLOCK_M=config.block_m, HAS_ROW_SCALE=scalars is not None,
            AHEAD=config.stages2, num_warps=config.warps2,
        )
        return y
    _, _, packed, scales = w.tiled
    gemm2_nvfp4_kernel[(order.tiles.shape[0] * (width // config.block_n2),)](
        h, row_scale, packed, scales, w.w2_scale_2, y, order.slots, order.tiles,
        H=width, INTER=w.shape.intermediate_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n2,
        STAGES=config.stages2, ASM=w.asm, HAS_ROW_SCALE=scalars is not None,
        num_warps=config.warps2, num_stages=config.stages2,
    )
    return y
