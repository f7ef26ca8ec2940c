"""A token's bits must not depend on the batch it is in (CPU), and no layout of the products may change them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import batch_invariant as bi
from moe_kernels.numerics import assert_bitwise_equal
from moe_kernels.records import Routing, RoutingConfig
from moe_kernels.registry import parse
from moe_kernels.routing import route
from moe_kernels.variants import grouped
from tests.kernels.records import bf16_record, make_layer, quantised

VARIANTS = ["bf16/reference", "fp8/reference", "fp8/emulated", "nvfp4/reference", "nvfp4/emulated"]
OTHERS = ["mxfp8/emulated", "mxfp4/emulated", "mxfp4/emulated:act=mxfp4", "mxfp4/emulated:act=bf16",
          "fp8_channel/emulated", "fp8_tensor/emulated", "nvfp4/emulated:input_scale=expert"]
CONFIG = RoutingConfig(16, 4)


@pytest.mark.parametrize("shape", [(512, 128), (144, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS + OTHERS)
def test_a_token_alone_and_in_any_batch(variant: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """60 random batches of 1 to 90 tokens drawn from 300, skewed and even routing, against one batch of all."""
    hidden_size, inter = (160, 96) if shape[0] == 144 and variant.startswith("mx") else shape
    layer = make_layer(variant, quantised(bf16_record(16, hidden_size, inter), parse(variant).format), CONFIG)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, hidden_size, generator=g).to(dtype)
    logits = torch.randn(300, 16, generator=g) * torch.rand(300, 1, generator=g) * 3
    logits[150:, 0] += 4  # half of the tokens crowd on expert 0
    everything, all_routing = layer.forward(hidden, logits)
    for _ in range(60 if variant in VARIANTS else 20):
        size = int(torch.randint(1, 91, (1,), generator=g)) if torch.rand(1, generator=g) < 0.7 else int(
            torch.randint(1, 12, (1,), generator=g))
        rows = torch.randint(0, 300, (size,), generator=g)
        out, routing = layer.forward(hidden[rows], logits[rows])
        assert_bitwise_equal(routing.ids, all_routing.ids[rows])
        assert_bitwise_equal(routing.weights, all_routing.weights[rows])
        assert_bitwise_equal(out, everything[rows], f"{variant} with {size} tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    """The router's product; plain F.linear fails this in FP32 for 1, 2, 3, 5, 6, 7, 9, 10 and 11 rows here."""
    g = torch.Generator().manual_seed(2)
    for size, out in ((512, 16), (128, 512), (100, 60), (1408, 4096)):
        x = torch.randn(80, size, generator=g).to(dtype)
        weight = torch.randn(out, size, generator=g).to(dtype)
        full = bi.linear_rows(x, weight)
        torch.testing.assert_close(full, F.linear(x, weight))
        for rows in range(1, 40):
            start = int(torch.randint(0, 80 - rows, (1,), generator=g))
            assert_bitwise_equal(bi.linear_rows(x[start : start + rows], weight), full[start : start + rows])


def test_sigmoid_and_silu_do_not_depend_on_the_place() -> None:
    """torch's own differ in FP32 wherever the last elements of a tensor are no full vector."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(100_000, generator=g) * 10
    for ours, stock in ((bi.sigmoid, torch.sigmoid), (bi.silu, F.silu)):
        full = ours(x)
        torch.testing.assert_close(full, stock(x), rtol=3e-7, atol=1e-37)
        for _ in range(300):
            size = int(torch.randint(1, 300, (1,), generator=g))
            start = int(torch.randint(0, 100_000 - size, (1,), generator=g))
            assert_bitwise_equal(ours(x[start : start + size]), full[start : start + size])
        assert_bitwise_equal(ours(x[:69_999]), full[:69_999])  # split between threads
    assert bi.sigmoid(torch.tensor([-1e4, 1e4, -float("inf"), float("inf")])).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert_bitwise_equal(bi.silu(x.bfloat16()), F.silu(x.bfloat16()))


@pytest.mark.parametrize("config", [
    RoutingConfig(128, 8, routed_scaling_factor=2.5), RoutingConfig(160, 8, n_group=8, topk_group=4),
    RoutingConfig(20, 10), RoutingConfig(12, 3, scoring="softmax"), RoutingConfig(64, 22),
])
def test_routing_does_not_depend_on_the_batch(config: RoutingConfig) -> None:
    g = torch.Generator().manual_seed(5)
    logits, bias = torch.randn(700, config.num_experts, generator=g), torch.rand(config.num_experts, generator=g)
    full = route(logits, bias, config)
    for rows in [*range(1, 40), 123, 511]:
        start = int(torch.randint(0, 700 - rows, (1,), generator=g))
        part = route(logits[start : start + rows], bias, config)
        assert_bitwise_equal(part.ids, full.ids[start : start + rows])
        assert_bitwise_equal(part.weights, full.weights[start : start + rows])


def _random_plan(counts: list[int]) -> tuple[Routing, grouped.Dispatch]:
    """One expert per token (k = 1), in random order, `counts` tokens for each expert."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].unsqueeze(1)
    routing = Routing(ids, torch.ones(ids.shape))
    return routing, grouped.dispatch(routing, len(counts))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=12).filter(any), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_layout_gives_the_bits_of_single_products(counts: list[int], low_precision: bool) -> None:
    dtype = torch.bfloat16 if low_precision else torch.float32
    g = torch.Generator().manual_seed(3)
    routing, plan = _random_plan(counts)
    x = torch.randn(routing.ids.shape[0], 96, generator=g).to(dtype)
    weights = torch.randn(len(counts), 40, 96, generator=g).to(dtype)
    sorted_x = x[plan.token]
    expected = torch.cat([
        bi.linear_rows(x[routing.ids[:, 0] == e], weights[e]) for e in range(len(counts)) if counts[e]])
    assert_bitwise_equal(grouped.grouped_linear(sorted_x, plan, weights), expected)
    assert_bitwise_equal(grouped.grouped_linear(sorted_x, plan, weights.__getitem__), expected)
    for batched in range(0, bi.padded_rows(max(counts)) + 1, bi.ROW_MULTIPLE):
        layout = plan._place(batched)
        assert layout.position.unique().numel() == sum(counts)  # no two rows share a place
        forced = grouped.Dispatch(plan.token, plan.expert, plan.slot_row, plan.counts)
        forced._layouts.update(dict.fromkeys(grouped.CPU_COST.values(), layout))
        assert_bitwise_equal(grouped.grouped_linear(sorted_x, forced, weights), expected, f"batched={batched}")


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.sampled_from(list(grouped.CPU_COST.values())))
@settings(max_examples=100, deadline=None)
def test_cheapest_batch_is_the_cheapest(counts: list[int], cost: grouped.Cost) -> None:
    sizes = [bi.padded_rows(n) for n in counts if n]

    def work(batched: int) -> float:
        if not batched:
            return sum(map(cost.separate, sizes))
        rest = [s - batched for s in sizes if s > batched]
        return cost.block(len(counts), batched) + sum(cost.ratio * r + cost.call for r in rest)

    chosen = grouped.cheapest_batch(counts, cost)
    assert chosen % bi.ROW_MULTIPLE == 0
    assert work(chosen) == pytest.approx(min(map(work, {0, *sizes})))


def test_dispatch_sorts_by_expert_then_token() -> None:
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    plan = grouped.dispatch(Routing(ids, torch.ones(4, 2)), 4)
    assert plan.counts == [3, 2, 3, 0]
    assert plan.expert.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert plan.token.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert plan.token[plan.slot_row].tolist() == [[t, t] for t in range(4)]
    assert torch.equal(plan.expert[plan.slot_row], ids)


def test_combine_weighs_in_slot_order() -> None:
    """(1e8 + 1) - 1e8 in FP32 is 0 in this order and 1 in another: the order is part of the result."""
    routing = Routing(torch.tensor([[2, 0, 1]]), torch.tensor([[1.0, 1.0, -1.0]]))
    plan = grouped.dispatch(routing, 3)
    rows = torch.tensor([[1.0], [1e8], [1e8]])  # sorted by expert 0, 1, 2
    assert grouped.combine(rows, routing, plan).tolist() == [[0.0]]
    again = Routing(torch.tensor([[2, 1, 0]]), torch.tensor([[1.0, -1.0, 1.0]]))
    assert grouped.combine(rows, again, grouped.dispatch(again, 3)).tolist() == [[1.0]]
