"""Warp-specialised grouped FP8 GEMM for many rows (Hopper, written in Gluon): one producer, two consumers.

A persistent program keeps a ring of shared-memory stages. Four producer warps gather activation rows and their
scales with cp.async and fetch two 128-row weight tiles with TMA; two consumer warpgroups own 64 rows each and, per
128 columns of K, run one tensor-core product per weight tile into a fresh accumulator and add it, scaled, in FP32.
While one consumer adds, the other's products fill the tensor cores. A consumer whose 64 rows are beyond the
expert's last row skips its products. The two weight tiles are gate and up of the same 128 intermediate columns
(first GEMM) or neighbouring output columns (second GEMM).

Four choices that change no bit, for the tuner: GROUP row tiles take turns at a column block, so that thread blocks
running together want the same weights; REGISTERS reads a consumer's rows from shared memory once for both products;
TMA_A fetches the rows of the second GEMM, which lie together, with TMA instead of cp.async; CORRECTED re-quantises
with a reciprocal per row and corrections instead of a division (with its branch) per value.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _tile(tiles, index, count, NB: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, row after the expert's last, column block) of a work item; `count` tiles in all."""
    if GROUP == 1:
        tile = index // NB
        block = index % NB
    else:
        start = index // (GROUP * NB) * GROUP
        size = gl.minimum(GROUP, count - start)
        inside = index - start * NB
        tile = start + inside % size
        block = inside // size
    return gl.load(tiles + 4 * tile), gl.load(tiles + 4 * tile + 1), gl.load(tiles + 4 * tile + 2), block


@gluon.jit
def _weight_rows(expert, block, N: gl.constexpr, FIRST: gl.constexpr):
    """Rows of the two weight tiles in the [E * N, K] view."""
    if FIRST:
        return expert * N + block * 128, expert * N + N // 2 + block * 128
    else:
        return expert * N + block * 256, expert * N + block * 256 + 128


@gluon.jit
def _produce(
    a, a_scale, b, sorted_slots, tiles, a_rows, ring_a, ring_s, ring_b0, ring_b1, full, empty,
    K: gl.constexpr, N: gl.constexpr, NB: gl.constexpr, TOP_K: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, TMA_A: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    lanes = gl.arange(0, 128, layout=flat)
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    count = gl.load(tiles + 3)
    step = 0
    for index in range(gl.program_id(0), count * NB, gl.num_programs(0)):
        expert, first, end, block = _tile(tiles, index, count, NB, GROUP)
        scale_rows = gl.minimum(first + lanes, end - 1)
        if FIRST:
            scale_rows = gl.load(sorted_slots + scale_rows) // TOP_K
        scales = a_scale + scale_rows
        if not TMA_A:
            rows = gl.minimum(first + offsets, end - 1)
            if FIRST:
                rows = gl.load(sorted_slots + rows) // TOP_K
            source = a + (rows.to(gl.int64) * K)[:, None] + columns[None, :]
        row0, row1 = _weight_rows(expert, block, N, FIRST)
        for kb in range(K // 128):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (3 if TMA_A else 2) * 128 * 128)
            tma.async_copy_global_to_shared(b, [row0, kb * 128], full.index(stage), ring_b0.index(stage))
            tma.async_copy_global_to_shared(b, [row1, kb * 128], full.index(stage), ring_b1.index(stage))
            if TMA_A:  # rows past the expert's last are other experts' and past the tensor zero: never stored
                tma.async_copy_global_to_shared(a, [first, kb * 128], full.index(stage), ring_a.index(stage))
            else:
                async_copy.async_copy_global_to_shared(ring_a.index(stage), source + kb * 128)
            scale_at = scales + kb.to(gl.int64) * a_rows  # type: ignore[attr-defined]
            async_copy.async_copy_global_to_shared(ring_s.index(stage), scale_at)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _divide(h, scale):
    """h / scale, rounded to nearest as IEEE division, for h [M, N] and scale [M] >= 2^-43.

    A correctly rounded reciprocal, a quotient within an ulp, and Markstein's correction from its exact remainder (P. W.
    Markstein, IBM J. Res. Dev. 34, 1990). Quotients below 2^-40, whose remainder may underflow, can be off by an ulp;
    they become zero in E4M3. Zero keeps its sign; with an infinite scale finite values give zero.
    """
    inverse = tl.math.div_rn(gl.full(scale.shape, 1.0, gl.float32, scale.type.layout), scale)
    negative = gl.where(scale == float("inf"), 0.0, -scale)[:, None].broadcast_to(h.shape)
    inverse = inverse[:, None].broadcast_to(h.shape)
    q = h * inverse
    q = gl.fma(gl.fma(q, negative, h), inverse, q)
    q = gl.fma(gl.fma(q, negative, h), inverse, q)
    return gl.where(h == 0.0, h, q)


@gluon.jit
def _consume(
    b_scale, out, out_scale, sorted_slots, tiles, pairs, ring_a, ring_s, ring_b0, ring_b1, full, empty,
    PART: gl.constexpr, K: gl.constexpr, N: gl.constexpr, NB: gl.constexpr, TOP_K: gl.constexpr,
    FIRST: gl.constexpr, STAGES: gl.constexpr, LIMIT: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
    CORRECTED: gl.constexpr,
):
    KB: gl.constexpr = K // 128
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    offsets = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    part = gl.zeros([64, 128], gl.float32, mma)
    count = gl.load(tiles + 3)
    step = 0
    for index in range(gl.program_id(0), count * NB, gl.num_programs(0)):
        expert, first, end, block = _tile(tiles, index, count, NB, GROUP)
        if first + PART * 64 < end:
            if FIRST:
                s0_at = b_scale + (expert.to(gl.int64) * (2 * NB) + block) * KB
                s1_at = s0_at + NB * KB
            else:
                s0_at = b_scale + (expert.to(gl.int64) * (2 * NB) + 2 * block) * KB
                s1_at = s0_at + KB
            s_0 = gl.load(s0_at)
            s_1 = gl.load(s1_at)
            sum0 = gl.zeros([64, 128], gl.float32, mma)
            sum1 = gl.zeros([64, 128], gl.float32, mma)
            for kb in range(KB):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                x = ring_a.index(stage).slice(PART * 64, 64)
                if REGISTERS:
                    x = x.load(gl.DotOperandLayout(0, mma, 4))
                part = warpgroup_mma(x, ring_b0.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
                ahead = gl.minimum(kb + 1, KB - 1)
                s_a = ring_s.index(stage).slice(PART * 64, 64).load(gl.SliceLayout(1, mma))
                s_0_next = gl.load(s0_at + ahead)
                s_1_next = gl.load(s1_at + ahead)
                part = warpgroup_mma_wait(0, deps=[part])
                sum0 += part * (s_a * s_0)[:, None]
                part = warpgroup_mma(x, ring_b1.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage), count=1)
                sum1 += part * (s_a * s_1)[:, None]
                s_0 = s_0_next
                s_1 = s_1_next
                step += 1
            out_rows = first + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
            columns = gl.arange(0, 128, layout=gl.SliceLayout(0, stored))
            live = (out_rows < end)[:, None]
            if FIRST:
                if LIMIT > 0:
                    sum0 = gl.minimum(sum0, LIMIT)
                    sum1 = gl.minimum(gl.maximum(sum1, -LIMIT), LIMIT)
                h = sum0 / (1.0 + gl.exp(-sum0)) * sum1
                amax = gl.maximum(gl.max(gl.abs(h), axis=1), 1e-10)
                scale = tl.math.div_rn(amax, gl.full([64], 448.0, gl.float32, gl.SliceLayout(1, mma)))
                if CORRECTED:
                    q = _divide(h, scale)
                else:
                    q = tl.math.div_rn(h, scale[:, None].broadcast_to(h.shape))
                q = gl.minimum(gl.maximum(q, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0,
                               propagate_nan=tl.PropagateNan.ALL)
                target = out + (out_rows.to(gl.int64) * (N // 2))[:, None] + (block * 128 + columns)[None, :]
                gl.store(target, gl.convert_layout(q.to(gl.float8e4nv), stored), mask=live)
                at = first + offsets
                gl.store(out_scale + block.to(gl.int64) * pairs + at, scale, mask=at < end)
            else:
                slots = gl.load(sorted_slots + gl.minimum(out_rows, end - 1)).to(gl.int64)
                target = out + (slots * N)[:, None] + (block * 256 + columns)[None, :]
                gl.store(target, gl.convert_layout(sum0.to(out.dtype.element_ty), stored), mask=live)
                gl.store(target + 128, gl.convert_layout(sum1.to(out.dtype.element_ty), stored), mask=live)
        else:
            for _ in range(KB):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1


@gluon.jit(do_not_specialize=["a_rows", "pairs"])
def grouped_kernel(
    a, a_scale, b, b_scale, out, out_scale, sorted_slots, tiles, a_rows, pairs,
    K: gl.constexpr, N: gl.constexpr, TOP_K: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
    LIMIT: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, TMA_A: gl.constexpr,
    CORRECTED: gl.constexpr,
):
    """FIRST: as `gemm.gemm1_kernel`, N = 2I; else as `gemm.gemm2_kernel`, N = H. Tiles of 128 rows.

    a E4M3 [a_rows, K] (with TMA_A a descriptor of [128, 128] tiles of it), a_scale [K/128, a_rows]; b a TMA
    descriptor of [128, 128] tiles of E4M3 [E * N, K].
    """
    NB: gl.constexpr = N // 256
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring_a = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], shared)
    ring_b0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b.layout)
    ring_b1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b.layout)
    ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129)  # 128 copying threads and the TMA's expected bytes
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (b_scale, out, out_scale, sorted_slots, tiles, pairs, ring_a, ring_s, ring_b0,
                        ring_b1, full, empty, 0, K, N, NB, TOP_K, FIRST, STAGES, LIMIT,
                        GROUP, REGISTERS, CORRECTED)),
            (_consume, (b_scale, out, out_scale, sorted_slots, tiles, pairs, ring_a, ring_s, ring_b0,
                        ring_b1, full, empty, 1, K, N, NB, TOP_K, FIRST, STAGES, LIMIT,
                        GROUP, REGISTERS, CORRECTED)),
            (_produce, (a, a_scale, b, sorted_slots, tiles, a_rows, ring_a, ring_s, ring_b0, ring_b1, full, empty,
                        K, N, NB, TOP_K, FIRST, STAGES, GROUP, TMA_A)),
        ],
        [4, 4],
        [232, 40],
    )
