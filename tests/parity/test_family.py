"""The other model types against stock transformers in FP32: logits, routing, layer kinds, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_kernels import hf
from moe_kernels.errors import CheckpointError, FormatError, VariantError
from moe_kernels.formats import open_checkpoint
from moe_kernels.formats.architectures import find_architecture
from tests import family

TYPES = [t for t in family.MODEL_TYPES if t != "glm4_moe"]  # that one has 20 seeds and more oracles in test_model.py
TOKENS = (1, 3, 7, 33)
# |logit difference| over the logits' standard deviation; measured maximum over the 80 models 3.0e-6, as FP32 sums
# in another order give (tests/parity/test_model.py has the reckoning).
LIMIT = 2e-5


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_routing_are_stock(tmp_path: Path, model_type: str, seed: int) -> None:
    """Sizes, biases, groups, layer kinds and RoPE vary with the seed (family.varied); 33 tokens pass index_topk."""
    path = family.tiny(model_type, tmp_path / "m", seed, **family.varied(model_type, seed))
    stock = family.stock(path)
    ours = hf.load_model(path, "bf16/reference", dtype=torch.float32)
    sparse = [i for i, layer in enumerate(stock.model.layers) if hasattr(layer.mlp, "experts")]
    assert list(ours.resolved) == sparse and sparse
    chosen: list[torch.Tensor] = []
    for i in sparse:
        stock.model.layers[i].mlp.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    generator = torch.Generator().manual_seed(seed)
    for tokens in TOKENS:
        ids = torch.randint(2, 256, (1, tokens), generator=generator)
        chosen.clear()
        with torch.inference_mode(), hf.capture_routing(ours.model) as trace:
            want, got = stock(ids).logits[0], ours.model(ids).logits[0]
        assert (got - want).abs().max() / want.std() < LIMIT, f"{tokens} tokens"
        assert torch.equal(trace.ids().long().sort(-1).values, torch.stack(chosen, 1).sort(-1).values)


def test_router_stays_fp32_in_bf16_models(tmp_path: Path) -> None:
    """Qwen3's router is BF16 in stock transformers; ours widens it, and its checkpoint has no bias."""
    loaded = hf.load_model(family.tiny("qwen3_moe", tmp_path / "m"), "bf16/reference")
    block = loaded.model.model.layers[1].mlp
    assert block.gate.weight.dtype == torch.float32 and block.layer.bias is None and block.shared_experts is None
    assert loaded.model.model.layers[1].self_attn.q_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", TYPES)
def test_mtp_layers_are_skipped_by_index(tmp_path: Path, model_type: str) -> None:
    """Tensors of layers after the last one belong to MTP where the config announces them, and are unknown otherwise."""
    from safetensors.torch import load_file, save_file

    path = family.tiny(model_type, tmp_path / "m")
    file, config_file = path / "model.safetensors", path / "config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    layers = config["num_hidden_layers"]
    tensors[f"model.layers.{layers}.eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.pop(key, None)
    config_file.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.layout.mtp) == 1 and checkpoint.num_layers == layers
    config_file.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match="eh_proj"):
        open_checkpoint(path)


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "num_hidden_layers": 8, "n_routed_experts": 8, **fields}


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({}, range(8)),  # GLM-5, 5.1: every layer
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),  # GLM-5.2, 5.3
        ({"index_topk_pattern": "FSSFFSSS"}, (0, 3, 4)),
        ({"indexer_types": ["full", *["shared"] * 7], "index_topk_freq": 1}, (0,)),
    ],
)
def test_indexer_layers(config: dict[str, Any], full: Any) -> None:
    """models.md 1.3 by hand, and transformers' own reading of the same keys."""
    from transformers import AutoConfig

    config = config_of("glm_moe_dsa", **config)
    assert find_architecture(config).indexer_layers(config) == tuple(full)
    theirs = AutoConfig.for_model(**config).indexer_types
    assert [i for i, kind in enumerate(theirs) if kind == "full"] == list(full)


def test_glm_5_2_has_21_indexers() -> None:
    config = config_of("glm_moe_dsa", num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    layers = find_architecture(config).indexer_layers(config)
    assert len(layers) == 21 and layers[:4] == (0, 1, 2, 6) and layers[-1] == 74


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        (config_of("deepseek_v3"), range(3, 8)),
        (config_of("deepseek_v3", first_k_dense_replace=1), range(1, 8)),
        (config_of("glm_moe_dsa"), range(3, 8)),
        (config_of("glm4_moe_lite"), range(1, 8)),
        (config_of("glm4_moe_lite", first_k_dense_replace=2), range(2, 8)),
        (config_of("glm4_moe_lite", mlp_layer_types=["sparse", "dense"] * 4, first_k_dense_replace=2), range(0, 8, 2)),
        (config_of("qwen3_moe"), range(8)),
        (config_of("qwen3_moe", decoder_sparse_step=2), (1, 3, 5, 7)),
        (config_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]), (1, 5, 7)),
    ],
)
def test_sparse_layers(config: dict[str, Any], sparse: Any) -> None:
    assert find_architecture(config).moe_layers(config) == tuple(sparse)


@pytest.mark.parametrize(
    ("model_type", "change", "why"),
    [
        ("glm5_next", {}, "'glm5_next' is not supported: its linear-attention .*supported: glm4_moe, glm4_moe_lite"),
        ("glm4v_moe", {}, "takes images"),
        ("mixtral", {}, "'mixtral' is not supported yet; supported: glm4_moe, glm4_moe_lite, glm_moe_dsa"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 5}, "layer 0 shares"),
        ("glm_moe_dsa", {"mlp_layer_types": ["moe"] * 5}, "mlp_layer_types must list dense or sparse"),
    ],
)
def test_refusals_name_the_reason(tmp_path: Path, model_type: str, change: dict[str, Any], why: str) -> None:
    base = model_type if model_type in family.MODEL_TYPES else "glm4_moe"
    path = family.tiny(base, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type} | change))
    with pytest.raises(CheckpointError, match=why):
        hf.load_model(path, "bf16/reference")


def test_positions_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path = family.tiny("qwen3_moe", tmp_path / "m", rope_parameters=rope)
    with pytest.raises(FormatError, match="RoPE type 'dynamic'"):
        hf.load_model(path, "bf16/reference")
    path = family.tiny("qwen3_moe", tmp_path / "w", use_sliding_window=True, sliding_window=8)
    with pytest.raises(FormatError, match="use_sliding_window"):
        hf.load_model(path, "bf16/reference")


def test_kernels_that_route_by_sigmoid_refuse_softmax(tmp_path: Path) -> None:
    """A variant that routes inside its kernel cannot serve Qwen3; the plain ones can (see the family matrix)."""
    from moe_kernels import registry
    from moe_kernels.variants.triton_fp8 import check_common
    from moe_kernels.variants.trtllm.layers import Fp8TrtllmLayer

    checkpoint = open_checkpoint(family.tiny("qwen3_moe", tmp_path / "m"))
    with pytest.raises(VariantError, match="softmax"):
        Fp8TrtllmLayer(checkpoint.experts(0), checkpoint.routing, None, registry.parse("fp8/trtllm"))
    with pytest.raises(VariantError, match="sigmoid scores only, the model uses softmax; use the emulated variant"):
        check_common("fp8/triton", checkpoint.routing, None)
