"""Files that AMD Quark 0.13 wrote from a tiny GLM-4-MoE checkpoint, read by us, against Quark's own decoders.

The files are made by tests/data/make_quark_vectors.py; Quark itself is no part of the test environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_kernels.formats import dequantize, open_checkpoint
from moe_kernels.formats.targets import TARGETS
from moe_kernels.quantize import quantize

DATA = Path(__file__).resolve().parents[1] / "data" / "quark"
EXPORTS = {
    "mxfp4": ("AMD Quark MXFP4 (format F)", "mxfp4", "dynamic", 0.0),
    "nvfp4": ("AMD Quark NVFP4 (format F)", "nvfp4", "dynamic", 2**-22),
    "fp8": ("AMD Quark per-tensor FP8 (format F)", "fp8_tensor", "static", 0.0),
    "ptpc_fp8": ("AMD Quark per-channel FP8 (format F)", "fp8_channel", "dynamic", 0.0),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_quark_exports_are_read_right(name: str) -> None:
    label, fmt, activations, tolerance = EXPORTS[name]
    checkpoint, expected = open_checkpoint(DATA / name), load_file(DATA / name / "expected.safetensors.bin")
    assert (checkpoint.scheme.label, checkpoint.format) == (label, fmt)
    assert checkpoint.expert_encoding is not None and checkpoint.expert_encoding.activations == activations
    assert all(m.encoding is None for m in checkpoint.layout.modules.values())  # its GLM template: experts only
    values = dequantize(checkpoint.experts(1), torch.float32)
    gate, up = values.w13.chunk(2, dim=1)
    assert len(expected) == 6
    for module, theirs in expected.items():
        expert, projection = module.partition(".experts.")[2].split(".")
        ours = {"gate_proj": gate, "up_proj": up, "down_proj": values.w2}[projection][int(expert)]
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


def test_our_quark_layout_is_quarks(tmp_path: Path) -> None:
    """Names, dtypes and shapes of format F, and the parts of the config that decide."""
    bf16 = quantize(DATA / "mxfp4", tmp_path / "bf16", "bf16")
    path = quantize(bf16, tmp_path / "f", "mxfp4_quark")
    ours, theirs = load_file(path / "model.safetensors"), load_file(DATA / "mxfp4" / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    mine, other = (json.loads((p / "config.json").read_text())["quantization_config"] for p in (path, DATA / "mxfp4"))
    for key in ("weight", "input_tensors"):
        wanted = other["global_quant_config"][key]
        assert all(wanted[k] == v for k, v in mine["global_quant_config"][key].items())
    assert set(mine["exclude"]) == set(other["exclude"])
    assert open_checkpoint(path).expert_encoding == TARGETS["mxfp4_quark"].encoding
