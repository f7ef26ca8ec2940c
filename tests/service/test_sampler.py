"""Sampling against transformers' logits processors, frequencies against probabilities, exact log-probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.sampler import Row, sample, uniform
from service.engine.types import LOGPROB_FLOOR, SamplingParams

VOCAB = 50


def row(position: int = 0, seed: int = 0, banned: tuple[int, ...] = (), **params) -> Row:
    return Row(SamplingParams(max_tokens=1, **params), seed, position, banned)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities by transformers' processors, in their order."""
    from transformers.generation import logits_process as hf

    scores = logits.double()[None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    if temperature != 1.0:
        scores = hf.TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = hf.TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(ids, scores)
    return scores.softmax(-1)[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 20, 500]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_support_is_that_of_transformers(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """200 draws stay within the tokens transformers would keep."""
    logits = logits_of(seed)
    want = allowed(logits[0], temperature, top_k, top_p, min_p)
    rows = [row(i, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for i in range(200)]
    drawn = {t.token_id for t in sample(logits.expand(200, -1), rows)}  # type: ignore[union-attr]
    assert drawn <= {i for i in range(VOCAB) if want[i] > 0}
    assert int(want.argmax()) in drawn or float(want.max()) < 0.05


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 8, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 20, 0.9, 0.05)],
)
def test_frequencies(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square of 20,000 draws against transformers' probabilities, at a level of about 1e-6."""
    logits = logits_of(7)
    want = allowed(logits[0], temperature, top_k, top_p, min_p)
    n = 20_000
    rows = [row(i, 99, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for i in range(n)]
    counts = Counter(t.token_id for t in sample(logits.expand(n, -1), rows))  # type: ignore[union-attr]
    kept = [i for i in range(VOCAB) if want[i] > 0]
    big = [i for i in kept if n * want[i] >= 5]
    chi = sum((counts[i] - n * float(want[i])) ** 2 / (n * float(want[i])) for i in big)
    free = max(1, len(big) - 1)
    assert chi < free + 5 * math.sqrt(2 * free) + 12
    assert set(counts) <= set(kept)


def test_uniform_is_uniform_and_counter_based() -> None:
    values = [uniform(s, p) for s in range(100) for p in range(100)]
    assert all(0 <= v < 1 for v in values) and len(set(values)) == len(values)
    mean = sum(values) / len(values)
    assert abs(mean - 0.5) < 0.012  # four standard errors
    assert uniform(3, 4) == uniform(3, 4) and uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_neighbours_do_not_matter() -> None:
    """A row drawn alone, and among rows with every other kind of parameters, is the same token and logprob."""
    logits = logits_of(1, rows=6)
    rows = [
        row(4, 11, temperature=0.9),
        row(4, 11, temperature=0.9, top_k=7),
        row(temperature=0.0),
        row(9, 5, temperature=1.5, top_p=0.7, logprobs=3),
        row(1, 1, banned=(0, 1, 2), temperature=1.0),
        row(2, 2, temperature=0.5, min_p=0.1, logprobs=0),
    ]
    together = sample(logits, rows)
    for i, one in enumerate(rows):
        assert sample(logits[i : i + 1], [one]) == [together[i]]


def test_logprobs_are_raw_and_identical_in_top() -> None:
    logits = logits_of(2, rows=3)
    want = logits.log_softmax(-1)
    rows = [
        row(0, 3, temperature=5.0, top_k=40, logprobs=4),
        row(temperature=0.0, logprobs=0),
        row(temperature=0.0, banned=(int(logits[2].argmax()),), logprobs=2),
    ]
    for i, token in enumerate(sample(logits, rows)):
        assert token is not None
        assert token.logprob == float(want[i, token.token_id])
        assert dict(token.top)[token.token_id] == token.logprob
        assert token.rank == 1 + int((want[i] > want[i, token.token_id]).sum())
        assert list(token.top) == sorted(token.top, key=lambda pair: -pair[1])
        n = rows[i].params.logprobs or 0
        best = want[i].topk(n)
        assert list(token.top[:n]) == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        assert len(token.top) == n + (token.token_id not in best.indices.tolist())
    assert sample(logits, rows)[2].rank == 2  # type: ignore[union-attr]


def test_minus_infinity_is_clamped() -> None:
    logits = torch.full((1, 4), -1e30)
    logits[0, 1] = 0.0
    (token,) = sample(logits, [row(temperature=0.0, logprobs=4)])
    assert token is not None and token.logprob == 0.0
    assert all(value >= LOGPROB_FLOOR for _, value in token.top) and min(v for _, v in token.top) == LOGPROB_FLOOR


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_give_none(bad: float) -> None:
    logits = logits_of(3, rows=3)
    logits[1, 7] = bad
    first, second, third = sample(logits, [row(0, 1, temperature=1.0), row(temperature=1.0), row(temperature=0.0)])
    assert second is None and first is not None and third is not None


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = logits[0, 6] = 2.0
    a, b = sample(logits, [row(temperature=0.0), row(temperature=0.0)])
    assert a is not None and b is not None and (a.token_id, b.token_id) == (3, 0) and a.rank == 1
