"""Where an operation runs, and whether its launches may overlap with the one before."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# Programmatic dependent launch (SM90): a kernel's blocks become resident while the one before drains and wait for its
# end before they touch memory that it may write. Every kernel of this package waits first, so results cannot change.
PDL = os.environ.get("MOE_PARITY_PDL", "1") == "1"


def kernels_run(x: Tensor) -> bool:
    """Triton takes CUDA tensors, and CPU tensors in its interpreter."""
    return x.is_cuda or INTERPRET


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """Compute capability times ten; 0 off CUDA."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def launch_options(x: Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's PDL constant and Triton's own switch."""
    overlap = PDL and capability(x.device) >= 90
    return {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}


def splits_of(x: Tensor) -> int:
    """0 for [T, N], S for split sums [S, T, N]."""
    return x.shape[0] if x.ndim == 3 else 0


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
