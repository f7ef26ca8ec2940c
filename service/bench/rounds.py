"""What a round of load measured, and what two alternating series of rounds say about their ratio."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from scipy import stats

PERCENTILES = (50, 90, 99)


@dataclass
class Answered:
    """One request's times on the clock of `time.perf_counter`, in seconds."""

    sent: float
    tokens: list[float] = field(default_factory=list)  # when each token (or chunk of them) came
    count: int = 0  # tokens in all
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """A round's work: `prompts` of token ids, `output` tokens each, at most `concurrency` at once."""

    prompts: list[list[int]]
    output: int
    concurrency: int


class Target(Protocol):
    """Something that answers prompts."""

    name: str
    vocab: int

    def run(self, load: Load) -> list[Answered]:
        """Answer all prompts; returns when the last is done."""


@dataclass(frozen=True)
class Round:
    """`tok_s`: generated tokens over the round's wall clock, prefill included.

    `decode_tok_s`: summed over requests, tokens after the first over the time they took, times the share of the
    concurrency that was in use: what the service writes a second once the prompts are read. Times in milliseconds.
    """

    tok_s: float
    decode_tok_s: float
    seconds: float
    tokens: int
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    errors: int


def measure(target: Target, load: Load) -> Round:
    """Run one round and summarise it."""
    answers = target.run(load)
    good = [a for a in answers if a.error is None and a.tokens]
    if not good:
        return Round(0.0, 0.0, 0.0, 0, {}, {}, len(answers))
    seconds = max(a.tokens[-1] for a in good) - min(a.sent for a in good)
    tokens = sum(a.count for a in good)
    gaps = np.concatenate([np.diff(a.tokens) for a in good]) * 1e3
    rates = [(a.count - 1) / (a.tokens[-1] - a.tokens[0]) for a in good if a.tokens[-1] > a.tokens[0]]
    at_once = min(load.concurrency, len(load.prompts))
    decode = float(np.mean(rates)) * at_once if rates else 0.0
    return Round(tokens / seconds, decode, seconds, tokens, _percentiles([(a.tokens[0] - a.sent) * 1e3 for a in good]),
                 _percentiles(gaps), len(answers) - len(good))


def _percentiles(values: Any) -> dict[str, float]:
    array = np.asarray(values, dtype=float)
    if not array.size:
        return {}
    return {"mean": float(array.mean())} | {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}


def make_load(vocab: int, prompt: int, output: int, concurrency: int, requests: int, seed: int) -> Load:
    """Random prompts of `prompt` tokens, the same for every target."""
    source = random.Random(seed)
    return Load([[source.randrange(vocab) for _ in range(prompt)] for _ in range(requests)], output, concurrency)


@dataclass(frozen=True)
class Ratio:
    """a over b: geometric mean over paired rounds with the 95 % interval of a paired t-test on logarithms."""

    ratio: float
    low: float
    high: float
    rounds: int

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Ratio of two series measured in turns; round i of both is a pair. Raises ValueError for fewer than two pairs."""
    if len(a) != len(b) or len(a) < 2 or min(*a, *b) <= 0:
        raise ValueError(f"a ratio with an interval needs two or more pairs of positive rates, got {a} and {b}")
    logs = np.log(np.asarray(a) / np.asarray(b))
    mean, error = float(logs.mean()), float(logs.std(ddof=1) / math.sqrt(len(logs)))
    reach = float(stats.t.ppf((1 + confidence) / 2, len(logs) - 1)) * error
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


@dataclass
class Comparison:
    """All rounds of one load shape, per target, and the ratio of the first target to the second."""

    prompt: int
    output: int
    concurrency: int
    rounds: dict[str, list[Round]]
    ratio: Ratio | None = None
    decode_ratio: Ratio | None = None

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(
    targets: Sequence[Target], prompt: int, output: int, concurrency: int, requests: int, rounds: int, *,
    warmup: int = 1, seed: int = 0, say: Callable[[str, Round], None] | None = None,
) -> Comparison:
    """Rounds of every target in turns, their order reversed in every second round (A B, B A, A B, ...).

    Round i has the same prompts for all targets. Warm-up rounds are not counted.
    """
    found: dict[str, list[Round]] = {target.name: [] for target in targets}
    for i in range(-warmup, rounds):
        load = make_load(min(t.vocab for t in targets), prompt, output, concurrency, requests, seed + max(i, 0))
        for target in targets if i % 2 == 0 else list(targets)[::-1]:
            one = measure(target, load)
            if i >= 0:
                found[target.name].append(one)
                if say:
                    say(target.name, one)
    out = Comparison(prompt, output, concurrency, found)
    if len(targets) == 2 and rounds >= 2:
        a, b = (found[target.name] for target in targets)
        if all(r.tok_s > 0 and r.decode_tok_s > 0 for r in (*a, *b)):
            out.ratio = paired_ratio([r.tok_s for r in a], [r.tok_s for r in b])
            out.decode_ratio = paired_ratio([r.decode_tok_s for r in a], [r.decode_tok_s for r in b])
    return out
