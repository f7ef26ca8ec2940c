"""The compiled kernels as functions of tensors.

All take contiguous CPU tensors of BF16 or FP32 whose last dimensions are multiples of 16, and give a row the same bits
whatever other rows there are. Except attention they have the bits of the torch operations they replace, which `library`
checks before it hands them out.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.native.build import Unavailable, build

log = logging.getLogger(__name__)

LANES = 16  # FP32 lanes of the kernels' vectors: what their dimensions must be multiples of
DTYPES = (torch.bfloat16, torch.float32)
HEADS_AT_ONCE = 4  # HEADS in attention.c
SUM_LANES = (8, 4)  # FP32 lanes torch may sum with (its sums have no AVX-512 copy); the check finds which

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "paged_attention": [_P] * 8 + [_L, _I, _I, _I, _I, _I, _F, _I, _I],
    "add_rms_norm": [_P] * 5 + [_I, _I, _F, _I, _I, _I],
    "qk_norm_rope_store": [_P] * 8 + [_I] * 6 + [_F, _I, _I, _I],
    "negated_gate": [_P] * 3 + [_I] * 4,
    "swiglu": [_P] * 4 + [_I] * 4,
    "combine": [_P] * 4 + [_I] * 6,
    "quantise_fp8": [_P] * 3 + [_L] * 2 + [_I] * 3 + [_F, _I, _I],
    "dequantise_fp8": [_P] * 3 + [_L] * 2 + [_I] * 4,
    "choose": [_P] * 4 + [_I] * 4 + [_F, _F, _I, _I],
}


def fits(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether the kernels take this dtype and these last dimensions."""
    return dtype in DTYPES and all(size > 0 and size % LANES == 0 for size in sizes)


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a compiled kernel needs a contiguous tensor, got strides {tensor.stride()}")
    return tensor.data_ptr()


class Library:
    """The functions of one shared library; see the module for what all of them demand."""

    def __init__(self, path: Path, sum_lanes: int = SUM_LANES[0]) -> None:
        self.path = path
        self._width = sum_lanes
        # Attention takes long enough to let other Python threads run; the rest keeps the lock for microseconds.
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._call = {}
        for name, types in _SIGNATURES.items():
            function = getattr(free if name == "paged_attention" else held, name)
            function.argtypes, function.restype = types, None
            self._call[name] = function

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, blocks: Tensor, starts: Tensor,
                        lengths: Tensor, longest: int, block: int, kv_heads: int, scaling: float) -> Tensor:
        """Attention of rows q [T, heads * dim] over pools [slots, kv_heads * dim]; the shape of q comes back.

        Row t sees the first lengths[t] tokens (at most `longest`) of the sequence whose blocks of `block` slots are
        blocks[starts[t]...], all int32; where lengths[t] is 0 its output is zero. Scores, softmax and sums are FP32.
        """
        threads = torch.get_num_threads()
        dim = k_pool.shape[-1] // kv_heads
        out = torch.empty_like(q)
        scores = torch.empty(threads, HEADS_AT_ONCE * -(-max(longest, 1) // LANES) * LANES)
        self._call["paged_attention"](
            _address(q), _address(k_pool), _address(v_pool), out.data_ptr(), _address(blocks), _address(starts),
            _address(lengths), scores.data_ptr(), scores.shape[1], q.shape[0], kv_heads, q.shape[-1] // dim // kv_heads,
            dim, block, scaling, q.dtype == torch.bfloat16, threads)
        return out

    def add_rms_norm(self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, its RMSNorm times weight) of [T, H]; x itself where there is no delta.

        As transformers' RMSNorm: FP32 inside, rounded to the model's dtype before the weight multiplies.
        """
        out = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        columns = x.shape[-1]
        self._call["add_rms_norm"](
            _address(x), _address(delta), _address(weight), total.data_ptr(), out.data_ptr(), x.numel() // columns,
            columns, eps, self._width, x.dtype == torch.bfloat16, torch.get_num_threads())
        return total, out

    def qk_norm_rope_store(self, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
                           slots: Tensor, heads: int, kv_heads: int, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Queries [T, heads * dim] of qkv [T, (heads + 2 kv_heads) * dim]; keys and values go to the pools' slots.

        weight [heads + kv_heads, dim] of the heads' RMSNorm (None: no norm); cos, sin [T, rotated dimensions] in the
        model's dtype; slots int64 [at most T]; pools [slots, kv_heads * dim].
        """
        rows, dim = qkv.shape[0], k_pool.shape[-1] // kv_heads
        q = qkv.new_empty(rows, heads * dim)
        self._call["qk_norm_rope_store"](
            _address(qkv), _address(weight), _address(cos), _address(sin), _address(slots), q.data_ptr(),
            _address(k_pool), _address(v_pool), rows, slots.shape[0], heads, kv_heads, dim, cos.shape[-1], eps,
            self._width, qkv.dtype == torch.bfloat16, torch.get_num_threads())
        return q

    def swiglu(self, gate_up: Tensor, place: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up of [.., 2I] = [gate; up]: [.., I], each step rounded as batch_invariant.silu and torch do.

        With `place` int64 [R] only those rows are computed, and written to the same rows of `out`.
        """
        inter = gate_up.shape[-1] // 2
        rows = gate_up.numel() // (2 * inter) if place is None else place.shape[0]
        if out is None:
            out = gate_up.new_empty(*gate_up.shape[:-1], inter)
        bf16, threads = gate_up.dtype == torch.bfloat16, torch.get_num_threads()
        e = torch.empty(rows, inter)
        self._call["negated_gate"](_address(gate_up), _address(place), e.data_ptr(), rows, inter, bf16, threads)
        e.exp_()
        self._call["swiglu"](
            gate_up.data_ptr(), _address(place), e.data_ptr(), _address(out), rows, inter, bf16, threads)
        return out

    def combine(self, rows: Tensor, place: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [T, H]: over slots, in order, the FP32 sum of weights [T, k] times rows[place[t, slot]]."""
        tokens, slots = place.shape
        columns = rows.shape[-1]
        out = torch.empty(tokens, columns, dtype=dtype)
        self._call["combine"](
            _address(rows), _address(place), _address(weights), out.data_ptr(), tokens, slots, columns,
            rows.dtype == torch.bfloat16, dtype == torch.bfloat16, torch.get_num_threads())
        return out

    def choose(self, scores: Tensor, bias: Tensor | None, top_k: int, normalise: bool, eps: float,
               factor: float) -> tuple[Tensor, Tensor]:
        """Ids int64 [T, top_k] of the largest scores [T, E] + bias [E], FP32, and their weights; see routing.route."""
        tokens, experts = scores.shape
        ids, weights = torch.empty(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k)
        self._call["choose"](
            _address(scores), _address(bias), ids.data_ptr(), weights.data_ptr(), tokens, experts, top_k, normalise,
            eps, factor, self._width, torch.get_num_threads())
        return ids, weights

    def quantise_fp8(self, x: Tensor, q: Tensor, scale: Tensor, group: int, eps: float) -> None:
        """x [M, K] to q E4M3 [M, K] and FP32 scales [M, K / group] of any strides; see quant.fp8."""
        rows, columns = x.shape
        self._call["quantise_fp8"](
            _address(x), _address(q), scale.data_ptr(), *scale.stride(), rows, columns, group, eps,
            x.dtype == torch.bfloat16, torch.get_num_threads())

    def dequantise_fp8(self, q: Tensor, scale: Tensor, group: int) -> Tensor:
        """FP32 [M, K] of q E4M3 [M, K] and FP32 scales [M, K / group] of any strides."""
        rows, columns = q.shape
        out = torch.empty(rows, columns)
        self._call["dequantise_fp8"](
            _address(q), scale.data_ptr(), out.data_ptr(), *scale.stride(), rows, columns, group,
            torch.get_num_threads())
        return out


@lru_cache(maxsize=1)
def _found() -> tuple[Library | None, str | None]:
    """The library, or why there is none."""
    if os.environ.get("MOE_PARITY_NATIVE", "1").lower() in ("0", "off", "no", "false"):
        return None, "MOE_PARITY_NATIVE turns them off"
    try:
        path = build()
        from moe_kernels.native.check import differing

        wrong = []
        for lanes in SUM_LANES:
            try:
                found = Library(path, lanes)
            except (OSError, AttributeError) as error:
                raise Unavailable(f"{path} cannot be loaded: {error}") from error
            if not (wrong := differing(found)):
                return found, None
        raise Unavailable(f"results differ from torch's here: {', '.join(wrong)}")
    except Unavailable as error:
        log.warning("compiled CPU kernels are not used, torch's operations are (slower): %s", error)
        return None, str(error)


def library() -> Library | None:
    """The compiled and checked kernels, made on the first call; None where `unavailable_because` says why."""
    return _found()[0]


def unavailable_because() -> str | None:
    """Why `library()` is None; None when it is not."""
    return _found()[1]
