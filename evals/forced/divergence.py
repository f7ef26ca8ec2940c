"""How far two servers' next-token distributions are apart on the same text: KL, top-1, NLL, worst tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from evals.errors import ServerError
from evals.forced.records import MISSING, Floats, Scores

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
KEEP_WORST = 12
CONTEXT = 8  # tokens shown before a bad one
_TINY = 1e-12


def token_kl(a: Scores, b: Scores) -> Floats:
    """Lower bound of KL(A || B) per token [T - 1] in nats, from the tokens both servers listed plus one tail bucket.

    With S the ids listed by both and p, q the distributions: sum_S p log(p/q) + P(not S) log(P(not S) / Q(not S)).
    Merging outcomes can only lower a KL divergence (data-processing inequality), so this never overstates; with the
    top 20 of a language model, S holds more than 0.999 of the mass on most tokens.
    """
    shared = (a.top_ids[1:, :, None] == b.top_ids[1:, None, :]) & (a.top_ids[1:, :, None] != MISSING)
    in_b = shared.any(-1)
    column = shared.argmax(-1)
    p = np.where(in_b, np.exp(a.top_logprobs[1:]), 0.0)
    q_log = np.take_along_axis(b.top_logprobs[1:], column, axis=1)
    with np.errstate(invalid="ignore"):
        body = np.where(p > 0, p * (a.top_logprobs[1:] - q_log), 0.0).sum(-1)
    q = np.where(in_b, np.exp(q_log), 0.0)
    p_tail, q_tail = np.clip(1 - p.sum(-1), 0.0, 1.0), np.clip(1 - q.sum(-1), _TINY, 1.0)
    tail = np.where(p_tail > _TINY, p_tail * (np.log(np.maximum(p_tail, _TINY)) - np.log(q_tail)), 0.0)
    return np.maximum(body + tail, 0.0)


def top1(s: Scores) -> np.ndarray:
    """Most likely id per token [T - 1]; the lowest id among equals, so that ties do not count as changes."""
    best = s.top_logprobs[1:].max(-1, keepdims=True)
    ids = np.where(s.top_logprobs[1:] == best, s.top_ids[1:], np.iinfo(np.int64).max)
    return ids.min(-1)


@dataclass(frozen=True)
class WorstToken:
    """A token where the servers differ most, with the text in front of it."""

    kl: float
    item: str
    position: int
    context: str
    token: str
    logprob_a: float
    logprob_b: float


@dataclass
class Divergence:
    """Running totals over texts; memory is one float per token and a dozen worst tokens."""

    texts: int = 0
    _kl: list[Floats] = field(default_factory=list)
    _agree: list[np.ndarray] = field(default_factory=list)
    _nll: list[tuple[float, int]] = field(default_factory=list)  # per text: sum of NLL_B - NLL_A, tokens
    _worst: list[tuple[float, int, WorstToken]] = field(default_factory=list)
    _seen: int = 0

    def add(self, a: Scores, b: Scores) -> None:
        """One text under both servers; different token ids mean different tokenizers, an error."""
        if not np.array_equal(a.ids, b.ids):
            raise ServerError(f"item {a.item}: the servers tokenise the same text differently; nothing can be compared")
        begin = max(a.scored_from, 1) - 1
        kl = token_kl(a, b)[begin:]
        agree = (top1(a) == top1(b))[begin:]
        delta = (a.logprobs - b.logprobs)[begin + 1 :]
        self.texts += 1
        self._kl.append(kl.astype(np.float32))
        self._agree.append(agree)
        self._nll.append((float(delta.sum()), len(delta)))
        for row in np.argsort(kl)[::-1][:3]:
            position = begin + 1 + int(row)
            self._remember(
                WorstToken(
                    float(kl[row]),
                    a.item,
                    position,
                    "".join(a.tokens[max(0, position - CONTEXT) : position]),
                    a.tokens[position],
                    float(a.logprobs[position]),
                    float(b.logprobs[position]),
                )
            )

    def _remember(self, token: WorstToken) -> None:
        self._seen += 1
        entry = (token.kl, self._seen, token)  # the counter decides between equals
        if len(self._worst) < KEEP_WORST:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)

    def summary(self) -> LogprobSummary:
        """Figures over everything added so far."""
        kl = np.concatenate(self._kl).astype(np.float64) if self._kl else np.zeros(0)
        agree = np.concatenate(self._agree) if self._agree else np.zeros(0, dtype=bool)
        n = len(kl)
        delta, low, high = mean_by_cluster(self._nll)
        return LogprobSummary(
            texts=self.texts,
            tokens=n,
            mean_kl=float(kl.mean()) if n else 0.0,
            percentiles={f"p{p:g}": float(np.percentile(kl, p)) if n else 0.0 for p in PERCENTILES},
            max_kl=float(kl.max()) if n else 0.0,
            top1_agreement=float(agree.mean()) if n else 1.0,
            delta_nll=delta,
            delta_nll_low=low,
            delta_nll_high=high,
            perplexity_ratio=math.exp(delta),
            worst=tuple(t for _, _, t in sorted(self._worst, reverse=True)),
        )


def mean_by_cluster(parts: Iterable[tuple[float, int]], z: float = 1.959964) -> tuple[float, float, float]:
    """Mean per token of cluster sums, with a 95 % interval from the between-cluster variance of a ratio estimator.

    Tokens of one text are not independent: the texts are the sampling unit (Miller, arXiv 2411.00640, clustered SE).
    """
    data = np.array(list(parts), dtype=np.float64).reshape(-1, 2)
    total = data[:, 1].sum()
    if not total:
        return 0.0, 0.0, 0.0
    mean = data[:, 0].sum() / total
    m = len(data)
    if m < 2:
        return float(mean), -math.inf, math.inf
    residual = data[:, 0] - mean * data[:, 1]
    error = math.sqrt(m / (m - 1) * float((residual**2).sum())) / total
    return float(mean), float(mean - z * error), float(mean + z * error)


@dataclass(frozen=True)
class LogprobSummary:
    """Divergence of B from A. KL in nats (lower bounds); `delta_nll` = NLL_B - NLL_A per token, 95 % interval."""

    texts: int
    tokens: int
    mean_kl: float
    percentiles: dict[str, float]
    max_kl: float
    top1_agreement: float
    delta_nll: float
    delta_nll_low: float
    delta_nll_high: float
    perplexity_ratio: float
    worst: tuple[WorstToken, ...] = ()
