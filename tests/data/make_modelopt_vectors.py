"""Makes tests/data/modelopt: one tiny GLM-4-MoE model through NVIDIA ModelOpt's own quantiser and exporter, on a CPU.

Run once, in an environment of its own (1.1 GB, so no part of `make test`):

    uv venv mo && uv pip install --python mo/bin/python nvidia-modelopt==0.47.0 torch==2.13.0 transformers==5.24.0 \\
        accelerate requests safetensors
    mo/bin/python tests/data/make_modelopt_vectors.py

Each folder is what `export_hf_checkpoint` wrote, untouched, plus `expected.safetensors`: FP32 values of its quantised
matrices by ModelOpt's own dequantisers (`QTensor.dequantize`), for all experts and one module of every other kind.
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

SMALL = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=32)
WIDE = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=256)  # two blocks of rows or columns
SHARED = dict(
    vocab_size=32, num_hidden_layers=2, n_routed_experts=2, num_experts_per_tok=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip


def quantised(source: Path, name: str):
    """The model after mtq.quantize with the named configuration, calibrated on random tokens."""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)

    def calibrate(m) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(4):
                m(torch.randint(0, 32, (2, 40), generator=generator))

    return mtq.quantize(model, mixed(mtq) if name == "MIXED" else getattr(mtq, name), calibrate)


def mixed(mtq) -> dict[str, object]:
    """As nvidia/GLM-5.3-NVFP4 is described: experts NVFP4, dense MLP per-tensor FP8, attention BF16; FP8 KV cache."""
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    fp8 = {"num_bits": (4, 3), "axis": None}
    for pattern in ("*self_attn*", "*shared_experts*"):
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    for kind in ("weight", "input"):
        config["quant_cfg"].append({"quantizer_name": f"*layers.0.mlp*{kind}_quantizer", "cfg": fp8})
    config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": fp8, "enable": True})
    return config


def decode(name: str, weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """FP32 values by ModelOpt's own code."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    scale, shape = parts["weight_scale"], weight.shape
    if name == "mixed":
        name = "nvfp4" if weight.dtype == torch.uint8 else "fp8"
    wide = torch.Size((shape[0], 2 * shape[1]))
    if name in ("nvfp4", "w4a16_nvfp4"):
        tensor = NVFP4QTensor(wide, torch.float32, weight)
        return tensor.dequantize(
            torch.float32, scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16})
    if name == "mxfp4":
        return MXFP4QTensor(wide, torch.float32, weight).dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    if name == "mxfp8":
        return MXFP8QTensor(shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    if name == "fp8_channel":
        scale = scale[:, None]
    if name == "fp8_pb_wo":
        blocks = scale.reshape(-(-shape[0] // 128), -(-shape[1] // 128))  # exported squeezed
        return FP8QTensor(shape, torch.float32, weight).dequantize(
            torch.float32, scale=blocks, block_sizes={-1: 128, -2: 128})
    return FP8QTensor(shape, torch.float32, weight).dequantize(torch.float32, scale=scale)


def main() -> None:
    """Write every folder."""
    from modelopt.torch.export import export_hf_checkpoint

    from tests.tiny import glm4_moe

    configs = {
        "nvfp4": "NVFP4_DEFAULT_CFG", "w4a16_nvfp4": "W4A16_NVFP4_CFG", "fp8": "FP8_DEFAULT_CFG",
        "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8_pb_wo": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
        "mxfp8": "MXFP8_DEFAULT_CFG", "mxfp4": "MXFP4_DEFAULT_CFG", "mixed": "MIXED",
    }  # fmt: skip
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            sizes = WIDE if name == "fp8_pb_wo" else SMALL
            source = glm4_moe(Path(folder) / "tiny", **SHARED, **sizes)
            out = HERE / "modelopt" / name
            shutil.rmtree(out, ignore_errors=True)
            with torch.inference_mode():
                export_hf_checkpoint(quantised(source, config), export_dir=out)
        tensors = load_file(out / "model.safetensors")
        expected = {}
        for key, weight in tensors.items():
            module = key.removesuffix(".weight")
            if weight.element_size() > 1 or not key.endswith(".weight"):
                continue
            others = ("layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight")
            keep = ".experts." in key or key.endswith(others)
            if keep or "layers.1.mlp.shared_experts.down" in key:
                parts = {n.removeprefix(module + "."): t for n, t in tensors.items() if n.startswith(module + ".")}
                expected[module] = decode(name, weight, parts).contiguous()
        if name == "fp8_pb_wo":  # large: one of the down projections, whose two blocks lie side by side
            expected = {n: t for n, t in expected.items() if "experts.1.down" in n or "q_proj" in n}
        save_file(expected, out / "expected.safetensors.bin")
        (out / "generation_config.json").unlink(missing_ok=True)
        size = sum(f.stat().st_size for f in out.iterdir())
        scale = next(t.shape for n, t in tensors.items() if n.endswith("weight_scale"))
        print(f"{name}: {len(tensors)} tensors, {len(expected)} expected, {size / 1024:.0f} KiB, scale {tuple(scale)}")


if __name__ == "__main__":
    main()
