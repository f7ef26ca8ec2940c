"""Every layout that `quantize` writes: read back to the same record, and decoded alike by the publishers' own code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_kernels.commands.quantize import LABELS
from moe_kernels.convert import quantize_record
from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import Checkpoint, dequantize, open_checkpoint
from moe_kernels.formats.calibration import InputScales
from moe_kernels.formats.targets import TARGETS
from moe_kernels.quantize import quantize
from moe_kernels.records import ExpertWeights
from tests.kernels.damage import rewrite

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FIELDS = ("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "w13_input_scale", "w2_input_scale")


@pytest.fixture(scope="module")
def written(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoint in every layout, all linears quantised."""
    folder = tmp_path_factory.mktemp("layouts")
    return {name: quantize(tiny_checkpoint, folder / name, name, only="linears") for name in TARGETS}


def stored(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def matrices(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """FP32 values of every quantised matrix by module name, through our reader."""
    found = {}
    for layer in checkpoint.moe_layers:
        record = dequantize(checkpoint.experts(layer), torch.float32)
        gate, up = record.w13.chunk(2, dim=1)
        for e in range(record.num_experts):
            for projection, weight in (("gate", gate), ("up", up), ("down", record.w2)):
                found[f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj"] = weight[e]
    for name, module in checkpoint.layout.modules.items():
        if module.encoding is not None:
            found[name.removesuffix(".weight")] = checkpoint.tensor(name, torch.float32)
    return found


def test_names_of_the_command_line() -> None:
    assert list(LABELS) == ["bf16", *TARGETS]
    for name, target in TARGETS.items():
        assert LABELS[name].startswith(target.encoding.label) or name == "nvfp4_mixed"


@pytest.mark.parametrize("name", TARGETS)
def test_read_back_what_was_written(name: str, written: dict[str, Path], tiny_checkpoint: Path) -> None:
    target, checkpoint = TARGETS[name], open_checkpoint(written[name])
    assert checkpoint.expert_encoding == target.encoding and checkpoint.format == target.encoding.format
    made = quantize_record(open_checkpoint(tiny_checkpoint).experts(1), target.encoding.format)
    read = checkpoint.experts(1)
    for field in FIELDS[:6]:
        ours, theirs = getattr(read, field), getattr(made, field)
        if ours is None or theirs is None:
            assert ours is theirs is None
        elif target.encoding.reciprocal and field.endswith("scale_2"):
            torch.testing.assert_close(ours, theirs, rtol=2**-23, atol=0)  # 1 / (1 / x)
        else:
            assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), field
    assert (read.w13_input_scale is not None) == (target.encoding.activations == "static")
    for module, weight in matrices(checkpoint).items():  # close to the original, gate not taken for up
        source = open_checkpoint(tiny_checkpoint)
        if ".experts." in module:
            continue
        exact = source.tensor(module + ".weight", torch.float32)
        assert ((weight - exact).norm() / exact.norm()).item() < 0.15, module
    exact_record = open_checkpoint(tiny_checkpoint).experts(1)
    error = (dequantize(read, torch.float32).w13 - exact_record.w13.float()).norm() / exact_record.w13.float().norm()
    assert error < (0.15 if "fp4" in name else 0.04)


@pytest.mark.parametrize("name", TARGETS)
def test_kept_modules_are_declared_and_everything_else_is_quantised(name: str, written: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(written[name])
    for tensor in checkpoint.layout.linears:
        module = checkpoint.layout.modules[tensor]
        declared = checkpoint.scheme.encoding(tensor.removesuffix(".weight"))
        assert (module.encoding is None) == (declared is None), tensor
    left = {n for n in checkpoint.layout.linears if checkpoint.layout.modules[n].encoding is None}
    small = {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(3) for p in "kv"}  # 64 rows: no FP8 block
    assert left == {"lm_head.weight"} | (small if checkpoint.format == "fp8" else set())


def test_default_is_experts_only_and_mixed_takes_the_dense_layer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    mixed = open_checkpoint(quantize(tiny_checkpoint, tmp_path / "m", "nvfp4_mixed"))
    encodings = {n: m.encoding.label for n, m in mixed.layout.modules.items() if m.encoding is not None}
    dense = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    assert encodings == dict.fromkeys(dense, "ModelOpt per-tensor FP8 (format H)")
    assert mixed.scheme.label == "ModelOpt mixed precision (format C')" and mixed.format == "nvfp4"
    plain = open_checkpoint(quantize(tiny_checkpoint, tmp_path / "d", "nvfp4_ct"))
    assert all(m.encoding is None for m in plain.layout.modules.values())
    assert plain.expert_encoding == TARGETS["nvfp4_ct"].encoding


# ---- cross-checks against the publishers' own decoders


def compressed_scheme(section: dict[str, Any]) -> Any:
    """The section as compressed-tensors itself parses it, and its only scheme."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(section)
    (scheme,) = config.config_groups.values()
    return config, scheme


@pytest.mark.parametrize("name", ["fp8_ct", "fp8_channel", "nvfp4_ct", "mxfp4", "mxfp8_ct"])
def test_compressed_tensors_decodes_as_we_do(name: str, written: dict[str, Path]) -> None:
    """Each module's tensors through compressed-tensors' own compressor, from the config that we wrote."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    section = json.loads((written[name] / "config.json").read_text())["quantization_config"]
    config, scheme = compressed_scheme(section)
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    assert compressor.can_compress(torch.nn.Linear, scheme), "not the compressor it would choose for the scheme"
    tensors, ours = stored(written[name]), matrices(open_checkpoint(written[name]))
    assert len(ours) > 60
    for module, weight in ours.items():
        parts = {n.removeprefix(module + "."): t for n, t in tensors.items() if n.startswith(module + ".")}
        parts.pop("bias", None)
        if name in ("nvfp4_ct", "mxfp4"):  # decompress() rounds to BF16: take its unpacked values instead
            helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
            packed = parts["weight_packed"]
            values = helpers.unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
            if name == "nvfp4_ct":
                step = parts["weight_scale"].float() / parts["weight_global_scale"]
                exact = values * step.repeat_interleave(16, 1)
            else:
                mx = pytest.importorskip("compressed_tensors.compressors.mx_utils")
                exact = values * mx.decompress_mx_scale(parts["weight_scale"]).float().repeat_interleave(32, 1)
            torch.testing.assert_close(weight, exact, rtol=2**-22 if name == "nvfp4_ct" else 0, atol=0)
        theirs = compressor.decompress(parts, scheme)["weight"].float()
        # its own result is FP32 for FP8, and BF16 for NVFP4 and MX, where an element times a power of two is exact
        torch.testing.assert_close(weight, theirs, rtol={"nvfp4_ct": 2**-6}.get(name, 0), atol=0)


@pytest.mark.parametrize("name", ["fp8_ct", "fp8_channel", "nvfp4_ct", "mxfp4", "mxfp8_ct"])
def test_compressed_tensors_leaves_out_what_we_left_out(name: str, written: dict[str, Path]) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    section = json.loads((written[name] / "config.json").read_text())["quantization_config"]
    checkpoint, linear = open_checkpoint(written[name]), torch.nn.Linear(1, 1)
    for tensor in checkpoint.layout.linears:
        module = tensor.removesuffix(".weight")
        chosen = match.is_match(module, linear, section["config_groups"]["group_0"]["targets"], section["ignore"])
        assert chosen == (checkpoint.layout.modules[tensor].encoding is not None), module


def test_d_is_right_where_stock_transformers_drops_the_global_scale(written: dict[str, Path]) -> None:
    """transformers 5.24 loads expert weights too large by weight_global_scale and says nothing (HF #48371)."""
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    path, tensors = written["nvfp4_ct"], stored(written["nvfp4_ct"])
    ours = matrices(open_checkpoint(path))
    module = "model.layers.1.mlp.experts.3.down_proj"
    packed = tensors[f"{module}.weight_packed"]
    values = torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)
    exact = values * tensors[f"{module}.weight_scale"].float().repeat_interleave(16, 1)
    exact /= tensors[f"{module}.weight_global_scale"]
    torch.testing.assert_close(ours[module], exact, rtol=2**-22, atol=0)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        theirs = model.get_parameter("model.layers.1.mlp.experts.down_proj")[3]
    except Exception as error:
        pytest.skip(f"this transformers does not load format D at all: {type(error).__name__}")
    ratio = (theirs.norm() / ours[module].norm()).item()
    wrong = tensors[f"{module}.weight_global_scale"].item()
    assert ratio == pytest.approx(wrong, rel=0.02) or ratio == pytest.approx(1, rel=0.02)


def test_transformers_decodes_block_fp8_and_mxfp8_as_we_do(written: dict[str, Path]) -> None:
    """transformers' own dequantiser on the stored tensors of formats A and G (E8M0 bytes in weight_scale_inv)."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    dequantizer = module.Fp8Dequantize.__new__(module.Fp8Dequantize)
    for name in ("fp8", "mxfp8_hf"):
        tensors, ours = stored(written[name]), matrices(open_checkpoint(written[name]))
        for key, weight in ours.items():
            theirs = dequantizer._dequantize_one(
                tensors[f"{key}.weight"], tensors[f"{key}.weight_scale_inv"], output_dtype=torch.float32)
            assert torch.equal(weight, theirs), (name, key)


def test_stock_transformers_loads_our_mxfp8(written: dict[str, Path]) -> None:
    """The whole file through from_pretrained: names, config and exclusions as it wants them."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(written["mxfp8_hf"])
    state = AutoModelForCausalLM.from_pretrained(written["mxfp8_hf"], dtype=torch.float32).state_dict()
    for name in checkpoint.tensor_names():
        assert torch.equal(state[name], checkpoint.tensor(name, torch.float32)), name
    for layer in checkpoint.moe_layers:
        record = dequantize(checkpoint.experts(layer), torch.float32)
        assert torch.equal(state[f"model.layers.{layer}.mlp.experts.gate_up_proj"], record.w13)
        assert torch.equal(state[f"model.layers.{layer}.mlp.experts.down_proj"], record.w2)


# ---- one layout to another, exact pairs


def test_same_weights_under_other_names(written: dict[str, Path], tmp_path: Path) -> None:
    """C to D and back, A to B': bits of the weights stay."""
    there = quantize(written["nvfp4"], tmp_path / "d", "nvfp4_ct")
    back = quantize(there, tmp_path / "c", "nvfp4")
    first, last = open_checkpoint(written["nvfp4"]).experts(2), open_checkpoint(back).experts(2)
    for field in FIELDS:
        a, b = getattr(first, field), getattr(last, field)
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2**-22, atol=0)
        else:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    other = open_checkpoint(quantize(written["fp8"], tmp_path / "b", "fp8_ct")).experts(1)
    assert torch.equal(other.w13_scale, open_checkpoint(written["fp8"]).experts(1).w13_scale)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="are nvfp4_ct already"):
        quantize(there, tmp_path / "x", "nvfp4_ct")


def test_another_layout_keeps_calibration_and_the_other_linears(tiny_checkpoint: Path, tmp_path: Path) -> None:
    amax = {layer: (torch.full((8,), 5.0 + layer), torch.full((8,), 50.0)) for layer in (1, 2)}
    source = quantize(tiny_checkpoint, tmp_path / "c", "nvfp4", only="linears", calibration=InputScales(amax))
    there = open_checkpoint(quantize(source, tmp_path / "d", "nvfp4_ct", only="linears"))
    before, after = open_checkpoint(source).experts(1), there.experts(1)
    torch.testing.assert_close(after.w13_input_scale, before.w13_input_scale, rtol=2**-22, atol=0)
    assert before.w13_input_scale is not None and before.w13_input_scale[0, 0] == 6.0 / (6 * 448)
    name = "model.layers.1.self_attn.q_proj"
    old, new = stored(source), stored(there.path)
    assert torch.equal(old[f"{name}.weight"], new[f"{name}.weight_packed"])
    assert torch.equal(old[f"{name}.weight_scale"].view(torch.uint8), new[f"{name}.weight_scale"].view(torch.uint8))
    only = stored(quantize(source, tmp_path / "w", "nvfp4_w4a16", only="linears"))
    assert not any(n.endswith("input_scale") for n in only)
    again = quantize(source, tmp_path / "d2", "nvfp4_ct", calibration=InputScales({
        layer: (torch.full((8,), 1.0), torch.full((8,), 2.0)) for layer in (1, 2)}))
    renewed = open_checkpoint(again).experts(2).w2_input_scale
    torch.testing.assert_close(renewed, torch.full((8,), 2.0 / (6 * 448)), rtol=2**-22, atol=0)


def test_calibrated_per_tensor_fp8(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """input_scale = amax / 448; an expert that no token reached takes its layer's largest."""
    amax = {layer: (torch.linspace(0, 7, 8), torch.full((8,), 50.0)) for layer in (1, 2)}
    record = open_checkpoint(
        quantize(tiny_checkpoint, tmp_path / "h", "fp8_tensor", calibration=InputScales(amax))).experts(1)
    assert record.w13_input_scale is not None and record.w2_input_scale is not None
    assert torch.equal(record.w13_input_scale[:, 0], torch.tensor([7.0, 1, 2, 3, 4, 5, 6, 7]) / 448)
    assert torch.equal(record.w2_input_scale, torch.full((8,), 50.0) / 448)


def test_conversions_that_keep_every_value(tiny_checkpoint: Path) -> None:
    source = open_checkpoint(tiny_checkpoint).experts(1)
    for start, end in (("fp8_tensor", "fp8"), ("fp8_tensor", "fp8_channel"), ("mxfp4", "mxfp8")):
        made = quantize_record(source, start)  # type: ignore[arg-type]
        for which in ("w13", "w2"):
            before = getattr(dequantize(made, torch.float32), which)
            after = getattr(dequantize(quantize_record(made, end), torch.float32), which)  # type: ignore[arg-type]
            assert torch.equal(before, after)
    ragged = ExpertWeights("bf16", torch.randn(2, 192, 160).bfloat16(), torch.randn(2, 160, 96).bfloat16())
    made = quantize_record(ragged, "fp8_tensor")
    assert torch.equal(dequantize(made).w13, dequantize(quantize_record(made, "fp8")).w13)


def test_conversion_rules() -> None:
    from moe_kernels.cache import conversion

    for allowed in (("bf16", "mxfp4"), ("fp8", "nvfp4"), ("fp8_tensor", "fp8"), ("mxfp4", "mxfp8"), ("nvfp4", "bf16")):
        assert conversion(*allowed) is None  # type: ignore[arg-type]
    for start, end in (("nvfp4", "fp8"), ("fp8_channel", "fp8"), ("mxfp8", "fp8"), ("mxfp8", "mxfp4")):
        assert f"'{start}/reference'" in (conversion(start, end) or "")  # type: ignore[arg-type]


# ---- variations of storage that publishers use


def test_e8m0_scales_of_block_fp8_become_fp32(written: dict[str, Path], tmp_path: Path) -> None:
    """Scales as float8_e8m0fnu, or as bytes where the config says ue8m0: 2^(b - 127), never the byte as a number."""
    def powers(t: dict[str, torch.Tensor]) -> None:
        for key in [k for k in t if k.endswith("_scale_inv")]:
            t[key] = torch.exp2(torch.log2(t[key]).round())

    plain = rewrite(written["fp8"], tmp_path / "1", powers)
    wanted = matrices(open_checkpoint(plain))

    def as_float8(t: dict[str, torch.Tensor]) -> None:
        powers(t)
        t.update({k: v.to(torch.float8_e8m0fnu) for k, v in t.items() if k.endswith("_scale_inv")})

    def as_bytes(t: dict[str, torch.Tensor]) -> None:
        as_float8(t)
        t.update({k: v.view(torch.uint8) for k, v in t.items() if k.endswith("_scale_inv")})

    for number, (change, declare) in enumerate([(as_float8, False), (as_bytes, True)]):
        path = rewrite(written["fp8"], tmp_path / f"e{number}", change,
                       lambda c, d=declare: c["quantization_config"].update(scale_fmt="ue8m0") if d else None)
        found = matrices(open_checkpoint(path))
        assert all(torch.equal(found[m], wanted[m]) for m in wanted)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' is U8, expected F32"):
        open_checkpoint(rewrite(written["fp8"], tmp_path / "undeclared", as_bytes))


@pytest.mark.parametrize(("layout", "dtype"), [("fp8_channel", torch.bfloat16), ("fp8_ct", torch.bfloat16)])
def test_bf16_scales(layout: str, dtype: torch.dtype, written: dict[str, Path], tmp_path: Path) -> None:
    """llm-compressor stores scales in the model's dtype: exact in FP32."""

    def narrow(t: dict[str, torch.Tensor]) -> None:
        t.update({k: v.to(dtype) for k, v in t.items() if k.endswith(".weight_scale")})

    path = rewrite(written[layout], tmp_path / "m", narrow)
    record, tensors = open_checkpoint(path).experts(1), stored(path)
    assert record.w2_scale is not None and record.w2_scale.dtype == torch.float32
    assert torch.equal(record.w2_scale[3], tensors["model.layers.1.mlp.experts.3.down_proj.weight_scale"].float())


def test_bad_scalars_are_named(written: dict[str, Path], tmp_path: Path) -> None:
    module = "model.layers.1.mlp.experts.3.up_proj"
    cases = [
        ("nvfp4_ct", f"{module}.weight_global_scale", torch.zeros(1), "holds 0.0; .*stores reciprocals"),
        ("mxfp4", f"{module}.weight_scale", torch.full((128, 4), 255, dtype=torch.uint8), "holds nan"),
        ("mxfp8", f"{module}.weight_scale", torch.full((128, 4), 255, dtype=torch.uint8), "holds nan"),
        ("fp8_tensor", f"{module}.weight_scale", torch.tensor(float("inf")), "holds inf"),
        ("fp8_channel", f"{module}.weight_scale", torch.full((128, 1), -1.0), "holds -1.0, scales are never negative"),
    ]
    for number, (layout, name, value, words) in enumerate(cases):
        path = rewrite(written[layout], tmp_path / str(number), lambda t, n=name, v=value: t.update({n: v}))
        with pytest.raises(CheckpointError, match=rf"'{name.replace('.', '[.]')}' {words}"):
            open_checkpoint(path).experts(1)


def test_kv_cache_scales_are_noted_and_ignored(
    written: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"model.layers.0.self_attn.{n}" for n in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "kv_scale",
                                                        "k_proj.output_scale")]

    def add(t: dict[str, torch.Tensor]) -> None:
        t.update({name: torch.ones(()) for name in names})

    path = rewrite(written["nvfp4"], tmp_path / "m", add)
    with caplog.at_level(logging.INFO, "moe_kernels.formats.checkpoint"):
        checkpoint = open_checkpoint(path)
    assert {i.name for i in checkpoint.layout.ignored} == set(names)
    assert "ignored 5 tensors such as" in caplog.text and not set(names) & set(checkpoint.tensor_names())


def test_what_is_not_declared_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    """Scales without weights (FreeToken #430), a mixed layer (mconcat's GLM-5.1), a module quantised unannounced."""

    def misspelt(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("weight_packed")]:
            t[name.replace("weight_packed", "weight")] = t.pop(name)

    with pytest.raises(CheckpointError, match=r"U8 but the config declares|weight_packed' is missing"):
        open_checkpoint(rewrite(written["nvfp4_ct"], tmp_path / "1", misspelt))

    def fp8_down(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if ".experts." in n and "down_proj.weight" in n]:
            del t[name]
        for layer in (1, 2):
            for e in range(8):
                module = f"model.layers.{layer}.mlp.experts.{e}.down_proj"
                t[f"{module}.weight"] = torch.zeros(128, 128).to(torch.float8_e4m3fn)
                t[f"{module}.weight_scale"] = torch.tensor(1.0)

    def declare(c: dict[str, Any]) -> None:
        layers = c["quantization_config"]["quantized_layers"]
        layers.update({n: {"quant_algo": "FP8"} for n in layers if n.endswith("down_proj")})

    path = rewrite(written["nvfp4_mixed"], tmp_path / "2", fp8_down, declare)
    (path / "hf_quant_config.json").unlink()
    with pytest.raises(FormatError, match="all routed experts need one weight format"):
        open_checkpoint(path)

    def forget(c: dict[str, Any]) -> None:
        del c["quantization_config"]["quantized_layers"]["model.layers.0.mlp.up_proj"]

    path = rewrite(written["nvfp4_mixed"], tmp_path / "3", None, forget)
    (path / "hf_quant_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight' is F8_E4M3 but the config declares .* without"):
        open_checkpoint(path)


def test_bf16_or_fp8_attention_beside_nvfp4_experts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """compressed-tensors groups: experts D, attention B, the rest BF16; each tensor as its own group says."""
    experts = stored(quantize(tiny_checkpoint, tmp_path / "d", "nvfp4_ct"))
    channel = stored(quantize(tiny_checkpoint, tmp_path / "b", "fp8_channel", only="linears"))
    section = json.loads((tmp_path / "d" / "config.json").read_text())["quantization_config"]
    other = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]

    def mix(t: dict[str, torch.Tensor]) -> None:
        attention = {n: v for n, v in channel.items() if ".self_attn." in n}
        t.clear()
        t.update(experts | attention)

    def declare(c: dict[str, Any]) -> None:
        groups = {"a": {**section["config_groups"]["group_0"], "targets": [r"re:.*\.experts\.\d+\..*"]},
                  "b": {**other["config_groups"]["group_0"], "targets": [r"re:.*self_attn\..*_proj"]}}
        c["quantization_config"] = {**section, "format": "mixed-precision", "config_groups": groups, "ignore": []}

    checkpoint = open_checkpoint(rewrite(tiny_checkpoint, tmp_path / "m", mix, declare))
    assert checkpoint.format == "nvfp4"
    query = "model.layers.1.self_attn.q_proj"
    want = channel[f"{query}.weight"].float() * channel[f"{query}.weight_scale"]
    assert torch.equal(checkpoint.tensor(f"{query}.weight", torch.float32), want)
    dense = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(checkpoint.tensor(dense), stored(tiny_checkpoint)[dense])
    read = checkpoint.experts(1)
    assert torch.equal(read.w13, quantize_record(open_checkpoint(tiny_checkpoint).experts(1), "nvfp4").w13)


@pytest.mark.parametrize("name", TARGETS)
def test_mtp_layers_stay_unquantised_and_are_left_out(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """In every producer's own spelling: its rule for exclusions covers the whole MTP layer, and that layer alone."""
    source = rewrite(
        tiny_checkpoint, tmp_path / "m", lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(4, 4)}),
        lambda c: c.update(num_nextn_predict_layers=1),
    )  # fmt: skip
    checkpoint = open_checkpoint(quantize(source, tmp_path / "q", name))
    assert [i.name for i in checkpoint.layout.mtp] == ["model.layers.3.mlp.up_proj.weight"]
    for module in ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.experts.0.down_proj"):
        assert checkpoint.scheme.encoding(module) is None
    if TARGETS[name].modelopt is None:  # ModelOpt's own spelling is "model.layers.3*"; no later layer exists
        assert not checkpoint.scheme.excludes("model.layers.30.mlp.experts.0.down_proj")
    assert not checkpoint.scheme.excludes("model.layers.1.mlp.experts.0.down_proj")


def test_names_are_those_of_compressed_tensors_compressors(written: dict[str, Path]) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    module = "model.layers.1.mlp.experts.3.up_proj"
    for name in ("fp8_ct", "fp8_channel", "nvfp4_ct", "mxfp4", "mxfp8_ct"):
        section = json.loads((written[name] / "config.json").read_text())["quantization_config"]
        config, scheme = compressed_scheme(section)
        wanted = set(compressors.BaseCompressor.get_value_from_registry(config.format).compression_param_names(scheme))
        found = {n.removeprefix(module + ".") for n in stored(written[name]) if n.startswith(module + ".")}
        # its list leaves out the input scale where only the local part of the activations' scales is dynamic
        assert found - {"input_global_scale"} == wanted - {"input_global_scale"}, name
        assert ("input_global_scale" in found) == (name == "nvfp4_ct")


def test_an_attention_bias_next_to_quantised_projections(written: dict[str, Path], tiny_checkpoint: Path) -> None:
    """q, k and v have biases in GLM-4.5: plain tensors beside weights of any format."""
    name = "model.layers.2.self_attn.q_proj.bias"
    for layout in ("fp8_channel", "nvfp4_ct", "mxfp4_quark"):
        assert torch.equal(open_checkpoint(written[layout]).tensor(name), stored(tiny_checkpoint)[name])
