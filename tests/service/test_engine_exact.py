"""The packed, chunked, cached, preempted engine computes what one stock transformers forward computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.engine.types import LOGPROB_FLOOR
from tests.service.engine_tools import GREEDY, Answer, Running, generate, loaded_stock, prompts_of, stock
from tests.tiny import glm4_moe

LENGTHS = [7, 1, 19, 33, 64, 5, 130]
NEW = 12
TOLERANCE = 2e-4  # FP32; measured maximum 4e-5 over 12 seeds


@pytest.fixture(scope="module", params=[0, 1, 2])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glm4_moe(tmp_path_factory.mktemp(f"seed{request.param}") / "m", seed=request.param)


def oracle_check(model, prompt: list[int], answer: Answer, top: int) -> float:
    """Compare an answer with one uncached forward over prompt and answer; returns the largest difference."""
    ids = prompt + answer.ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    worst = 0.0
    for i, token in enumerate(answer.tokens):
        row = logprobs[len(prompt) - 1 + i]
        best = float(row.max())
        # Greedy: its token is the oracle's, or one whose log-probability is within rounding of it.
        assert float(row[token.token_id]) >= best - TOLERANCE
        worst = max(worst, abs(float(row[token.token_id]) - token.logprob))
        assert len(token.top) in (top, top + 1)
        for (_, value), want in zip(token.top[:top], row.topk(top).values.tolist(), strict=True):
            worst = max(worst, abs(value - want))
    entries = answer.prompt_logprobs
    assert len(entries) == len(prompt) and entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        row = logprobs[position - 1]
        assert entry is not None and entry.token_id == prompt[position]
        want = max(float(row[prompt[position]]), LOGPROB_FLOOR)
        worst = max(worst, abs(want - entry.logprob))
        rank = int((row > row[prompt[position]] + TOLERANCE).sum()) + 1
        loose = int((row > row[prompt[position]] - TOLERANCE).sum()) + 1
        assert rank <= entry.rank <= loose
    return worst


@pytest.mark.parametrize("budget", [7, 32, 512])
def test_matches_stock_forward(checkpoint: Path, budget: int) -> None:
    """Chunks of 7 and 32 split most prompts; 512 packs everything; three random models."""
    prompts = prompts_of(LENGTHS)
    with Running(loaded_stock(checkpoint), max_batch_tokens=budget, max_seqs=5) as engine:
        answers = generate(engine, prompts, max_tokens=NEW, logprobs=3, prompt_logprobs=2, ignore_eos=True, **GREEDY)
        assert engine.stats().steps_total >= NEW
    model = stock(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == NEW and answer.last.finish_reason == "length"
        assert oracle_check(model, prompt, answer, top=3) < TOLERANCE


def test_preemption_changes_nothing(checkpoint: Path) -> None:
    """A pool too small for the load evicts and recomputes; every answer still matches the oracle."""
    prompts = prompts_of([30, 41, 22, 35, 17])
    with Running(loaded_stock(checkpoint), kv_blocks=14, kv_block=8, max_batch_tokens=32) as engine:
        answers = generate(engine, prompts, max_tokens=40, logprobs=3, prompt_logprobs=1, ignore_eos=True, **GREEDY)
        assert engine.stats().preemptions_total > 0
    model = stock(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 40
        assert oracle_check(model, prompt, answer, top=3) < TOLERANCE


def test_max_tokens_zero_scores_the_prompt(checkpoint: Path) -> None:
    """max_tokens 0 samples nothing and still delivers prompt log-probabilities."""
    prompt = prompts_of([50])[0]
    with Running(loaded_stock(checkpoint), max_batch_tokens=16) as engine:
        (answer,) = generate(engine, [prompt], max_tokens=0, prompt_logprobs=1)
    assert answer.ids == [] and answer.last.finish_reason == "length"
    assert answer.last.prompt_tokens == 50 and answer.last.completion_tokens == 0
    assert oracle_check(stock(checkpoint), prompt, answer, top=1) < TOLERANCE


def test_routing_is_the_routers(checkpoint: Path) -> None:
    """return_routing gives, per forwarded token and MoE layer, the experts stock routers choose."""
    prompts = prompts_of([9, 40])
    with Running(loaded_stock(checkpoint), max_batch_tokens=16) as engine:
        answers = generate(engine, prompts, max_tokens=6, return_routing=True, ignore_eos=True, **GREEDY)
        plain = generate(engine, prompts, max_tokens=6, ignore_eos=True, **GREEDY)
    model = stock(checkpoint)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    for prompt, answer, other in zip(prompts, answers, plain, strict=True):
        assert answer.ids == other.ids and other.last.routing is None
        routing = answer.last.routing
        assert routing is not None and routing.layers == (1, 2)
        chosen.clear()
        with torch.inference_mode():
            model(torch.tensor([prompt + answer.ids[:-1]]))
        want = torch.stack(chosen, dim=1)
        assert routing.ids.dtype == torch.int16 and routing.ids.shape == want.shape == (len(prompt) + 5, 2, 2)
        assert torch.equal(routing.ids.sort(-1).values.long(), want.sort(-1).values)
