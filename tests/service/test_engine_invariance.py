"""A request's bits do not depend on its batch mates, on chunk splits or on preemption (BF16 on the CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.engine.types import TokenOutput
from tests.service.engine_tools import GREEDY, Running, generate, loaded_stock, prompts_of

hf = pytest.importorskip("moe_kernels.hf")

LENGTHS = [3, 21, 64, 65, 9, 130, 40, 1, 77, 33]
LONG = [940, 640, 400, 290]
FP32_BOUND = 2e-5  # stated bound for FP32 models, where torch's attention rounds by batch shape


@pytest.fixture(scope="module", params=["bf16/reference", "fp8/emulated"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_PARITY_CACHE", str(tmp_path_factory.mktemp("cache")))
        return hf.load_model(tiny_checkpoint, request.param)


def exact(tokens: list[TokenOutput]) -> list[tuple]:
    return [(t.token_id, t.logprob, t.rank, t.top) for t in tokens]


def run(model, prompts: list[list[int]], **config) -> tuple[list[list[tuple]], list[list[tuple]], int]:
    with Running(model, **config) as engine:
        answers = generate(engine, prompts, max_tokens=24, logprobs=4, prompt_logprobs=2, ignore_eos=True, **GREEDY)
        preemptions = engine.stats().preemptions_total
    return (
        [exact(a.tokens) for a in answers],
        [exact(a.prompt_logprobs[1:]) for a in answers],  # type: ignore[arg-type]
        preemptions,
    )


def test_alone_equals_any_batch(model) -> None:
    """Each prompt alone, all together, chunks of 8, 20 and 512, with preemption: the same bits."""
    prompts = prompts_of(LENGTHS)
    together = run(model, prompts)
    with Running(model) as engine:
        assert engine.runner.kind.invariant
        for i, prompt in enumerate(prompts):
            (alone,) = generate(
                engine, [prompt], max_tokens=24, logprobs=4, prompt_logprobs=2, ignore_eos=True, **GREEDY
            )
            assert exact(alone.tokens) == together[0][i], f"prompt {i} differs in a batch"
            assert exact(alone.prompt_logprobs[1:]) == together[1][i]  # type: ignore[arg-type]
    for config in (dict(max_batch_tokens=8), dict(max_batch_tokens=20, max_seqs=3)):
        assert run(model, prompts, **config)[:2] == together[:2], f"differs with {config}"
    *evicted, preemptions = run(model, prompts, kv_blocks=16, max_batch_tokens=64)
    assert preemptions > 0
    assert evicted == list(together[:2])


def test_long_prompts_too(model) -> None:
    """Beyond 128 tokens torch's attention sums the keys in panels cut by the padded KV length."""
    prompts = prompts_of(LONG)
    together = run(model, prompts)
    for config in (dict(max_batch_tokens=100), dict(max_seqs=1), dict(kv_blocks=100)):
        *other, preemptions = run(model, prompts, **config)
        assert other == list(together[:2]), f"differs with {config}"
        assert preemptions > 0 or "kv_blocks" not in config


def test_sampling_is_seeded_and_batch_independent(model) -> None:
    """A seed fixes the answer whatever runs beside it; different seeds differ."""
    prompts = prompts_of([12, 30, 7])
    params = dict(max_tokens=20, temperature=1.0, top_p=0.95, top_k=50, seed=1234, ignore_eos=True)
    with Running(model) as engine:
        together = generate(engine, prompts, **params)
        for prompt, answer in zip(prompts, together, strict=True):
            (alone,) = generate(engine, [prompt], **params)
            assert exact(alone.tokens) == exact(answer.tokens)
        (other,) = generate(engine, prompts[:1], **{**params, "seed": 1235})
        assert other.ids != together[0].ids
        unseeded = generate(engine, [prompts[0]] * 4, **{**params, "seed": None})
        assert len({tuple(answer.ids) for answer in unseeded}) > 1


def test_fp32_within_the_stated_bound(tiny_checkpoint: Path) -> None:
    """An FP32 model agrees alone and in a batch to FP32_BOUND in log-probability, token for token."""
    prompts = prompts_of(LENGTHS)
    params = dict(max_tokens=16, ignore_eos=True, **GREEDY)
    with Running(loaded_stock(tiny_checkpoint)) as engine:
        together = generate(engine, prompts, **params)
        for prompt, answer in zip(prompts, together, strict=True):
            (alone,) = generate(engine, [prompt], **params)
            assert alone.ids == answer.ids
            difference = torch.tensor(alone.logprobs) - torch.tensor(answer.logprobs)
            assert float(difference.abs().max()) <= FP32_BOUND
