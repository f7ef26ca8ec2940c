"""Do two engines say the same of held-out texts? Bounds that rounding keeps and a real fault breaks."""

from __future__ import annotations

import numpy as np

from evals.mini.dataset import load as problems
from service.engine.engine import Engine
from service.tokenizer import Tokenizer
from tests.service.engine_tools import GREEDY, generate

# Rounding between two BF16 forwards: mean 0.0012, 99th percentile 0.037 (an H200); on a CPU 0.0010, 0.030.
# Tokens where routing is nearly tied differ by more and are rare in held-out texts, so the maximum has no bound.
MEAN_GAP, HIGH_GAP = 0.0025, 0.08


def texts(tokenizer: Tokenizer, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, whole texts with their answers) of the first `count` gsm8k-mini problems, as token ids."""
    rows = problems(count)
    asked = [f"Question: {row['question']}\nAnswer:" for row in rows]
    return ([tokenizer.encode(text) for text in asked],
            [tokenizer.encode(f"{text} {row['answer']}") for text, row in zip(asked, rows, strict=True)])


def scores(engine: Engine, whole: list[list[int]]) -> np.ndarray:
    """Log-probabilities of all tokens but the first of every text, one forward each."""
    answers = generate(engine, whole, max_tokens=0, prompt_logprobs=0, **GREEDY)
    return np.asarray([token.logprob for answer in answers for token in answer.prompt_logprobs[1:] if token])


def gaps(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Mean and 99th percentile of the absolute difference."""
    gap = np.abs(mine - theirs)
    return float(gap.mean()), float(np.percentile(gap, 99))


def agree(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Within both bounds; NaN never is."""
    mean, high = gaps(mine, theirs)
    return bool(mean < MEAN_GAP and high < HIGH_GAP)
