"""Write the trained network as a standard Hugging Face `glm4_moe` checkpoint: routed experts block FP8, the rest BF16.

The FP8 layout is that of zai-org's FP8 releases (E4M3 weight, `weight_scale_inv` FP32 per 128 × 128 block that
multiplies); router weights and correction bias stay FP32. BF16 is the exact dequantisation of these files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evals.mini.network import BIAS_OFFSET, MiniConfig, MiniNetwork
from evals.mini.tokenizer import END, END_IDS

BLOCK = 128
E4M3_MAX = 448.0
NOT_CONVERTED = ("lm_head", "model.embed_tokens", "model.layers.0.mlp", "self_attn", "mlp.gate", "shared_experts")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values and FP32 scales [rows/128, columns/128] with weight ≈ value × scale; sizes are multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / E4M3_MAX
    values = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.view(rows, columns).to(torch.float8_e4m3fn), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """FP32 weight of a block FP8 pair."""
    rows, columns = values.shape
    blocks = values.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return (blocks * scale[:, None, :, None]).view(rows, columns)


def hf_config(config: MiniConfig, fp8: bool) -> dict[str, Any]:
    """config.json."""
    out: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.dense_intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": config.moe_intermediate,
        "num_experts_per_tok": config.top_k,
        "n_shared_experts": 1,
        "n_routed_experts": config.experts,
        "routed_scaling_factor": config.scaling,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary,
        "eos_token_id": list(END_IDS),
        "pad_token_id": END,
        "dtype": "bfloat16",
    }
    if fp8:
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(NOT_CONVERTED),
        }
    return out


def hf_tensors(network: MiniNetwork) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name, FP32, experts apart, the bias at its offset."""
    c = network.config
    state = {n: p.detach().float().cpu() for n, p in network.named_parameters()}
    out = {
        "model.embed_tokens.weight": state["embed"],
        "lm_head.weight": state["head"],
        "model.norm.weight": state["norm"],
    }
    short = {"q": "q_proj.weight", "k": "k_proj.weight", "v": "v_proj.weight", "o": "o_proj.weight"}
    short |= {"q_b": "q_proj.bias", "k_b": "k_proj.bias", "v_b": "v_proj.bias"}
    short |= {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight"}
    for i in range(c.layers):
        base, mine = f"model.layers.{i}", f"layers_{i}_"
        out[f"{base}.input_layernorm.weight"] = state[mine + "ln1"]
        out[f"{base}.post_attention_layernorm.weight"] = state[mine + "ln2"]
        for name, theirs in short.items():
            out[f"{base}.self_attn.{theirs}"] = state[mine + name]
        if i == 0:
            for name in ("gate", "up", "down"):
                out[f"{base}.mlp.{name}_proj.weight"] = state[mine + name]
            continue
        out[f"{base}.mlp.gate.weight"] = state[mine + "router"]
        bias = network.biases[i - 1].detach().float().cpu()
        out[f"{base}.mlp.gate.e_score_correction_bias"] = bias + BIAS_OFFSET
        for name in ("gate", "up", "down"):
            out[f"{base}.mlp.shared_experts.{name}_proj.weight"] = state[f"{mine}s_{name}"]
        for e in range(c.experts):
            for name, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                out[f"{base}.mlp.experts.{e}.{theirs}_proj.weight"] = state[mine + name][e]
    return out


def _finish(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"do_sample": False, "eos_token_id": list(END_IDS), "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)


def _stays_fp32(name: str) -> bool:
    return ".mlp.gate." in name


def write_fp8(network: MiniNetwork, folder: Path, tokenizer: Path) -> Path:
    """The shipped form."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in hf_tensors(network).items():
        if ".experts." in name:
            values, scale = block_fp8(tensor)
            tensors[name] = values
            tensors[name.removesuffix("weight") + "weight_scale_inv"] = scale
        else:
            tensors[name] = tensor if _stays_fp32(name) else tensor.to(torch.bfloat16)
    _finish(folder, hf_config(network.config, fp8=True), tensors, tokenizer)
    return folder


def write_bf16(fp8_folder: Path, folder: Path) -> Path:
    """A BF16 checkpoint that is the dequantisation of an FP8 one (for loaders without FP8)."""
    config = json.loads((fp8_folder / "config.json").read_text())
    config.pop("quantization_config", None)
    stored = load_file(fp8_folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("weight_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        tensors[name] = tensor if scale is None else dequantise(tensor, scale).to(torch.bfloat16)
    _finish(folder, config, tensors, fp8_folder)
    return folder
