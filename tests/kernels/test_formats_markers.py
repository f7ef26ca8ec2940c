"""Every quantisation format is recognised by its config, module by module; the others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import open_checkpoint
from moe_kernels.formats.markers import declared_scheme
from moe_kernels.formats.patterns import Patterns
from moe_kernels.formats.schemes import QuantScheme
from tests.kernels.damage import rewrite

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EXPERT = "model.layers.3.mlp.experts.7.down_proj"
QUERY = "model.layers.3.self_attn.q_proj"


def compressed(fmt: str, inputs: Any = None, targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": {"type": "float", **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def modelopt(algo: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, **more}


def quark(weight: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}, **more}


def scheme(section: dict[str, Any], file: dict[str, Any] | None = None) -> QuantScheme:
    return declared_scheme({"quantization_config": section}, file)


MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
DYNAMIC, LOCAL, STATIC = {"dynamic": True}, {"dynamic": "local"}, {"dynamic": False}

# name -> (config, label of models.md's letter, weight format, activations)
READ: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "A": (FP8, "(format A)", "fp8", "dynamic"),
    "A ue8m0": ({**FP8, "scale_fmt": "ue8m0"}, "(format A)", "fp8", "dynamic"),
    "fp8 per tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"}, "like format H", "fp8_tensor", "static"),
    "B": (
        compressed("float-quantized", DYNAMIC, num_bits=8, strategy="channel"), "(format B)", "fp8_channel", "dynamic"),
    "B'": (
        compressed("float-quantized", DYNAMIC, num_bits=8, strategy="block", block_structure=[128, 128]),
        "(format B')", "fp8", "dynamic"),
    "B' old": (
        compressed("float-quantized", DYNAMIC, num_bits=8, strategy="block", block_structure="128x128"),
        "(format B')", "fp8", "dynamic"),
    "B tensor": (
        compressed("float-quantized", STATIC, num_bits=8, strategy="tensor"), "like format B", "fp8_tensor", "static"),
    "C": (modelopt("nvfp4", group_size=16), "(format C)", "nvfp4", "static"),
    "C''": (modelopt("W4A16_NVFP4", group_size=16), "(format C'')", "nvfp4", "none"),
    "D": (
        compressed("nvfp4-pack-quantized", LOCAL, num_bits=4, strategy="tensor_group", group_size=16),
        "(format D)", "nvfp4", "static"),
    "D weight-only": (
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        "(format D), weight-only", "nvfp4", "none"),
    "E": (
        compressed("mxfp4-pack-quantized", DYNAMIC, num_bits=4, strategy="group", group_size=32),
        "(format E)", "mxfp4", "dynamic"),
    "F MXFP4": (quark({"dtype": "fp4", **MX}, {"is_dynamic": True}), "(format F)", "mxfp4", "dynamic"),
    "F NVFP4": (
        quark([{"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, {"dtype": "fp8_e4m3",
               "qscheme": "per_tensor"}], [{"is_dynamic": False}, {}]), "(format F)", "nvfp4", "static"),
    "F MXFP8": (quark({"dtype": "fp8_e4m3", **MX}), "(format F)", "mxfp8", "none"),
    "F tensor": (
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"is_dynamic": False}),
        "(format F)", "fp8_tensor", "static"),
    "F channel": (
        quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"}, {"is_dynamic": True}),
        "(format F)", "fp8_channel", "dynamic"),
    "G HF": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "(format G)", "mxfp8", "dynamic"),
    "G fp8 1x32": ({**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "(format G)", "mxfp8", "dynamic"),
    "G ModelOpt": (modelopt("MXFP8", group_size=32), "ModelOpt MXFP8 (format G)", "mxfp8", "dynamic"),
    "G compressed": (
        compressed("mxfp8-quantized", DYNAMIC, num_bits=8, strategy="group", group_size=32),
        "(format G)", "mxfp8", "dynamic"),
    "H": (modelopt("FP8"), "(format H)", "fp8_tensor", "static"),
    "H channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "(format H)", "fp8_channel", "dynamic"),
    "H block": (modelopt("FP8_PB_WO", group_size=128), "(format H)", "fp8", "none"),
    "ModelOpt MXFP4": (modelopt("W4A8_MXFP4_FP8", group_size=32), "(format E)", "mxfp4", "dynamic"),
}


@pytest.mark.parametrize("name", READ)
def test_read_formats(name: str) -> None:
    section, label, weights, activations = READ[name]
    found = scheme(section)
    encoding = found.encoding(EXPERT)
    assert encoding is not None and label in encoding.label and label in found.label
    assert (found.format, encoding.format, encoding.activations) == (weights, weights, activations)


# words of the message -> a config of that format
REFUSED = {
    "format I": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "compressed-tensors INT8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-tensors float6": compressed("mxfp6-pack-quantized", num_bits=6, strategy="group", group_size=32),
    "compressed-tensors with zero points": compressed("float-quantized", num_bits=8, symmetric=False),
    "block_structure [64, 64]": compressed(
        "float-quantized", num_bits=8, strategy="block", block_structure=[64, 64]),
    "strategy group and group size 64": compressed("new", num_bits=8, strategy="group", group_size=64),
    "NVFP4 with AWQ pre-scales": modelopt("NVFP4_AWQ"),
    "SVDQuant": modelopt("NVFP4_SVD"),
    "ModelOpt INT4 AWQ (like format I)": modelopt("W4A16_AWQ"),
    "FP8 activations": modelopt("W4A8_NVFP4_FP8"),
    "quant_algo 'NVFP5'": modelopt("NVFP5"),
    "group size {32}": modelopt("NVFP4", group_size=32),
    "dtype int4": quark({"dtype": "int4", "qscheme": "per_channel"}),
    "dtype fp6_e3m2": quark({"dtype": "fp6_e3m2", **MX}),
    "weight stages ['fp8_e4m3', 'int4']": quark([{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]),
    "weight_format 'fake_quantized'": quark({"dtype": "fp4", **MX}, export={"weight_format": "fake_quantized"}),
    "layer_type_quant_config": quark({"dtype": "fp4", **MX}, layer_type_quant_config={"Linear": {}}),
    "AWQ": {"quant_method": "awq"},
    "GPTQ": {"quant_method": "gptq"},
    "FBGEMM": {"quant_method": "fbgemm_fp8"},
    "fused expert blocks": {"quant_method": "mxfp4"},
    "'tomorrow'": {"quant_method": "tomorrow"},
    "weight_block_size [64, 64]": {**FP8, "weight_block_size": [64, 64]},
    "activation_scheme 'static'": {**FP8, "activation_scheme": "static"},
    "fmt 'e5m2'": {**FP8, "fmt": "e5m2"},
    "expert_dtype 'fp4'": {**FP8, "expert_dtype": "fp4"},
    "block size [1, 16]": {"quant_method": "mxfp8", "weight_block_size": [1, 16]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_what_to_do(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(quantization_config=REFUSED[name]))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert name in message and "is not supported" in message
    assert "moe-kernels quantize SRC DST" in message


def test_weight_only_nvfp4_by_its_groups() -> None:
    """quant_algo NVFP4 without input activations: C'' too; so where both files speak, config.json's groups decide."""
    group = {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}}
    only = modelopt("NVFP4", config_groups=group)
    assert "format C''" in scheme(only).label
    file = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    both = scheme(only, file)
    assert both.encoding(EXPERT).activations == "none" and both.excluded == ("lm_head",)  # type: ignore[union-attr]


def test_hf_quant_config_comes_first() -> None:
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    file = {"producer": {"name": "modelopt", "version": "0.40"}, "quantization": inner}
    assert declared_scheme({}, file).format == "nvfp4" and declared_scheme({}, file).kv_cache == "FP8"
    both = scheme(modelopt("NVFP4", ignore=["*.mlp.gate"]), file)
    assert both.excluded == ("lm_head", "*.mlp.gate")
    with pytest.raises(CheckpointError, match=r"declares ModelOpt NVFP4.*but config.json declares block FP8"):
        scheme(FP8, file)
    with pytest.raises(CheckpointError, match="no 'quantization' entry"):
        declared_scheme({}, {"producer": {}})
    assert scheme(modelopt("FP8", kv_cache_scheme={"num_bits": 8, "type": "float"})).kv_cache == "float8"


# ---- decisions per module


def test_modelopt_mixed_precision_decides_per_module() -> None:
    """As nvidia/GLM-5.3-NVFP4: experts NVFP4, dense MLPs per-tensor FP8, everything that is not listed BF16."""
    layers = {
        EXPERT: {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.9.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1?.mlp.experts*": {"quant_algo": "NVFP4", "group_size": 16},
    }
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = declared_scheme({}, {"quantization": inner})
    assert found.label == "ModelOpt mixed precision (format C')"

    def of(module: str) -> str | None:
        encoding = found.encoding(module)
        return None if encoding is None else encoding.format + "/" + encoding.activations

    assert of(EXPERT) == "nvfp4/static" and of("model.layers.0.mlp.up_proj") == "fp8_tensor/static"
    assert of("model.layers.9.mlp.experts.3.up_proj") == "nvfp4/none"
    assert of("model.layers.12.mlp.experts.3.up_proj") == "nvfp4/static"
    assert of(QUERY) is None and of("model.layers.0.mlp.up_proj_2") is None
    with pytest.raises(FormatError, match="AWQ pre-scales"):
        declared_scheme({}, {"quantization": {**inner, "quantized_layers": {"x": {"quant_algo": "NVFP4_AWQ"}}}})


def test_modelopt_mixed_precision_by_groups() -> None:
    groups = {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": {"num_bits": 4},
                    "targets": [EXPERT]},
        "group_1": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {}, "targets": [QUERY]},
    }
    found = scheme(modelopt("MIXED_PRECISION", config_groups=groups))
    assert found.encoding(EXPERT).format == "nvfp4"  # type: ignore[union-attr]
    assert found.encoding(QUERY).format == "fp8_tensor"  # type: ignore[union-attr]
    with pytest.raises(FormatError, match="copy hf_quant_config"):
        scheme(modelopt("MIXED_PRECISION"))


def test_compressed_tensors_groups_names_before_patterns_before_classes() -> None:
    """Experts NVFP4, attention channel FP8: llm-compressor's mixed recipes."""
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    found = scheme({
        "quant_method": "compressed-tensors", "format": "mixed-precision",
        "ignore": ["lm_head", r"re:.*layers\.0\..*"],
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": block, "input_activations": DYNAMIC},
            "b": {"targets": [r"re:.*\.experts\.\d+\..*"], "weights": nvfp4, "input_activations": LOCAL},
            "c": {"targets": [QUERY], "weights": channel, "input_activations": DYNAMIC},
            "kv": {"targets": [r"re:.*self_attn$"], "weights": None, "input_activations": STATIC},
        },
    })  # fmt: skip
    assert [found.encoding(m).format for m in (QUERY, EXPERT, "model.layers.3.mlp.shared_experts.up_proj")] == [  # type: ignore[union-attr]
        "fp8_channel", "nvfp4", "fp8"]
    assert found.encoding("model.layers.0.self_attn.q_proj") is None and found.encoding("lm_head") is None
    assert "mixed precision" in found.label
    with pytest.raises(FormatError, match="two config_groups target 'Linear'"):
        scheme({**compressed("x"), "config_groups": {
            "a": {"targets": ["Linear"], "weights": block}, "b": {"targets": ["Linear"], "weights": channel}}})


def test_quark_decides_by_pattern() -> None:
    found = scheme(quark(
        {"dtype": "fp4", **MX}, {"is_dynamic": True}, exclude=["lm_head", r"re:.*\.self_attn\..*_a_proj"],
        layer_quant_config={"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}},
                            "*.mlp.shared_experts.*": {"weight": None}}))  # fmt: skip
    assert found.encoding(EXPERT).format == "mxfp4" and found.encoding(QUERY).format == "fp8_channel"  # type: ignore[union-attr]
    assert found.encoding("model.layers.3.mlp.shared_experts.up_proj") is None
    assert found.encoding("model.layers.3.self_attn.q_a_proj") is None


@pytest.mark.parametrize(
    ("style", "pattern", "module", "covers"),
    [
        ("transformers", "lm_head", "lm_head", True),
        ("transformers", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("transformers", "mlp.gate", "model.layers.1.mlp.gate", True),
        ("transformers", "mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("transformers", "model.layers.1", "model.layers.1.self_attn.q_proj", True),
        ("transformers", "model.layers.1", "model.layers.11.self_attn.q_proj", False),
        ("transformers", "shared_experts", "model.layers.1.mlp.shared_experts.up_proj", True),
        ("transformers", r"model.layers.\d+.self_attn", "model.layers.12.self_attn.o_proj", True),
        ("transformers", "(broken", "model.layers.12.self_attn.o_proj", False),
        ("modelopt", "lm_head", "lm_head", True),
        ("modelopt", "*.self_attn*", "model.layers.3.self_attn.q_proj", True),
        ("modelopt", "model.layers.46*", "model.layers.46.mlp.experts.0.gate_proj", True),
        ("modelopt", "model.layers.*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("modelopt", "model.layers.*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("modelopt", "model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("modelopt", "model.layers.0", "model.layers.01.mlp.up_proj", False),
        ("compressed", "model.layers.0", "model.layers.0.mlp.up_proj", False),
        ("compressed", "re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("compressed", "re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False),
        ("compressed", "re:mlp", "model.layers.3.mlp.gate_proj", False),  # re.match: from the start
        ("compressed", "*.mlp.*", "model.layers.3.mlp.gate_proj", False),
        ("quark", "*.mlp.*", "model.layers.3.mlp.gate_proj", True),
        ("quark", "re:.*up_proj", "model.layers.3.mlp.up_proj", True),
    ],
)
def test_what_a_pattern_covers(style: Any, pattern: str, module: str, covers: bool) -> None:
    assert Patterns(style, (pattern, "other")).match(module) == covers


def test_patterns_as_compressed_tensors_itself_matches_them() -> None:
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    for target in ("lm_head", r"re:.*\.experts\..*", "re:model.layers.1", "model.layers.1.mlp", "re:.*gate$"):
        for module in ("lm_head", EXPERT, QUERY, "model.layers.1.mlp", "model.layers.1.mlp.gate", "x.lm_head"):
            assert Patterns("compressed", (target,)).match(module) == match_name(module, target), (target, module)


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
