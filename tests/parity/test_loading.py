"""load_model: dtypes, names, conversion, refusals, capture, and that stock classes stay as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_kernels import hf, registry
from moe_kernels.capture import moe_blocks
from moe_kernels.errors import CheckpointError, FormatError, VariantError
from moe_kernels.numerics import assert_bitwise_equal
from moe_kernels.registry import Support
from tests.tiny import glm4_moe

IDS = torch.tensor([[5, 17, 300, 41, 8, 99, 100]])


def _logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def _edited(source: Path, target: Path, edit) -> Path:
    """A copy of a one-file checkpoint with its tensors and config changed by `edit(tensors, config)`."""
    shutil.copytree(source, target)
    tensors, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Converted checkpoints go to a folder of the test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MOE_PARITY_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_and_rope_stay_fp32(tiny_checkpoint: Path, dtype: torch.dtype) -> None:
    loaded = hf.load_model(tiny_checkpoint, "bf16/reference", dtype=dtype)
    fp32 = {n for n, t in [*loaded.model.named_parameters(), *loaded.model.named_buffers()] if t.dtype == torch.float32}
    must = {f"model.layers.{i}.mlp.gate.{n}" for i in (1, 2) for n in ("weight", "e_score_correction_bias")}
    must |= {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert must <= fp32
    assert fp32 == must if dtype == torch.bfloat16 else len(fp32) > len(must)
    # 1 / theta^(2 i / 16) for 16 rotated dimensions: values, not only dtype (a BF16 detour leaves 3.7e-3 errors)
    expected = 1e6 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(loaded.model.model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0)
    stored = load_file(tiny_checkpoint / "model.safetensors")
    gate = moe_blocks(loaded.model)[1].gate  # type: ignore[attr-defined]
    assert_bitwise_equal(gate.e_score_correction_bias, stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert_bitwise_equal(gate.weight.data, stored["model.layers.1.mlp.gate.weight"])


def test_expert_parameters_are_never_allocated(tiny_checkpoint: Path) -> None:
    loaded = hf.load_model(tiny_checkpoint, "fp8/emulated")
    assert not [n for n, _ in loaded.model.named_parameters() if ".experts." in n]
    assert all(not p.requires_grad for p in loaded.model.parameters()) and not loaded.model.training
    assert loaded.dtype == torch.bfloat16 and loaded.config.num_hidden_layers == 3
    assert loaded.device == torch.device("cpu")


def test_bf16_checkpoints_are_converted_once(tiny_checkpoint: Path, cache: Path) -> None:
    first = hf.load_model(tiny_checkpoint, "fp8/emulated:bias=bf16", dtype=torch.float32)
    assert first.format == "fp8" and cache in first.path.parents
    assert first.resolved == {1: "fp8/emulated:bias=bf16", 2: "fp8/emulated:bias=bf16"}
    assert str(first.variant) == "fp8/emulated:bias=bf16"
    changed = first.path.stat().st_mtime_ns
    again = hf.load_model(first.path, "fp8/emulated:bias=bf16", dtype=torch.float32)
    assert again.path == first.path and first.path.stat().st_mtime_ns == changed
    assert_bitwise_equal(_logits(again.model), _logits(first.model))
    plain = hf.load_model(tiny_checkpoint, "bf16/reference")
    assert plain.weights_sha256 != first.weights_sha256 == again.weights_sha256
    from_fp8 = hf.load_model(first.path, "bf16/reference", dtype=torch.float32)
    assert from_fp8.path == first.path  # bf16/reference reads quantised experts as they are
    assert (_logits(from_fp8.model) - _logits(first.model)).abs().max() > 1e-4
    four_bit = hf.load_model(tiny_checkpoint, "nvfp4/emulated").path
    with pytest.raises(FormatError, match=r"needs fp8 expert weights .* holds nvfp4"):
        hf.load_model(four_bit, "fp8/emulated")


def test_variants_differ_from_each_other(tiny_checkpoint: Path, cache: Path) -> None:
    logits = {
        v: _logits(hf.load_model(tiny_checkpoint, v, dtype=torch.float32).model)
        for v in ("bf16/reference", "fp8/reference", "fp8/emulated", "nvfp4/reference", "nvfp4/emulated")
    }
    names = list(logits)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert (logits[a] - logits[b]).abs().max() > 1e-3, (a, b)


def test_stock_classes_stay_stock(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.glm4_moe import modeling_glm4_moe as stock
    from transformers.monkey_patching import get_patch_mapping

    original = stock.Glm4MoeMoE
    hf.load_model(tiny_checkpoint, "bf16/reference")
    assert stock.Glm4MoeMoE is original

    def fail(self, config):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:  # transformers leaves its patch in place after an error: we must not
        patch.setattr(hf.ParityMoE, "__init__", fail)
        with pytest.raises(RuntimeError, match="no"):
            hf.load_model(tiny_checkpoint, "bf16/reference")
    assert stock.Glm4MoeMoE is original and "Glm4MoeMoE" not in get_patch_mapping()
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    assert type(model.model.layers[1].mlp) is original


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("fp8/unheard", VariantError, "unknown variant 'fp8/unheard'"),
        ("fp8/emulated:bias=fp16", VariantError, "bias=fp16"),
    ],
)
def test_wrong_variants(tiny_checkpoint: Path, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf.load_model(tiny_checkpoint, name)


def test_wrong_dtype(tiny_checkpoint: Path) -> None:
    with pytest.raises(VariantError, match=r"float16 .*bfloat16 or float32"):
        hf.load_model(tiny_checkpoint, "bf16/reference", dtype=torch.float16)


def test_unsupported_variant_names_the_nearest(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "supports", lambda *a: Support(False, "needs SM100", "fp8/emulated"))
    with pytest.raises(VariantError, match=r"cannot run here: needs SM100; the nearest that runs: fp8/emulated"):
        hf.load_model(tiny_checkpoint, "bf16/reference")


def test_missing_and_unknown_tensors_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    gone = "model.layers.2.self_attn.q_norm.weight"
    path = _edited(tiny_checkpoint, tmp_path / "a", lambda t, c: t.pop(gone))
    with pytest.raises(CheckpointError, match=gone):
        hf.load_model(path, "bf16/reference")
    path = _edited(tiny_checkpoint, tmp_path / "b", lambda t, c: t.update(stray=torch.zeros(3)))
    with pytest.raises(CheckpointError, match="stray"):
        hf.load_model(path, "bf16/reference")
    # a config that does not want the q and k norms the files hold
    path = _edited(tiny_checkpoint, tmp_path / "c", lambda t, c: c.update(use_qk_norm=False))
    with pytest.raises(CheckpointError, match=r"q_norm|k_norm"):
        hf.load_model(path, "bf16/reference")


def test_tied_embeddings(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = glm4_moe(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    loaded = hf.load_model(path, "bf16/reference", dtype=torch.float32)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(_logits(loaded.model), _logits(stock), rtol=1e-4, atol=1e-4)


def test_capture_in_forward_order(tiny_checkpoint: Path) -> None:
    model = hf.load_model(tiny_checkpoint, "bf16/reference", dtype=torch.float32).model
    with hf.capture_routing(model) as whole, hf.capture_moe_inputs(model) as inputs:
        out = model(IDS, output_router_logits=True)
    assert whole.layers == (1, 2)
    ids = whole.ids()
    assert ids.shape == (7, 2, 2) and ids.dtype == torch.int16
    with hf.capture_routing(model) as parts:
        assert parts.ids().shape == (0, 2, 2)
        for piece in (IDS[:, :3], IDS[:, :5]):
            _logits(model, piece)
    assert torch.equal(parts.ids(), torch.cat([ids[:3], ids[:5]]))
    for position, layer in enumerate((1, 2)):
        hidden, logits = inputs[layer]
        assert hidden.shape == (7, 128) and logits.shape == (7, 8)
        if "router_logits" in out:  # transformers' own recorder still works (glm4_moe has none in 5.17)
            assert_bitwise_equal(logits, out.router_logits[position])
        block = moe_blocks(model)[layer]
        assert torch.equal(block.layer.route(logits).ids.to(torch.int16), ids[:, position])  # type: ignore[attr-defined]
        assert_bitwise_equal(block.gate(hidden)[0], logits)  # type: ignore[attr-defined]
    assert not any(block.observers for block in moe_blocks(model).values())
    _logits(model)
    assert whole.ids().shape[0] == 7  # closed: nothing more is recorded


def test_capture_can_stop_early(tiny_checkpoint: Path) -> None:
    model = hf.load_model(tiny_checkpoint, "bf16/reference").model
    with hf.capture_moe_inputs(model, max_tokens=10) as inputs:
        for _ in range(3):
            _logits(model)
    assert [t.shape[0] for t in inputs[1]] == [10, 10]
    with pytest.raises(ValueError, match="ParityMoE"), hf.capture_routing(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("variant", ["bf16/reference", "fp8/emulated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_does_not_depend_on_the_batch(
    tiny_checkpoint: Path, cache: Path, variant: str, dtype: torch.dtype
) -> None:
    """Router, experts and shared experts together."""
    model = hf.load_model(tiny_checkpoint, variant, dtype=dtype).model
    block = model.model.layers[1].mlp
    x = torch.randn(60, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        full = block(x[None])[0]
        for rows in range(1, 30):
            assert_bitwise_equal(block(x[None, 20 : 20 + rows])[0], full[20 : 20 + rows], f"{rows} rows")
