"""Re-lays NVFP4 weights once so that a tile's bytes are contiguous and its nibbles need no shuffle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels.errors import VariantError


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
    experts, _, rows, _ = tiled.shape
    columns = torch.stack([tiled & 15, tiled >> 4], dim=-2).permute(0, 2, 1, 3, 4).reshape(experts, rows, -1, 2)
    return columns[..., 0] | (columns[..., 1] << 4)


def tile_scales(scale: Tensor) -> Tensor:
    """E4M3 [E, N, K/16] -> E4M3 [E, K/128, N, 8]."""
    experts, rows, groups = scale.shape
    raw = scale.view(torch.uint8).view(experts, rows, groups // 8, 8).transpose(1, 2).contiguous()
    return raw.view(torch.float8_e4m3fn)


# Where `fragment_weights` puts the bits s, e1, e0, m of a nibble in a 16-bit half of a word: one row per product
# register (row half h, column half j) = (0, 0), (1, 0), (0, 1), (1, 1). After one shift and mask each lands where
# BF16 has its sign and lowest two exponent and first fraction bits (the last needs three; no fourth pattern fits).
_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


def fragment_weights(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [E, N, K/2] -> int32 [E, N/64, K/128, 2, 128, 4] for `nvfp4_decode.py`; N % 64 == 0, K % 128 == 0.

    Axes after the block of 64 rows and 128 columns: its two blocks of 64 columns; 32 w + 4 r + c for warp w and
    lane 4 r + c; four words. Word s holds rows 16 w + r and + 8 of columns 16 c + 4 s .. + 3. Groups whose scale
    is zero become zero codes, since the re-encoded scale has no zero.
    """
    experts, rows, half = packed.shape
    out = torch.empty(experts, rows // 64, half // 64, 2, 128, 4, dtype=torch.int32, device=packed.device)
    for source, groups, target in zip(packed, scale.view(torch.uint8), out, strict=True):
        codes = torch.stack([source & 15, source >> 4], dim=-1).view(rows, half // 8, 16)
        codes = codes.masked_fill((groups & 127).unsqueeze(-1) == 0, 0)
        # rows: tile, w, h, r; columns: K block, q, c, s, j, i
        parts = codes.view(rows // 64, 4, 2, 8, half // 64, 2, 4, 4, 2, 2)
        parts = parts.permute(0, 4, 5, 1, 3, 6, 7, 2, 8, 9).to(torch.int32)  # tile, block, q, w, r, c, s, h, j, i
        word = torch.zeros(parts.shape[:7], dtype=torch.int32, device=packed.device)
        for number, places in enumerate(_BITS):
            h, j = number % 2, number // 2
            for i in range(2):
                code = parts[..., h, j, i]
                for bit, place in zip((3, 2, 1, 0), places, strict=True):
                    word |= ((code >> bit) & 1) << (place + 16 * i)
        target.copy_(word.view(rows // 64, half // 64, 2, 128, 4))
    return out


def fragment_scales(scale: Tensor) -> Tensor:
    """E4M3 [E, N, K/16] -> int32 [E, N/64, K/128, 128]: four bytes (q, h) = (0, 0), (0, 1), (1, 0), (1, 1).

    A byte is the scale as unsigned E5M3, exponent field + 237 and fraction: subnormals become normal, so that one
    multiply-add makes BF16 of it. Raises VariantError for negative or NaN scales, which no quantiser writes.
    """
    raw = scale.view(torch.uint8)
    if raw.numel() and int(raw.amax()) >= 0x7F:
        raise VariantError("NVFP4 block scales must be finite and not negative; look for a damaged checkpoint")
    experts, rows, groups = raw.shape
    table = torch.zeros(256, dtype=torch.uint8)
    for code in range(1, 0x7F):
        fraction, exponent = math.frexp(float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn)))
        table[code] = ((exponent - 1 + 9) << 3) | int((fraction * 2 - 1) * 8)
    codes = table.to(raw.device)[raw.long()].view(experts, rows // 64, 4, 2, 8, groups // 8, 2, 4)
    lanes = codes.permute(0, 1, 5, 2, 4, 7, 6, 3).reshape(experts, rows // 64, groups // 8, 128, 4)
    return lanes.contiguous().view(torch.int32).squeeze(-1)
