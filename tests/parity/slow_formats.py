"""The slow emulation of slow_emulation.py for the other formats: MX, FP8 per channel and per tensor, NVFP4 per expert.

One token, one expert, one group at a time in numpy, with its tables and its search for the nearest entry; FP64 sums.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.parity.slow_emulation import E2M1, E4M3, F32, nearest, nvfp4_group, silu


def mx_scale(amax: float, largest: float) -> float:
    """The smallest power of two (from 2^-127) that is not below FP32(amax / largest)."""
    quotient = float(F32(F32(amax) / F32(largest)))
    if quotient == 0:
        return 2.0**-127
    exponent = math.floor(math.log2(quotient)) - 2
    while 2.0**exponent < quotient:
        exponent += 1
    return 2.0 ** max(exponent, -127)


def _groups(x: np.ndarray, act: str, scalar: float | None) -> tuple[np.ndarray, float]:
    """x [K] after quantisation, FP64, and the smallest distance to a rounding tie."""
    if act == "bf16":
        return torch.from_numpy(x).bfloat16().double().numpy(), np.inf
    if act == "static":
        assert scalar is not None
        q, margin = nearest((x / F32(scalar)).astype(F32), E4M3)
        return q * scalar, float(margin.min())
    if act == "token":
        scale = F32(max(np.abs(x).max(), F32(1e-10)) / F32(448))
        q, margin = nearest((x / scale).astype(F32), E4M3)
        return q * float(scale), float(margin.min())
    out, least = np.zeros(x.shape), np.inf
    if act == "nvfp4":
        if scalar is None:  # of the token's own
            scalar = float(F32(np.abs(x).max() / F32(6 * 448))) or 1.0
        for b in range(0, x.shape[0], 16):
            q, scale, margin = nvfp4_group(x[b : b + 16], F32(scalar))
            out[b : b + 16], least = q * scale * float(F32(scalar)), min(least, margin)
        return out, least
    table, largest = (E4M3, 448.0) if act == "mxfp8" else (E2M1, 6.0)
    for b in range(0, x.shape[0], 32):
        scale = mx_scale(np.abs(x[b : b + 32]).max(), largest)
        q, margin = nearest(x[b : b + 32].astype(np.float64) / scale, table)
        out[b : b + 32], least = q * scale, min(least, float(margin.min()))
    return out, least


def matrix(record, which: str, expert: int) -> np.ndarray:
    """FP64 [N, K] of one expert's matrix, decoded by table and by loop over its scales."""
    stored = getattr(record, which)[expert]
    scale = getattr(record, f"{which}_scale")[expert]
    scale_2 = getattr(record, f"{which}_scale_2")
    rows = stored.shape[0]
    codes = stored.view(torch.uint8).numpy()
    if record.format in ("nvfp4", "mxfp4"):
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1)  # even column low
        values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    else:
        values = np.where(codes & 128, -1.0, 1.0) * np.append(E4M3, np.nan)[codes & 127]
    for row in range(rows):
        half = row // (rows // 2) if which == "w13" else 0
        if record.format == "fp8_tensor":
            values[row] *= float(scale[half] if which == "w13" else scale)
        elif record.format == "fp8_channel":
            values[row] *= float(scale[row, 0])
        elif record.format == "nvfp4":
            steps = E4M3[scale[row].view(torch.uint8).numpy()]
            one = float(scale_2[expert, half] if which == "w13" else scale_2[expert])
            values[row] *= np.repeat(steps, 16) * one
        else:
            values[row] *= np.repeat(2.0 ** (scale[row].numpy().astype(np.float64) - 127), 32)
    return values


def layer(record, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, act: str, per_expert: bool = False):
    """FP64 outputs [T, H] and each token's smallest distance to a rounding tie of its intermediate [T].

    `act`: "mxfp8", "mxfp4", "bf16", "token" (FP8 per token), "static" (FP8 under input_scale) or "nvfp4".
    """
    x_all = hidden.float().numpy()
    out, margins, size = np.zeros(x_all.shape), np.full(x_all.shape[0], np.inf), record.intermediate_size
    matrices = {e: (matrix(record, "w13", e), matrix(record, "w2", e)) for e in ids.unique().tolist()}
    for t, x in enumerate(x_all):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            scalars: list[float | None] = [None, None]
            if act in ("static", "nvfp4") and record.w13_input_scale is not None:
                wide, down = record.w13_input_scale, record.w2_input_scale
                scalars = [float((wide[expert] if per_expert else wide).max()),
                           float((down[expert] if per_expert else down).max())]
            w13, w2 = matrices[expert]
            gate_up = w13 @ _groups(x, act, scalars[0])[0]
            gate, up = gate_up[:size], gate_up[size:]
            if record.swiglu_limit is not None:
                limit = record.swiglu_limit
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            q, margin = _groups((silu(gate) * up).astype(F32), act, scalars[1])
            out[t] += weight * (w2 @ q)
            margins[t] = min(margins[t], margin)
    return torch.from_numpy(out), torch.from_numpy(margins)
