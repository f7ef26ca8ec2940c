"""The operations of a decoder layer outside the MoE block, for serving: Triton on a GPU, torch elsewhere.

All can be captured in a CUDA graph: no host synchronisation, launches that depend on shapes only. A row's bits do not
depend on the other rows. An FP32 tensor [S, T, N] where BF16 [T, N] is expected holds *split sums*: the parts of a
linear whose K was split, which the consumer adds in order (this saves a launch); `Fp8Linear.split` makes them.
"""

from moe_kernels.ops.attention import paged_decode, paged_decode_quantised, paged_prefill
from moe_kernels.ops.elementwise import (
    add_rms_norm,
    add_rms_norm_quantised,
    qk_norm_rope_store,
    rms_norm,
    rms_norm_quantised,
    swiglu,
    swiglu_quantised,
)
from moe_kernels.ops.linear import Bf16Linear, Fp8Linear, quantise, router_logits
from moe_kernels.ops.reference import Quantised, greedy_argmax, rope_table

__all__ = [
    "Bf16Linear", "Fp8Linear", "Quantised", "add_rms_norm", "add_rms_norm_quantised", "greedy_argmax", "paged_decode",
    "paged_decode_quantised", "paged_prefill", "qk_norm_rope_store", "quantise", "rms_norm", "rms_norm_quantised",
    "rope_table", "router_logits", "swiglu", "swiglu_quantised",
]
