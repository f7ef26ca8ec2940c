"""The compiled CPU kernels: torch's bits, rows on their own, and an honest way out where they cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_kernels import native
from moe_kernels.native import bindings, build, check
from moe_kernels.quant import fp8
from moe_kernels.records import RoutingConfig
from moe_kernels.routing import route, selection_scores


@pytest.fixture
def kernels() -> native.Library:
    """The library, or skip with the reason."""
    found = native.library()
    if found is None:
        pytest.skip(f"no compiled kernels here: {native.unavailable_because()}")
    return found


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for anew inside, and again afterwards."""
    bindings._found.cache_clear()
    yield
    bindings._found.cache_clear()


def test_results_are_torchs(kernels: native.Library) -> None:
    assert check.differing(kernels) == []


def test_a_wrong_result_is_named(kernels: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.combine
    monkeypatch.setattr(kernels, "combine", lambda *args: real(*args) * (1 + 2**-23))
    assert check.differing(kernels) == ["combine"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4, 64), (1, 7, 128), (3, 2, 32)])
def test_a_row_is_attended_alone(kernels: native.Library, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The same query alone, in a batch and within a chunk: the same bits; another row's NaN stays there."""
    kv_heads, per_kv, dim = shape
    g = torch.Generator().manual_seed(5)
    k, v = (torch.randn(40 * 16, kv_heads * dim, generator=g).to(dtype) for _ in range(2))
    blocks = torch.randperm(40, generator=g).int()
    lengths = torch.tensor([1, 2, 15, 16, 17, 130, 131, 132, 133, 500]).int()
    q = torch.randn(10, kv_heads * per_kv * dim, generator=g).to(dtype)
    starts = torch.zeros(10, dtype=torch.int32)

    def attend(rows: slice) -> torch.Tensor:
        seen = lengths[rows].contiguous()
        return kernels.paged_attention(q[rows].contiguous(), k, v, blocks, starts[rows].contiguous(), seen,
                                       int(seen.max()), 16, kv_heads, dim**-0.5)

    together = attend(slice(0, 10))
    assert torch.isfinite(together).all()
    for row in range(10):
        assert torch.equal(attend(slice(row, row + 1))[0], together[row])
    assert torch.equal(attend(slice(3, 8)), together[3:8])
    q[4] = torch.nan
    spoilt = attend(slice(0, 10))
    assert torch.isnan(spoilt[4]).all()
    keep = torch.arange(10) != 4
    assert torch.equal(spoilt[keep], together[keep])


def test_strides_are_refused(kernels: native.Library) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.add_rms_norm(torch.randn(64, 4).t(), torch.ones(64), 1e-5)


def test_same_routing_without(kernels: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and weights with ties and NaN, with the library and without."""
    config = RoutingConfig(num_experts=16, top_k=4, routed_scaling_factor=2.5)
    logits = torch.randint(-3, 4, (33, 16), generator=torch.Generator().manual_seed(0)).float()
    logits[5, 7] = torch.nan
    bias = torch.linspace(6.82, 7.06, 16)
    for dtype in (torch.float32, torch.bfloat16):
        with_it = route(logits, bias, config, bias_dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr("moe_kernels.routing.library", lambda: None)
            without = route(logits, bias, config, bias_dtype=dtype)
        assert torch.equal(with_it.ids, without.ids)
        assert torch.equal(with_it.weights.nan_to_num(9.0), without.weights.nan_to_num(9.0))
        keys = selection_scores(logits, bias, config, bias_dtype=dtype)[1]
        assert torch.equal(keys.gather(-1, with_it.ids)[6:], keys.topk(4).values[6:])


@pytest.mark.parametrize("layout", ["row", "column", "column_tma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_quantisation_without(kernels: native.Library, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
                                   layout: fp8.ScaleLayout) -> None:
    x = (torch.randn(7, 384, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    q, scale = fp8.quantize_activations(x, layout=layout)
    back = fp8.dequantize_activations(q, scale)
    monkeypatch.setattr(fp8, "library", lambda: None)
    other_q, other_scale = fp8.quantize_activations(x, layout=layout)
    assert torch.equal(q.view(torch.uint8), other_q.view(torch.uint8))
    assert torch.equal(scale, other_scale) and scale.stride() == other_scale.stride()
    assert torch.equal(back, fp8.dequantize_activations(other_q, other_scale))


def test_turned_off(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_PARITY_NATIVE", "0")
    assert native.library() is None and "MOE_PARITY_NATIVE" in str(native.unavailable_because())


def test_no_compiler_is_said(fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("MOE_PARITY_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "no C compiler" in caplog.text and "torch's operations are" in caplog.text


def test_a_failing_compiler_is_said(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is left in the cache that a later process would take for a library."""
    if native.library() is None:
        pytest.skip("no compiled kernels here")
    bindings._found.cache_clear()
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: out of ideas" >&2\nexit 3\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "cache"))
    assert native.library() is None
    assert "out of ideas" in str(native.unavailable_because())
    assert not list((tmp_path / "cache").rglob("kernels-*.so"))
