"""Norms, activation and the step between the qkv projection and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels.ops import reference
from moe_kernels.ops.reference import Quantised
from moe_kernels.ops.runtime import ceil_div, kernels_run, launch_options, next_power_of_2, splits_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * round(x / rms(x)): x [T, H] -> [T, H] in x's dtype."""
    if not kernels_run(x):
        return reference.rms_norm(x, weight, eps)
    return _norm(x, None, None, weight, eps, quantise=False)[0]


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantised]:
    """`rms_norm` and its result quantised for an `Fp8Linear`; H a multiple of 128."""
    if not kernels_run(x):
        y = reference.rms_norm(x, weight, eps)
        return y, reference.quantise(y)
    y, _, quantised = _norm(x, None, None, weight, eps, quantise=True)
    return y, quantised


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, new_residual), both [T, H]: new_residual = residual + x, or residual + (x + x2); y = rms_norm of it.

    x and x2 are [T, H] or split sums. Each addition rounds to the residual's dtype, in the order of transformers'
    decoder layer: routed + shared experts first, then the residual.
    """
    if not kernels_run(residual):
        return reference.add_rms_norm(x, residual, weight, eps, x2)
    return _norm(x, x2, residual, weight, eps, quantise=False)[:2]


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor, Quantised]:
    """(y, new_residual, y quantised for an `Fp8Linear`); H a multiple of 128."""
    if not kernels_run(residual):
        y, new = reference.add_rms_norm(x, residual, weight, eps, x2)
        return y, new, reference.quantise(y)
    return _norm(x, x2, residual, weight, eps, quantise=True)


def _norm(
    x: Tensor, x2: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float, *, quantise: bool
) -> tuple[Tensor, Tensor, Quantised]:
    from moe_kernels.ops.kernels.norm import norm_kernel

    like = x if residual is None else residual
    tokens, width = like.shape
    y = torch.empty_like(like)
    new = torch.empty_like(like) if residual is not None else y
    q = scale = y
    if quantise:
        q = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=like.device)
        scale = torch.empty(width // 128, tokens, dtype=torch.float32, device=like.device)
    if tokens:
        block = max(128, next_power_of_2(width))
        norm_kernel[(tokens,)](
            x, x if x2 is None else x2, x if residual is None else residual, weight, y, new, q, scale, tokens, eps,
            H=width, BLOCK=block, SPLITS=splits_of(x), SPLITS2=0 if x2 is None else splits_of(x2),
            HAS_X2=x2 is not None, HAS_RESIDUAL=residual is not None, QUANTISE=quantise,
            num_warps=min(16, max(1, block // 256)), **launch_options(x),
        )
    return y, new, Quantised(q, scale)


def swiglu(gate_up: Tensor) -> Tensor:
    """round(silu(gate)) * up, BF16 [T, I] from [T, 2I] (gate first) or split sums FP32 [S, T, 2I]."""
    dtype = torch.bfloat16 if gate_up.ndim == 3 else gate_up.dtype
    if not kernels_run(gate_up):
        return reference.swiglu(gate_up, dtype)
    return _swiglu(gate_up, dtype, quantise=False).q


def swiglu_quantised(gate_up: Tensor) -> Quantised:
    """`swiglu` quantised for an `Fp8Linear`; I a multiple of 128."""
    if not kernels_run(gate_up):
        return reference.quantise(swiglu(gate_up))
    return _swiglu(gate_up, torch.bfloat16 if gate_up.ndim == 3 else gate_up.dtype, quantise=True)


def _swiglu(gate_up: Tensor, dtype: torch.dtype, *, quantise: bool) -> Quantised:
    from moe_kernels.ops.kernels.norm import swiglu_kernel

    tokens, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn if quantise else dtype, device=gate_up.device)
    scale = torch.empty(ceil_div(width, 128), tokens, dtype=torch.float32, device=gate_up.device) if quantise else out
    if tokens:
        rows = min(8, next_power_of_2(tokens))
        swiglu_kernel[(ceil_div(tokens, rows) * ceil_div(width, 128),)](
            gate_up, out, scale, tokens, INTER=width, BT=rows, SPLITS=splits_of(gate_up), DTYPE=triton_dtype(dtype),
            QUANTISE=quantise, num_warps=1 if rows <= 2 else 4, **launch_options(gate_up),
        )
    return Quantised(out, scale)


def triton_dtype(dtype: torch.dtype) -> object:
    """Triton's name of a float dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def qk_norm_rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    q_heads: int, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:
    """Norm (where weights are given) and rotate q and k, write k and v to the pool; returns q [T, q_heads, D].

    qkv [T, (q_heads + 2 kv_heads) * D], bias included, or split sums; positions int32 or int64 [T]; cos, sin FP32
    [P, R/2] from `rope_table` (R of the D dimensions rotate, by halves; values are rounded to qkv's dtype as in
    transformers); slots int64 or int32 [T] = block * block_size + offset; k_pool, v_pool [blocks, block_size,
    kv_heads, D], one layer, D a power of two on a GPU. Rows that share a slot (padding) race harmlessly: what lies
    there is unspecified.
    """
    if not kernels_run(qkv):
        return reference.qk_norm_rope_store(qkv, positions, cos, sin, slots, k_pool, v_pool, q_heads, q_weight,
                                            k_weight, eps)
    from moe_kernels.ops.kernels.rope import rope_kernel

    tokens, (kv_heads, dim) = qkv.shape[-2], k_pool.shape[-2:]
    q = torch.empty(tokens, q_heads, dim, dtype=k_pool.dtype, device=qkv.device)
    if tokens:
        heads = min(math.gcd(q_heads, kv_heads) & -math.gcd(q_heads, kv_heads), 4 if tokens <= 16 else 8)
        norm = q_weight is not None and k_weight is not None
        rope_kernel[(tokens * (q_heads + 2 * kv_heads) // heads,)](
            qkv, positions, cos, sin, slots, k_pool, v_pool, q, q_weight if norm else q, k_weight if norm else q,
            tokens, eps, HQ=q_heads, HKV=kv_heads, D=dim, HALF=cos.shape[1], HB=heads, SPLITS=splits_of(qkv),
            NORM=norm, num_warps=2 if tokens <= 16 else 4, enable_fp_fusion=False, **launch_options(qkv),
        )
    return q
