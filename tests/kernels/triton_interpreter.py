"""Runs Triton kernels on the CPU: Triton's interpreter with its known faults worked round. Run as a subprocess.

The faults (design.md §8, triton 3.6.0): a BF16 `tl.dot` multiplies raw bits; the cast to E4M3 halves values that
round up across a power of two; and run-time loop bounds fail with numpy 2.4, which refuses int() of a 1-element
array. The replacements below use torch's casts and FP32 products. They change the interpreter, not the kernels.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _torch_view(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor | None:
    raw = torch.from_numpy(np.ascontiguousarray(data))
    if dtype == tl.float32:
        return raw.view(torch.float32)
    if dtype == tl.float16:
        return raw.view(torch.float16)
    if dtype == tl.bfloat16:
        return raw.view(torch.bfloat16)
    if dtype == tl.float8e4nv:
        return raw.view(torch.float8_e4m3fn)
    return None


def _convert_float(data, src, dst, rounding):  # type: ignore[no-untyped-def]
    """torch's casts where either side is E4M3 or BF16; the clamp to ±448 is the kernel's business."""
    targets = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
               tl.float8e4nv: torch.float8_e4m3fn}
    source = _torch_view(data, src)
    if source is None or dst not in targets:
        return _convert(data, src, dst, rounding)
    out = source.to(targets[dst])
    raw = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]).numpy()
    return raw.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[out.element_size()])


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
    def fp32(x):  # type: ignore[no-untyped-def]
        view = _torch_view(x.data, x.dtype.scalar)
        return view.float().numpy()

    return interpreter.TensorHandle(np.matmul(fp32(a), fp32(b)) + d.data, d.dtype.scalar)


def _scalar(self) -> int:  # type: ignore[no-untyped-def]
    return int(np.asarray(self.handle.data).reshape(-1)[0])


def install() -> None:
    """Apply the replacements; called once before the first kernel runs."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _dot
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", _scalar)
        scope.set_attr(tensor, "__int__", _scalar)

    interpreter._patch_lang_tensor = patched
