"""Linear layers of BF16 activations: block-FP8 weights, BF16 weights, and the FP32 router.

A row's bits do not depend on the number of rows: K is cut into parts by a rule that knows the weight's shape only, and
every kernel sums a part's blocks, and then the parts, in the same order (`kernels/linear.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.errors import ContractError
from moe_kernels.ops import reference
from moe_kernels.ops.reference import Quantised
from moe_kernels.ops.runtime import capability, ceil_div, kernels_run, launch_options, next_power_of_2
from moe_kernels.quant.fp8 import E4M3
from moe_kernels.records import FP8_BLOCK

FEW = 128  # rows up to which weights take the tensor core's M side and K is split


@dataclass(frozen=True)
class Tile:
    """Launch parameters: `rows` tokens by `columns` outputs a program, warps and pipeline stages.

    `stream` takes the Gluon kernel of `kernels/stream.py` (Hopper, FP8, few rows).
    """

    rows: int
    columns: int
    warps: int
    stages: int
    stream: bool = False


def split_count(rows: int, columns: int) -> int:
    """Parts of K for a weight [rows, columns]: enough programs of 64 rows to fill 132 SMs twice, not tiny parts."""
    tiles, blocks, splits = ceil_div(rows, 64), columns // 128, 1
    while splits < 8 and tiles * splits * 2 <= 264 and blocks >= 5 * splits * 2:
        splits *= 2
    return splits


def tile_of(tokens: int, element_size: int, stream: bool = False) -> Tile:
    """Default launch parameters for a number of rows and the bytes of a weight; `stream` where that kernel runs."""
    if tokens > FEW:
        return Tile(64, 128, 4, 4) if element_size == 1 else Tile(128, 128, 8, 3)
    rows = max(16, next_power_of_2(tokens))
    if element_size == 1 and stream:
        return Tile(rows, 64, 4, {16: 8, 32: 6, 64: 5, 128: 4}[rows], stream)
    if element_size == 1:  # by `benchmarks/h200_ops.py`
        return Tile(rows, 128, 8, 6) if rows == 16 and tokens == 1 else Tile(rows, 128 if rows <= 32 else 64, 4, 4)
    return Tile(rows, 128, 4, 4 if rows <= 32 else 3)


def streams(device: torch.device) -> bool:
    """The Gluon kernel (Hopper, the Triton it was written for) runs; MOE_PARITY_STREAM=0 forbids it. The same bits."""
    if not 90 <= capability(device) < 100 or os.environ.get("MOE_PARITY_STREAM") == "0":
        return False
    import triton

    return triton.__version__.startswith("3.6.")


def quantise(x: Tensor) -> Quantised:
    """Per token and 128 columns, as an `Fp8Linear` reads them: x [T, K] -> E4M3 [T, K], FP32 [K/128, T]."""
    if not kernels_run(x):
        return reference.quantise(x)
    from moe_kernels.variants.triton.pipeline import quantise_hidden

    return Quantised(*quantise_hidden(x.contiguous()))


class _Linear:
    """What both formats share: the launches."""

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.scale, self.bias = weight.contiguous(), scale, bias
        self.rows, self.columns = weight.shape
        self.splits = split_count(self.rows, self.columns)
        self.override: Tile | None = None  # set by the tuner
        self._operands: dict[tuple[int, bool], Any] = {}

    def _operand(self, tensor: Tensor, rows: int, tma: bool, stream: bool = False) -> Any:
        """The tensor, or a TMA descriptor of [rows, 128] tiles; the weight's are kept."""
        if not tma:
            return tensor
        key = (rows, stream)
        if tensor is self.weight and key in self._operands:
            return self._operands[key]
        made: Any
        if stream:
            from triton.experimental.gluon.language import NVMMASharedLayout
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

            made = GluonDescriptor.from_tensor(tensor, [rows, 128], NVMMASharedLayout(128, 8, 2))
        else:
            from triton.tools.tensor_descriptor import TensorDescriptor

            made = TensorDescriptor.from_tensor(tensor, [rows, 128])
        if tensor is self.weight:
            self._operands[key] = made
        return made

    def _launch(self, x: Tensor, x_scale: Tensor | None, *, keep_split: bool) -> Tensor:
        from moe_kernels.ops.kernels import linear as kernels
        from moe_kernels.ops.kernels.norm import sum_splits_kernel

        tokens = x.shape[0]
        few = tokens <= FEW
        tile = self.override or tile_of(tokens, self.weight.element_size(), streams(x.device))
        split = few and self.splits > 1
        size = (self.splits, tokens, self.rows) if split else (tokens, self.rows)
        out = torch.empty(size, dtype=torch.float32 if split else torch.bfloat16, device=x.device)
        if tokens == 0:
            return out.sum(0).bfloat16() if split else out
        tma = capability(x.device) >= 90
        blocks, options = ceil_div(self.rows, tile.columns), launch_options(x)
        bias = None if split else self.bias
        weight = self._operand(self.weight, tile.columns, tma, tile.stream)
        arguments = (x_scale if x_scale is not None else x, weight, self.scale if self.scale is not None else x,
                     bias if bias is not None else x, out, tokens)
        constants: dict[str, Any] = dict(
            N=self.rows, K=self.columns, SPLITS=self.splits, BT=tile.rows, BN=tile.columns, HAS_BIAS=bias is not None,
            STAGES=tile.stages, num_warps=tile.warps, **options)
        if few and tile.stream:
            from moe_kernels.ops.kernels.stream import linear_stream_kernel  # Gluon is imported only where it runs

            part = ceil_div(self.columns // 128, self.splits)
            linear_stream_kernel[(blocks * self.splits,)](
                self._operand(x, tile.rows, True, True), *arguments, PART_PAD=next_power_of_2(part), **constants)
        else:
            constants |= {"FP8": self.scale is not None, "TMA": tma, "num_stages": tile.stages}
            if few:
                grid = (blocks * self.splits * ceil_div(tokens, tile.rows),)
                kernels.linear_few_kernel[grid](x, *arguments, **constants)
            else:
                kernels.linear_many_kernel[(blocks * ceil_div(tokens, tile.rows),)](
                    self._operand(x, tile.rows, tma), *arguments, GROUP=8, **constants)
        if not split or keep_split:
            return out
        total = torch.empty(tokens, self.rows, dtype=torch.bfloat16, device=x.device)
        block = min(1024, next_power_of_2(self.rows))
        sum_splits_kernel[(tokens * ceil_div(self.rows, block),)](
            out, total if self.bias is None else self.bias, total, tokens, N=self.rows, BLOCK=block,
            SPLITS=self.splits, HAS_BIAS=self.bias is not None, num_warps=4, **options)
        return total


class Fp8Linear(_Linear):
    """x @ weight.T + bias: weight E4M3 [N, K] in 128x128 blocks, activations 1x128, FP32 sums, BF16 result.

    `weight_scale_inv` FP32 [ceil(N/128), K/128] multiplies; bias BF16 or FP32 [N] is added to the FP32 sum before it
    is rounded. K must be a multiple of 128.
    """

    def __init__(self, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None) -> None:
        rows, columns = weight.shape
        if weight.dtype != E4M3 or columns % FP8_BLOCK:
            raise ContractError(f"an FP8 linear needs E4M3 [N, K] with K a multiple of {FP8_BLOCK}, got "
                                f"{weight.dtype} {tuple(weight.shape)}; keep this layer in BF16")
        wanted = (-(-rows // FP8_BLOCK), columns // FP8_BLOCK)
        if weight_scale_inv.dtype != torch.float32 or tuple(weight_scale_inv.shape) != wanted:
            raise ContractError(f"weight_scale_inv must be FP32 {wanted}, got {weight_scale_inv.dtype} "
                                f"{tuple(weight_scale_inv.shape)}")
        super().__init__(weight, weight_scale_inv.contiguous(), bias)

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        """BF16 [T, N] from BF16 [T, K] or what an `..._quantised` function made of it."""
        return self._run(x, keep_split=False)

    def split(self, x: Tensor | Quantised) -> Tensor:
        """As the call, or split sums FP32 [S, T, N] where that is faster; only without bias."""
        return self._run(x, keep_split=self.bias is None)

    def _run(self, x: Tensor | Quantised, *, keep_split: bool) -> Tensor:
        values = x if isinstance(x, Quantised) else quantise(x)
        if not kernels_run(values.q):
            assert self.scale is not None
            return reference.linear_fp8(values, self.weight, self.scale, self.bias, torch.bfloat16)
        return self._launch(values.q, values.scale, keep_split=keep_split)


class Bf16Linear(_Linear):
    """x @ weight.T + bias in BF16 with FP32 sums: weight [N, K].

    With `invariant` (the default) a row's bits do not depend on T; without, or where K is no multiple of 128, torch's
    own product is used (cuBLAS picks its kernel by T).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = True) -> None:
        super().__init__(weight, None, bias)
        self.ours = invariant and weight.dtype == torch.bfloat16 and self.columns % 128 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] from [T, K]."""
        return self._run(x, keep_split=False)

    def split(self, x: Tensor) -> Tensor:
        """As the call, or split sums FP32 [S, T, N] where that is faster; only without bias."""
        return self._run(x, keep_split=self.bias is None)

    def _run(self, x: Tensor, *, keep_split: bool) -> Tensor:
        if not (self.ours and kernels_run(x)):
            return F.linear(x, self.weight, self.bias)
        return self._launch(x.contiguous(), None, keep_split=keep_split)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 [T, E] from x [T, H] and weight FP32 [E, H]: exact products, FP32 sums, no TF32."""
    if not kernels_run(x):
        return reference.router_logits(x, weight)
    from moe_kernels.ops.kernels.linear import router_kernel

    tokens, experts = x.shape[0], weight.shape[0]
    out = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        # Tokens and experts a program, warps: every choice lays a row's 512 columns over four warps alike.
        rows, columns, warps = (1, 2, 4) if tokens <= 8 else (8, 4, 4) if tokens <= 64 else (8, 8, 8)
        router_kernel[(ceil_div(experts, columns) * ceil_div(tokens, rows),)](
            x, weight, out, tokens, experts, H=x.shape[1], BT=rows, BE=columns, BK=512, num_warps=warps,
            **launch_options(x))
    return out
