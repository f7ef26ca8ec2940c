"""Files that NVIDIA ModelOpt 0.47's own exporter wrote, read by us, against its own dequantisers.

The files are made by tests/data/make_modelopt_vectors.py; ModelOpt itself (1.1 GB with its dependencies) is no part of
the test environment.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_kernels.formats import dequantize, open_checkpoint
from moe_kernels.quant import codec
from moe_kernels.quantize import quantize

DATA = Path(__file__).resolve().parents[1] / "data" / "modelopt"
# folder -> (letter, weight format, has input scales, relative tolerance: order of two FP32 products)
EXPORTS = {
    "nvfp4": ("(format C)", "nvfp4", True, 2**-22),
    "w4a16_nvfp4": ("(format C'')", "nvfp4", False, 2**-22),
    "fp8": ("per-tensor FP8 (format H)", "fp8_tensor", True, 0.0),
    "fp8_channel": ("per-channel FP8 (format H)", "fp8_channel", False, 0.0),
    "fp8_pb_wo": ("block FP8 (format H)", "fp8", False, 0.0),
    "mxfp8": ("(format G)", "mxfp8", False, 0.0),
    "mxfp4": ("(format E)", "mxfp4", False, 0.0),
    "mixed": ("(format C')", "nvfp4", True, 2**-22),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_modelopt_exports_are_read_right(name: str) -> None:
    letter, fmt, has_inputs, tolerance = EXPORTS[name]
    checkpoint, expected = open_checkpoint(DATA / name), load_file(DATA / name / "expected.safetensors.bin")
    assert letter in checkpoint.scheme.label and checkpoint.format == fmt
    record = checkpoint.experts(1)
    assert (record.w13_input_scale is not None) == has_inputs
    values = dequantize(record, torch.float32)
    gate, up = values.w13.chunk(2, dim=1)
    for module, theirs in expected.items():
        if ".experts." in module:
            _, _, tail = module.partition(".experts.")
            expert, projection = tail.split(".")
            ours = {"gate_proj": gate, "up_proj": up, "down_proj": values.w2}[projection][int(expert)]
        else:
            ours = checkpoint.tensor(f"{module}.weight", torch.float32)
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)
    kinds = {module.rpartition(".")[2] for module in expected}
    assert "down_proj" in kinds and ("q_proj" in kinds or name == "mixed")


def test_modelopt_mixed_precision_with_an_fp8_kv_cache() -> None:
    """Its exporter names the fused experts module in quantized_layers and leaves attention's KV scales in the file."""
    checkpoint = open_checkpoint(DATA / "mixed")
    encodings = {n: m.encoding.format for n, m in checkpoint.layout.modules.items() if m.encoding is not None}
    assert encodings == {f"model.layers.0.mlp.{p}_proj.weight": "fp8_tensor" for p in ("gate", "up", "down")}
    assert checkpoint.scheme.exact.keys() >= {"model.layers.1.mlp.experts"} and checkpoint.scheme.kv_cache == "FP8"
    assert len(checkpoint.layout.ignored) == 4 and not any("k_scale" in n for n in checkpoint.tensor_names())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The BF16 weights that ModelOpt was given."""
    from tests.data.make_modelopt_vectors import SHARED, SMALL
    from tests.tiny import glm4_moe

    return load_file(glm4_moe(tmp_path_factory.mktemp("source") / "m", **SHARED, **SMALL) / "model.safetensors")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_channel", "mxfp4", "fp8"])
def test_our_quantiser_gives_modelopts_bits(name: str, source: dict[str, torch.Tensor]) -> None:
    """Codes and scales bit for bit, for every module whose scalars ModelOpt does not share with another one.

    It rounds MXFP4's ties another way (neighbouring codes in about 1 % of the weights), and divides BF16 weights by a
    per-tensor scale in BF16, so that 5 % of the FP8 codes are neighbours of the FP32 quotient's.
    """
    tensors, fmt = load_file(DATA / name / "model.safetensors"), EXPORTS[name][1]
    shared = ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj") if fmt in ("nvfp4", "fp8_tensor") else ()
    compared = codes = 0
    for key, weight in tensors.items():
        module = key.removesuffix(".weight")
        if weight.element_size() > 1 or not key.endswith(".weight") or module.endswith(shared or ("none",)):
            continue
        q, scale, scale_2 = codec.encode(fmt, source[key])  # type: ignore[arg-type]
        stored = tensors[f"{module}.weight_scale"]
        assert torch.equal(scale.flatten().view(torch.uint8), stored.flatten().view(torch.uint8)), module
        if scale_2 is not None:
            assert torch.equal(scale_2, tensors[f"{module}.weight_scale_2"])
        ours, theirs = q.view(torch.uint8), weight.view(torch.uint8)
        if name not in ("mxfp4", "fp8"):
            assert torch.equal(ours, theirs), module
        codes += int((ours != theirs).sum())
        compared += ours.numel()
    assert compared > 2000 and codes <= {"mxfp4": 0.02, "fp8": 0.1}.get(name, 0) * compared


def test_our_names_are_modelopts(tmp_path: Path) -> None:
    """`quantize --only linears` writes the tensors that ModelOpt's exporter writes, dtype and shape alike."""
    bf16 = quantize(DATA / "nvfp4", tmp_path / "bf16", "bf16")
    for layout, export in (("nvfp4", "nvfp4"), ("nvfp4_w4a16", "w4a16_nvfp4"), ("fp8_tensor", "fp8"),
                           ("fp8_channel_modelopt", "fp8_channel"), ("mxfp8", "mxfp8")):
        ours = load_file(quantize(bf16, tmp_path / layout, layout, only="linears") / "model.safetensors")
        theirs = load_file(DATA / export / "model.safetensors")
        assert {n: (t.shape, t.dtype) for n, t in ours.items() if "gate.weight" not in n} == {
            n: (t.shape, t.dtype) for n, t in theirs.items() if "gate.weight" not in n}
