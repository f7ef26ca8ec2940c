"""FP8 linear for few rows (Hopper, Gluon): weights are on their way before the launch in front has ended.

Weights never change, so a block fills its ring of shared-memory stages with weight tiles first and only then waits for
the launch that makes its activations; with dependent launches this hides the start of one kernel in the end of the
other. All scales of the block's part of K are multiplied and laid in shared memory once, so that no load from global
memory stands in the loop. The order of sums, and so the bits, are those of `linear.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _fetch_weights(w, ring_w, full, stage, row, block, PLANNED: gl.constexpr, wanted):
    mbarrier.expect(full.index(stage), PLANNED, pred=wanted)
    tma.async_copy_global_to_shared(w, [row, block * 128], full.index(stage), ring_w.index(stage), pred=wanted)


@gluon.jit(do_not_specialize=["tokens"])
def linear_stream_kernel(
    x, x_scale, w, w_scale, bias, out, tokens,
    N: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, BT: gl.constexpr, BN: gl.constexpr,
    HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, PART_PAD: gl.constexpr, PDL: gl.constexpr,
):
    """As `linear.linear_few_kernel` for T <= BT. x, w: descriptors of [BT, 128] and [BN, 128]. Grid: N / BN * SPLITS.

    PART_PAD: the blocks of a part of K rounded up to a power of two.
    """
    WARPS: gl.constexpr = gl.num_warps()
    NB: gl.constexpr = (N + BN - 1) // BN
    KB: gl.constexpr = K // 128
    PART: gl.constexpr = (KB + SPLITS - 1) // SPLITS
    BYTES: gl.constexpr = (BN + BT) * 128
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 32])
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    ring_w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], w.layout)
    ring_x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BT, 128], x.layout)
    scales = gl.allocate_shared_memory(gl.float32, [PART_PAD, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    pid = gl.program_id(0)
    row = (pid % NB) * BN
    split = pid // NB
    first = split * PART
    count = gl.minimum(KB - first, PART)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        _fetch_weights(w, ring_w, full, stage, row, first + stage, BYTES, stage < count)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [0, (first + stage) * 128], full.index(stage), ring_x.index(stage),
                                        pred=stage < count)
    blocks = gl.arange(0, PART_PAD, layout=gl.SliceLayout(1, flat))
    rows = gl.arange(0, BT, layout=gl.SliceLayout(0, flat))
    kept = blocks < count
    s_x = gl.load(x_scale + (first + blocks).to(gl.int64)[:, None] * tokens + rows[None, :],
                  mask=kept[:, None] & (rows < tokens)[None, :], other=0.0)
    s_w = gl.load(w_scale + (row // 128) * KB + first + blocks, mask=kept, other=0.0)
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales._reinterpret(gl.float32, [PART_PAD, BT], plane).store(s_x * s_w[:, None])
    gl.thread_barrier()
    total = gl.zeros([BN, BT], gl.float32, mma)
    part = gl.zeros([BN, BT], gl.float32, mma)
    for index in range(count):
        slot = index % STAGES
        mbarrier.wait(full.index(slot), (index // STAGES) & 1)
        part = warpgroup_mma(ring_w.index(slot), ring_x.index(slot).permute((1, 0)), part, use_acc=False,
                             is_async=True)
        scale = scales.index(index).load(gl.SliceLayout(0, mma))
        part = warpgroup_mma_wait(0, deps=[part])
        gl.thread_barrier()  # every warp has read the stage
        later = index + STAGES
        _fetch_weights(w, ring_w, full, slot, row, first + later, BYTES, later < count)
        tma.async_copy_global_to_shared(x, [0, (first + later) * 128], full.index(slot), ring_x.index(slot),
                                        pred=later < count)
        total += part * scale[None, :]
    columns = row + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    tokens_at = gl.arange(0, BT, layout=gl.SliceLayout(0, mma))
    if HAS_BIAS:
        total += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    where = (split.to(gl.int64) * tokens + tokens_at)[None, :] * N + columns[:, None]
    gl.store(out + where, total.to(out.dtype.element_ty), mask=(tokens_at < tokens)[None, :] & (columns < N)[:, None])
