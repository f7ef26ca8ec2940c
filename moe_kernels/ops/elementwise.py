"""Norms, activation and the step between the qkv projection and attention."""

from __future__ import annotations

from torch import Tensor

from moe_kernels.ops import reference
from moe_kernels.ops.reference import Quantised


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * round(x / rms(x)): x [T, H] -> [T, H] in x's dtype."""
    return reference.rms_norm(x, weight, eps)


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantised]:
    """`rms_norm` and its result quantised for an `Fp8Linear`; H a multiple of 128."""
    y = reference.rms_norm(x, weight, eps)
    return y, reference.quantise(y)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, new_residual), both [T, H]: new_residual = residual + x, or residual + (x + x2); y = rms_norm of it.

    x and x2 are [T, H] or split sums. Each addition rounds to the residual's dtype, in the order of transformers'
    decoder layer: routed + shared experts first, then the residual.
    """
    return reference.add_rms_norm(x, residual, weight, eps, x2)


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x2: Tensor | None = None
) -> tuple[Tensor, Tensor, Quantised]:
    """(y, new_residual, y quantised for an `Fp8Linear`); H a multiple of 128."""
    y, new = reference.add_rms_norm(x, residual, weight, eps, x2)
    return y, new, reference.quantise(y)


def swiglu(gate_up: Tensor) -> Tensor:
    """round(silu(gate)) * up, BF16 [T, I] from [T, 2I] (gate first) or split sums FP32 [S, T, 2I]."""
    return reference.swiglu(gate_up) if gate_up.ndim == 3 else reference.swiglu(gate_up, gate_up.dtype)


def swiglu_quantised(gate_up: Tensor) -> Quantised:
    """`swiglu` quantised for an `Fp8Linear`; I a multiple of 128."""
    return reference.quantise(swiglu(gate_up))


def qk_norm_rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    q_heads: int, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:
    """Norm (where weights are given) and rotate q and k, write k and v to the pool; returns q [T, q_heads, D].

    qkv [T, (q_heads + 2 kv_heads) * D], bias included, or split sums; positions int32 or int64 [T]; cos, sin FP32
    [P, R/2] from `rope_table` (R of the D dimensions rotate, by halves; values are rounded to qkv's dtype as in
    transformers); slots int64 or int32 [T] = block * block_size + offset; k_pool, v_pool [blocks, block_size,
    kv_heads, D], one layer. Rows that share a slot (padding) race harmlessly: what lies there is unspecified.
    """
    return reference.qk_norm_rope_store(qkv, positions, cos, sin, slots, k_pool, v_pool, q_heads, q_weight, k_weight,
                                        eps)
