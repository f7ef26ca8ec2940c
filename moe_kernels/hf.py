"""Puts a kernel variant into transformers' own Glm4MoeForCausalLM and loads a checkpoint into it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMLP, Glm4MoeTopkRouter
from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

from moe_kernels import registry
from moe_kernels.batch_invariant import linear_rows, pad_rows, silu
from moe_kernels.cache import ensure_format
from moe_kernels.capture import Observer, RoutingTrace, capture_moe_inputs, capture_routing
from moe_kernels.errors import CheckpointError, FormatError, VariantError
from moe_kernels.formats import Checkpoint, open_checkpoint
from moe_kernels.records import WeightFormat
from moe_kernels.registry import MoELayer, VariantSpec

__all__ = [
    "LoadedModel", "ParityMoE", "RoutingTrace", "capture_moe_inputs", "capture_routing", "load_model",
]

log = logging.getLogger(__name__)

MODEL_TYPE = "glm4_moe"
_MOE_CLASS = "Glm4MoeMoE"
_FP32_NAMES = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
_patching = threading.Lock()  # transformers' patch registry is global


class ParityRouter(Glm4MoeTopkRouter):
    """The stock router's parameters; `forward` gives only the logits, since choosing is the variant's part.

    A subclass, so that `output_router_logits=True` still finds it.
    """

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        """FP32 logits [T, E] of hidden [T, H]; on a CPU a row does not depend on the others."""
        return (linear_rows(hidden.float(), self.weight),)


class ParityMoE(nn.Module):
    """Takes the place of Glm4MoeMoE: FP32 gate, one variant's layer for the routed experts, shared experts."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate = ParityRouter(config)
        self.shared_experts = Glm4MoeMLP(config, config.moe_intermediate_size * config.n_shared_experts)
        self.top_k: int = config.num_experts_per_tok
        self.layer: MoELayer | None = None  # set by load_model
        self.layer_index = -1
        self.observers: list[Observer] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] in and out, as the block it replaces."""
        assert self.layer is not None, "load_model has not attached a variant"
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        (logits,) = self.gate(hidden)
        routed, routing = self.layer.forward(hidden, logits)
        for observe in self.observers:
            observe(self.layer_index, hidden, logits, routing)
        return self.add_shared(routed, hidden).view_as(hidden_states)

    def add_shared(self, routed: Tensor, hidden: Tensor) -> Tensor:
        """Routed + shared experts [T, H]; the shared experts are not scaled by routed_scaling_factor."""
        return routed + self.shared_experts(pad_rows(hidden))[: hidden.shape[0]]


class _Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what it was made of.

    `model` is transformers' Glm4MoeForCausalLM in eval mode; `path` the checkpoint really loaded (the
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
    """Load a GLM-4-MoE checkpoint with one kernel variant in all of its MoE layers.

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
    if checkpoint.model_type != MODEL_TYPE:
        raise FormatError(f"{checkpoint.path}: model_type '{checkpoint.model_type}' cannot be served yet, "
                          f"only '{MODEL_TYPE}' (GLM-4.5, 4.5-Air, 4.6, 4.7)")
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
    # Block FP8 is how GLM-5.3 (and the embedded model) ships: its exact dequantisation is the BF16 original.
    if checkpoint.format != "bf16" and (checkpoint.format, needed) != ("fp8", "nvfp4"):
        raise FormatError(f"variant '{spec}' needs {needed} expert weights and {path} holds {checkpoint.format}; "
                          f"give a {needed}, block FP8 or BF16 checkpoint, or use '{checkpoint.format}/emulated'")
    converted = ensure_format(path, needed)
    log.info("variant '%s' needs %s weights: using %s, made from %s", spec, needed, converted, path)
    return open_checkpoint(converted)


@contextmanager
def _replaced() -> Iterator[None]:
    """Glm4MoeMoE is ParityMoE inside; restored at the end, also after an error."""
    original = getattr(modeling_glm4_moe, _MOE_CLASS)
    with _patching:
        setattr(modeling_glm4_moe, _MOE_CLASS, ParityMoE)
        try:
            yield
        finally:
            setattr(modeling_glm4_moe, _MOE_CLASS, original)


@contextmanager
def _registered() -> Iterator[None]:
    """ParityMoE is registered with transformers inside, whose from_config then builds it for Glm4MoeMoE."""
    original = getattr(modeling_glm4_moe, _MOE_CLASS)
    with _patching:
        register_patch_mapping({_MOE_CLASS: ParityMoE}, overwrite=True)
        try:
            yield
        finally:
            unregister_patch_mapping([_MOE_CLASS])
            setattr(modeling_glm4_moe, _MOE_CLASS, original)  # transformers does not restore it after an error


def _empty_model(
    checkpoint: Checkpoint, dtype: torch.dtype, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    """transformers' model on the meta device, with ParityMoE for its MoE blocks."""
    left_out = ("quantization_config", "compression_config", "auto_map", "model_type")
    fields = {k: v for k, v in checkpoint.config.items() if k not in left_out}
    config = AutoConfig.for_model(checkpoint.model_type, **fields)

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False)

    try:
        with _registered():
            model = build()
    except ImportError:
        # transformers 5.17 imports every optional module it knows (torchvision, ...) in search of the class
        with _replaced():
            model = build()
    for index, block in enumerate(model.model.layers):
        if isinstance(block.mlp, ParityMoE):
            block.mlp.layer_index = index
        mlp = block.mlp.shared_experts if isinstance(block.mlp, ParityMoE) else block.mlp
        if device.type == "cpu" and config.hidden_act == "silu":
            mlp.act_fn = _Silu()  # stock nn.SiLU depends on the batch, see batch_invariant.py
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
        block.layer = make(record, checkpoint.routing, block.gate.e_score_correction_bias, spec)
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
