"""Packs the chunks of one step into flat tensors: decoding sequences first, then prefill chunks, then padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.attention import Span
from service.engine.scheduler import Chunk

Planner = Callable[[list[Span], int], Any]  # spans and rows of a step, padding included -> the attention's plan
ROW_MULTIPLE = 4  # FP32 products on a CPU round a row alike only in counts that are multiples of 4


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: `ids`, `positions` int64 [1, T], `slots` int64 [tokens]; chunk i owns rows from starts[i] on."""

    chunks: list[Chunk]
    starts: list[int]
    tokens: int  # without padding
    ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: Any  # what the planner made


def padded_tokens(tokens: int) -> int:
    """Rows a step of `tokens` tokens is padded to: a multiple of 4, from 128 on of an eighth of the power of two below.

    Padding rows cost work (and crowd the experts they are routed to), but matrix kernels are compiled per row count
    (oneDNN on the CPU: about 0.3 ms each, into a bounded cache), so large counts must be few.
    """
    step = max(ROW_MULTIPLE, (1 << tokens.bit_length() - 1) // 8) if tokens >= 128 else ROW_MULTIPLE
    return -(-tokens // step) * step


def pack(chunks: list[Chunk], block: int, plan: Planner, device: torch.device) -> Batch:
    """Build the batch; reorders the chunks (decoding ones first, shortest first), which no result depends on."""
    chunks = sorted(chunks, key=lambda c: (c.count > 1, c.sequence.computed))
    total = sum(chunk.count for chunk in chunks)
    padded = padded_tokens(total)
    ids = np.zeros(padded, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    slots = np.zeros(total, dtype=np.int64)
    starts, spans, at = [], [], 0
    for chunk in chunks:
        sequence, count = chunk.sequence, chunk.count
        first = sequence.computed
        starts.append(at)
        spans.append(Span(count, first + count, sequence.blocks))
        if count == 1:
            ids[at], positions[at] = sequence.ids[first], first
            slots[at] = sequence.blocks[first // block] * block + first % block
        else:
            where = np.arange(first, first + count)
            ids[at : at + count] = sequence.ids[first : first + count]
            positions[at : at + count] = where
            slots[at : at + count] = np.asarray(sequence.blocks)[where // block] * block + where % block
        at += count
    return Batch(
        chunks, starts, total,
        torch.from_numpy(ids).to(device)[None], torch.from_numpy(positions).to(device)[None],
        torch.from_numpy(slots).to(device), plan(spans, padded),
    )
