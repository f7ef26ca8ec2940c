"""Operations whose result for a token does not depend on the batch it is in, for CPUs.

Plain torch breaks this in two places (measured with torch 2.13, MKL and oneDNN, AVX512, 1 and 2 threads):

* F.linear in FP32: BLAS picks its inner kernel by the number of rows, and a row's last bits change with it.
  Rows differ for 1, 2, 3, 5, 6, 7, 9, 10 and 11 rows, in BF16 for 1 row at large sizes; they never differed
  for a multiple of 4, in F.linear and torch.bmm alike, which then also agree with each other (13 shapes from
  60 x 100 to 4096 x 2816).
* torch.sigmoid and F.silu in FP32: full vectors and the last elements of a thread's share take two different
  exponentials, so an element's last bit depends on where it lies. torch.exp is one code for all elements.

tests/kernels/test_variants_batch.py holds this wherever it runs. On a GPU nothing here claims it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4


def padded_rows(count: int) -> int:
    """`count` rounded up to a multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """x [M, ...] followed by zero rows up to `padded_rows(M)`; x itself on a GPU or when M fits."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    if not missing or x.device.type != "cpu":
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [M, K] with weight [N, K]: [M, N]."""
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), the formula torch.sigmoid uses; x must be FP32."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in FP32, rounded to x.dtype, as F.silu computes it."""
    wide = x.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(x.dtype)
