"""Reading and quantising a checkpoint never holds two copies of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_kernels.formats.architectures import GLM4_MOE

MIB = 1 << 20
# Run in a process of its own: the highest resident size is kept per process and only grows.
SCRIPT = """
import sys, torch
from moe_kernels.formats import open_checkpoint
from moe_kernels.quantize import quantize
torch.set_num_threads(1)
def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
quantize(sys.argv[3], sys.argv[4], "nvfp4")  # warm up allocators and imports on a small model
start = kib("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # forget the highest size so far
quantize(sys.argv[1], sys.argv[2], "fp8", max_shard_bytes=8 << 20)
quantizing = kib("VmHWM:") - start
start = kib("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
checkpoint = open_checkpoint(sys.argv[1])
records = [checkpoint.experts(layer) for layer in checkpoint.moe_layers]
loading = kib("VmHWM:") - start
print(quantizing, loading, sum(r.w13.nbytes + r.w2.nbytes for r in records) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs")
def test_peak_memory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """96 MiB of experts in 16 MiB shards: loading stays below one copy + a shard, quantising below half a copy."""
    big = _checkpoint(tmp_path / "big", layers=9, experts=16)
    arguments = [str(big), str(tmp_path / "fp8"), str(tiny_checkpoint), str(tmp_path / "warm")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    quantizing, loading, model = (int(x) for x in done.stdout.split())
    assert model == 96 * 1024
    # mapped pages of the open shard count as resident as well
    assert loading < model + 40 * 1024, f"{loading} KiB for a model of {model} KiB"
    assert quantizing < model // 2, f"{quantizing} KiB for a model of {model} KiB"


def _checkpoint(folder: Path, layers: int, experts: int) -> Path:
    """A random BF16 checkpoint, hidden 512, I 256: 0.75 MiB an expert, one shard of 12 MiB a layer."""
    folder.mkdir()
    config = {
        "model_type": "glm4_moe", "vocab_size": 256, "hidden_size": 512, "intermediate_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "moe_intermediate_size": 256, "n_routed_experts": experts, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}

    def save(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))

    plain = {name: torch.ones(shape).bfloat16() for name, shape, row in GLM4_MOE.expected(config) if not row.optional}
    save("model-plain.safetensors", plain)
    pool = torch.randn(512 * 256 + 4096).bfloat16()
    for layer in range(1, layers):
        tensors = {}
        for expert in range(experts):
            for p, (projection, shape) in enumerate(GLM4_MOE.expert_shapes(config).items()):
                offset = 97 * expert + 31 * p
                name = GLM4_MOE.expert.format(layer=layer, expert=expert, projection=projection) + ".weight"
                tensors[name] = pool[offset : offset + 512 * 256].view(shape).clone()
        save(f"model-{layer}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
