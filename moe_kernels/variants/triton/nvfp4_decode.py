"""Grouped NVFP4 GEMMs for few tokens, written in Gluon: weights go from memory to tensor-core registers directly.

`nvfp4_layout.fragment_weights` stores each thread's share of a 64 x 64 block as 16 consecutive bytes in the order
of the m16n8k16 operand, so a warp reads 512 contiguous bytes, and no shared memory, shuffle or conversion stands
between the load and the product. The 16 columns of a block scale all belong to one thread. Weights are loaded
AHEAD blocks early into a ring of registers; the loop is unrolled by the ring's size, because copying a register
that a load has yet to fill would wait for it. Numerics as in `nvfp4_gemm.py`: exact BF16 weights, FP32 sums,
scalars last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_kernels.variants.triton.nvfp4_gemm import SCALE_BACK


@gluon.jit
def _splat(scales):
    """Four scale bytes (block 0 row r, row r + 8, block 1 row r, row r + 8) -> BF16 pairs of scale * 2^119."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 b;
        prmt.b32 b, $4, 0, 0x4440; mad.lo.u32 $0, b, 0x00100010, 0x76807680;
        prmt.b32 b, $4, 0, 0x4441; mad.lo.u32 $1, b, 0x00100010, 0x76807680;
        prmt.b32 b, $4, 0, 0x4442; mad.lo.u32 $2, b, 0x00100010, 0x76807680;
        prmt.b32 b, $4, 0, 0x4443; mad.lo.u32 $3, b, 0x00100010, 0x76807680;
        }""",
        "=r,=r,=r,=r,r", [scales], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )


@gluon.jit
def _decode(words, s0, s1, mma: gl.constexpr):
    """int32 [32 W, 4] words and their rows' scales int32 [32 W] -> BF16 [16 W, 64], the product's left operand."""
    W: gl.constexpr = words.shape[0] // 32
    s0 = s0[:, None].broadcast_to(words.shape)
    s1 = s1[:, None].broadcast_to(words.shape)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, t;
        and.b32 a, $8, 0x81C081C0;
        mul.rn.bf16x2 a, a, $9;
        mov.b32 {$0, $1}, a;
        shl.b32 b, $8, 3; and.b32 b, b, 0x81C081C0;
        mul.rn.bf16x2 b, b, $10;
        mov.b32 {$2, $3}, b;
        shl.b32 c, $8, 6; and.b32 c, c, 0x81C081C0;
        mul.rn.bf16x2 c, c, $9;
        mov.b32 {$4, $5}, c;
        shl.b32 d, $8, 1; and.b32 d, d, 0x80008000;
        shr.u32 t, $8, 5; lop3.b32 d, t, 0x01000100, d, 0xEA;
        shr.u32 t, $8, 4; lop3.b32 d, t, 0x00C000C0, d, 0xEA;
        mul.rn.bf16x2 d, d, $10;
        mov.b32 {$6, $7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, s0, s1],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16),
        is_pure=True, pack=1,
    )
    low = gl.join(gl.join(a0, a1), gl.join(c0, c1))  # row r: [32 W, 4, pair, k half]
    high = gl.join(gl.join(b0, b1), gl.join(d0, d1))  # row r + 8
    both = gl.join(low, high).reshape([W, 8, 4, 4, 2, 2, 2])  # warp, r, c, step, pair, k half, row half
    tile = both.permute([0, 6, 1, 3, 5, 2, 4]).reshape([16 * W, 64])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def _activations(at, mma: gl.constexpr, BLOCK_M: gl.constexpr):
    """BF16 [BLOCK_M, 64] at `at` -> [64, BLOCK_M], the right operand with columns in the weights' order."""
    x = gl.load(at).reshape([BLOCK_M, 4, 4, 2, 2])  # token, c, step, k half, pair
    x = x.permute([2, 3, 1, 4, 0]).reshape([64, BLOCK_M])
    return gl.convert_layout(x, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.constexpr_function
def token_layout(block_m: int, warps: int) -> gl.DistributedLinearLayout:
    """[block_m, 64]: a thread holds 16 consecutive columns of every eighth token; all warps hold the same."""
    extra = [[8 << n, 0] for n in range((block_m // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], *extra], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[0, 0]] * (warps.bit_length() - 1), [], [block_m, 64],
    )


@gluon.jit
def _fetch(words, scales, kb):
    """Both 64-column blocks' words of K block `kb` and their scales."""
    return gl.load(words + kb * 1024), gl.load(words + kb * 1024 + 512), gl.load(scales + kb * 128)


@gluon.jit
def _accumulate(acc, fetched, x0, x1, mma: gl.constexpr):
    w0, w1, s = fetched
    s00, s01, s10, s11 = _splat(s)
    acc = mma_v2(_decode(w0, s00, s01, mma), x0, acc)
    return mma_v2(_decode(w1, s10, s11, mma), x1, acc)


@gluon.jit
def _row_tile(words, scales, expert, tile, N: gl.constexpr, K: gl.constexpr, W: gl.constexpr, wide: gl.constexpr):
    """Pointers of a tile of 16 W rows, a part of a stored tile of 64: int32 [32 W, 4] and [32 W]."""
    PARTS: gl.constexpr = 4 // W
    row = (tile % PARTS) * (32 * W) + gl.arange(0, 32 * W, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, wide))
    index = (expert * (N // 64) + tile // PARTS) * (K // 128)
    return words + index * 1024 + (row * 4)[:, None] + column[None, :], scales + index * 128 + row


@gluon.jit
def gemm1_decode_kernel(
    x, x_row_scale, w13, w13_scale, w13_scale_2, h, sorted_slots, tiles,
    H: gl.constexpr, INTER: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, LIMIT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr, AHEAD: gl.constexpr,
):
    """As `nvfp4_gemm.gemm1_nvfp4_kernel`, 16 columns of INTER a warp. Grid: tiles * INTER / (16 W) for W = 2 or 4."""
    W: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    tokens: gl.constexpr = token_layout(BLOCK_M, W)
    NB: gl.constexpr = INTER // (16 * W)
    KB: gl.constexpr = H // 128
    pid = gl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= gl.load(tiles + 3):
        return
    expert = gl.load(tiles + 4 * tile).to(gl.int64)
    first = gl.load(tiles + 4 * tile + 1)
    end = gl.load(tiles + 4 * tile + 2)
    gate_w, gate_s = _row_tile(w13, w13_scale, expert, block, 2 * INTER, H, W, wide)
    up_w, up_s = _row_tile(w13, w13_scale, expert, block + NB, 2 * INTER, H, W, wide)
    ring = ()
    for slot in gl.static_range(AHEAD):
        ring = ring + (_fetch(gate_w, gate_s, slot % KB), _fetch(up_w, up_s, slot % KB))  # type: ignore[assignment]
    rows = gl.minimum(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, tokens)), end - 1)
    token = gl.load(sorted_slots + rows) // TOP_K
    x_at = x + (token.to(gl.int64) * H)[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, tokens))[None, :]
    gate = gl.zeros([16 * W, BLOCK_M], gl.float32, mma)
    up = gl.zeros([16 * W, BLOCK_M], gl.float32, mma)
    for outer in range(KB // AHEAD):
        refilled = ()
        for slot in gl.static_range(AHEAD):
            kb = outer * AHEAD + slot
            x0 = _activations(x_at + kb * 128, mma, BLOCK_M)
            x1 = _activations(x_at + (kb * 128 + 64), mma, BLOCK_M)
            gate = _accumulate(gate, ring[2 * slot], x0, x1, mma)
            up = _accumulate(up, ring[2 * slot + 1], x0, x1, mma)
            later = gl.minimum(kb + AHEAD, KB - 1)
            refilled = refilled + (_fetch(gate_w, gate_s, later), _fetch(up_w, up_s, later))  # type: ignore[assignment]
        ring = refilled
    for slot in gl.static_range(KB % AHEAD):
        kb = KB // AHEAD * AHEAD + slot
        x0 = _activations(x_at + kb * 128, mma, BLOCK_M)
        x1 = _activations(x_at + (kb * 128 + 64), mma, BLOCK_M)
        gate = _accumulate(gate, ring[2 * slot], x0, x1, mma)
        up = _accumulate(up, ring[2 * slot + 1], x0, x1, mma)
    n = block * (16 * W) + gl.arange(0, 16 * W, layout=gl.SliceLayout(1, mma))
    out_rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    live = (out_rows < end)[None, :]
    scale = gl.full([BLOCK_M], SCALE_BACK, gl.float32, gl.SliceLayout(0, mma))
    if HAS_ROW_SCALE:
        slots = gl.load(sorted_slots + gl.minimum(out_rows, end - 1))
        scale *= gl.load(x_row_scale + slots // TOP_K)
    gate *= (scale * gl.load(w13_scale_2 + expert * 2))[None, :]
    up *= (scale * gl.load(w13_scale_2 + expert * 2 + 1))[None, :]
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    value = gate / (1.0 + gl.exp(-gate)) * up
    gl.store(h + (out_rows.to(gl.int64) * INTER)[None, :] + n[:, None], value.to(h.dtype.element_ty), mask=live)


@gluon.jit
def gemm2_decode_kernel(
    h, h_row_scale, w2, w2_scale, w2_scale_2, y, sorted_slots, tiles,
    H: gl.constexpr, INTER: gl.constexpr, BLOCK_M: gl.constexpr, HAS_ROW_SCALE: gl.constexpr, AHEAD: gl.constexpr,
):
    """As `nvfp4_gemm.gemm2_nvfp4_kernel`, for 16 columns of H a warp. Grid: tiles * H / (16 W), W = 2 or 4 warps."""
    W: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    tokens: gl.constexpr = token_layout(BLOCK_M, W)
    NB: gl.constexpr = H // (16 * W)
    KB: gl.constexpr = INTER // 128
    pid = gl.program_id(0)
    tile = pid // NB
    block = pid % NB
    if tile >= gl.load(tiles + 3):
        return
    expert = gl.load(tiles + 4 * tile).to(gl.int64)
    first = gl.load(tiles + 4 * tile + 1)
    end = gl.load(tiles + 4 * tile + 2)
    words, scales = _row_tile(w2, w2_scale, expert, block, H, INTER, W, wide)
    ring = ()
    for slot in gl.static_range(AHEAD):
        ring = ring + (_fetch(words, scales, slot % KB),)  # type: ignore[assignment]
    rows = gl.minimum(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, tokens)), end - 1)
    h_at = h + (rows.to(gl.int64) * INTER)[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, tokens))[None, :]
    total = gl.zeros([16 * W, BLOCK_M], gl.float32, mma)
    for outer in range(KB // AHEAD):
        refilled = ()
        for slot in gl.static_range(AHEAD):
            kb = outer * AHEAD + slot
            x0 = _activations(h_at + kb * 128, mma, BLOCK_M)
            x1 = _activations(h_at + (kb * 128 + 64), mma, BLOCK_M)
            total = _accumulate(total, ring[slot], x0, x1, mma)
            later = gl.minimum(kb + AHEAD, KB - 1)
            refilled = refilled + (_fetch(words, scales, later),)  # type: ignore[assignment]
        ring = refilled
    for slot in gl.static_range(KB % AHEAD):
        kb = KB // AHEAD * AHEAD + slot
        x0 = _activations(h_at + kb * 128, mma, BLOCK_M)
        x1 = _activations(h_at + (kb * 128 + 64), mma, BLOCK_M)
        total = _accumulate(total, ring[slot], x0, x1, mma)
    n = block * (16 * W) + gl.arange(0, 16 * W, layout=gl.SliceLayout(1, mma))
    out_rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    kept = gl.minimum(out_rows, end - 1)
    scale = gl.full([BLOCK_M], SCALE_BACK, gl.float32, gl.SliceLayout(0, mma)) * gl.load(w2_scale_2 + expert)
    if HAS_ROW_SCALE:
        scale *= gl.load(h_row_scale + kept)
    slots = gl.load(sorted_slots + kept).to(gl.int64)
    value = (total * scale[None, :]).to(y.dtype.element_ty)
    gl.store(y + (slots * H)[None, :] + n[:, None], value, mask=(out_rows < end)[None, :])
