"""quantize(): files that other implementations read the same way, and what is and is not quantised."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import dequantize, open_checkpoint
from moe_kernels.formats.calibration import InputScales
from moe_kernels.quantize import quantize, quantize_record
from moe_kernels.records import ExpertWeights
from tests.kernels.damage import rewrite
from tests.tiny import glm4_moe

NVFP4_MAX = 6 * 448


def dense(path: Path) -> dict[str, torch.Tensor]:
    """Every weight as our reader sees it, FP32, in transformers' fused names."""
    checkpoint = open_checkpoint(path)
    out = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.tensor_names()}
    for layer in checkpoint.moe_layers:
        record = dequantize(checkpoint.experts(layer), torch.float32)
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = record.w13
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = record.w2
    return out


@pytest.mark.parametrize("only", ["experts", "linears"])
def test_transformers_reads_format_a_as_we_do(tiny_checkpoint: Path, tmp_path: Path, only: str) -> None:
    """Stock transformers dequantises block FP8 on a CPU; every weight must be equal to ours, bit for bit."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    path = quantize(tiny_checkpoint, tmp_path / "fp8", "fp8", only=only)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs, ours = model.state_dict(), dense(path)
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == torch.float32, name
        assert torch.equal(theirs[name], tensor), name
    ids = torch.arange(11)[None] + 3
    with torch.no_grad():
        logits = model(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)(ids).logits
    assert torch.isfinite(logits).all() and not torch.equal(logits, plain)


def test_compressed_tensors_reads_the_nvfp4_bytes_as_we_do(tiny_checkpoint: Path, tmp_path: Path) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    path = quantize(tiny_checkpoint, tmp_path / "c", "nvfp4", only="linears")
    stored, ours = load_file(path / "model.safetensors"), dense(path)
    modules = [n.removesuffix(".weight") for n, t in stored.items() if t.dtype == torch.uint8]
    assert len(modules) == 2 * 8 * 3 + 3 * 4 + 3 + 2 * 3  # experts, attention, dense MLP, shared experts
    for module in modules:
        packed, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        values = helpers.unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
        # compressed-tensors keeps the reciprocal of weight_scale_2 and divides the block scale by it
        reciprocal = 1 / stored[f"{module}.weight_scale_2"].double()
        theirs = values.double() * scale.double().repeat_interleave(16, 1) / reciprocal
        if ".experts." in module:
            head, _, tail = module.partition(".experts.")
            expert, projection = tail.split(".")
            fused = ours[f"{head}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
            got = fused if projection == "down_proj" else fused.chunk(2)[projection == "up_proj"]
        else:
            got = ours[f"{module}.weight"]
        torch.testing.assert_close(got.double(), theirs, rtol=2**-23, atol=0)


def test_default_quantises_routed_experts_only(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = load_file(tiny_checkpoint / "model.safetensors")
    for fmt in ("fp8", "nvfp4"):
        path = quantize(tiny_checkpoint, tmp_path / fmt, fmt)  # type: ignore[arg-type]
        after = load_file(path / "model.safetensors")
        for name, tensor in before.items():
            if ".experts." not in name:
                assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
            else:
                assert after[name].dtype in (torch.float8_e4m3fn, torch.uint8)
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        excluded = config["modules_to_not_convert" if fmt == "fp8" else "ignore"]
        assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.0.self_attn.q_proj"} <= set(excluded)
        assert not any(".experts." in name for name in excluded)


def test_linears_leave_out_what_does_not_fit(tmp_path: Path) -> None:
    """GLM-4.5-Air's dense intermediate size is no multiple of 128; here 192 is not, nor are 64 K/V rows."""
    tiny = glm4_moe(tmp_path / "tiny", intermediate_size=192)
    checkpoint = open_checkpoint(quantize(tiny, tmp_path / "fp8", "fp8", only="linears"))
    formats = {name: m.format for name, m in checkpoint.layout.modules.items()}
    assert formats["model.layers.0.mlp.up_proj.weight"] == formats["model.layers.1.self_attn.k_proj.weight"] == "bf16"
    assert formats["model.layers.1.self_attn.q_proj.weight"] == "fp8"
    assert formats["model.layers.1.mlp.shared_experts.up_proj.weight"] == "fp8"
    assert {formats["lm_head.weight"], formats["model.layers.1.mlp.gate.weight"]} == {"bf16"}
    left_out = checkpoint.scheme.excluded
    assert "model.layers.0.mlp.up_proj" in left_out and "model.layers.1.self_attn.q_proj" not in left_out


@pytest.mark.parametrize("size", [96, 160])
def test_ragged_experts(tmp_path: Path, size: int) -> None:
    """An intermediate size that is no multiple of 128: halves have block rows of their own."""
    tiny = glm4_moe(tmp_path / "tiny", moe_intermediate_size=size, num_hidden_layers=2)
    exact = open_checkpoint(tiny).experts(1)
    checkpoint = open_checkpoint(quantize(tiny, tmp_path / "fp8", "fp8"))
    record = checkpoint.experts(1)
    blocks = -(-size // 128)
    assert record.w13_scale is not None and record.w13_scale.shape == (8, 2 * blocks, 1)
    up = exact.w13[:, size:].float()
    assert torch.equal(record.w13_scale[:, blocks, 0], up[:, :128].abs().amax((1, 2)) / 448)
    back = dequantize(record, torch.float32)
    assert ((back.w13 - exact.w13.float()).norm() / exact.w13.float().norm()).item() < 0.04
    assert ((back.w2 - exact.w2.float()).norm() / exact.w2.float().norm()).item() < 0.04


def test_nvfp4_scalars(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = open_checkpoint(tiny_checkpoint).experts(2)
    record = open_checkpoint(quantize(tiny_checkpoint, tmp_path / "c", "nvfp4")).experts(2)
    assert record.w13_scale_2 is not None and record.w2_scale_2 is not None
    halves = exact.w13.float().view(8, 2, 128, 128).abs().amax((2, 3))
    assert torch.equal(record.w13_scale_2, halves / NVFP4_MAX)
    assert torch.equal(record.w2_scale_2, exact.w2.float().abs().amax((1, 2)) / NVFP4_MAX)
    assert (record.w13_scale_2[:, 0] != record.w13_scale_2[:, 1]).any()
    assert record.w13_input_scale is not None and record.w2_input_scale is not None
    assert record.w13_input_scale.unique().tolist() == [0.25] and record.w2_input_scale.unique().tolist() == [1.0]
    error = (dequantize(record, torch.float32).w13 - exact.w13.float()).norm() / exact.w13.float().norm()
    assert 0.05 < error.item() < 0.12  # 4 bits of a normal distribution


def test_records_and_files_agree(tiny_checkpoint: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(tiny_checkpoint).experts(1)
    assert quantize_record(plain, "bf16") is plain
    for fmt in ("fp8", "nvfp4"):
        made = quantize_record(plain, fmt)  # type: ignore[arg-type]
        read = open_checkpoint(quantize(tiny_checkpoint, tmp_path / fmt, fmt)).experts(1)  # type: ignore[arg-type]
        for field in ("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2"):
            a, b = getattr(made, field), getattr(read, field)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape and a.dtype == b.dtype
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_back_to_bf16(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """What dequantising writes is a stock checkpoint with the dequantised values."""
    quantised = quantize(tiny_checkpoint, tmp_path / "nvfp4", "nvfp4", only="linears")
    plain = open_checkpoint(quantize(quantised, tmp_path / "bf16", "bf16"))
    assert plain.format == "bf16" and "quantization_config" not in plain.config
    assert not (plain.path / "hf_quant_config.json").exists()
    written = dense(plain.path)
    for name, tensor in dense(quantised).items():
        if "mlp.gate." in name:  # FP32 as before
            assert torch.equal(written[name], tensor), name
        else:
            assert torch.equal(written[name], tensor.bfloat16().float()), name


def test_quantised_source_is_warned_about(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fp8 = quantize(tiny_checkpoint, tmp_path / "fp8", "fp8")
    path = quantize(fp8, tmp_path / "nvfp4", "nvfp4")
    assert "adds its error" in caplog.text
    want = quantize_record(dequantize(open_checkpoint(fp8).experts(1), torch.float32), "bf16")
    got = open_checkpoint(path).experts(1)
    again = quantize_record(want, "nvfp4")
    assert torch.equal(got.w13, again.w13)


def test_shards_have_a_largest_size(tiny_checkpoint: Path, tmp_path: Path) -> None:
    one = quantize(tiny_checkpoint, tmp_path / "one", "fp8")
    many = quantize(tiny_checkpoint, tmp_path / "many", "fp8", max_shard_bytes=300_000)
    files = sorted(f.name for f in many.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((many / "model.safetensors.index.json").read_text())
    tensors = load_file(one / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    assert all(f.stat().st_size < 320_000 for f in many.glob("*.safetensors"))
    split = dense(many)
    for name, tensor in dense(one).items():
        assert torch.equal(split[name], tensor), name


def test_other_files_are_copied(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = rewrite(tiny_checkpoint, tmp_path / "src")
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "old.bin").write_bytes(b"weights")
    path = quantize(source, tmp_path / "dst", "fp8")
    names = {f.name for f in path.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json",
    }  # fmt: skip
    assert (path / "tokenizer.json").read_text() == '{"a": 1}'
    config, before = (json.loads((p / "config.json").read_text()) for p in (path, source))
    del config["quantization_config"]
    assert config == before


def test_mtp_layers_are_kept_unquantised(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eh = torch.randn(128, 256).bfloat16()
    source = rewrite(
        tiny_checkpoint, tmp_path / "src", lambda t: t.update({"model.layers.3.eh_proj.weight": eh}),
        lambda c: c.update(num_nextn_predict_layers=1),
    )  # fmt: skip
    for fmt, pattern in (("fp8", "model.layers.3"), ("nvfp4", "model.layers.3*")):
        path = quantize(source, tmp_path / fmt, fmt)  # type: ignore[arg-type]
        assert torch.equal(load_file(path / "model.safetensors")["model.layers.3.eh_proj.weight"], eh)
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.layout.mtp) == 1 and pattern in checkpoint.scheme.excluded
    with caplog.at_level(logging.WARNING):
        back = quantize(tmp_path / "fp8", tmp_path / "bf16", "bf16")
    assert "MTP layers model.layers.3 are left out" in caplog.text
    assert open_checkpoint(back).layout.mtp == [] and json.loads((back / "config.json").read_text())[
        "num_nextn_predict_layers"
    ] == 0


def test_refusals(tiny_checkpoint: Path, tmp_path: Path) -> None:
    fp8 = quantize(tiny_checkpoint, tmp_path / "fp8", "fp8")
    with pytest.raises(FormatError, match="are fp8 already"):
        quantize(fp8, tmp_path / "again", "fp8")
    with pytest.raises(FormatError, match="cannot write format 'mxfp5'; choose one of: bf16, fp8, fp8_ct, fp8_channel"):
        quantize(tiny_checkpoint, tmp_path / "x", "mxfp5")
    with pytest.raises(CheckpointError, match="exists already: give a new folder"):
        quantize(tiny_checkpoint, fp8, "nvfp4")
    nan = rewrite(tiny_checkpoint, tmp_path / "nan", lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds nan"):
        quantize(nan, tmp_path / "bad", "fp8")
    assert not (tmp_path / "bad").exists() and not (tmp_path / "again").exists()


def test_odd_columns_cannot_be_nvfp4(tmp_path: Path) -> None:
    tiny = glm4_moe(tmp_path / "tiny", moe_intermediate_size=72, num_hidden_layers=2)
    with pytest.raises(Exception, match="72 columns, no multiple of 16"):
        quantize(tiny, tmp_path / "x", "nvfp4")
    assert not (tmp_path / "x").exists()


# ---- calibration


def scales(value: float) -> InputScales:
    amax = torch.linspace(0, 7, 8) * value  # expert 0 was never reached
    return InputScales({layer: (amax.clone(), amax * 3) for layer in (1, 2)})


def test_calibrated_input_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    scales(2.0).save(tmp_path / "amax.safetensors")
    path = quantize(tiny_checkpoint, tmp_path / "c", "nvfp4", calibration=tmp_path / "amax.safetensors")
    record = open_checkpoint(path).experts(1)
    amax = torch.tensor([14.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0])
    assert record.w13_input_scale is not None and record.w2_input_scale is not None
    assert torch.equal(record.w13_input_scale, (amax / NVFP4_MAX)[:, None].expand(8, 2))
    assert torch.equal(record.w2_input_scale, amax * 3 / NVFP4_MAX)


def test_bad_calibration_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def refuse(match: str, file: Path) -> None:
        with pytest.raises(CheckpointError, match=match):
            quantize(tiny_checkpoint, tmp_path / "x", "nvfp4", calibration=file)

    refuse("cannot be read", tmp_path / "none")
    (tmp_path / "text").write_text("no")
    refuse("cannot be read", tmp_path / "text")
    one = scales(1.0)
    InputScales({1: one.amax[1]}).save(tmp_path / "short")
    refuse(r"layers\.2\.mlp\.experts\.w13_input_amax' must have shape \[8\], found no tensor", tmp_path / "short")
    InputScales({**one.amax, 3: scales(1.0).amax[1]}).save(tmp_path / "long")
    refuse(r"layers\.3\.mlp\.experts\.w13_input_amax' is not expected", tmp_path / "long")
    InputScales({1: one.amax[1], 2: (torch.full((8,), float("nan")), torch.ones(8))}).save(tmp_path / "nan")
    refuse("must be finite and not negative", tmp_path / "nan")


def test_calibrate_sees_what_the_experts_see(mini_checkpoint: Path) -> None:
    """Against hooks on stock transformers' experts, which run in BF16 too: equal maxima up to BF16 rounding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moe_kernels.calibrate import calibrate

    texts = ["Question: Tom has 3 apples and buys 4 more. How many has he now?\nAnswer:", "Question: What is 2 + 2?"]
    found = calibrate(mini_checkpoint, texts, max_texts=2)
    model = AutoModelForCausalLM.from_pretrained(mini_checkpoint, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(mini_checkpoint)
    want = {layer: torch.zeros(16) for layer in found.amax}

    def hook(layer: int):
        def record(module, args) -> None:
            hidden, ids = args[0].float(), args[1]
            for expert in ids.unique().tolist():
                rows = hidden[(ids == expert).any(-1)]
                want[layer][expert] = torch.maximum(want[layer][expert], rows.abs().max())

        return record

    for layer in want:
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(hook(layer))
    with torch.no_grad():
        for text in texts:
            model(tokenizer(text, return_tensors="pt").input_ids)
    for layer, (wide, down) in found.amax.items():
        torch.testing.assert_close(wide, want[layer], rtol=0.05, atol=0.05)
        assert ((down > 0) == (wide > 0)).all() and (wide > 0).sum() > 8


def test_quantize_record_refuses_unknown_formats() -> None:
    record = ExpertWeights("bf16", torch.ones(1, 32, 16).bfloat16(), torch.ones(1, 16, 16).bfloat16())
    with pytest.raises(FormatError, match="cannot quantise to 'mxfp5'"):
        quantize_record(record, "mxfp5")


def test_the_indexers_head_weights_stay(tmp_path: Path) -> None:
    """zai-org's GLM-5 FP8 releases quantise the indexer's wq_b and wk and leave weights_proj in BF16."""
    from tests import family

    source = family.tiny(
        "glm_moe_dsa", tmp_path / "m", seed=1, hidden_size=128, moe_intermediate_size=128, intermediate_size=128,
        num_hidden_layers=2, indexer_types=["full", "full"],
    )  # fmt: skip
    checkpoint = open_checkpoint(quantize(source, tmp_path / "q", "fp8_channel", only="linears"))
    formats = {n: m.format for n, m in checkpoint.layout.modules.items() if ".indexer." in n and n.endswith("weight")}
    kept = {n for n, f in formats.items() if f == "bf16"}
    assert kept == {n for n in formats if "weights_proj" in n or "k_norm" in n} and len(kept) < len(formats)
