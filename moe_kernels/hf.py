"""Puts a kernel variant into transformers' own MoE models and loads a checkpoint into them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_kernels import hf_blocks, registry
from moe_kernels.cache import ensure_format
from moe_kernels.capture import RoutingTrace, capture_moe_inputs, capture_routing
from moe_kernels.convert import conversion
from moe_kernels.errors import CheckpointError, FormatError, VariantError
from moe_kernels.formats import Checkpoint, open_checkpoint
from moe_kernels.formats.layer_kinds import mlp_layer_types
from moe_kernels.hf_blocks import ParityMoE, router_bias
from moe_kernels.records import WeightFormat
from moe_kernels.registry import VariantSpec

__all__ = [
    "LoadedModel", "ParityMoE", "RoutingTrace", "capture_moe_inputs", "capture_routing", "load_model",
]

log = logging.getLogger(__name__)

_FP32_NAMES = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
# RoPE types whose frequencies are the same for every position of every sequence; "dynamic" and "longrope" change them
# with the longest sequence of a batch.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what it was made of.

    `model` is transformers' causal language model in eval mode; `path` the checkpoint really loaded (the
    quantised copy, where one was made); `resolved` the kernel that runs in each MoE layer.
    """

    model: PreTrainedModel
    checkpoint: Checkpoint
    path: Path
    variant: VariantSpec
    resolved: dict[int, str]
    dtype: torch.dtype
    device: torch.device

    @property
    def config(self):
        """The transformers config."""
        return self.model.config

    @property
    def format(self) -> WeightFormat:
        """Format of the expert weights in `path`."""
        return self.checkpoint.format

    @cached_property
    def weights_sha256(self) -> str:
        """Hash over the weights' bytes."""
        return self.checkpoint.sha256()


def load_model(
    path: str | Path,
    variant: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Load a checkpoint of a supported model type with one kernel variant in all of its MoE layers.

    `dtype` is that of everything but the experts (the variant's), the router weight, its correction bias and
    the RoPE frequencies (FP32 always). A BF16 checkpoint is converted once where the variant needs FP8 or
    NVFP4 (`ensure_format`), a block FP8 one where it needs NVFP4; `bf16/reference` takes any format. Nothing is
    fetched from a network and no code from the checkpoint is run. `attn_implementation` is a name known to
    transformers' AttentionInterface.

    Raises VariantError (unknown variant, or not supported here), FormatError, CheckpointError.
    """
    spec = registry.parse(variant)
    where = torch.device(device)
    if dtype not in (torch.bfloat16, torch.float32):
        raise VariantError(f"dtype {dtype} is not supported; use bfloat16 or float32")
    checkpoint = _in_format(Path(path), spec)
    if checkpoint.model_type not in hf_blocks.FAMILIES:
        raise FormatError(f"{checkpoint.path}: model_type '{checkpoint.model_type}' cannot be served yet, "
                          f"only {', '.join(hf_blocks.FAMILIES)}")
    support = registry.supports(spec, where, checkpoint.shape)
    if not support.ok:
        nearest = f"; the nearest that runs: {support.nearest}" if support.nearest else ""
        raise VariantError(f"variant '{spec}' cannot run here: {support.reason}{nearest}")

    model = _empty_model(checkpoint, dtype, attn_implementation, where)
    _fill(model, checkpoint, dtype, where)
    resolved = _attach(model, checkpoint, spec, where)
    _check(model)
    return LoadedModel(model, checkpoint, checkpoint.path, spec, resolved, dtype, where)


def _in_format(path: Path, spec: VariantSpec) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    needed = registry.info(spec.base).weight_format
    if checkpoint.format == needed or spec.base == "bf16/reference":
        return checkpoint
    if reason := conversion(checkpoint.format, needed):
        raise FormatError(f"variant '{spec}' needs {needed} expert weights and {path} holds {checkpoint.format}: "
                          f"{reason}")
    converted = ensure_format(path, needed)
    log.info("variant '%s' needs %s weights: using %s, made from %s", spec, needed, converted, path)
    return open_checkpoint(converted)


def _config(checkpoint: Checkpoint) -> Any:
    """transformers' config, with layer kinds said as the checkpoint's tensors were matched."""
    left_out = ("quantization_config", "compression_config", "auto_map", "model_type")
    fields = {k: v for k, v in checkpoint.config.items() if k not in left_out}
    if checkpoint.architecture.attention == "dsa":
        fields.pop("layer_types", None)  # one value for all layers, renamed between transformers' releases
    if checkpoint.model_type in ("glm4_moe_lite", "glm_moe_dsa"):
        fields["mlp_layer_types"] = mlp_layer_types(fields, checkpoint.moe_layers)
    config = AutoConfig.for_model(checkpoint.model_type, **fields)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise FormatError(f"{checkpoint.path}: RoPE type '{kind}' makes a token's result depend on the sequences "
                          f"beside it and is not served; supported: {', '.join(_ROPE_TYPES)}")
    if getattr(config, "use_sliding_window", False):
        raise FormatError(f"{checkpoint.path}: use_sliding_window is not supported; set it to false (no released "
                          "Qwen3-MoE uses it)")
    return config


def _empty_model(
    checkpoint: Checkpoint, dtype: torch.dtype, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    """transformers' model on the meta device, with ParityMoE for its MoE blocks."""
    config = _config(checkpoint)

    def make() -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False)

    model = hf_blocks.build(checkpoint.model_type, make)
    for index, layer in enumerate(model.model.layers):
        if isinstance(layer.mlp, ParityMoE):
            layer.mlp.layer_index = index
    hf_blocks.use_invariant_silu(model, device)
    return model.eval().requires_grad_(False)


def _fill(model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Give the empty model its tensors, one at a time; names must match exactly in both directions."""
    wanted = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if not name.startswith("model.rotary_emb.")
    }
    names = set(checkpoint.tensor_names())
    tied = model.config.tie_word_embeddings and "lm_head.weight" not in names
    missing = sorted(wanted.keys() - names - ({"lm_head.weight"} if tied else set()))
    extra = sorted(names - wanted.keys())
    if missing or extra:
        what = f"lacks '{missing[0]}'" if missing else f"has the unknown tensor '{extra[0]}'"
        raise CheckpointError(f"{checkpoint.path} {what} ({len(missing)} missing, {len(extra)} unknown): "
                              "the files do not belong to this config.json")
    for name, empty in wanted.items():
        if name not in names:
            continue
        keep = torch.float32 if name.endswith(_FP32_NAMES) else dtype
        tensor = checkpoint.tensor(name, keep).to(device)
        if tensor.shape != empty.shape:
            raise CheckpointError(f"{checkpoint.path}: '{name}' is {tuple(tensor.shape)}, "
                                  f"config.json implies {tuple(empty.shape)}")
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    rotary = model.model.rotary_emb  # computed, not stored: made anew in FP32 off the meta device
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)


def _attach(
    model: PreTrainedModel, checkpoint: Checkpoint, spec: VariantSpec, device: torch.device
) -> dict[int, str]:
    """Build the variant's layer of every MoE block, one layer's experts in memory at a time."""
    make = registry.layer_class(spec)
    resolved = {}
    for index in checkpoint.moe_layers:
        block = model.model.layers[index].mlp
        record = checkpoint.experts(index).to(device)
        block.layer = make(record, checkpoint.routing, router_bias(block), spec)
        resolved[index] = block.layer.resolved()
    return resolved


def _check(model: PreTrainedModel) -> None:
    """Nothing left empty, every block attached, router and RoPE in FP32: a wrong dtype here is silent later."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in everything:
        if tensor.is_meta:
            raise CheckpointError(f"'{name}' was never filled")
        if (name.endswith(_FP32_NAMES) or "rotary_emb" in name) and tensor.dtype != torch.float32:
            raise CheckpointError(f"'{name}' is {tensor.dtype}; router and RoPE must stay float32")
    for index, block in enumerate(model.model.layers):
        if isinstance(block.mlp, ParityMoE) and block.mlp.layer is None:
            raise CheckpointError(f"MoE layer {index} got no expert weights")
