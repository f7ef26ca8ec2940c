"""`moe-kernels bench`: its floors against hand calculation, its output files, its refusals."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moe_kernels import bench
from moe_kernels.cli import main

CPU = torch.device("cpu")
TINY = bench.BenchShape("tiny", 256, 128, 4, 2, 2.5)


def test_floor_is_the_larger_of_bytes_and_flop() -> None:
    """Two of four experts hit: 3 * 256 * 128 bytes of FP8 and their scales each, 5 tokens in and out in BF16."""
    record = bench.random_record(TINY, "fp8", CPU)
    scales = (2 * 2 + 2 * 1) * 4  # w13 [2, 2] and w2 [2, 1] FP32 blocks an expert
    size = 2 * (3 * 256 * 128 + scales) + 4 * 5 * 256
    flops = 2 * 5 * 2 * 3 * 256 * 128
    assert bench.bytes_read(TINY, record, 5, 2) == size
    memory = bench.Ceilings(1e9, 1e15, "")
    compute = bench.Ceilings(1e15, 1e9, "")
    assert bench.floor_us(TINY, record, 5, 2, memory) == pytest.approx(size / 1e9 * 1e6)
    assert bench.floor_us(TINY, record, 5, 2, compute) == pytest.approx(flops / 1e9 * 1e6)
    parts = sum(bench.floor_us(TINY, record, 5, 2, compute, stage) for stage in ("gemm1", "gemm2"))
    assert parts == pytest.approx(flops / 1e9 * 1e6)


def test_one_token_inputs_use_disjoint_experts_in_turn() -> None:
    """Or the cache would serve weights that the call before read."""
    shape = bench.BenchShape("s", 64, 64, 32, 4, 1.0)
    chosen = [set(logits.topk(4).indices[0].tolist()) for _, logits in bench.inputs(shape, 1, 8, CPU)]
    assert set().union(*chosen) == set(range(32)) and all(not a & b for a, b in pairwise(chosen))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_random_weights_are_finite_and_spread_like_trained_ones(fmt: str) -> None:
    """A product with unit-normal inputs comes out near one, so that no stage saturates."""
    from moe_kernels.variants.weights import expert_matrices

    record = bench.random_record(TINY, fmt, CPU)  # type: ignore[arg-type]
    w = expert_matrices(record, 1, "w13")
    assert w.isfinite().all() and 0.3 < (w.std() * 256**0.5).item() < 3


def test_spread_is_median_and_deciles() -> None:
    """Of a known sample."""
    assert bench.spread([5.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 7.0, 8.0, 9.0, 11.0]) == (6.0, 2.0, 10.0)


def test_paired_difference_sees_through_drift_that_hits_both() -> None:
    """A clock that slows both sides by half over the run leaves the pairs' 2 µs; noise of known size sets the width."""
    first = [100.0 + 0.25 * i for i in range(200)]
    assert bench.paired_difference(first, [x + 2.0 for x in first]) == pytest.approx((2.0, 0.0))
    noise = [1.0 if i // 10 % 2 else -1.0 for i in range(200)]  # means of ten: +1 and -1 in turn
    mean, width = bench.paired_difference(first, [x + 2.0 + n for x, n in zip(first, noise, strict=True)])
    assert mean == pytest.approx(2.0)
    assert width == pytest.approx(1.96 * (20 / 19) ** 0.5 / 20**0.5)
    assert bench.paired_difference([1.0], [2.0]) == (1.0, float("inf"))


def test_bench_writes_table_csv_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, emulated variants; an odd token count."""
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "json", "png")}
    code = main([
        "bench", "fp8/emulated", "fp8/emulated:scales=copied", "--shape", "256,128,4,2", "--tokens", "1,3",
        "--device", "cpu", "--csv", str(files["csv"]), "--json", str(files["json"]), "--plot", str(files["png"])])
    assert code == 0
    out = capsys.readouterr().out
    assert "fp8/emulated" in out and "floor" in out
    rows = list(csv.DictReader(files["csv"].open()))
    assert [(r["tokens"], r["variant"]) for r in rows] == [
        ("1", "fp8/emulated"), ("1", "fp8/emulated:scales=copied"), ("3", "fp8/emulated"),
        ("3", "fp8/emulated:scales=copied")]
    for row in rows:
        assert float(row["us"]) > 0 and float(row["p10_us"]) <= float(row["us"]) <= float(row["p90_us"])
    assert json.loads(files["json"].read_text())[0]["stage"] == "layer"
    assert files["png"].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("arguments", "message"), [
    (["fp8/triton", "--device", "cpu"], "needs a CUDA GPU"),
    (["fp8/emulated", "--tokens", "0"], "whole numbers of 1 or more"),
    (["fp8/emulated", "--shape", "1,2,3"], "H,I,E,K"),
    (["fp8/emulated", "--shape", "128,128,4,8"], "exceeds the 4 experts"),
    (["fp8/nothing"], "unknown variant"),
])
def test_bench_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and what to do."""
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
