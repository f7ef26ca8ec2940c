"""Holds the compiled kernels against torch on small random data, before anything relies on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.batch_invariant import silu
from moe_kernels.native.bindings import DTYPES, Library
from moe_kernels.ops.reference import rms_norm

ATTENTION_BOUND = {torch.bfloat16: 2.0**-6, torch.float32: 1e-5}  # of values of order 1


def differing(library: Library) -> list[str]:
    """Names of the functions whose results are not torch's: to the bit, for attention within rounding."""
    checks: dict[str, Callable[[Library, torch.Generator, torch.dtype], bool]] = {
        "add_rms_norm": _norms, "qk_norm_rope_store": _queries, "swiglu": _swiglu, "combine": _combine,
        "choose": _choose, "quantise_fp8": _fp8, "paged_attention": _attention}
    wrong = []
    with torch.inference_mode():
        for name, check in checks.items():
            if not all(check(library, torch.Generator().manual_seed(3), dtype) for dtype in DTYPES):
                wrong.append(name)
    return wrong


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, dim] on the first cos.shape[-1] dimensions, whose halves may differ."""
    turning = cos.shape[-1]
    half = turning // 2
    first, rest = x[..., :turning], x[..., turning:]
    turned = torch.cat([-first[..., half:], first[..., :half]], dim=-1)
    return torch.cat([first * cos[:, None] + turned * sin[:, None], rest], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """The last query q [kv_heads, per_kv, dim] over keys and values [tokens, kv_heads, dim], in FP64."""
    q, k, v = q.double(), k.double(), v.double()
    scores = torch.einsum("hgd,thd->hgt", q, k) * scaling
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), v)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _norms(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    same = True
    for rows, columns in ((1, 64), (5, 512), (3, 1056), (2, 4096)):
        x, delta, weight = (_random(g, dtype, *s) for s in ((rows, columns), (rows, columns), (columns,)))
        total, out = library.add_rms_norm(x, weight, 1e-5, delta)
        same &= torch.equal(total, x + delta) and torch.equal(out, rms_norm(x + delta, weight, 1e-5))
        same &= torch.equal(library.add_rms_norm(x, weight, 1e-5)[1], rms_norm(x, weight, 1e-5))
    return same


def _queries(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    rows, heads, kv_heads, dim, turning = 5, 6, 2, 64, 32
    qkv, weight = _random(g, dtype, rows, (heads + 2 * kv_heads) * dim), _random(g, dtype, heads + kv_heads, dim)
    cos, sin = _random(g, dtype, rows, turning), _random(g, dtype, rows, turning)
    slots = torch.tensor([7, 0, 3, 12])
    same = True
    for norm in (weight, None):
        k_pool, v_pool = (torch.zeros(16, kv_heads * dim, dtype=dtype) for _ in range(2))
        q = library.qk_norm_rope_store(qkv, norm, 1e-5, cos, sin, slots, heads, kv_heads, k_pool, v_pool)
        qk = qkv.view(rows, -1, dim)[:, : heads + kv_heads]
        qk = rope(qk if norm is None else rms_norm(qk, norm, 1e-5), cos, sin)
        stored = slots.shape[0]
        same &= torch.equal(q, qk[:, :heads].flatten(1))
        same &= torch.equal(k_pool[slots], qk[:stored, heads:].flatten(1))
        same &= torch.equal(v_pool[slots], qkv[:stored, (heads + kv_heads) * dim :])
        same &= int(k_pool.any(-1).sum()) == stored
    return same


def _swiglu(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    gate_up = _random(g, dtype, 24, 2 * 96) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    want = silu(gate) * up
    place = torch.tensor([3, 17, 20, 0, 9])
    scattered = library.swiglu(gate_up, place, torch.zeros(24, 96, dtype=dtype))
    return (torch.equal(library.swiglu(gate_up), want) and torch.equal(scattered[place], want[place])
            and int(scattered.any(-1).sum()) == place.shape[0])


def _combine(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    rows, weights = _random(g, dtype, 40, 96), _random(g, torch.float32, 7, 5)
    place = torch.randint(0, 40, (7, 5), generator=g)
    picked = rows[place].float() * weights.unsqueeze(-1)
    total = picked[:, 0]
    for slot in range(1, 5):
        total = total + picked[:, slot]
    return all(torch.equal(library.combine(rows, place, weights, kind), total.to(kind)) for kind in DTYPES)


def _choose(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    same = True
    for experts, top_k in ((16, 4), (40, 7), (64, 8), (256, 20)):
        scores = torch.rand(9, experts, generator=g).to(dtype).float()  # BF16 ones have ties
        bias = torch.randint(-3, 4, (experts,), generator=g) / 8
        for added in (bias, None):
            ids, weights = library.choose(scores, added, top_k, True, 1e-20, 2.5)
            keys = scores if added is None else scores + added
            want = keys.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            chosen = scores.gather(-1, want)
            same &= torch.equal(ids, want)
            same &= torch.equal(weights, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5)
    return same


def _fp8(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    x = _random(g, dtype, 6, 4, 64) * 2.0 ** torch.randint(-30, 6, (6, 4, 64), generator=g)
    x[0, 0], x[1, 1, 5], x[2, 2, 7], x[3, 3] = 0.0, torch.nan, -torch.inf, x[3, 3] / x[3, 3].abs().amax() * 448.0
    x = x.to(dtype)
    amax = x.float().abs().amax(-1).clamp_(min=1e-10)
    want_scale = amax / torch.tensor(448.0)
    want = (x.float() / want_scale.unsqueeze(-1)).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    q, scale = torch.empty(6, 256, dtype=torch.float8_e4m3fn), torch.empty(4, 6).t()
    library.quantise_fp8(x.flatten(1), q, scale, 64, 1e-10)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    step = torch.tensor([[0.75]])
    back = library.dequantise_fp8(every, step, 256)
    return (torch.equal(q.view(torch.uint8) & 0x7F, want.flatten(1).view(torch.uint8) & 0x7F)
            and torch.equal(q.float().nan_to_num(7.0), want.flatten(1).float().nan_to_num(7.0))
            and torch.equal(scale.nan_to_num(7.0), want_scale.nan_to_num(7.0))
            and torch.equal(back.nan_to_num(7.0), (every.float() * step).nan_to_num(7.0)))


def _attention(library: Library, g: torch.Generator, dtype: torch.dtype) -> bool:
    block, lengths = 16, [1, 16, 33, 75, 0]
    good = True
    for kv_heads, per_kv, dim in ((2, 4, 64), (1, 6, 128), (2, 3, 32)):
        width = kv_heads * dim
        k_pool, v_pool = _random(g, dtype, 20 * block, width), _random(g, dtype, 20 * block, width)
        q = _random(g, dtype, len(lengths), kv_heads * per_kv * dim)
        blocks = torch.randperm(20, generator=g)[: len(lengths) * 5 - 5].int()
        starts, seen = torch.arange(len(lengths)).int() * 5, torch.tensor(lengths).int()
        out = library.paged_attention(q, k_pool, v_pool, blocks, starts, seen, max(lengths), block, kv_heads, dim**-0.5)
        for row, length in enumerate(lengths):
            if not length:
                good &= not out[row].any()
                continue
            table = blocks[int(starts[row]) :][: -(-length // block)].long()
            slots = (table[:, None] * block + torch.arange(block)).flatten()[:length]
            k, v = (pool[slots].view(length, kv_heads, dim) for pool in (k_pool, v_pool))
            want = attention(q[row].view(kv_heads, per_kv, dim), k, v, dim**-0.5)
            difference = F.l1_loss(out[row].double().view_as(want), want, reduction="none").amax()
            good &= bool(difference <= ATTENTION_BOUND[dtype])
    return good
