"""Turns logits into tokens: greedy or seeded sampling per row, raw log-probabilities, ranks and best tokens.

Randomness is counter-based: the uniform number for a token comes from a hash of (seed, position) alone, so a request's
answer depends neither on its batch mates nor on preemption, and is the same on every machine whose logits are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from service.engine.types import LOGPROB_FLOOR, SamplingParams, TokenOutput


@dataclass(frozen=True, slots=True)
class Row:
    """One row to sample: `position` counts the request's generated tokens, `banned` ids cannot be chosen."""

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from BLAKE2b of (seed, position)."""
    data = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def filtered(params: SamplingParams) -> bool:
    """Whether top_k, top_p or min_p leaves tokens out."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def sample(logits: Tensor, rows: Seq[Row]) -> list[TokenOutput | None]:
    """One token per row of FP32 logits [R, vocab]; None where a row holds NaN or infinity.

    Log-probabilities are log_softmax of the given logits: before temperature, filters and bans.
    """
    logprobs = logits.log_softmax(-1)
    finite = torch.isfinite(logits.sum(-1)).tolist()
    chooser = logits
    if any(row.banned for row in rows):
        chooser = logits.clone()
        for index, row in enumerate(rows):
            if row.banned:
                chooser[index, list(row.banned)] = -torch.inf
    chosen = chooser.argmax(-1)
    # Two groups, so that sorting (filters only) never depends on what a batch mate asked for.
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0 and finite[i]]
    for group in ([i for i in random if not filtered(rows[i].params)], [i for i in random if filtered(rows[i].params)]):
        if group:
            chosen[group] = _draw(chooser[group], [rows[i] for i in group])
    wanted = [row.params.logprobs for row in rows]
    out: list[TokenOutput | None] = list(describe(logprobs, chosen, wanted))
    return [token if ok else None for token, ok in zip(out, finite, strict=True)]


def describe(logprobs: Tensor, chosen: Tensor, wanted: Seq[int | None]) -> list[TokenOutput]:
    """Log-probability, rank and `wanted[r]` best tokens of token `chosen[r]` in each row of logprobs [R, vocab]."""
    own = logprobs.gather(-1, chosen[:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    values, ids = own[:, 0].tolist(), chosen.tolist()
    best: dict[int, tuple[list[int], list[float]]] = {}
    most = max((n or 0 for n in wanted), default=0)
    if most:
        rows = [r for r, n in enumerate(wanted) if n]
        part = logprobs if len(rows) == len(wanted) else logprobs[rows]
        top_values, top_ids = part.topk(min(most, logprobs.shape[-1]), dim=-1)
        best = dict(zip(rows, zip(top_ids.tolist(), top_values.tolist(), strict=True), strict=True))
    out = []
    for r, token in enumerate(ids):
        value = max(values[r], LOGPROB_FLOOR)
        top: tuple[tuple[int, float], ...] = ()
        if (n := wanted[r]) is not None:
            top_i, top_v = best.get(r, ([], []))
            pairs = [(i, max(v, LOGPROB_FLOOR)) for i, v in zip(top_i[:n], top_v[:n], strict=True)]
            if token not in top_i[:n]:
                pairs.append((token, value))  # last: every other one is at least as likely
            top = tuple(pairs)
        out.append(TokenOutput(token, value, ranks[r], top))
    return out


def _draw(logits: Tensor, rows: Seq[Row]) -> Tensor:
    """Tokens int64 [R] for rows that all have temperature > 0 and either all or none a filter."""
    params = [row.params for row in rows]
    columns = [[p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params],
               [p.min_p for p in params], [uniform(row.seed, row.position) for row in rows]]
    table = torch.tensor(columns, dtype=torch.float64, device=logits.device)[:, :, None]
    return draw(logits, table, sort=any(filtered(p) for p in params))


def draw(logits: Tensor, columns: Tensor, *, sort: bool) -> Tensor:
    """Inverse-CDF sampling, int64 [R]: temperature, then top_k, top_p and min_p, each on what the last one left.

    `columns` FP64 [5, R, 1]: temperature, top_k (0: all), top_p, min_p, uniform number. top_p keeps the fewest
    likeliest tokens whose probabilities reach it; min_p drops those below min_p times the likeliest. Without `sort` no
    filter is applied. Sums are FP64 along a row, so neighbours cannot change a bit. Never waits for the device.
    """
    temperature, top_k, top_p, min_p, number = columns
    vocab = logits.shape[-1]
    scaled = logits.double() / temperature
    order: Tensor | None = None
    if sort:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab, device=logits.device)
        scaled = scaled.masked_fill(rank >= torch.where(top_k > 0, top_k, float(vocab)), -torch.inf)
    probs = scaled.softmax(-1)
    if order is not None:
        before = probs.cumsum(-1) - probs
        dropped = before >= torch.where(top_p < 1.0, top_p, 2.0)
        dropped |= probs < min_p * probs[:, :1]
        dropped[:, 0] = False
        probs = probs.masked_fill(dropped, 0.0)
    cdf = probs.cumsum(-1)
    target = number * cdf[:, -1:]
    # First entry above the target: never one of probability 0. Rounding may lift the target to the total itself.
    index = torch.searchsorted(cdf, target, right=True)
    index = torch.where(index < vocab, index, torch.searchsorted(cdf, cdf[:, -1:].contiguous()))
    return (index if order is None else order.gather(-1, index))[:, 0]
