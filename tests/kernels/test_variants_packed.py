"""Products over all experts (CPU): the same bits as sorted rows, with and without kept matrices, and really used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_kernels.numerics import assert_bitwise_equal
from moe_kernels.records import RoutingConfig
from moe_kernels.registry import parse
from moe_kernels.variants import packed
from moe_kernels.variants.grouped import dispatch, grouped_linear
from moe_kernels.variants.weights import CACHE_VARIABLE
from tests.kernels.records import bf16_record, make_layer, quantised

CONFIG = RoutingConfig(16, 4)
SHAPES = [(512, 128), (1152, 80)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", ["bf16/reference", "fp8/emulated"])
def test_kept_or_not_gives_the_same_bits(
    variant: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide enough that MKL and oneDNN add up in different orders."""
    record = quantised(bf16_record(16, *shape), parse(variant).format)
    kept = make_layer(variant, record, CONFIG)
    monkeypatch.setenv(CACHE_VARIABLE, "0")
    made = make_layer(variant, record, CONFIG)
    dense = "_packed" if variant == "bf16/reference" else "_dense"
    assert getattr(made, dense) is None
    g = torch.Generator().manual_seed(1)
    for tokens in (1, 3, 32, 47, 48, 49, 130):
        hidden, logits = torch.randn(tokens, shape[0], generator=g).bfloat16(), torch.randn(tokens, 16, generator=g)
        assert_bitwise_equal(kept.forward(hidden, logits)[0], made.forward(hidden, logits)[0], f"{tokens} tokens")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_expert_at_once(dtype: torch.dtype) -> None:
    """Against sorted rows, for every number of tokens: bits in BF16, rounding of another order in FP32."""
    layer: Any = make_layer("bf16/reference", bf16_record(16, 512, 128), CONFIG)
    if not packed.usable(layer.shape, dtype, torch.device("cpu")):
        pytest.skip("oneDNN's products are not used on this machine")
    w13, w2 = layer._w13.to(dtype), layer._w2.to(dtype)
    dense = packed.Packed.make(w13, w2, layer)
    assert dense is not None
    g = torch.Generator().manual_seed(2)
    for tokens in range(1, packed.DENSE_TOKENS + 1):
        hidden = torch.randn(tokens, 512, generator=g).to(dtype)
        routing = layer.route(torch.randn(tokens, 16, generator=g))
        plan, rows = dispatch(routing, 16), dense.plan(routing.ids)
        assert rows.place is not None
        first = grouped_linear(hidden[plan.token], plan, w13)[plan.slot_row].flatten(0, 1)
        ours = dense.gate_up(hidden, rows.place)
        inner = ours[:, :128].contiguous()
        sorted_inner = torch.empty_like(inner)
        sorted_inner[plan.slot_row.flatten()] = inner
        second = grouped_linear(sorted_inner, plan, w2)[plan.slot_row].flatten(0, 1)
        for got, want in ((ours, first), (dense.down(inner, rows.place, tokens), second)):
            if dtype == torch.bfloat16:
                assert_bitwise_equal(got, want, f"{tokens} tokens")
            else:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_a_fault_sees_rows_sorted_by_expert() -> None:
    layer: Any = make_layer("fp8/emulated", quantised(bf16_record(16, 512, 128), "fp8"), CONFIG)
    routing = layer.route(torch.randn(7, 16, generator=torch.Generator().manual_seed(3)))
    mixed: Any = object.__new__(type("Mixed", (type(layer),), {}))
    mixed.__dict__.update(layer.__dict__)
    assert mixed.plan(routing).expert.diff().min() >= 0 and sum(mixed.plan(routing).counts) == 28
