"""`--load-format random`: built from a config alone, seeded, quantised, and served like any other model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_kernels.errors import FormatError, VariantError
from moe_kernels.ops import Bf16Linear, Fp8Linear
from service.api import launch
from service.config import EngineConfig
from service.errors import StartupError
from service.gpu import random_model
from service.gpu.id_tokenizer import IdTokenizer
from tests.service.engine_tools import GREEDY, Running, generate, prompts_of

CONFIG = dict(
    model_type="glm4_moe", vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True, max_position_embeddings=256, rope_theta=10000.0,
    partial_rotary_factor=0.5, num_nextn_predict_layers=0,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def answers(model: random_model.RandomModel, **settings) -> list[list[int]]:
    prompts = prompts_of([9, 30, 4])
    with Running(model, max_seqs=4, **settings) as engine:
        assert engine.runner.forward_name == "own"
        return [a.ids for a in generate(engine, prompts, max_tokens=8, ignore_eos=True, **GREEDY)]


def test_seed_decides(config: Path) -> None:
    """The same seed gives the same tokens, another one others; all weights finite and where they belong."""
    build = random_model.build
    one = build(config, "fp8/emulated", seed=3, attention_dtype="fp8")
    layer = one.weights.layers[2]
    assert isinstance(layer.qkv, Fp8Linear) and isinstance(layer.down, Fp8Linear)
    assert isinstance(one.weights.head, Bf16Linear) and layer.router is not None and layer.router.dtype == torch.float32
    assert layer.moe is not None and layer.moe.bias is not None
    low, high = random_model.BIAS_RANGE
    assert layer.moe.bias.dtype == torch.float32 and low <= layer.moe.bias.min() and layer.moe.bias.max() <= high
    assert one.resolved == {1: "fp8/emulated", 2: "fp8/emulated"} and one.weights_sha256.startswith("random:3:")
    first = answers(one)
    assert first == answers(build(config, "fp8/emulated", seed=3, attention_dtype="fp8"))
    assert first != answers(build(config, "fp8/emulated", seed=4, attention_dtype="fp8"))
    assert len({token for ids in first for token in ids}) > 5, "a random model must not say one word only"


def test_tokens_choose_on_their_own(config: Path) -> None:
    """Different tokens reach different experts: no bias or spread decides for all of them."""
    model = random_model.build(config, "bf16/reference", seed=1)
    with Running(model) as engine:
        (answer,) = generate(engine, prompts_of([100]), max_tokens=1, return_routing=True, **GREEDY)
    routing = answer.last.routing
    assert routing is not None and routing.ids.shape == (100, 2, 2)
    for layer in range(2):
        counts = torch.bincount(routing.ids[:, layer].flatten().long(), minlength=8)
        assert (counts > 0).sum() >= 7 and counts.max() < 90


def test_refusals(config: Path) -> None:
    with pytest.raises(VariantError, match="needs a CUDA GPU"):
        random_model.build(config, "fp8/triton")
    config.write_text(json.dumps({**CONFIG, "intermediate_size": 200}))
    with pytest.raises(FormatError, match="multiple of 128"):
        random_model.build(config, "fp8/emulated")
    config.write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    with pytest.raises(FormatError, match="'llama'"):
        random_model.build(config, "fp8/emulated")


def test_service_serves_it(config: Path) -> None:
    """Through `launch.load`: ids as text, a fingerprint that says random and the seed."""
    options = launch.Options(model=str(config), variant="fp8/emulated", load_format="random", seed=7, num_layers=2,
                             engine=EngineConfig(max_seqs=4))
    path = launch.checkpoint_path(options.model, options.load_format)
    before = torch.get_num_threads()
    loaded = launch.load(options, path, "tiny")
    torch.set_num_threads(before)
    try:
        said = loaded.fingerprint
        running = loaded.engine.call(torch.get_num_threads)
        assert said["engine"]["threads"] == running == before  # the loading thread itself is left with one
        assert said["weights_sha256"].startswith("random:7:") and said["variant"]["resolved"] == {"1": "fp8/emulated"}
        assert said["engine"]["forward"] == "own" and said["engine"]["prefix_cache"] is False
        assert said["engine"]["cuda_graph"] is False
        ids = loaded.tokenizer.encode("t5 t17 t511")
        assert ids == [5, 17, 511] and loaded.tokenizer.decode(ids) == "t5 t17 t511"
    finally:
        loaded.engine.stop()
    with pytest.raises(StartupError, match="no such folder"):
        launch.checkpoint_path("/nowhere/config.json", "random")


def test_id_tokenizer() -> None:
    tokenizer = IdTokenizer(300)
    assert len(tokenizer) == 300 and tokenizer.eos_id is None and not tokenizer.has_chat_template
    assert tokenizer.encode("unknown t3") == [0, 3] and tokenizer.token_text(299) == "t299"
