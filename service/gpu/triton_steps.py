"""Triton kernels of a decode step outside the model: its inputs, and greedy sampling with log-probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns of logits one program reads


@triton.jit(do_not_specialize=["pad"])
def _inputs_kernel(inputs, last_token, ids, lengths, count, pad, BLOCK: tl.constexpr):
    """ids = the given token or the row's last sampled one; lengths = position + 1, 0 for padding."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    given = tl.load(inputs + at, mask=mask, other=0)
    position = tl.load(inputs + count + at, mask=mask, other=0)
    row = tl.load(inputs + 3 * count + at, mask=mask, other=0)
    sampled = tl.load(last_token + row, mask=mask, other=0)
    tl.store(ids + at, tl.where(given < 0, sampled, given), mask=mask)
    tl.store(lengths + at, tl.where(row == pad, 0, position + 1).to(tl.int32), mask=mask)


@triton.jit
def _partial_kernel(logits, best, index, total, bad, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Per chunk of a row: maximum, its lowest index, sum of exp(x - maximum), and how many are not finite."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab
    x = tl.load(logits + row.to(tl.int64) * vocab + columns, mask=mask, other=float("-inf")).to(tl.float32)
    high = tl.max(x, axis=0)
    at = row * CHUNKS + chunk
    tl.store(best + at, high)
    tl.store(index + at, tl.min(tl.where(x == high, columns, vocab), axis=0))
    tl.store(total + at, tl.sum(tl.exp(x - high), axis=0))
    zero = x - x
    tl.store(bad + at, tl.sum((mask & (zero != 0)).to(tl.int32), axis=0))


@triton.jit
def _final_kernel(best, index, total, bad, rows, last_token, out, count, CHUNKS: tl.constexpr, PAD: tl.constexpr):
    """Over chunks: token, log-probability, rank 1 and finiteness to FP64 [4, count]; the token to its row as well."""
    row = tl.program_id(0)
    chunk = tl.arange(0, PAD)
    mask = chunk < CHUNKS
    at = row * CHUNKS + chunk
    high = tl.load(best + at, mask=mask, other=float("-inf"))
    where = tl.load(index + at, mask=mask, other=2147483647)
    sums = tl.load(total + at, mask=mask, other=0.0)
    wrong = tl.sum(tl.load(bad + at, mask=mask, other=0), axis=0)
    top = tl.max(high, axis=0)
    token = tl.min(tl.where(high == top, where, 2147483647), axis=0)
    whole = tl.sum(tl.where(mask, sums * tl.exp(high - top), 0.0), axis=0)
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + count + row, (0.0 - tl.log(whole)).to(tl.float64))
    tl.store(out + 2 * count + row, (token * 0 + 1).to(tl.float64))
    tl.store(out + 3 * count + row, (wrong == 0).to(tl.float64))
    safe = tl.where(wrong == 0, token, 0)  # of a row with NaN there may be no token
    tl.store(last_token + tl.load(rows + row), safe.to(tl.int64))


def step_inputs(inputs: Tensor, last_token: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [B], lengths int32 [B]) of the step's int64 [4, B]: given token or -1, position, slot, row."""
    count = inputs.shape[1]
    ids = torch.empty(count, dtype=torch.int64, device=inputs.device)
    lengths = torch.empty(count, dtype=torch.int32, device=inputs.device)
    _inputs_kernel[(triton.cdiv(count, 128),)](inputs, last_token, ids, lengths, count, pad, BLOCK=128, num_warps=4)
    return ids, lengths


def greedy(logits: Tensor, rows: Tensor, last_token: Tensor) -> Tensor:
    """As `sampling.greedy`, for contiguous logits [B, vocab] of any float dtype; also writes last_token[rows]."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, BLOCK)
    device = logits.device
    best, total = torch.empty(2, count, chunks, device=device)
    index, bad = torch.empty(2, count, chunks, dtype=torch.int32, device=device)
    out = torch.empty(4, count, dtype=torch.float64, device=device)
    _partial_kernel[(count, chunks)](logits, best, index, total, bad, vocab, CHUNKS=chunks, BLOCK=BLOCK, num_warps=8)
    _final_kernel[(count,)](best, index, total, bad, rows, last_token, out, count, CHUNKS=chunks,
                            PAD=triton.next_power_of_2(chunks), num_warps=1)
    return out
