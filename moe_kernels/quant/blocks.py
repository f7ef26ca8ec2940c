"""Helpers shared by the quantisers: memory-frugal slices of rows, and naming the place of a bad value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_kernels.errors import QuantizationError

# Elements handled at once. On a CPU the FP32 temporaries (1 MiB each) then stay in the cache and are not
# mapped afresh, measured several times faster than 4 M elements at once; on a GPU launches should be few.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 18, 1 << 26


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def slices(count: int, elements_each: int, device: torch.device) -> Iterator[slice]:
    """Cut `count` rows (or matrices) of `elements_each` elements into slices of bounded size."""
    limit = _GPU_ELEMENTS if device.type == "cuda" else _CPU_ELEMENTS
    step = max(1, limit // max(1, elements_each))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def require_finite(x: Tensor, what: str) -> None:
    """Raise QuantizationError with the position of the first NaN or infinity in `x` (one pass, no copy)."""
    if x.numel() == 0:
        return
    low, high = torch.aminmax(x)
    if bool(torch.isfinite(low) & torch.isfinite(high)):  # NaN propagates through both
        return
    position = (~torch.isfinite(x)).nonzero()[0].tolist()
    raise QuantizationError(
        f"{what} holds {float(x[tuple(position)])} at {position}: quantisation needs finite values; "
        "look for a damaged tensor or an overflow upstream"
    )


def require_float(x: Tensor, what: str) -> None:
    """Refuse what is no floating-point tensor with at least one dimension."""
    if not x.is_floating_point() or x.ndim < 1:
        raise QuantizationError(f"{what} must be a floating-point tensor, got {x.dtype} {tuple(x.shape)}")


def constant(like: Tensor, value: float) -> Tensor:
    """`value` as a 0-d FP32 tensor on the device of `like`, to divide by.

    On CUDA torch turns division by a Python number into a product with its reciprocal, one ulp off the CPU's
    quotient; with BF16 inputs that flips about 2 % of the E4M3 roundings (ties). A tensor is divided by exactly.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)
