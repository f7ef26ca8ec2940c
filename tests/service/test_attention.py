"""Paged attention against plain attention over each sequence's own keys and values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from service import attention
from service.attention import PagedContext, Span, Tiles, choose_tiles, padded_length, paged_attention, plan
from service.engine.batch import ROW_MULTIPLE, padded_tokens
from service.engine.kv_cache import ZERO_BLOCK, BlockPool, PagedKV

CPU = torch.device("cpu")


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FP64 causal attention of the last q.shape[0] positions: q [n, heads, d], k and v [L, kv_heads, d]."""
    q, k, v = q.double(), k.double(), v.double()
    n, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    out = torch.empty(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        visible = length - n + i + 1
        for h in range(heads):
            g = h // (heads // kv_heads)
            weights = (k[:visible, g] @ q[i, h] * dim**-0.5).softmax(0)
            out[i, h] = weights @ v[:visible, g]
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=6),
    st.sampled_from([(2, 4, 64), (1, 3, 16), (2, 1, 32)]),
    st.sampled_from([4, 16]),
    st.integers(0, 100),
)
def test_equals_plain_attention(spans, shape, block: int, seed: int) -> None:
    """Random mixes of decoding sequences and chunks, scattered blocks, other sequences' data all around."""
    kv_heads, per_kv, dim = shape
    generator = torch.Generator().manual_seed(seed)
    spans = [(min(n, length), length) for n, length in spans]
    spans.sort(key=lambda s: (s[0] > 1, s[1]))
    kv = PagedKV(1, 200, block, kv_heads, dim, torch.float32, CPU)
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    free = (torch.randperm(200, generator=generator) + 1).tolist()
    tokens = sum(n for n, _ in spans)
    padded = padded_tokens(tokens)
    query = torch.randn(1, kv_heads * per_kv, padded, dim, generator=generator)
    key, value = (torch.randn(1, kv_heads, padded, dim, generator=generator) for _ in range(2))
    slots, made = [], []
    for n, length in spans:
        blocks = [free.pop() for _ in range(-(-length // block))]
        made.append(Span(n, length, blocks))
        slots += [blocks[p // block] * block + p % block for p in range(length - n, length)]
    kv.slots = torch.tensor(slots)
    assert kv.update(key, value, 0) == (key, value)
    steps = plan(made, block, per_kv, Tiles(64, 1, True), CPU)
    module = SimpleNamespace(layer_idx=0)
    out, weights = paged_attention(module, query, key, value, None, dim**-0.5, paged=PagedContext(kv, steps))
    assert weights is None and out.shape == (1, padded, kv_heads * per_kv, dim)
    start = 0
    for span in made:
        where = torch.tensor([span.blocks[p // block] * block + p % block for p in range(span.kv_len)])
        k = kv.k[0].view(-1, kv_heads, dim)[where]
        v = kv.v[0].view(-1, kv_heads, dim)[where]
        assert torch.equal(k[span.kv_len - span.queries :], key[0, :, start : start + span.queries].transpose(0, 1))
        want = plain(query[0, :, start : start + span.queries].transpose(0, 1), k, v)
        torch.testing.assert_close(out[0, start : start + span.queries].double(), want, atol=5e-6, rtol=0)
        start += span.queries
    assert not out[0, tokens:].any()


def test_long_chunks_are_tiled_and_lengths_grouped() -> None:
    blocks = list(range(1, 100))
    decode = [Span(1, n, blocks) for n in (3, 60, 100, 130, 600, 700, 760)]
    steps = plan([*decode, Span(300, 400, blocks)], 16, 2, Tiles(64, 1, True), CPU)
    sizes = [(g.start, g.sequences, g.queries, g.mask.shape[-1]) for g in steps.groups]
    assert sizes == [
        (0, 2, 1, 64), (2, 1, 1, 128), (3, 1, 1, 192), (4, 1, 1, 640), (5, 2, 1, 768),
        (7, 1, 28, 128), (35, 1, 64, 192), (99, 1, 64, 256), (163, 1, 64, 320), (227, 1, 64, 384), (291, 1, 16, 448),
    ]  # fmt: skip
    assert steps.tokens == 307
    # Only blocks that hold visible tokens are read; padding reads the zero block.
    assert steps.groups[0].table.view(2, 4)[0].tolist() == [1] + [ZERO_BLOCK] * 3


@given(st.integers(1, 200_000), st.sampled_from([64, 96, 128]))
def test_padded_length(visible: int, tile: int) -> None:
    """Covers what is seen, in whole tiles, with less than a tile or a quarter to spare, and never shrinks."""
    length = padded_length(visible, tile)
    assert length >= visible and length % tile == 0 and length - visible < max(tile, visible / 4)
    assert padded_length(length, tile) == length and padded_length(visible + 1, tile) >= length


@given(st.data())
def test_a_query_meets_one_kv_length_only(data: st.DataObject) -> None:
    """However the spans fall: the mask's width follows from the query's own position. Its masked part rounds, too."""
    decode = sorted(data.draw(st.lists(st.integers(1, 1500), max_size=6)))
    chunk = data.draw(st.integers(2, 700))
    end = data.draw(st.integers(chunk, 1500))
    spans = [*(Span(1, n, list(range(1, 100))) for n in decode), Span(chunk, end, list(range(1, 100)))]
    seen = 0
    for group in plan(spans, 16, 1, Tiles(64, 1, True), CPU).groups:
        visible = group.mask.sum(-1).flatten().tolist()
        assert {padded_length(n, 64) for n in visible} == {group.mask.shape[-1]}
        seen += len(visible)
    assert seen == len(decode) + chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4, 64), (4, 2, 64), (2, 2, 32), (8, 12, 128), (4, 1, 256)])
def test_attention_is_bit_invariant(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What the engine's batch invariance rests on; found by trying on this machine, not assumed."""
    multiple = 1 if shape[1] % 4 == 0 else 4
    assert choose_tiles(*shape, dtype, 16) == Tiles(64, multiple, True)


def test_the_trial_sees_what_breaks_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows where others have four, and a KV length that depends on others in the batch."""
    assert not attention._bit_equal(4, 2, 64, torch.bfloat16, 64, 1, "cpu")
    assert attention._bit_equal(2, 4, 64, torch.bfloat16, 64, 1, "cpu")
    sdpa, turn = attention.sdpa, itertools.cycle((0, 64))

    def longer(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
        extra = next(turn)
        k, v = (F.pad(x, (0, 0, 0, extra)) for x in (k, v))
        return sdpa(q, k, v, F.pad(mask, (0, extra)), *rest)

    monkeypatch.setattr(attention, "sdpa", longer)
    assert not attention._bit_equal(2, 4, 64, torch.bfloat16, 64, 1, "cpu")


def test_padded_rows_change_no_result() -> None:
    q, k, v = (torch.randn(3, 2, n, 16) for n in (2, 64, 64))
    mask = torch.rand(3, 1, 1, 64) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(attention.sdpa(q, k, v, mask, 0.3, 8), attention.sdpa(q, k, v, mask, 0.3, 1))


def test_needs_the_engine() -> None:
    with pytest.raises(RuntimeError, match=r"service\.engine"):
        paged_attention(SimpleNamespace(layer_idx=0), *[torch.zeros(1, 1, 1, 4)] * 3, None, 1.0)


@given(st.integers(1, 5000))
def test_padded_tokens(tokens: int) -> None:
    """A multiple of four, at most three rows more than asked below 128 and at most an eighth more above."""
    padded = padded_tokens(tokens)
    assert padded >= tokens and padded % ROW_MULTIPLE == 0
    assert padded - tokens <= max(3, tokens / 8)
    assert padded_tokens(padded) == padded


def test_few_row_counts() -> None:
    """Kernels are compiled per row count: at most 8 in each doubling from 128 on."""
    assert len({padded_tokens(n) for n in range(1, 513)}) <= 32 + 16 + 1


def test_block_pool() -> None:
    pool = BlockPool(5)
    a, b = pool.allocate(2), pool.allocate(3)
    assert a == [1, 2] and b == [3, 4, 5] and pool.allocate(1) is None and (pool.free, pool.used) == (0, 5)
    pool.release([4, 2])
    assert pool.allocate(2) == [2, 4]  # the lowest first
    with pytest.raises(KeyError):
        pool.release([2, 2])


def test_zero_wipes_blocks_in_all_layers() -> None:
    kv = PagedKV(3, 4, 2, 1, 4, torch.float32, CPU)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    kv.zero([2, 4])
    for pool in (kv.k, kv.v):
        assert not pool[:, [2, 4]].any() and pool[:, [0, 1, 3]].isnan().all()
