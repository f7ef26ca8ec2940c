"""The serving operations in Triton's interpreter on the CPU, one JSON object of measurements a case. Run by pytest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kernels import triton_interpreter

triton_interpreter.install()

import torch  # noqa: E402

from moe_kernels import numerics, ops  # noqa: E402
from moe_kernels.ops import attention, linear, reference  # noqa: E402
from moe_kernels.quant import fp8  # noqa: E402
from tests.kernels.ops_inputs import paged  # noqa: E402


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(got: torch.Tensor, want: torch.Tensor) -> dict:
    return {"rel": numerics.relative_l2(got.float(), want.float()), "dtype": str(got.dtype),
            "finite": bool(got.isfinite().all())}


def norm_case(tokens: int, width: int, splits: int) -> dict:
    """Sums, residual and quantised bytes against torch."""
    g = generator(tokens)
    x = torch.randn(splits or 1, tokens, width, generator=g)
    x = x if splits else x[0].bfloat16()
    x2, residual = (torch.randn(tokens, width, generator=g).bfloat16() for _ in range(2))
    weight = torch.rand(width, generator=g).bfloat16() + 0.5
    y, new, q = ops.add_rms_norm_quantised(x, residual, weight, 1e-5, x2)
    want, want_new = reference.add_rms_norm(x, residual, weight, 1e-5, x2)
    want_q = reference.quantise(y)
    alone = ops.rms_norm(residual, weight, 1e-5)
    return {**close(y, want), "residual_equal": torch.equal(new, want_new),
            "bytes_equal": torch.equal(q.q.view(torch.uint8), want_q.q.view(torch.uint8)),
            "scales_equal": torch.equal(q.scale, want_q.scale),
            "alone": numerics.relative_l2(alone.float(), reference.rms_norm(residual, weight, 1e-5).float()),
            "plain_equal": torch.equal(ops.add_rms_norm(x, residual, weight, 1e-5, x2)[0], y)}


def swiglu_case(tokens: int, width: int, splits: int) -> dict:
    """Both forms."""
    g = generator(tokens)
    size = (splits, tokens, 2 * width) if splits else (tokens, 2 * width)
    x = torch.randn(size, generator=g) * 3
    x = x if splits else x.bfloat16()
    got = ops.swiglu(x)
    case = close(got, reference.swiglu(x))
    if width % 128 == 0:
        q, want = ops.swiglu_quantised(x), reference.quantise(got)
        case["bytes_equal"] = torch.equal(q.q.view(torch.uint8), want.q.view(torch.uint8))
        case["scales_equal"] = torch.equal(q.scale, want.scale)
    return case


def rope_case(q_heads: int, kv_heads: int, dim: int, rotary: int, norm: bool) -> dict:
    """q, and what lies in the pool afterwards; other slots stay."""
    g = generator(dim + rotary)
    tokens = 5
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, generator=g).bfloat16()
    cos, sin = ops.rope_table(1e4, rotary, 300)
    positions, slots = torch.tensor([0, 7, 299, 12, 3]), torch.tensor([16, 31, 5, 40, 41])
    weights = [torch.rand(dim, generator=g).bfloat16() + 0.5 for _ in range(2)] if norm else [None, None]
    pools = [torch.full((4, 16, kv_heads, dim), 9.0).bfloat16() for _ in range(4)]
    got = ops.qk_norm_rope_store(qkv, positions, cos, sin, slots, *pools[:2], q_heads, *weights)
    want = reference.qk_norm_rope_store(qkv, positions, cos, sin, slots, *pools[2:], q_heads, *weights)
    return {**close(got, want), "k": numerics.relative_l2(pools[0].float(), pools[2].float()),
            "v_equal": torch.equal(pools[1], pools[3]),
            "others_kept": int((pools[0] == 9.0).all(-1).all(-1).sum()) == 64 - tokens}


def linear_case(tokens: int, rows: int, columns: int, kind: str, bias: bool) -> dict:
    """Against FP32 on the same quantised operands; the many-row kernel gives the few-row kernel's bits."""
    g = generator(tokens + rows)
    weight = torch.randn(rows, columns, generator=g) * columns**-0.5
    x = torch.randn(tokens, columns, generator=g).bfloat16()
    b = torch.randn(rows, generator=g).bfloat16() if bias else None
    layer: ops.Fp8Linear | ops.Bf16Linear
    if kind == "fp8":
        q, scale = fp8.quantize_weight_blocks(weight)
        layer = ops.Fp8Linear(q, scale, b)
        want = reference.linear_fp8(reference.quantise(x), q, scale, b, torch.bfloat16)
    else:
        layer = ops.Bf16Linear(weight.bfloat16(), b)
        want = (x.float() @ weight.bfloat16().float().t() + (0 if b is None else b.float())).bfloat16()
    got, parts = layer(x), layer.split(x)
    kept, linear.FEW = linear.FEW, 0
    layer.override = linear.Tile(16, 64, 4, 2)
    many = layer(x)
    linear.FEW = kept
    return {**close(got, want), "splits": layer.splits, "parts": list(parts.shape),
            "many_equal": torch.equal(many, got),
            "parts_equal": torch.equal(reference.summed(parts, torch.bfloat16), got)}


def router_case(tokens: int, width: int, experts: int) -> dict:
    """FP32 accuracy, and a row's bits alone and among others."""
    g = generator(tokens)
    x, weight = torch.randn(tokens, width, generator=g).bfloat16(), torch.randn(experts, width, generator=g)
    got = ops.router_logits(x, weight)
    exact = x.double() @ weight.double().t()
    return {**close(got, exact), "row_equal": torch.equal(ops.router_logits(x[-1:], weight)[0], got[-1])}


def decode_case(lengths: list[int], q_heads: int, kv_heads: int, dim: int, chunk: int) -> dict:
    """Against FP32 attention; a row alone, and with a wider table, keeps its bits; poisoned blocks are not read."""
    attention.CHUNK, attention.DECODE = chunk, {"BN": 16, "STAGES": 1, "num_warps": 4}
    q, k, v, table, seq = paged(lengths, q_heads, kv_heads, dim)
    got = ops.paged_decode(q, k, v, table, seq, dim**-0.5)
    want = reference.paged_decode(q, k, v, table, seq, dim**-0.5)
    row = max(range(len(lengths)), key=lengths.__getitem__)
    wide = torch.cat([table, torch.full((len(lengths), 7), 10**6, dtype=torch.int32)], 1)
    alone = ops.paged_decode(q[row : row + 1], k, v, wide[row : row + 1], seq[row : row + 1], dim**-0.5)
    case = {**close(got, want), "alone_equal": torch.equal(alone[0], got[row]),
            "empty_zero": all(bool((got[i] == 0).all()) for i, n in enumerate(lengths) if n == 0)}
    if dim == 128:
        quantised = ops.paged_decode_quantised(q, k, v, table, seq, dim**-0.5)
        wanted = reference.quantise(got.flatten(1))
        case["bytes_equal"] = torch.equal(quantised.q.view(torch.uint8), wanted.q.view(torch.uint8))
        case["scales_equal"] = torch.equal(quantised.scale, wanted.scale)
    return case


def prefill_case(lengths: list[int], counts: list[int], q_heads: int, kv_heads: int, dim: int, padding: int) -> dict:
    """Chunks of several sequences with padding rows; a prompt cut elsewhere keeps its bits."""
    attention.PREFILL = {"BM": 16, "BN": 16, "STAGES": 1, "num_warps": 4}
    _, k, v, table, seq = paged(lengths, q_heads, kv_heads, dim)
    total = sum(counts)
    q = torch.randn(total + padding, q_heads, dim, generator=generator(total)).bfloat16()
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    got = ops.paged_prefill(q, k, v, table, starts, seq, dim**-0.5, max(counts))
    want = reference.paged_prefill(q, k, v, table, starts, seq, dim**-0.5)
    cut = counts[0] // 2 + 1
    rest = ops.paged_prefill(q[cut : counts[0]], k, v, table[:1], torch.tensor([0, counts[0] - cut], dtype=torch.int32),
                             seq[:1], dim**-0.5, counts[0] - cut)
    return {**close(got, want), "padding_zero": bool((got[total:] == 0).all()),
            "cut_equal": torch.equal(rest, got[cut : counts[0]])}


CASES = {
    "norm_T3": lambda: norm_case(3, 384, 0),
    "norm_T5_splits": lambda: norm_case(5, 256, 3),
    "swiglu_T1": lambda: swiglu_case(1, 256, 0),
    "swiglu_T7_splits": lambda: swiglu_case(7, 256, 2),
    "swiglu_T5_ragged": lambda: swiglu_case(5, 96, 0),
    "rope_glm": lambda: rope_case(6, 2, 32, 16, False),
    "rope_norm": lambda: rope_case(4, 4, 64, 32, True),
    "rope_full": lambda: rope_case(3, 1, 32, 32, True),
    "linear_fp8_T1": lambda: linear_case(1, 256, 1408, "fp8", False),
    "linear_fp8_T7_bias": lambda: linear_case(7, 192, 256, "fp8", True),
    "linear_fp8_T19_bias_split": lambda: linear_case(19, 128, 1280, "fp8", True),
    "linear_fp8_T2_empty_part": lambda: linear_case(2, 64, 5248, "fp8", False),
    "linear_bf16_T3": lambda: linear_case(3, 200, 1408, "bf16", False),
    "linear_bf16_T17_bias": lambda: linear_case(17, 64, 256, "bf16", True),
    "router_T1": lambda: router_case(1, 640, 7),
    "router_T37": lambda: router_case(37, 640, 16),
    "decode_long": lambda: decode_case([70, 0, 1, 33], 4, 2, 32, 32),
    "decode_quantised": lambda: decode_case([17, 40], 3, 1, 128, 16),
    "decode_more_chunks_than_splits": lambda: decode_case([16 * 40 + 3, 5], 2, 1, 16, 16),
    "prefill": lambda: prefill_case([37, 20, 1], [37, 9, 1], 4, 2, 32, 5),
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items() if len(sys.argv) < 2 or name in sys.argv[1:]}))
