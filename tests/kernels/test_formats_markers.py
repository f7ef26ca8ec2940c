"""Every quantisation format is recognised by its config: two are read, the others refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import open_checkpoint
from moe_kernels.formats.markers import QuantScheme, declared_scheme
from tests.kernels.damage import rewrite

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(fmt: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def modelopt(algo: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, **more}


# letter of models.md section 2 -> a config of that format
REFUSED = {
    "format B)": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "format B')": compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]),
    "like format B": compressed("float-quantized", num_bits=8, strategy="tensor"),
    "format C')": modelopt("MIXED_PRECISION", quantized_layers={}),
    "format C'')": modelopt("W4A16_NVFP4"),
    "format D": compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    "compressed-tensors MXFP4 (format E)": compressed("mxfp4-pack-quantized", num_bits=4, group_size=32),
    "format F": {"quant_method": "quark"},
    "MXFP8 (format G)": {"quant_method": "mxfp8"},
    "ModelOpt MXFP8 (format G)": modelopt("mxfp8"),
    "compressed-tensors MXFP8 (format G)": compressed("mxfp8-quantized", num_bits=8, group_size=32),
    "per-tensor FP8 (format H)": modelopt("FP8"),
    "per-channel FP8 (format H)": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "weight-only block FP8 (format H)": modelopt("FP8_PB_WO"),
    "format I": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "AWQ": {"quant_method": "awq"},
    "GPTQ": {"quant_method": "gptq"},
    "'tomorrow'": {"quant_method": "tomorrow"},
    "quant_algo 'NVFP5'": modelopt("NVFP5"),
    "compressed-tensors format 'new'": compressed("new"),
    "per-tensor FP8 (quant_method fp8 without weight_block_size)": {"quant_method": "fp8"},
    "weight_block_size [64, 64]": {**FP8, "weight_block_size": [64, 64]},
    "activation_scheme 'static'": {**FP8, "activation_scheme": "static"},
    "scale_fmt 'ue8m0'": {**FP8, "scale_fmt": "ue8m0"},
    "fmt 'e5m2'": {**FP8, "fmt": "e5m2"},
    "group size {32}": modelopt("NVFP4", group_size=32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_what_to_do(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(quantization_config=REFUSED[name]))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert name in message and "is not supported" in message
    assert "moe-kernels quantize SRC DST" in message


def test_weight_only_nvfp4_is_refused() -> None:
    group = {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}}
    with pytest.raises(FormatError, match="format C''"):
        declared_scheme({"quantization_config": modelopt("NVFP4", config_groups=group)}, None)


def test_the_two_that_are_read() -> None:
    assert declared_scheme({}, None).format == "bf16"
    a = declared_scheme({"quantization_config": {**FP8, "ignored_layers": ["lm_head"]}}, None)
    assert (a.format, a.excluded) == ("fp8", ("lm_head",))
    c = declared_scheme({"quantization_config": modelopt("nvfp4", group_size=16, ignore=["lm_head"])}, None)
    assert (c.format, c.excluded) == ("nvfp4", ("lm_head",))


def test_hf_quant_config_comes_first() -> None:
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    file = {"producer": {"name": "modelopt", "version": "0.40"}, "quantization": inner}
    assert declared_scheme({}, file).format == "nvfp4"
    both = declared_scheme({"quantization_config": modelopt("NVFP4", ignore=["*.mlp.gate"])}, file)
    assert both.excluded == ("lm_head", "*.mlp.gate")
    with pytest.raises(CheckpointError, match=r"declares ModelOpt NVFP4.*but config.json declares block FP8"):
        declared_scheme({"quantization_config": FP8}, file)
    with pytest.raises(CheckpointError, match="no 'quantization' entry"):
        declared_scheme({}, {"producer": {}})
    mixed = {**file, "quantization": {**inner, "quant_algo": "MIXED_PRECISION"}}
    with pytest.raises(FormatError, match="format C'"):
        declared_scheme({}, mixed)


@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj", False),
        ("shared_experts", "model.layers.1.mlp.shared_experts.up_proj", True),
        (r"model.layers.\d+.self_attn", "model.layers.12.self_attn.o_proj", True),
        ("(broken", "model.layers.12.self_attn.o_proj", False),
    ],
)
def test_exclusion_by_name_or_expression(pattern: str, module: str, excluded: bool) -> None:
    assert QuantScheme("fp8", "", (pattern,)).excludes(module) == excluded


@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("*.self_attn*", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.46*", "model.layers.46.mlp.experts.0.gate_proj", True),
        ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0", "model.layers.01.mlp.up_proj", False),
    ],
)
def test_exclusion_by_wildcard(pattern: str, module: str, excluded: bool) -> None:
    assert QuantScheme("nvfp4", "", (pattern,)).excludes(module) == excluded


def test_a_checkpoint_with_only_hf_quant_config(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from moe_kernels.quantize import quantize

    path = quantize(tiny_checkpoint, tmp_path / "c", "nvfp4")
    config = json.loads((path / "config.json").read_text())
    section = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).format == "nvfp4"
    (path / "hf_quant_config.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    assert open_checkpoint(path).format == "nvfp4"
