"""The serving kernels cross-compiled for Hopper: tensor cores, TMA, asynchronous copies, no spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.test_triton_compile import BF16, FP8, FP32, HOPPER_SHARED, I32, Compiled

I64 = "*i64"
QKV = {"N": 14336, "K": 4096, "SPLITS": 1, "HAS_BIAS": True}
OUT = {"N": 4096, "K": 12288, "SPLITS": 4, "HAS_BIAS": False}


def descriptor(dtype: str, rows: int) -> str:
    return f"tensordesc<{dtype}[{rows}, 128]>"


def linear(kind: str, few: bool, shape: dict[str, Any], bt: int, bn: int, warps: int, stages: int,
           tmp: Path) -> Compiled:
    from moe_kernels.ops.kernels import linear as kernels

    dtype = "fp8e4nv" if kind == "fp8" else "bf16"
    scales = FP32 if kind == "fp8" else BF16
    types = {"x": f"*{dtype}" if few else descriptor(dtype, bt), "x_scale": scales, "w": descriptor(dtype, bn),
             "w_scale": scales, "bias": BF16, "out": FP32 if few and shape["SPLITS"] > 1 else BF16, "tokens": "i32"}
    constants = {**shape, "BT": bt, "BN": bn, "FP8": kind == "fp8", "TMA": True, "STAGES": stages, "PDL": True}
    if not few:
        constants["GROUP"] = 8
    return Compiled(kernels.linear_few_kernel if few else kernels.linear_many_kernel, types, constants, warps, tmp)


@pytest.mark.parametrize(("kind", "bt", "bn", "stages"), [
    ("fp8", 16, 64, 6), ("fp8", 16, 128, 6), ("fp8", 64, 64, 5), ("fp8", 128, 64, 4), ("bf16", 16, 64, 4),
    ("bf16", 128, 64, 3)])
def test_few_rows_stream_weights_through_tma(tmp_path: Path, kind: str, bt: int, bn: int, stages: int) -> None:
    """Weights on the M side of wgmma, tokens on a side as narrow as 16."""
    kernel = linear(kind, True, OUT, bt, bn, 4, stages, tmp_path)
    step = "k32.f32.e4m3.e4m3" if kind == "fp8" else "k16.f32.bf16.bf16"
    assert kernel.count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{bt}{step}") >= 4
    assert kernel.count(r"cp\.async\.bulk\.tensor\.2d") > 0 and kernel.count(r"griddepcontrol\.wait") == 1
    assert kernel.stack == 0 and kernel.shared <= HOPPER_SHARED


@pytest.mark.parametrize(("kind", "shape", "stages"), [("fp8", QKV, 4), ("fp8", OUT, 4), ("bf16", QKV, 3),
                                                       ("bf16", OUT, 3)])
def test_many_rows_use_wgmma_without_spills(tmp_path: Path, kind: str, shape: dict[str, Any], stages: int) -> None:
    """With the second accumulator of a split K too."""
    kernel = linear(kind, False, shape, 128, 128, 8, stages, tmp_path)
    assert kernel.count(r"wgmma\.mma_async\.sync\.aligned\.m64n128") >= 4
    assert kernel.stack == 0 and kernel.shared <= HOPPER_SHARED


@pytest.mark.parametrize(("bt", "stages"), [(16, 8), (128, 4)])
def test_stream_fetches_weights_before_it_waits(tmp_path: Path, bt: int, stages: int) -> None:
    """The ring of weight tiles is asked for ahead of griddepcontrol.wait, the activations behind it."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from moe_kernels.ops.kernels.stream import linear_stream_kernel

    layout = NVMMASharedLayout(128, 8, 2)
    types = {"x": f"tensordesc<fp8e4nv[{bt}, 128],{layout!r}>", "x_scale": FP32, "bias": BF16, "w_scale": FP32,
             "w": f"tensordesc<fp8e4nv[64, 128],{layout!r}>", "out": FP32, "tokens": "i32"}
    kernel = Compiled(linear_stream_kernel, types, {**OUT, "BT": bt, "BN": 64, "STAGES": stages, "PART_PAD": 32,
                                                    "PDL": True}, 4, tmp_path)
    before, behind = kernel.ptx.split("griddepcontrol.wait")
    assert before.count("cp.async.bulk.tensor.2d") == stages and "ld.global" not in before
    assert behind.count("cp.async.bulk.tensor.2d") == stages + 2  # activations, and both once in the loop
    assert kernel.count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{bt}k32") == 4
    assert kernel.stack == 0 and kernel.shared <= HOPPER_SHARED


def attention(decode: bool, d: int, bm: int, bn: int, stages: int, warps: int, tmp: Path) -> Compiled:
    from moe_kernels.ops.kernels import attention as kernels

    shared = {"q": BF16, "k_pool": BF16, "v_pool": BF16, "block_table": I32, "seq_lens": I32, "scale": "fp32",
              "max_blocks": "i32"}
    if decode:
        types = {**shared, "part": FP32, "part_lse": FP32}
        constants = {"HKV": 8, "GROUP": 12, "GROUP_PAD": 16, "D": d, "PAGE": 16, "CHUNK": 256, "MAX_SPLITS": 32,
                     "BN": bn, "STAGES": stages, "ASM": True, "PDL": True}
        return Compiled(kernels.decode_kernel, types, constants, warps, tmp)
    types = {**shared, "query_start": I32, "out": BF16, "total_rows": "i32", "sequences": "i32"}
    constants = {"HQ": 96, "HKV": 8, "D": d, "PAGE": 16, "BM": bm, "BN": bn, "STAGES": stages, "ASM": True, "PDL": True}
    return Compiled(kernels.prefill_kernel, types, constants, warps, tmp)


@pytest.mark.parametrize("d", [128, 64])
def test_decode_copies_pages_asynchronously(tmp_path: Path, d: int) -> None:
    """The 16-row form of the tensor core; pages come by cp.async, 16 bytes a thread."""
    kernel = attention(True, d, 0, 128, 2, 4, tmp_path)
    assert kernel.count(r"mma\.sync\.aligned\.m16n8k16") > 0
    assert kernel.count(r"cp\.async\.cg\.shared\.global") > 0
    assert kernel.stack == 0 and kernel.shared <= HOPPER_SHARED


@pytest.mark.parametrize("d", [128, 64])
def test_prefill_uses_wgmma(tmp_path: Path, d: int) -> None:
    """Both products."""
    kernel = attention(False, d, 128, 64, 3, 8, tmp_path)
    assert kernel.count(r"wgmma\.mma_async") >= 8 and kernel.count(r"cp\.async\.cg\.shared\.global") > 0
    assert kernel.stack == 0 and kernel.shared <= HOPPER_SHARED


def test_elementwise_kernels_keep_rows_in_registers(tmp_path: Path) -> None:
    """A row of GLM-4.5-Air's norm, its rotary step, and 16 tokens of the router."""
    from moe_kernels.ops.kernels.linear import router_kernel
    from moe_kernels.ops.kernels.norm import norm_kernel
    from moe_kernels.ops.kernels.rope import rope_kernel

    norm = Compiled(norm_kernel, {
        "x": FP32, "x2": FP32, "residual": BF16, "weight": BF16, "y": BF16, "new_residual": BF16, "y_q": FP8,
        "y_scale": FP32, "tokens": "i32", "eps": "fp32"}, {
        "H": 4096, "BLOCK": 4096, "SPLITS": 4, "SPLITS2": 2, "HAS_X2": True, "HAS_RESIDUAL": True, "QUANTISE": True,
        "PDL": True}, 16, tmp_path)
    assert norm.stack == 0
    rope = Compiled(rope_kernel, {
        "qkv": BF16, "positions": I32, "cos": FP32, "sin": FP32, "slots": I64, "k_pool": BF16, "v_pool": BF16,
        "q_out": BF16, "q_weight": BF16, "k_weight": BF16, "tokens": "i32", "eps": "fp32"}, {
        "HQ": 96, "HKV": 8, "D": 128, "HALF": 32, "HB": 4, "SPLITS": 0, "NORM": True, "PDL": True}, 2, tmp_path)
    assert rope.stack == 0
    router = Compiled(router_kernel, {"x": BF16, "w": FP32, "out": FP32, "tokens": "i32", "E": "i32"},
                      {"H": 4096, "BT": 8, "BE": 8, "BK": 512, "PDL": True}, 8, tmp_path)
    assert router.stack == 0 and router.count(r"\btf32\b") == 0 and router.count(r"fma\.rn\.f32") >= 128
