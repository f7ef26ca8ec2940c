"""Makes tests/data/quark: a tiny GLM-4-MoE checkpoint through AMD Quark's own file-to-file quantiser, on a CPU.

Run once, in an environment of its own (1.5 GB, so no part of `make test`):

    uv venv qk && uv pip install --python qk/bin/python amd-quark==0.13 torch==2.13.0 transformers==5.24.0 accelerate
    qk/bin/python tests/data/make_quark_vectors.py

Each folder is what `quantize_model_per_safetensor` wrote with Quark's template for glm4_moe, untouched, plus
`expected.safetensors.bin`: FP32 values of the experts' matrices by Quark's own unpacking and dequantisation.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def decode(scheme: str, weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """FP32 values by Quark's own code."""
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import dequantize_impl
    from quark.torch.quantization.nn.modules.flydsl_a8w4_inference_linear import _e8m0_to_fp32
    from quark.torch.utils.pack import Pack_fp4

    scale = parts["weight_scale"]
    if scheme in ("mxfp4", "nvfp4"):
        values = Pack_fp4("per_group", "fp4").unpack(weight, True)
        steps = _e8m0_to_fp32(scale) if scheme == "mxfp4" else scale.float() * parts["weight_scale_2"]
        return dequantize_impl("fp4", values, steps, None, -1, 32 if scheme == "mxfp4" else 16, "per_group")
    if scheme == "fp8":
        return dequantize_impl("fp8_e4m3", weight.float(), scale, None, 0, 0, "per_tensor")
    return dequantize_impl("fp8_e4m3", weight.float(), scale, None, 0, 0, "per_channel")


def main() -> None:
    """Write every folder."""
    from quark.torch.quantization.config.template import LLMTemplate
    from quark.torch.quantization.file2file_quantization import quantize_model_per_safetensor

    from tests.data.make_modelopt_vectors import SHARED, SMALL
    from tests.tiny import glm4_moe

    for scheme in ("mxfp4", "nvfp4", "fp8", "ptpc_fp8"):
        out = HERE / "quark" / scheme
        shutil.rmtree(out, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            source = glm4_moe(Path(folder) / "tiny", **SHARED, **SMALL)
            config = LLMTemplate.get("glm4_moe").get_config(scheme=scheme)
            quantize_model_per_safetensor(str(source), config, str(out), device="cpu")
        tensors = load_file(next(out.glob("*.safetensors")))
        expected = {}
        for key, weight in tensors.items():
            module = key.removesuffix(".weight")
            if key.endswith(".weight") and weight.element_size() == 1:
                parts = {n.removeprefix(module + "."): t for n, t in tensors.items() if n.startswith(module + ".")}
                expected[module] = decode(scheme, weight, parts).contiguous()
        save_file(expected, out / "expected.safetensors.bin")
        (out / "generation_config.json").unlink(missing_ok=True)
        print(f"{scheme}: {len(expected)} matrices, {sum(f.stat().st_size for f in out.iterdir())} bytes")


if __name__ == "__main__":
    main()
