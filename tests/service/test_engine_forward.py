"""The packed forward gives transformers' bits, shares its weights, and is left out where it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_kernels import hf, native
from service.engine import forward
from service.engine.native_forward import NativeForward
from tests.service.engine_tools import GREEDY, Running, generate, loaded_stock, prompts_of
from tests.tiny import glm4_moe

SHAPES = [
    {},
    dict(use_qk_norm=False, attention_bias=False),
    dict(num_key_value_heads=4, n_shared_experts=2, first_k_dense_replace=2),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
]

FUSED = [dict(head_dim=64), dict(head_dim=64, use_qk_norm=False, attention_bias=False)]  # sizes the kernels take


def same_as_stock(loaded: Any, kind: type) -> None:
    """The engine takes a forward of that kind; with it and with transformers' own, every number is equal."""
    prompts = prompts_of([5, 40, 17, 90])
    params = dict(max_tokens=10, logprobs=2, prompt_logprobs=1, ignore_eos=True, **GREEDY)
    with Running(loaded, max_batch_tokens=32) as engine:
        assert isinstance(engine.runner.packed, kind), "the packed forward was refused on start"
        fast = generate(engine, prompts, **params)
        engine.runner.packed = None
        slow = generate(engine, prompts, **params)
    for a, b in zip(fast, slow, strict=True):
        assert a.tokens == b.tokens and a.prompt_logprobs == b.prompt_logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", FUSED)
def test_compiled_bits_are_transformers(tmp_path: Path, shape: dict, dtype: torch.dtype) -> None:
    """The same for the compiled forward, which must be the one that is taken."""
    if native.library() is None:
        pytest.skip(f"no compiled kernels here: {native.unavailable_because()}")
    # Not the stock MoE block: in FP32 its bits follow the batch, and which requests meet in one is a matter of time.
    loaded = hf.load_model(glm4_moe(tmp_path / "m", seed=3, **shape), "bf16/reference", dtype=dtype)
    same_as_stock(loaded, NativeForward)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_transformers(tmp_path: Path, shape: dict) -> None:
    """Prompts in chunks and decoding steps, BF16: tokens and log-probabilities equal with and without."""
    loaded = loaded_stock(glm4_moe(tmp_path / "m", seed=3, **shape), torch.bfloat16)
    same_as_stock(loaded, forward.PackedForward)


def test_weights_are_shared(tiny_checkpoint: Path) -> None:
    """The stacked product's weight is the storage of the projections it stacks."""
    loaded = loaded_stock(tiny_checkpoint, torch.bfloat16)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    with Running(loaded) as engine:
        packed = engine.runner.packed
        assert packed is not None
        qkv = packed.attention[1].qkv
        module = loaded.model.model.layers[1].self_attn
        for part in (module.q_proj, module.k_proj, module.v_proj):
            assert part.weight.untyped_storage().data_ptr() == qkv.weight.untyped_storage().data_ptr()
    after = dict(loaded.model.named_parameters())
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_another_rounding_is_refused(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one value is off by a BF16 step, the engine keeps transformers' forward."""
    real = forward.PackedForward.forward

    def off(self, *args):
        out = real(self, *args)
        out[0, 3] *= 1 + 2**-7
        return out

    monkeypatch.setattr(forward.PackedForward, "forward", off)
    loaded = loaded_stock(tiny_checkpoint, torch.bfloat16)
    with Running(loaded) as engine:
        assert engine.runner.packed is None
        assert not any(isinstance(module, forward.GatedMLP) for module in loaded.model.modules())
        assert len(generate(engine, [[5, 6]], max_tokens=3, ignore_eos=True, **GREEDY)[0].ids) == 3
