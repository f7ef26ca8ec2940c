"""Numbers that say how far two tensors are apart, each with its source and its behaviour at zero and NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN_ULP = torch.iinfo(torch.int64).max


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} and {tuple(y.shape)}")
    return x.double(), y.double()


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2<x, y> / (|x|^2 + |y|^2), in FP64 (DeepGEMM's `calc_diff`).

    0 for equal tensors, 1 for orthogonal ones, 2 for y = -x; unlike the cosine it sees a wrong scale. Two
    all-zero or empty tensors give 0. NaN or infinity in either gives +inf, so that `diff < limit` fails.
    """
    a, b = _pair(x, y)
    scale = _common_scale(a, b)
    if scale in (0.0, math.inf):
        return scale
    a, b = a / scale, b / scale  # squares of 1e300 or 1e-300 would leave FP64's range
    # the same number as |x - y|^2 / (|x|^2 + |y|^2), which does not cancel when x is near y
    return (a - b).square().sum().item() / (a.square() + b.square()).sum().item()


def relative_l2(actual: Tensor, reference: Tensor) -> float:
    """|actual - reference| / |reference| in FP64; 0 for 0/0, +inf for x/0 and for NaN or infinity."""
    a, r = _pair(actual, reference)
    scale = _common_scale(a, r)
    if scale in (0.0, math.inf):
        return scale
    error, norm = ((a - r) / scale).norm().item(), (r / scale).norm().item()
    return error / norm if norm else math.inf


def _common_scale(x: Tensor, y: Tensor) -> float:
    """Largest magnitude of both; 0 when both are zero or empty, +inf when any value is NaN or infinite."""
    if not x.numel():
        return 0.0
    amax = torch.stack([x.abs().amax(), y.abs().amax()]).amax().item()  # amax passes NaN on
    return amax if math.isfinite(amax) else math.inf


def ulp_distance(x: Tensor, y: Tensor) -> Tensor:
    """Representable values between x and y, int64, for two tensors of one floating dtype.

    Bits are mapped to integers that grow with the value, so neighbours differ by 1 and +0 equals -0. NaN
    against NaN is 0, NaN against a number the largest int64.
    """
    if x.dtype != y.dtype or x.shape != y.shape:
        raise ValueError(
            f"need one dtype and shape, got {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}")
    distance = (_ordinal(x) - _ordinal(y)).abs()
    nan_x, nan_y = x.float().isnan(), y.float().isnan()
    return distance.masked_fill(nan_x & nan_y, 0).masked_fill(nan_x ^ nan_y, _NAN_ULP)


def _ordinal(x: Tensor) -> Tensor:
    kind = _INT_OF_SIZE[x.element_size()]
    if kind is torch.int64:
        raise ValueError("ulp distance of float64 is not offered: it can exceed int64")
    bits = x.contiguous().view(kind).long()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def max_ulp(x: Tensor, y: Tensor) -> int:
    """Largest `ulp_distance`; 0 for empty tensors."""
    return int(ulp_distance(x, y).amax()) if x.numel() else 0


def matched_ratio(reference: Tensor, actual: Tensor, *, atol: float, rtol: float) -> float:
    """Share of elements with |reference - actual| <= atol + rtol * |actual|; 1 for empty tensors.

    FlashInfer's MoE tests use it (FP8 block: atol 0.1, rtol 0.85, share >= 0.79). The slack grows with the
    tested value, not the reference, so with rtol 0.85 every output of 0.54 to 6.7 times the reference passes.
    NaN never matches, infinity only itself.
    """
    r, a = _pair(reference, actual)
    if not r.numel():
        return 1.0
    return torch.isclose(r, a, atol=atol, rtol=rtol).double().mean().item()


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Raise `AssertionError` with the first differing index, both values and both bit patterns.

    Compares bits: -0 differs from +0, and NaN equals a NaN of the same payload. (DeepGEMM's tests have a
    function of this name with the same aim.)
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}")
    kind = _INT_OF_SIZE[actual.element_size()]
    a, e = (t.contiguous().view(kind) if t.is_floating_point() else t for t in (actual, expected))
    wrong = a != e
    count = int(wrong.sum())
    if count:
        index = tuple(int(i) for i in wrong.nonzero()[0])
        size = 8 * actual.element_size()
        bits = [int(t[index]) % (1 << size) for t in (a, e)]
        raise AssertionError(
            f"{what}: {count} of {actual.numel()} elements differ, first at {index}: "
            f"{actual[index].item()!r} (0x{bits[0]:0{size // 4}x}) against "
            f"{expected[index].item()!r} (0x{bits[1]:0{size // 4}x})")


def kl_divergence(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """KL(P || Q) in nats over the last dimension, FP64 [...], from normalised log-probabilities.

    -inf in P adds nothing (0 log 0 = 0); -inf in Q where P is not gives +inf; NaN stays NaN.
    """
    p, q = _pair(p_logprobs, q_logprobs)
    terms = p.exp() * (p - q)
    return terms.masked_fill(p == -math.inf, 0.0).sum(-1)
