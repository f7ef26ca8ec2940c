"""Every model type through the engine: exact against stock transformers, batch invariant, honest in its fingerprint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import hf, native
from service import fingerprint, latent
from service.config import ConfigError
from service.engine.kinds import attention_kind
from service.engine.kv_cache import PagedLatent
from service.engine.probe import run_probe
from tests import family
from tests.service.engine_tools import GREEDY, Running, byte_tokenizer, generate, prompts_of
from tests.service.test_engine_exact import oracle_check
from tests.service.test_engine_invariance import run

PAGED = "moe_parity_native" if native.library() else "moe_parity_paged"
TYPES = [t for t in family.MODEL_TYPES if t != "glm4_moe"]
TOLERANCE = 2e-5  # log-probabilities, FP32; measured maximum 3.3e-6 over the 80 models
SEEDS = [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 20))]
LENGTHS = [7, 1, 33, 64, 91]  # of the DSA models' index_topk (7 to 64) the last passes every one


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_matches_stock(tmp_path: Path, model_type: str, seed: int) -> None:
    """Chunks of 7 or 31 tokens and steps of one token against one uncached forward, prompt and answer."""
    path = family.tiny(model_type, tmp_path / "m", seed, **family.varied(model_type, seed))
    loaded, model = hf.load_model(path, "bf16/reference", dtype=torch.float32), family.stock(path)
    prompts = prompts_of(LENGTHS, vocab=256, seed=seed)
    with Running(loaded, max_batch_tokens=(7, 31)[seed % 2], max_seqs=4) as engine:
        answers = generate(engine, prompts, max_tokens=7, logprobs=3, prompt_logprobs=2, ignore_eos=True,
                           return_routing=True, **GREEDY)
    chosen: list[torch.Tensor] = []
    for i in loaded.resolved:
        model.model.layers[i].mlp.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 7 and oracle_check(model, prompt, answer, top=3) < TOLERANCE
        chosen.clear()
        with torch.inference_mode():
            model(torch.tensor([prompt + answer.ids[:-1]]))
        routing = answer.last.routing
        assert routing is not None and routing.layers == tuple(loaded.resolved)
        assert torch.equal(routing.ids.long().sort(-1).values, torch.stack(chosen, 1).sort(-1).values)


@pytest.mark.parametrize("model_type", TYPES)
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, model_type: str) -> None:
    """BF16: alone, in chunks of 8, together, preempted: the same bits, and the fingerprint says so."""
    loaded = hf.load_model(family.tiny(model_type, tmp_path / "m", seed=1), "bf16/reference")
    prompts = prompts_of([3, 65, 9, 100, 40], vocab=256)
    with Running(loaded, byte_tokenizer(tmp_path / "t")) as engine:
        assert engine.runner.kind.invariant
        said = fingerprint.build(loaded, engine.tokenizer, engine, "tiny")
    assert said["determinism"]["batch_invariant"] is True and "bit-equal" in said["determinism"]["probe"]
    latents = model_type != "qwen3_moe"
    assert said["engine"]["attention"] == (latent.NAME if latents else PAGED)
    assert (6 if model_type == "glm_moe_dsa" else 5) == int(said["determinism"]["probe"].split()[0])
    together = run(loaded, prompts)
    for config in (dict(max_batch_tokens=8), dict(max_seqs=1)):
        assert run(loaded, prompts, **config)[:2] == together[:2], f"differs with {config}"
    *evicted, preemptions = run(loaded, prompts, kv_blocks=9, max_batch_tokens=64)
    assert preemptions > 0 and evicted == list(together[:2])


def test_probe_sees_a_choice_that_depends_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer that leaves out one token more in batches: the probe's fifth prompt is long enough to show it."""
    loaded = hf.load_model(family.tiny("glm_moe_dsa", tmp_path / "m"), "bf16/reference")
    real = latent.select
    with Running(loaded) as engine:
        monkeypatch.setattr(latent, "select", lambda scores, visible, count: real(
            scores, visible, count - (scores.shape[0] > 1 or len(engine.scheduler.running) > 1)))
        found = run_probe(engine)
    assert not found.batch_invariant


def test_latents_are_what_is_cached(tmp_path: Path) -> None:
    """Per token kv_lora_rank + rope elements a layer and index keys on full layers only, as `service plan` reckons."""
    from moe_kernels.formats import open_checkpoint

    path = family.tiny("glm_moe_dsa", tmp_path / "m")
    loaded, checkpoint = hf.load_model(path, "bf16/reference"), open_checkpoint(path)
    with Running(loaded, kv_blocks=9, kv_block=16) as engine:
        kv = engine.runner.kv
        assert isinstance(kv, PagedLatent) and sorted(kv.index_keys) == [0, 1, 3]
        elements = kv.pool[:, 0, 0].numel() + sum(pool[0, 0].numel() for pool in kv.index_keys.values())
    assert elements == 5 * (32 + 16) + 3 * 24 == checkpoint.architecture.kv_elements(checkpoint.config)


def test_zero_wipes_latents_and_index_keys() -> None:
    kv = PagedLatent(2, 4, 2, 3, 1, torch.float32, torch.device("cpu"), [1], 5)
    kv.pool.fill_(torch.nan)
    kv.index_keys[1].fill_(torch.nan)
    kv.zero([2, 4])
    assert not kv.pool[:, [2, 4]].any() and kv.pool[:, [0, 1, 3]].isnan().all()
    assert not kv.index_keys[1][[2, 4]].any() and kv.index_keys[1][[0, 1, 3]].isnan().all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 20), st.integers(0, 30))
def test_select_is_top_k_of_the_visible(seed: int, length: int, count: int, more: int) -> None:
    """Against sorting in Python; ties are frequent; padding behind the visible tokens changes nothing."""
    count = min(count, length)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 4, (3, length), generator=generator).float()
    visible = torch.rand(3, length, generator=generator) < 0.7
    chosen = latent.select(scores, visible, count)
    for row, see, got in zip(scores.tolist(), visible.tolist(), chosen.tolist(), strict=True):
        order = sorted((i for i in range(length) if see[i]), key=lambda i: (-row[i], i))
        assert [i for i in range(length) if got[i]] == sorted(order[:count])
    wider = latent.select(torch.cat([scores, torch.full((3, more), 9.0)], 1),
                          torch.cat([visible, torch.zeros(3, more, dtype=torch.bool)], 1), count)
    assert torch.equal(wider[:, :length], chosen) and not wider[:, length:].any()


def test_parts_of_a_group_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanding one sequence at a time and scoring one query at a time changes no bit."""
    loaded = hf.load_model(family.tiny("glm_moe_dsa", tmp_path / "m", seed=2), "bf16/reference")
    prompts = prompts_of([70, 41, 90], vocab=256)
    whole = run(loaded, prompts)
    monkeypatch.setattr(latent, "EXPANDED_ELEMENTS", 1)
    monkeypatch.setattr(latent, "SCORE_ELEMENTS", 1)
    assert run(loaded, prompts)[:2] == whole[:2]


def test_unknown_attention_is_refused() -> None:
    module: Any = SimpleNamespace(in_proj=None)
    model: Any = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=module)]),
                                 config=SimpleNamespace(model_type="glm5_next"))
    with pytest.raises(ConfigError, match="model_type 'glm5_next': the paged cache cannot hold"):
        attention_kind(model, 4, 16)
