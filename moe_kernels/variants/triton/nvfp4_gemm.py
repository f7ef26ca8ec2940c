"""Grouped GEMMs with NVFP4 weights, dequantised to BF16 in registers, and BF16 activations.

E2M1 times an E4M3 block scale has at most six significant bits, so BF16 holds it exactly; the FP32 scalars
multiply the sums at the end. Weights are re-laid once by `nvfp4_layout.py`: tiles of 128 columns contiguous,
column c of a tile in the low nibble of byte c for c < 64 and in the high nibble of byte c - 64 above, so that the
two nibbles of a tile are two products over contiguous halves of the activations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.variants.triton.gemm import swiglu

# Bits s eem of a nibble, put where BF16 has its sign and its lowest two exponent and highest fraction bits, read
# as e2m1 * 2^-126 (also for the subnormal 0.5). The scale carries 2^119, so a product is value * 2^-7, normal.
SCALE_UP = tl.constexpr(2.0**119)
SCALE_BACK = tl.constexpr(2.0**7)


@triton.jit
def decode(packed, s_low, s_high, ASM: tl.constexpr):
    """BF16 low and high nibble values times their scales (BF16, already times 2^119), both shaped as `packed`."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b;
            prmt.b32 t, $4, 0, 0x4140;
            shl.b32 a, t, 12; shl.b32 b, t, 6; and.b32 b, b, 0x01C001C0;
            lop3.b32 a, a, 0x80008000, b, 0xEA;
            mul.rn.bf16x2 $0, a, $5;
            shl.b32 a, t, 8; shl.b32 b, t, 2; and.b32 b, b, 0x01C001C0;
            lop3.b32 a, a, 0x80008000, b, 0xEA;
            mul.rn.bf16x2 $2, a, $7;
            prmt.b32 t, $4, 0, 0x4342;
            shl.b32 a, t, 12; shl.b32 b, t, 6; and.b32 b, b, 0x01C001C0;
            lop3.b32 a, a, 0x80008000, b, 0xEA;
            mul.rn.bf16x2 $1, a, $6;
            shl.b32 a, t, 8; shl.b32 b, t, 2; and.b32 b, b, 0x01C001C0;
            lop3.b32 a, a, 0x80008000, b, 0xEA;
            mul.rn.bf16x2 $3, a, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [packed, s_low, s_high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )
    else:
        bits = packed.to(tl.int16)
        low = ((bits & 8) << 12) | ((bits & 7) << 6)
        high = ((bits & 128) << 8) | ((bits & 112) << 2)
        low = low.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32) * s_low.to(tl.float32)
        high = high.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32) * s_high.to(tl.float32)
        return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def _spread(scale, BN: tl.constexpr):
    """Scales E4M3 [BN, 4] -> BF16 [BN, 64], each for 16 columns, times 2^119."""
    s = (scale.to(tl.float32) * SCALE_UP).to(tl.bfloat16)
    return tl.reshape(tl.broadcast_to(s[:, :, None], [BN, 4, 16]), [BN, 64])


@triton.jit
def gemm1_nvfp4_kernel(
    x, x_row_scale, w13, w13_scale, w13_scale_2, h, sorted_slots, tiles,
    H: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr, HAS_ROW_SCALE: tl.constexpr,
):
    """h = silu(x Wg) * (x Wu), BF16 [pairs, INTER] in sorted order, for one tile of rows and BLOCK_N columns of INTER.

    x BF16 [T, H] (with FP32 `x_row_scale` [T] to multiply by, for emulated activations); w13 uint8
    [E, H/128, 2I, 64], w13_scale E4M3 [E, H/128, 2I, 8], w13_scale_2 FP32 [E, 2].
    """
    NB: tl.constexpr = INTER // BLOCK_N
    KB: tl.constexpr = H // 128
    pid = tl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= tl.load(tiles + 3):
        return
    expert = tl.load(tiles + 4 * tile).to(tl.int64)
    first = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 2)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < end
    token = tl.load(sorted_slots + tl.minimum(rows, end - 1)) // TOP_K
    x_low = x + token.to(tl.int64)[:, None] * H + tl.arange(0, 64)[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    w_gate = w13 + expert * (KB * 2 * INTER * 64) + n[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_gate = w13_scale + expert * (KB * 2 * INTER * 8) + n[:, None] * 8 + tl.arange(0, 4)[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for kb in tl.range(0, KB, num_stages=STAGES):
        a = tl.trans(tl.load(x_low + kb * 128))
        b = tl.trans(tl.load(x_low + kb * 128 + 64))
        s0 = _spread(tl.load(s_gate + kb * (2 * INTER * 8)), BLOCK_N)
        s1 = _spread(tl.load(s_gate + kb * (2 * INTER * 8) + 4), BLOCK_N)
        low, high = decode(tl.load(w_gate + kb * (2 * INTER * 64)), s0, s1, ASM)
        gate = tl.dot(low, a, gate)
        gate = tl.dot(high, b, gate)
        s0 = _spread(tl.load(s_gate + kb * (2 * INTER * 8) + INTER * 8), BLOCK_N)
        s1 = _spread(tl.load(s_gate + kb * (2 * INTER * 8) + INTER * 8 + 4), BLOCK_N)
        low, high = decode(tl.load(w_gate + kb * (2 * INTER * 64) + INTER * 64), s0, s1, ASM)
        up = tl.dot(low, a, up)
        up = tl.dot(high, b, up)
    scale = tl.full([BLOCK_M], SCALE_BACK, tl.float32)
    if HAS_ROW_SCALE:
        scale *= tl.load(x_row_scale + token)
    gate *= (scale * tl.load(w13_scale_2 + expert * 2))[None, :]
    up *= (scale * tl.load(w13_scale_2 + expert * 2 + 1))[None, :]
    where = rows.to(tl.int64)[None, :] * INTER + n[:, None]
    tl.store(h + where, swiglu(gate, up, LIMIT).to(h.dtype.element_ty), mask=live[None, :])


@triton.jit
def gemm2_nvfp4_kernel(
    h, h_row_scale, w2, w2_scale, w2_scale_2, y, sorted_slots, tiles,
    H: tl.constexpr, INTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, HAS_ROW_SCALE: tl.constexpr,
):
    """y[slot] = h W2, [T * top_k, H] in slot order.

    w2 uint8 [E, INTER/128, H, 64], w2_scale E4M3 [E, INTER/128, H, 8], w2_scale_2 FP32 [E].
    """
    NB: tl.constexpr = H // BLOCK_N
    KB: tl.constexpr = INTER // 128
    pid = tl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= tl.load(tiles + 3):
        return
    expert = tl.load(tiles + 4 * tile).to(tl.int64)
    first = tl.load(tiles + 4 * tile + 1)
    end = tl.load(tiles + 4 * tile + 2)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < end
    rows = tl.minimum(rows, end - 1)
    h_low = h + rows.to(tl.int64)[:, None] * INTER + tl.arange(0, 64)[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = w2 + expert * (KB * H * 64) + n[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_row = w2_scale + expert * (KB * H * 8) + n[:, None] * 8 + tl.arange(0, 4)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for kb in tl.range(0, KB, num_stages=STAGES):
        a = tl.trans(tl.load(h_low + kb * 128))
        b = tl.trans(tl.load(h_low + kb * 128 + 64))
        s0 = _spread(tl.load(s_row + kb * (H * 8)), BLOCK_N)
        s1 = _spread(tl.load(s_row + kb * (H * 8) + 4), BLOCK_N)
        low, high = decode(tl.load(w_row + kb * (H * 64)), s0, s1, ASM)
        total = tl.dot(low, a, total)
        total = tl.dot(high, b, total)
    scale = tl.full([BLOCK_M], SCALE_BACK, tl.float32) * tl.load(w2_scale_2 + expert)
    if HAS_ROW_SCALE:
        scale *= tl.load(h_row_scale + rows)
    slots = tl.load(sorted_slots + rows).to(tl.int64)
    tl.store(y + slots[None, :] * H + n[:, None], (total * scale[None, :]).to(y.dtype.element_ty), mask=live[None, :])
