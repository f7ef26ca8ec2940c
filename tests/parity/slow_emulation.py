"""A second, slow emulation of the quantised MoE layers: one token, one expert, one block at a time, in numpy.

Written without the project's quantisers: values are rounded by looking for the nearest entry of a table of
all E4M3 or E2M1 numbers (ties to the even code). Sums are FP64, so the result is what exact accumulation of
the same quantised operands would give. Scales are formed by the same FP32 divisions as the kernels use,
since those decide the codes.
"""

from __future__ import annotations

import numpy as np
import torch

F32 = np.float32


def _e4m3_values() -> np.ndarray:
    """All non-negative finite E4M3FN numbers by code 0..126: 4 exponent bits (bias 7), 3 mantissa bits."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = _e4m3_values()
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x rounded to +-table (ties to even code, saturating), and its relative distance to the next tie."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    high = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    low = high - 1
    middle = (table[low] + table[high]) / 2
    code = np.where(magnitude > middle, high, np.where(magnitude < middle, low, np.where(low % 2 == 0, low, high)))
    margin = np.abs(magnitude - middle) / np.maximum(middle, 1e-30)
    return np.copysign(table[code], x), margin


def fp8_group(x: np.ndarray) -> tuple[np.ndarray, float, float]:
    """One group of up to 128 FP32 values: dequantised FP64 values, scale, and the smallest tie margin."""
    scale = F32(max(np.abs(x).max(), F32(1e-10)) / F32(448))
    q, margin = nearest((x / scale).astype(F32), E4M3)
    return q, float(scale), float(margin.min())


def nvfp4_group(x: np.ndarray, scale_2: np.float32) -> tuple[np.ndarray, float, float]:
    """16 FP32 values under the scalar: E2M1 values, E4M3 block scale, smallest tie margin (scale included)."""
    wanted = F32(F32(np.abs(x).max() / F32(6)) / scale_2)
    scale, scale_margin = nearest(np.array([min(wanted, F32(448))], dtype=F32), E4M3)
    step = F32(scale[0]) * scale_2
    if step == 0:
        return np.zeros_like(x, dtype=np.float64), 0.0, float(scale_margin.min())
    q, margin = nearest((x / step).astype(F32), E2M1)
    return q, float(scale[0]), float(min(margin.min(), scale_margin.min()))


def silu(x: np.ndarray) -> np.ndarray:
    """FP64."""
    return x / (1 + np.exp(-x))


def _fp8_dot(x: np.ndarray, record, name: str, expert: int, rows: slice, half: int) -> tuple[np.ndarray, float]:
    """x [K] quantised 1x128 against the FP8 matrix `name`, block by block; FP64 [N] and the tie margin."""
    codes = getattr(record, name)[expert, rows].view(torch.uint8).numpy()
    weight = np.where(codes & 128, -1.0, 1.0) * np.append(E4M3, np.nan)[codes & 127]
    scales = getattr(record, f"{name}_scale")[expert].numpy().astype(np.float64)
    if name == "w13":
        scales = np.split(scales, 2)[half]
    total, margin = np.zeros(weight.shape[0]), np.inf
    for b in range(0, x.shape[0], 128):
        q, scale, m = fp8_group(x[b : b + 128])
        margin = min(margin, m)
        dots = weight[:, b : b + 128] @ q
        for n in range(weight.shape[0]):
            total[n] += dots[n] * scale * scales[n // 128, b // 128]
    return total, margin


def _nvfp4_dot(x: np.ndarray, scale_2, record, name: str, expert: int, rows: slice, half: int):
    """x [K] quantised 1x16 against the NVFP4 matrix `name`; FP64 [N] and the tie margin."""
    packed = getattr(record, name)[expert, rows].numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)  # even column low
    weight = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    scale_codes = getattr(record, f"{name}_scale")[expert, rows].view(torch.uint8).numpy()
    scales = E4M3[scale_codes]
    weight_scalar = getattr(record, f"{name}_scale_2")[expert]
    scalar = float(weight_scalar[half] if name == "w13" else weight_scalar)
    total, margin = np.zeros(weight.shape[0]), np.inf
    for b in range(0, x.shape[0], 16):
        q, scale, m = nvfp4_group(x[b : b + 16], scale_2)
        margin = min(margin, m)
        total += (weight[:, b : b + 16] @ q) * scale * scales[:, b // 16]
    return total * float(scale_2) * scalar, margin


def layer(record, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """FP64 outputs [T, H] and each token's smallest distance to a rounding tie of its intermediate [T]."""
    x_all = hidden.float().numpy()
    out = np.zeros(x_all.shape)
    margins = np.full(x_all.shape[0], np.inf)
    size = record.intermediate_size
    for t, x in enumerate(x_all):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if record.format == "fp8":
                gate, _ = _fp8_dot(x, record, "w13", expert, slice(0, size), 0)
                up, _ = _fp8_dot(x, record, "w13", expert, slice(size, None), 1)
            else:
                s = F32(record.w13_input_scale.max().item())
                gate, _ = _nvfp4_dot(x, s, record, "w13", expert, slice(0, size), 0)
                up, _ = _nvfp4_dot(x, s, record, "w13", expert, slice(size, None), 1)
            if record.swiglu_limit is not None:
                limit = record.swiglu_limit
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            h = (silu(gate) * up).astype(F32)
            if record.format == "fp8":
                y, margin = _fp8_dot(h, record, "w2", expert, slice(None), 0)
            else:
                s = F32(record.w2_input_scale.max().item())
                y, margin = _nvfp4_dot(h, s, record, "w2", expert, slice(None), 0)
            out[t] += weight * y
            margins[t] = min(margins[t], margin)
    return torch.from_numpy(out), torch.from_numpy(margins)
