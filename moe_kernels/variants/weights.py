"""Expert matrices in the precision a variant computes in: kept while they fit a budget, else made when needed."""

from __future__ import annotations

import os
import threading
import weakref

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.quant import codec, nvfp4
from moe_kernels.records import ExpertWeights

CACHE_VARIABLE = "MOE_PARITY_DEQUANT_CACHE_GB"
DEFAULT_CACHE_GB = 4.0


class Budget:
    """Bytes that dequantised experts of all layers together may hold; freed when their owner goes."""

    def __init__(self) -> None:
        self.used = 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """From the environment, in GB of 1e9 bytes, read at each call."""
        text = os.environ.get(CACHE_VARIABLE, str(DEFAULT_CACHE_GB))
        try:
            gigabytes = float(text)
        except ValueError:
            gigabytes = -1.0
        if not gigabytes >= 0:
            raise VariantError(f"{CACHE_VARIABLE}={text!r} must be a number of GB, 0 or more")
        return int(gigabytes * 1e9)

    def reserve(self, size: int, owner: object) -> bool:
        """Take `size` bytes for as long as `owner` lives, if they fit."""
        with self._lock:
            if self.used + size > self.limit:
                return False
            self.used += size
        weakref.finalize(owner, self._release, size)
        return True

    def _release(self, size: int) -> None:
        with self._lock:
            self.used -= size


BUDGET = Budget()


def expert_matrices(record: ExpertWeights, expert: int, which: str) -> Tensor:
    """FP32 [N, K] of one expert, dequantised exactly as the format says; `which` is "w13" or "w2".

    gate and up are separate matrices: their own block rows in FP8 (ragged I), their own scalars.
    """
    q, scale, scale_2 = record.parts(which)
    scale, scale_2 = (None if x is None else x[expert] for x in (scale, scale_2))
    matrix = codec.decode(record.format, q[expert], scale, scale_2)
    return matrix.flatten(0, 1) if which == "w13" else matrix


def unscaled_nvfp4(record: ExpertWeights, expert: int, which: str) -> Tensor:
    """FP32 [N, K] of e2m1 * block scale, exact in FP32 (2 + 4 significant bits); scale_2 is left to the caller."""
    q, scale = getattr(record, which)[expert], getattr(record, f"{which}_scale")[expert]
    return nvfp4.dequantize(q, scale, torch.ones((), device=q.device))


def stack(matrix, num_experts: int, dtype: torch.dtype, owner: object) -> Tensor | None:
    """[E, N, K] in `dtype` of `matrix(e)` for every expert, or None where the budget has no room for it."""
    first = matrix(0)
    if not BUDGET.reserve(num_experts * first.numel() * dtype.itemsize, owner):
        return None
    out = torch.empty(num_experts, *first.shape, dtype=dtype, device=first.device)
    out[0] = first
    for expert in range(1, num_experts):
        out[expert] = matrix(expert)
    return out
