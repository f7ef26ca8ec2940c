"""Re-lays NVFP4 weights once so that a tile's bytes are contiguous and its nibbles need no shuffle."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_weights(packed: Tensor) -> Tensor:
    """uint8 [E, N, K/2] (even column in the low nibble) -> uint8 [E, K/128, N, 64].

    Byte c of a tile's row holds column c in its low nibble and column c + 64 in its high nibble. K % 128 == 0.
    One expert at a time, so that the extra memory is a few matrices.
    """
    experts, rows, half = packed.shape
    out = torch.empty(experts, half // 64, rows, 64, dtype=torch.uint8, device=packed.device)
    for source, target in zip(packed, out, strict=True):
        columns = torch.stack([source & 15, source >> 4], dim=-1).view(rows, half // 64, 2, 64)
        target.copy_((columns[:, :, 0] | (columns[:, :, 1] << 4)).transpose(0, 1))
    return out


def untile_weights(tiled: Tensor) -> Tensor:
    """The inverse of `tile_weights`."""
    experts, blocks, rows, _ = tiled.shape
    columns = torch.stack([tiled & 15, tiled >> 4], dim=-2).permute(0, 2, 1, 3, 4).reshape(experts, rows, -1, 2)
    return columns[..., 0] | (columns[..., 1] << 4)


def tile_scales(scale: Tensor) -> Tensor:
    """E4M3 [E, N, K/16] -> E4M3 [E, K/128, N, 8]."""
    experts, rows, groups = scale.shape
    raw = scale.view(torch.uint8).view(experts, rows, groups // 8, 8).transpose(1, 2).contiguous()
    return raw.view(torch.float8_e4m3fn)
