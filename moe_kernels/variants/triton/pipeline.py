"""Launches the FP8 kernels of one layer, a method per stage, without a host synchronisation anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from moe_kernels.records import MoEShape, Routing, RoutingConfig
from moe_kernels.variants.triton.combine import combine_kernel
from moe_kernels.variants.triton.config import GemmConfig
from moe_kernels.variants.triton.gemm import gemm1_kernel, gemm2_kernel
from moe_kernels.variants.triton.quant import quantise_kernel
from moe_kernels.variants.triton.route import route_quantise_kernel
from moe_kernels.variants.triton.sort import count_kernel, prefix_kernel, scatter_kernel
from moe_kernels.variants.triton.tiles import max_tiles

FUSED_TOKENS = 512  # above, quantisation does not share the routing launch
PREFIX_CHUNKS = 64  # above, a launch of its own sums the histograms


@dataclass(frozen=True)
class Order:
    """Pairs sorted by expert: `slots` int32 [T * k] (slot = token * k + j), `tiles` int32 [max_tiles, 4]."""

    slots: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class Sizes:
    """Launch sizes of the routing kernels for a model shape and a token count."""

    tokens: int
    experts: int
    top_k: int

    @property
    def padded(self) -> int:
        """Experts rounded up to a power of two."""
        return max(16, triton.next_power_of_2(self.experts))

    @property
    def chunk(self) -> int:
        """Tokens one program routes; its [chunk, experts] scores stay in registers."""
        return min(32 if self.padded <= 128 else 16, triton.next_power_of_2(self.tokens))

    @property
    def chunks(self) -> int:
        """Programs that route."""
        return triton.cdiv(self.tokens, self.chunk)

    @property
    def warps(self) -> int:
        """Warps of a routing program: one for one token, whose reductions then need no barrier."""
        elements = self.chunk * self.padded
        return 1 if elements <= 256 else 4 if elements <= 1024 else 8


def quant_block(tokens: int) -> int:
    """Tokens a quantising program covers: neighbouring scales are then stored together."""
    return min(32, triton.next_power_of_2(tokens))


def _empty(like: Tensor, *size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=like.device)


def route_sort_quantise(
    logits: Tensor, bias: Tensor | None, hidden: Tensor | None, config: RoutingConfig, block_m: int,
    *, column_major: bool = True, sort: bool = True, overlap: bool = False,
) -> tuple[Routing, Order | None, Tensor | None, Tensor | None]:
    """Routing, order and (where `hidden` is given) x_q E4M3 [T, H] with scales [H/128, T] or [T, H/128].

    One launch for up to 32 tokens (16 with more than 128 experts); two up to FUSED_TOKENS; above, a quantiser
    of its own, which runs at a higher occupancy, with `overlap` on a second stream beside routing and sort.
    """
    tokens = logits.shape[0]
    sizes = Sizes(tokens, config.num_experts, config.top_k)
    pairs, experts, k = tokens * config.top_k, config.num_experts, config.top_k
    ids64 = _empty(logits, tokens, k, dtype=torch.int64)
    weights = _empty(logits, tokens, k, dtype=torch.float32)
    slots = _empty(logits, pairs, dtype=torch.int32)
    tiles = _empty(logits, max_tiles(pairs, experts, block_m), 4, dtype=torch.int32)
    single = sizes.chunks == 1
    ids = ranks = histogram = slots
    if not single:
        ids, ranks = (_empty(logits, pairs, dtype=torch.int32) for _ in range(2))
        histogram = _empty(logits, sizes.chunks, experts, dtype=torch.int32)
    x_q = x_scale = None
    quant_programs, block_q, width = 0, 1, 128
    side = None
    if hidden is not None and tokens > FUSED_TOKENS:
        x_q, x_scale = quantised_like(hidden, column_major)
        if overlap and hidden.is_cuda:
            side = side_stream(hidden.device)
            side.wait_stream(torch.cuda.current_stream(hidden.device))
            with torch.cuda.stream(side):
                _quantise(hidden, x_q, x_scale, column_major)
        else:
            _quantise(hidden, x_q, x_scale, column_major)
    elif hidden is not None:
        width = hidden.shape[1]
        x_q, x_scale = quantised_like(hidden, column_major)
        block_q = quant_block(tokens)
        quant_programs = triton.cdiv(tokens, block_q) * (width // 128)
    route_quantise_kernel[(sizes.chunks + quant_programs,)](
        logits, bias if bias is not None else weights, hidden if quant_programs else weights,
        ids64, ids, weights, ranks, histogram, slots, tiles,
        x_q if quant_programs else weights, x_scale if quant_programs else weights,
        tokens, config.routed_scaling_factor, sizes.chunks,
        H=width, E=experts, E_PAD=sizes.padded, K=k, K_PAD=triton.next_power_of_2(k), BT=sizes.chunk,
        HAS_BIAS=bias is not None, NORM=config.norm_topk_prob, SINGLE=single, BLOCK_M=block_m,
        COLUMN_MAJOR=column_major, MODE="fp8" if quant_programs else "none", BQ=block_q, num_warps=sizes.warps,
    )
    routing = Routing(ids64, weights)
    if sort and not single:
        _scatter(ids, ranks, histogram, slots, tiles, sizes, block_m)
    if side is not None:  # all memory above is the main stream's, which goes on only after the quantiser
        torch.cuda.current_stream(logits.device).wait_stream(side)
    return routing, Order(slots, tiles) if sort else None, x_q, x_scale


def sort_by_expert(ids: Tensor, experts: int, block_m: int) -> Order:
    """The order of pairs for ids int64 [T, k] made elsewhere; ids within a row must differ."""
    tokens, k = ids.shape
    sizes, pairs = Sizes(tokens, experts, k), tokens * k
    slots = _empty(ids, pairs, dtype=torch.int32)
    tiles = _empty(ids, max_tiles(pairs, experts, block_m), 4, dtype=torch.int32)
    single = sizes.chunks == 1
    ids32 = ranks = histogram = slots
    if not single:
        ids32, ranks = (_empty(ids, pairs, dtype=torch.int32) for _ in range(2))
        histogram = _empty(ids, sizes.chunks, experts, dtype=torch.int32)
    count_kernel[(sizes.chunks,)](
        ids, ids32, ranks, histogram, slots, tiles, tokens,
        E=experts, E_PAD=sizes.padded, K=k, BT=sizes.chunk, SINGLE=single, BLOCK_M=block_m, num_warps=sizes.warps,
    )
    if not single:
        _scatter(ids32, ranks, histogram, slots, tiles, sizes, block_m)
    return Order(slots, tiles)


def _scatter(
    ids: Tensor, ranks: Tensor, histogram: Tensor, slots: Tensor, tiles: Tensor, sizes: Sizes, block_m: int
) -> None:
    before, totals, prefix = ids, ids, sizes.chunks > PREFIX_CHUNKS
    if prefix:
        before, totals = torch.empty_like(histogram), _empty(ids, sizes.experts, dtype=torch.int32)
        prefix_kernel[(triton.cdiv(sizes.experts, 16),)](
            histogram, before, totals, sizes.chunks, E=sizes.experts, BE=16, BC=128, num_warps=4
        )
    scatter_kernel[(sizes.chunks,)](
        ids, ranks, histogram, before, totals, slots, tiles, sizes.tokens, sizes.chunks,
        E=sizes.experts, E_PAD=sizes.padded, K=sizes.top_k, BT=sizes.chunk, BC=max(1, 4096 // sizes.padded),
        BP=triton.next_power_of_2(sizes.chunk * sizes.top_k), BLOCK_M=block_m, PREFIX=prefix, num_warps=4,
    )


def quantised_like(hidden: Tensor, column_major: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs of the quantiser for hidden [T, H]."""
    tokens, width = hidden.shape
    groups = width // 128
    x_q = _empty(hidden, tokens, width, dtype=torch.float8_e4m3fn)
    size = (groups, tokens) if column_major else (tokens, groups)
    return x_q, _empty(hidden, *size, dtype=torch.float32)


def quantise_hidden(hidden: Tensor, *, column_major: bool = True) -> tuple[Tensor, Tensor]:
    """x_q E4M3 [T, H] and scales FP32, [H/128, T] column-major or [T, H/128] row-major."""
    x_q, x_scale = quantised_like(hidden, column_major)
    _quantise(hidden, x_q, x_scale, column_major)
    return x_q, x_scale


def _quantise(hidden: Tensor, x_q: Tensor, x_scale: Tensor, column_major: bool) -> None:
    tokens, width = hidden.shape
    block = quant_block(tokens)
    quantise_kernel[(triton.cdiv(tokens, block) * (width // 128),)](
        hidden, x_q, x_scale, tokens, H=width, BQ=block, COLUMN_MAJOR=column_major, num_warps=4
    )


@dataclass(frozen=True)
class Fp8Weights:
    """Weights of one layer as the kernels read them; descriptors are made once per tile height."""

    w13: Tensor  # E4M3 [E, 2I, H], [gate; up]
    w13_scale: Tensor  # FP32 [E, 2I/128, H/128]
    w2: Tensor  # E4M3 [E, H, I]
    w2_scale: Tensor  # FP32 [E, H/128, I/128]
    shape: MoEShape
    tma: bool
    limit: float = 0.0

    def operand(self, weight: Tensor, rows: int) -> object:
        """The tensor itself, or a TMA descriptor of [rows, 128] tiles over its [E * N, K] view."""
        if not self.tma:
            return weight
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[-1]), [rows, 128])


def special_operand(matrix: Tensor) -> object:
    """A TMA descriptor of [128, 128] tiles of E4M3 [..., K] for the warp-specialised kernel."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = matrix.view(-1, matrix.shape[-1])
    return TensorDescriptor.from_tensor(flat, [128, 128], NVMMASharedLayout(128, 8, 2))


def gemm1(w: Fp8Weights, x_q: Tensor, x_scale: Tensor, order: Order, config: GemmConfig) -> tuple[Tensor, Tensor]:
    """h_q E4M3 [pairs, I] in sorted order and h_scale FP32 [I/128, pairs]."""
    pairs, width = order.slots.numel(), w.shape.intermediate_size
    h_q = _empty(x_q, pairs, width, dtype=torch.float8_e4m3fn)
    h_scale = _empty(x_q, width // 128, pairs, dtype=torch.float32)
    if config.special1:
        _specialised(w, x_q, x_scale, w.w13, w.w13_scale, h_q, h_scale, order, config, first=True)
        return h_q, h_scale
    gemm1_kernel[(order.tiles.shape[0] * (width // 128),)](
        x_q, x_scale, w.operand(w.w13, 128), w.w13_scale, h_q, h_scale, order.slots, order.tiles,
        x_q.shape[0], pairs, H=w.shape.hidden_size, INTER=width, TOP_K=w.shape.top_k, BLOCK_M=config.block_m,
        SWAP=config.swap1, TMA=w.tma, STAGES=config.stages1, LIMIT=w.limit,
        num_warps=config.warps1, num_stages=config.stages1,
    )
    return h_q, h_scale


def gemm2(
    w: Fp8Weights, h_q: Tensor, h_scale: Tensor, order: Order, config: GemmConfig, dtype: torch.dtype
) -> Tensor:
    """y `dtype` [T * k, H]: the experts' outputs in slot order, not yet weighted."""
    pairs, width = order.slots.numel(), w.shape.hidden_size
    y = _empty(h_q, pairs, width, dtype=dtype)
    if config.special2:
        _specialised(w, h_q, h_scale, w.w2, w.w2_scale, y, h_scale, order, config, first=False)
        return y
    gemm2_kernel[(order.tiles.shape[0] * (width // config.block_n),)](
        h_q, h_scale, w.operand(w.w2, config.block_n), w.w2_scale, y, order.slots, order.tiles, pairs,
        H=width, INTER=w.shape.intermediate_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        SWAP=config.swap2, TMA=w.tma, STAGES=config.stages2, num_warps=config.warps2, num_stages=config.stages2,
    )
    return y


def _specialised(
    w: Fp8Weights, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, out_scale: Tensor,
    order: Order, config: GemmConfig, *, first: bool,
) -> None:
    from moe_kernels.variants.triton.specialised import grouped_kernel  # Gluon is imported only where it runs

    columns, width = b.shape[1], b.shape[2]
    programs = min(order.tiles.shape[0] * (columns // 256), multiprocessors(a.device))
    tma_a = config.tma2 and not first
    grouped_kernel[(programs,)](
        special_operand(a) if tma_a else a, a_scale, special_operand(b), b_scale, out, out_scale, order.slots,
        order.tiles, a.shape[0], order.slots.numel(), K=width, N=columns, TOP_K=w.shape.top_k, FIRST=first,
        STAGES=config.stages1 if first else config.stages2, LIMIT=w.limit,
        GROUP=config.group1 if first else config.group2,
        REGISTERS=config.registers1 if first else config.registers2, TMA_A=tma_a,
        CORRECTED=config.corrected1 and first, num_warps=4,
    )


@lru_cache(maxsize=8)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that `overlap` quantises on."""
    return torch.cuda.Stream(device)


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU: one persistent program each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def combine(y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """out `dtype` [T, H] = FP32 sum over j of weights[t, j] y[t, j], j in rising order."""
    tokens, k = weights.shape
    width = y.shape[1]
    out = _empty(y, tokens, width, dtype=dtype)
    block = min(1024, triton.next_power_of_2(width))
    combine_kernel[(tokens * triton.cdiv(width, block),)](y, weights, out, H=width, K=k, BLOCK=block, num_warps=4)
    return out
