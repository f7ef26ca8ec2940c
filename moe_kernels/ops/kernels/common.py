"""Shared by the serving kernels: the wait of a dependent launch, and rows that may still be split sums."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next launch's blocks in (they wait too), then wait until all before has finished and is seen."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_rows(x, at, plane, mask, SPLITS: tl.constexpr, DTYPE: tl.constexpr):
    """Elements at offsets `at` in DTYPE; with SPLITS > 0 the sum of that many FP32 planes `plane` apart, rounded."""
    value = _load(x + at, mask)
    for s in tl.static_range(1, SPLITS):
        value += _load(x + s * plane + at, mask)
    return value.to(DTYPE)


@triton.jit
def _load(at, mask):
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0.0)
