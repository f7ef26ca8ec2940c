"""Sampling on the device: greedy for every row, more only for rows that ask; one small copy to the host a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from service.engine.sampler import Row, draw, filtered, uniform
from service.engine.types import LOGPROB_FLOOR, TokenOutput
from service.gpu.kv import to_device


def greedy(logits: Tensor) -> Tensor:
    """FP64 [4, R] of logits [R, vocab]: token, its log-probability, its rank, and 1 where the row is finite."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logits.argmax(-1)
    own = logprobs.gather(-1, chosen[:, None])
    finite = torch.isfinite(logits.sum(-1))
    return torch.stack([chosen.double(), own[:, 0].double(), torch.ones_like(own[:, 0]).double(), finite.double()])


def greedy_kept(logits: Tensor, rows: Tensor, last_token: Tensor) -> Tensor:
    """`greedy`, the tokens also to `last_token[rows]`; on a GPU by one kernel, whose bits do not depend on R.

    Every step on a GPU takes its greedy tokens from here: torch's `log_softmax` rounds differently in the last bit.
    """
    if logits.is_cuda:
        from service.gpu import triton_steps

        return triton_steps.greedy(logits, rows, last_token)
    out = greedy(logits.float())
    last_token.index_copy_(0, rows, out[0].long())
    return out


@dataclass(frozen=True)
class Special:
    """Rows that are not plain greedy: their results replace the greedy ones."""

    out: Tensor  # FP64 [4, R]
    top_values: Tensor | None  # FP32 [R, n]
    top_ids: Tensor | None  # int64 [R, n]


def plain(row: Row) -> bool:
    """Whether greedy's result is all this row needs."""
    return row.params.temperature <= 0 and not row.banned and not row.params.logprobs


def special(logits: Tensor, rows: Seq[Row]) -> Special | None:
    """Results for rows that sample, ban or want more log-probabilities; None where there is no such row.

    The same arithmetic per row as `service.engine.sampler.sample`, so a row does not depend on its neighbours.
    """
    if all(plain(row) for row in rows):
        return None
    logits = logits.float()
    device = logits.device
    logprobs = logits.log_softmax(-1)
    chooser = logits
    bans = [(i, token) for i, row in enumerate(rows) for token in row.banned]
    if bans:
        at = to_device(np.asarray(bans, dtype=np.int64).T.copy(), device)
        chooser = logits.clone()
        chooser[at[0], at[1]] = -torch.inf
    chosen = chooser.argmax(-1)
    for kind in (False, True):
        group = [row.params.temperature > 0 and filtered(row.params) == kind for row in rows]
        if any(group):
            drawn = draw(chooser, _columns(rows, device), sort=kind)
            chosen = torch.where(to_device(np.asarray(group), device), drawn, chosen)
    own = logprobs.gather(-1, chosen[:, None])
    rank = (logprobs > own).sum(-1) + 1
    finite = torch.isfinite(logits.sum(-1))
    out = torch.stack([chosen.double(), own[:, 0].double(), rank.double(), finite.double()])
    most = max(row.params.logprobs or 0 for row in rows)
    top = logprobs.topk(min(most, logits.shape[-1]), dim=-1) if most else None
    return Special(out, top.values if top else None, top.indices if top else None)


def _columns(rows: Seq[Row], device: torch.device) -> Tensor:
    """FP64 [5, R, 1]: temperature, top_k, top_p, min_p, uniform number; neutral for greedy rows."""
    table = np.ones((5, len(rows), 1))
    for i, row in enumerate(rows):
        p = row.params
        table[:, i, 0] = (p.temperature if p.temperature > 0 else 1.0, p.top_k, p.top_p, p.min_p,
                          uniform(row.seed, row.position))
    return to_device(table, device)


class DevicePending:
    """Tokens on their way: `read` waits for the copy alone, not for what was launched after it."""

    def __init__(self, out: Tensor, rows: Seq[Row], extra: Special | None) -> None:
        self._rows = rows
        parts = [out] if extra is None or extra.top_values is None or extra.top_ids is None else [
            out, extra.top_values, extra.top_ids]
        if out.device.type == "cuda":
            self._host = []
            for part in parts:
                pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                self._host.append(pinned.copy_(part, non_blocking=True))
            self._event: torch.cuda.Event | None = torch.cuda.Event()
            self._event.record()
        else:
            self._host, self._event = [part.clone() for part in parts], None

    def read(self) -> list[TokenOutput | None]:
        """One token a row; None where its logits were not finite."""
        if self._event is not None:
            self._event.synchronize()
        ids, values, ranks, finite = self._host[0].tolist()
        best = list(zip(*(part.tolist() for part in self._host[1:]), strict=True))
        if not best and all(row.params.logprobs is None for row in self._rows):
            return [TokenOutput(int(i), v if v > LOGPROB_FLOOR else LOGPROB_FLOOR, int(r)) if ok else None
                    for i, v, r, ok in zip(ids, values, ranks, finite, strict=True)]
        out: list[TokenOutput | None] = []
        for r, row in enumerate(self._rows):
            if not finite[r]:
                out.append(None)
                continue
            token, value = int(ids[r]), max(values[r], LOGPROB_FLOOR)
            top: tuple[tuple[int, float], ...] = ()
            if (n := row.params.logprobs) is not None:
                top_v, top_i = best[r] if best else ([], [])
                if n < len(top_i):
                    top_v, top_i = top_v[:n], top_i[:n]
                if top_v and top_v[-1] < LOGPROB_FLOOR:  # they fall
                    top_v = [max(v, LOGPROB_FLOOR) for v in top_v]
                pairs = list(zip(top_i, top_v, strict=True))
                if token not in top_i:
                    pairs.append((token, value))
                top = tuple(pairs)
            out.append(TokenOutput(token, value, int(ranks[r]), top))
        return out
