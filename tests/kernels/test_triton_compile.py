"""Cross-compilation for Hopper without a GPU: the tensor-core instructions are there, registers do not spill."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

FP32, FP8, BF16, I32 = "*fp32", "*fp8e4nv", "*bf16", "*i32"
AIR = {"H": 4096, "INTER": 1408}


class Compiled:
    """PTX and the assembler's stack use of one kernel."""

    def __init__(self, fn: Any, types: dict[str, str], constants: dict[str, Any], warps: int, tmp: Path,
                 sm: int = 90) -> None:
        names = fn.arg_names
        signature = {n: types.get(n, "constexpr") for n in names}
        values = {(names.index(k),): v for k, v in constants.items()}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
        source = ASTSource
        if fn.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            source = GluonASTSource
        kernel = triton.compile(
            source(fn, signature, constexprs=values, attrs=aligned), target=GPUTarget("cuda", sm, 32),
            options={"num_warps": warps},
        )
        self.ptx: str = kernel.asm["ptx"]
        self.shared: int = kernel.metadata.shared
        cubin = tmp / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True).stdout
        found = re.search(r"STACK:(\d+)", usage)
        assert found, usage
        self.stack = int(found.group(1))

    def count(self, pattern: str) -> int:
        """Occurrences in the PTX."""
        return len(re.findall(pattern, self.ptx))


def descriptor(rows: int) -> str:
    return f"tensordesc<fp8e4nv[{rows}, 128]>"


GEMM1 = {"x_q": FP8, "x_scale": FP32, "w13": descriptor(128), "w13_scale": FP32, "h_q": FP8, "h_scale": FP32,
         "sorted_slots": I32, "tiles": I32, "tokens": "i32", "pairs": "i32"}
GEMM2 = {"h_q": FP8, "h_scale": FP32, "w2": descriptor(128), "w2_scale": FP32, "y": BF16, "sorted_slots": I32,
         "tiles": I32, "pairs": "i32"}
HOPPER_SHARED = 227 * 1024  # CUDA programming guide, compute capability 9.0


@pytest.mark.parametrize(("block_m", "swap", "warps", "stages"), [(16, True, 8, 4), (16, True, 4, 6), (64, True, 8, 3)])
def test_fp8_gemm1_uses_wgmma_and_tma(tmp_path: Path, block_m: int, swap: bool, warps: int, stages: int) -> None:
    """With weights on the M side, so that 16 tokens still fill the instruction."""
    from moe_kernels.variants.triton.gemm import gemm1_kernel

    constants = {**AIR, "TOP_K": 8, "BLOCK_M": block_m, "SWAP": swap, "TMA": True, "STAGES": stages, "LIMIT": 0.0}
    kernel = Compiled(gemm1_kernel, GEMM1, constants, warps, tmp_path)
    assert kernel.count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{block_m}k32\.f32\.e4m3\.e4m3") >= 8
    assert kernel.count(r"cp\.async\.bulk\.tensor\.2d") > 0
    assert kernel.stack == 0
    assert kernel.shared <= HOPPER_SHARED


def test_fp8_gemm2_uses_wgmma(tmp_path: Path) -> None:
    """The second product."""
    from moe_kernels.variants.triton.gemm import gemm2_kernel

    constants = {**AIR, "BLOCK_M": 16, "BLOCK_N": 128, "SWAP": True, "TMA": True, "STAGES": 3}
    kernel = Compiled(gemm2_kernel, GEMM2, constants, 4, tmp_path)
    assert kernel.count(r"wgmma\.mma_async") >= 4 and kernel.stack == 0


def test_fp8_gemm1_compiles_for_ada_without_hopper_instructions(tmp_path: Path) -> None:
    """SM89: FP8 mma.sync, no TMA, within its 99 KB of shared memory."""
    from moe_kernels.variants.triton.gemm import gemm1_kernel

    constants = {**AIR, "TOP_K": 8, "BLOCK_M": 16, "SWAP": False, "TMA": False, "STAGES": 2, "LIMIT": 0.0}
    kernel = Compiled(gemm1_kernel, {**GEMM1, "w13": FP8}, constants, 4, tmp_path, sm=89)
    assert kernel.count("mma.sync") > 0 and kernel.count("wgmma|cp.async.bulk") == 0
    assert kernel.shared <= 99 * 1024


@pytest.mark.parametrize(("first", "group", "registers", "tma_a", "corrected"),
                         [(True, 1, False, False, False), (False, 1, False, False, False),
                          (True, 4, True, False, True), (False, 3, True, True, False)])
def test_specialised_gemm_overlaps_two_consumers_and_a_producer(
    tmp_path: Path, first: bool, group: int, registers: bool, tma_a: bool, corrected: bool
) -> None:
    """Registers move from the producer to the consumers; no accumulator goes to memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from moe_kernels.variants.triton.specialised import grouped_kernel

    tiles = f"tensordesc<fp8e4nv[128, 128],{NVMMASharedLayout(128, 8, 2)!r}>"
    types = {"a": tiles if tma_a else FP8, "a_scale": FP32, "b": tiles, "b_scale": FP32,
             "out": FP8 if first else BF16, "out_scale": FP32, "sorted_slots": I32, "tiles": I32,
             "a_rows": "i32", "pairs": "i32"}
    constants = {"K": 4096 if first else 1408, "N": 2816 if first else 4096, "TOP_K": 8, "FIRST": first, "STAGES": 4,
                 "LIMIT": 0.0, "GROUP": group, "REGISTERS": registers, "TMA_A": tma_a,
                 "CORRECTED": corrected}
    kernel = Compiled(grouped_kernel, types, constants, 4, tmp_path)
    assert kernel.count(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32") == 16  # 2 consumers, 2 tiles, 4 k steps
    assert kernel.count("setmaxnreg") > 0 and kernel.count(r"cp\.async\.bulk\.tensor\.2d") == 2 + tma_a
    assert kernel.stack <= 16  # one or two addresses of 384 threads, no accumulator
    assert kernel.shared <= HOPPER_SHARED


@pytest.mark.parametrize(("block_m", "warps", "ahead"), [(8, 2, 4), (8, 4, 4), (16, 4, 2)])
def test_nvfp4_decode_feeds_tensor_cores_from_registers(tmp_path: Path, block_m: int, warps: int, ahead: int) -> None:
    """16-byte loads, BF16 products, neither shared memory nor stack in between."""
    from moe_kernels.variants.triton.nvfp4_decode import gemm1_decode_kernel

    types = {"x": BF16, "x_row_scale": FP32, "w13": I32, "w13_scale": I32, "w13_scale_2": FP32, "h": BF16,
             "sorted_slots": I32, "tiles": I32}
    constants = {**AIR, "TOP_K": 8, "BLOCK_M": block_m, "LIMIT": 0.0, "HAS_ROW_SCALE": False, "AHEAD": ahead}
    kernel = Compiled(gemm1_decode_kernel, types, constants, warps, tmp_path)
    assert kernel.shared == 0 and kernel.stack == 0
    assert kernel.count(r"mma\.sync\.aligned\.m16n8k16") > 0
    assert kernel.count(r"ld\.global\.v4") >= 4 * ahead


def test_routing_kernel_keeps_scores_in_registers(tmp_path: Path) -> None:
    """32 tokens of 128 experts a program."""
    from moe_kernels.variants.triton.route import route_quantise_kernel

    types = {"logits": FP32, "bias": FP32, "hidden": BF16, "ids64": "*i64", "ids": I32, "weights": FP32, "ranks": I32,
             "histogram": I32, "sorted_slots": I32, "tiles": I32, "x_q": FP8, "x_scale": FP32, "tokens": "i32",
             "scaling": "fp32", "chunks": "i32"}
    constants = {"H": 4096, "E": 128, "E_PAD": 128, "K": 8, "K_PAD": 8, "BT": 32, "HAS_BIAS": True, "NORM": True,
                 "SINGLE": True, "BLOCK_M": 16, "COLUMN_MAJOR": True, "MODE": "fp8", "BQ": 32}
    kernel = Compiled(route_quantise_kernel, types, constants, 8, tmp_path)
    assert kernel.stack == 0
    assert kernel.count(r"\b(?:atom|red)\.(?:global|shared)") == 0  # nothing depends on the order of programs
