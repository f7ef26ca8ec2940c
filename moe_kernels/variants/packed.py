"""A layer's expert matrices in oneDNN's own layout, for CPUs: one product for all experts where tokens are few.

A decoding batch of 32 tokens with 4 of 16 experts each gives an expert 8 rows on average and 25 at most, so a padded
batch of products is hardly smaller than all experts over all tokens. The latter needs no sorting: one product of the
tokens with every expert's w13, one grouped convolution (kernel 1, a group an expert) for every w2, and the chosen rows
are picked from the results. Measured at H 512, I 128, E 16, 32 tokens, 2 cores: w13 0.18 ms against 0.31 for a bmm in
BF16 and 0.35 against 0.70 in FP32, w2 in FP32 0.20 against 0.43.

BF16 products have the bits of `grouped_linear`. FP32 ones add up in oneDNN's order where `grouped_linear` has MKL's
(bits differ beyond some 400 columns), so a layer that uses these in FP32 must use them for every batch: `separate` is
for the larger ones. Rows do not depend on their number, which `usable` and `Packed.make` check by trying.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.batch_invariant import pad_rows, padded_rows
from moe_kernels.native import Library, fits
from moe_kernels.records import MoEShape, Routing
from moe_kernels.variants.grouped import Dispatch, Matrix
from moe_kernels.variants.weights import BUDGET

# Beyond, sorting costs less. With 64 rows a grouped convolution of 0.9 ms (60 rows) took 44 ms.
DENSE_TOKENS = 48
DENSE_RATIO = 4  # experts per chosen expert at most
PACK_ROWS = 64  # rows the layout is chosen for; any number works with it
_TRIED = (1, 2, 3, 4, 5, 8, 12, 31, 32, 36, 48)  # rows


def usable(shape: MoEShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether computing every expert can pay and the products are as the module says; the same for equal arguments."""
    if (device.type != "cpu" or shape.num_experts > DENSE_RATIO * shape.top_k
            or not torch.backends.mkldnn.is_available()):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    hidden, inter = shape.hidden_size, shape.intermediate_size
    return _invariant(hidden, 2 * inter, dtype) and _invariant(inter, hidden, dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K], plain or packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)


@lru_cache(maxsize=64)
def _invariant(columns: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN's products with a matrix [rows, columns] give a row the same bits in every (padded) batch.

    BF16 must also agree with torch's own product.
    """
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(300, columns, generator=generator).to(dtype)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    packed = _pack(weight)
    full = F.linear(x, weight) if dtype == torch.bfloat16 else _linear(x, packed)
    return all(torch.equal(_linear(pad_rows(x[:n]), w)[:n], full[:n]) for n in (*_TRIED, 300) for w in (packed, weight))


def separate(x: Tensor, plan: Dispatch, matrix: Matrix) -> Tensor:
    """As `grouped_linear`, a oneDNN product per expert; `matrix(e)` may be packed."""
    parts = []
    for expert, rows in enumerate(x.split(plan.counts)):
        if count := rows.shape[0]:
            parts.append(_linear(pad_rows(rows), matrix(expert))[:count])
    return torch.cat(parts)


class Packed:
    """Copies of w13 [E, 2I, H] and w2 [E, H, I] for products over all experts. See the module."""

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        self.experts, self.inter = w13.shape[0], w2.shape[2]
        self.fits_native = fits(w2.dtype, self.inter, w2.shape[1])
        self._w13 = _pack(w13.flatten(0, 1))
        self._w2 = torch.ops.mkldnn._reorder_convolution_weight(
            w2.flatten(0, 1)[..., None, None], [0, 0], [1, 1], [1, 1], self.experts,
            [1, self.experts * self.inter, 1, 32])
        self._starts = torch.arange(DENSE_TOKENS)[:, None] * self.experts

    @classmethod
    def make(cls, w13: Tensor | Matrix, w2: Tensor | Matrix, owner: object) -> Packed | None:
        """None where the matrices are not kept, the budget has no room for copies, or a bit differs."""
        if not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
            return None
        size = (w13.numel() + w2.numel()) * w13.element_size()
        if not BUDGET.reserve(size, owner):
            return None
        packed = cls(w13, w2)
        return packed if packed._same(w13[-1], w2[-1]) else None

    def _same(self, w13: Tensor, w2: Tensor) -> bool:
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(DENSE_TOKENS, w13.shape[1], generator=generator).to(w13.dtype)
        rows = torch.randn(DENSE_TOKENS, w2.shape[1], generator=generator).to(w2.dtype)
        for n in _TRIED:
            place = torch.arange(n) * self.experts + self.experts - 1
            if not (torch.equal(self.gate_up(x[:n], place), _linear(pad_rows(x[:n]), w13)[:n])
                    and torch.equal(self.down(rows[:n], place, n), _linear(pad_rows(rows[:n]), w2)[:n])):
                return False
        return True

    def plan(self, ids: Tensor) -> Dispatch:
        """The (token, slot) pairs of ids [T, k] in token order; their places among all T x E results."""
        tokens, k = ids.shape
        place = self._place(ids)
        row = torch.arange(tokens * k)
        return Dispatch(row // k, ids.flatten(), row.view(tokens, k), [], place)

    def _place(self, ids: Tensor) -> Tensor:
        return (ids + self._starts[: ids.shape[0]]).flatten()

    def gate_up(self, tokens: Tensor, place: Tensor) -> Tensor:
        """[R, 2I] of tokens [T, H]."""
        return _linear(pad_rows(tokens), self._w13).view(-1, 2 * self.inter).index_select(0, place)

    def down(self, rows: Tensor, place: Tensor, tokens: int) -> Tensor:
        """[R, H] of rows [R, I]."""
        spread = rows.new_zeros(padded_rows(tokens) * self.experts, self.inter).index_copy_(0, place, rows)
        return self._all_down(spread).index_select(0, place)

    def _all_down(self, spread: Tensor) -> Tensor:
        """[T * E, H] of every token's row for every expert, [T * E, I]."""
        tokens = spread.shape[0] // self.experts
        image = spread.view(1, 1, tokens, -1).permute(0, 3, 1, 2)  # channels last: no copy
        out = torch.ops.mkldnn._convolution_pointwise(
            image, self._w2, None, [0, 0], [1, 1], [1, 1], self.experts, "none", [], "")
        return out.permute(0, 2, 3, 1).reshape(tokens * self.experts, -1)

    def experts_of(self, hidden: Tensor, routing: Routing, native: Library) -> Tensor:
        """[T, H] in and out: gate_up, SwiGLU, down and the weighted sum, with the same bits and no gathering."""
        tokens, k = routing.ids.shape
        place = self._place(routing.ids)
        gate_up = _linear(pad_rows(hidden), self._w13).view(-1, 2 * self.inter)
        spread = native.swiglu(gate_up, place, hidden.new_zeros(gate_up.shape[0], self.inter))
        return native.combine(self._all_down(spread), place.view(tokens, k), routing.weights, hidden.dtype)


def separable(matrices: Tensor | Matrix, owner: object) -> Matrix:
    """`matrix(e)` for `separate`: packed where the matrices are kept and the budget has room for a copy."""
    if not isinstance(matrices, Tensor):
        return matrices
    if not BUDGET.reserve(matrices.numel() * matrices.element_size(), owner):
        return matrices.__getitem__
    return [_pack(matrix) for matrix in matrices].__getitem__
