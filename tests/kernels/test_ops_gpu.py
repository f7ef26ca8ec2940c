"""The serving operations on a GPU: parity, odd row counts, poisoned padding, determinism, batch invariance, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels import numerics, ops
from moe_kernels.ops import reference
from moe_kernels.quant import fp8
from tests.kernels.ops_inputs import paged

pytestmark = pytest.mark.gpu
ODD = [1, 2, 3, 5, 7, 16, 17, 33, 100, 129, 300, 1024]


def rand(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*size, generator=generator, device="cuda")


def poison() -> None:
    """NaN bytes in the memory that the allocator hands out next."""
    blocks = [torch.full((2**k,), 255, dtype=torch.uint8, device="cuda") for k in range(9, 26) for _ in range(3)]
    del blocks


def fp8_layer(rows: int, columns: int, bias: bool = False) -> ops.Fp8Linear:
    q, scale = fp8.quantize_weight_blocks(rand(rows, columns, seed=1) * columns**-0.5)
    return ops.Fp8Linear(q, scale, rand(rows, seed=2).bfloat16() if bias else None)


@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize(("width", "splits"), [(4096, 0), (4096, 4), (256, 2)])
def test_norm(tokens: int, width: int, splits: int) -> None:
    x = rand(splits, tokens, width) if splits else rand(tokens, width).bfloat16()
    residual, x2 = rand(tokens, width, seed=1).bfloat16(), rand(2, tokens, width, seed=2)
    weight = rand(width).bfloat16()
    poison()
    y, new, q = ops.add_rms_norm_quantised(x, residual, weight, 1e-5, x2)
    want, want_new = reference.add_rms_norm(x, residual, weight, 1e-5, x2)
    assert torch.equal(new, want_new)
    assert numerics.relative_l2(y, want) < 1e-3
    wanted = reference.quantise(y)
    assert torch.equal(q.q.view(torch.uint8), wanted.q.view(torch.uint8)) and torch.equal(q.scale, wanted.scale)


@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize(("width", "splits"), [(1408, 4), (1408, 0), (128, 0)])
def test_swiglu(tokens: int, width: int, splits: int) -> None:
    x = rand(splits, tokens, 2 * width) if splits else rand(tokens, 2 * width).bfloat16()
    poison()
    y, q = ops.swiglu(x), ops.swiglu_quantised(x)
    assert numerics.relative_l2(y, reference.swiglu(x)) < 1e-3
    wanted = reference.quantise(y)
    assert torch.equal(q.q.view(torch.uint8), wanted.q.view(torch.uint8)) and torch.equal(q.scale, wanted.scale)


@pytest.mark.parametrize("tokens", [1, 3, 17, 129])
@pytest.mark.parametrize(("heads", "kv", "dim", "rotary", "norm"), [(96, 8, 128, 64, False), (8, 4, 64, 32, True)])
def test_rope(tokens: int, heads: int, kv: int, dim: int, rotary: int, norm: bool) -> None:
    qkv = rand(tokens, (heads + 2 * kv) * dim).bfloat16()
    cos, sin = ops.rope_table(1e6, rotary, 4096, "cuda")
    positions = torch.randint(0, 4096, (tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(40 * 16, device="cuda")[:tokens]
    weights = [rand(dim, seed=s).bfloat16() for s in (3, 4)] if norm else [None, None]
    pools = [torch.zeros(40, 16, kv, dim, device="cuda").bfloat16() for _ in range(4)]
    got = ops.qk_norm_rope_store(qkv, positions, cos, sin, slots, *pools[:2], heads, *weights)
    want = reference.qk_norm_rope_store(qkv, positions, cos, sin, slots, *pools[2:], heads, *weights)
    limit = 1e-3 if norm else 1e-9  # without the norm's rsqrt every step is one rounded operation
    assert numerics.relative_l2(got, want) < limit
    assert numerics.relative_l2(pools[0], pools[2]) < limit and torch.equal(pools[1], pools[3])


@pytest.mark.parametrize(("rows", "columns", "bias"), [(1024, 4096, True), (4096, 1408, False), (576, 256, True),
                                                       (4096, 12288, False), (64, 5248, False)])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("stream", ["0", "1"])
def test_linear(rows: int, columns: int, bias: bool, kind: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity for every row count, the same bits for a row alone and among others, in a graph, by either kernel."""
    if kind == "bf16" and stream == "1":
        pytest.skip("the stream kernel is FP8's")
    monkeypatch.setenv("MOE_PARITY_STREAM", stream)
    layer: ops.Fp8Linear | ops.Bf16Linear
    x = rand(max(ODD), columns).bfloat16()
    if kind == "fp8":
        layer = fp8_layer(rows, columns, bias)
        exact = reference.linear_fp8(reference.quantise(x), layer.weight, layer.scale, layer.bias, torch.float32)
    else:
        layer = ops.Bf16Linear((rand(rows, columns, seed=1) * columns**-0.5).bfloat16(),
                               rand(rows, seed=2).bfloat16() if bias else None)
        exact = x.float() @ layer.weight.float().t() + (0 if layer.bias is None else layer.bias.float())
    whole = layer(x)
    for tokens in ODD:
        poison()
        y = layer(x[:tokens])
        assert numerics.relative_l2(y.float(), exact[:tokens]) < 5e-3, tokens
        assert torch.equal(y, whole[:tokens]), tokens
        assert torch.equal(reference.summed(layer.split(x[:tokens]), torch.bfloat16), y), tokens
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = layer(x[:7])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(kept, whole[:7])


@pytest.mark.parametrize("tokens", ODD)
def test_router(tokens: int) -> None:
    x, weight = rand(tokens, 4096).bfloat16(), rand(128, 4096, seed=1) / 64
    got = ops.router_logits(x, weight)
    assert numerics.relative_l2(got, x.double() @ weight.double().t()) < 1e-6
    assert torch.equal(ops.router_logits(x[-1:], weight)[0], got[-1])


@pytest.mark.parametrize(("heads", "kv", "dim"), [(96, 8, 128), (8, 4, 64)])
@pytest.mark.parametrize("lengths", [[1], [1500], [0, 1, 15, 16, 17, 255, 256, 257, 1023, 2000], [9001, 3]])
def test_decode(heads: int, kv: int, dim: int, lengths: list[int]) -> None:
    """Blocks outside the sequences are NaN or out of range; every row keeps its bits alone and with a wider table."""
    q, k, v, table, seq = paged(lengths, heads, kv, dim, "cuda")
    poison()
    got = ops.paged_decode(q, k, v, table, seq, dim**-0.5)
    want = reference.paged_decode(q, k, v, table, seq, dim**-0.5)
    assert got.isfinite().all() and numerics.relative_l2(got, want) < 4e-3
    wide = torch.cat([table, torch.full((len(lengths), 40), 10**6, dtype=torch.int32, device="cuda")], 1)
    for row, length in enumerate(lengths):
        alone = ops.paged_decode(q[row : row + 1], k, v, wide[row : row + 1], seq[row : row + 1], dim**-0.5)
        assert torch.equal(alone[0], got[row]), length
        assert length or not got[row].any()
    quantised = ops.paged_decode_quantised(q, k, v, table, seq, dim**-0.5)
    wanted = reference.quantise(got.flatten(1))
    assert torch.equal(quantised.q.view(torch.uint8), wanted.q.view(torch.uint8))
    assert torch.equal(quantised.scale, wanted.scale)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(24, 2, 128), (8, 4, 64)])
@pytest.mark.parametrize(("lengths", "counts"), [([700], [700]), ([1000, 300, 5], [129, 300, 1]), ([40], [3])])
def test_prefill(heads: int, kv: int, dim: int, lengths: list[int], counts: list[int]) -> None:
    """With padding rows, and a prompt cut at another place."""
    _, k, v, table, seq = paged(lengths, heads, kv, dim, "cuda")
    total = sum(counts)
    q = rand(total + 9, heads, dim).bfloat16()
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    poison()
    got = ops.paged_prefill(q, k, v, table, starts, seq, dim**-0.5, max(counts))
    want = reference.paged_prefill(q, k, v, table, starts, seq, dim**-0.5)
    assert got.isfinite().all() and numerics.relative_l2(got, want) < 4e-3
    assert not got[total:].any()
    cut = counts[0] // 2 + 1
    rest = ops.paged_prefill(q[cut : counts[0]].contiguous(), k, v, table[:1], (starts[:2] - cut).clamp(min=0), seq[:1],
                             dim**-0.5, counts[0] - cut)
    assert torch.equal(rest, got[cut : counts[0]])
