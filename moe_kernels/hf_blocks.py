"""The MoE block that takes the place of transformers' own in each supported model type."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

from moe_kernels.batch_invariant import linear_rows, pad_rows, silu
from moe_kernels.capture import Observer
from moe_kernels.registry import MoELayer

_patching = threading.Lock()  # transformers' patch registry is global


@dataclass(frozen=True)
class Family:
    """Class names in transformers' modelling file of a model type; `mlp` None where there are no shared experts."""

    model_type: str
    block: str
    router: str
    mlp: str | None

    @property
    def module(self) -> Any:
        """transformers.models.X.modeling_X."""
        return importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")


# What else differs between them (scoring, groups, scaling, bias, layers) is read from the config: see
# moe_kernels.formats.architectures.
FAMILIES = {
    f.model_type: f
    for f in (
        Family("glm4_moe", "Glm4MoeMoE", "Glm4MoeTopkRouter", "Glm4MoeMLP"),
        Family("glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteTopkRouter", "Glm4MoeLiteMLP"),
        Family("glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaTopkRouter", "GlmMoeDsaMLP"),
        Family("deepseek_v3", "DeepseekV3MoE", "DeepseekV3TopkRouter", "DeepseekV3MLP"),
        Family("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", None),
    )
}


class _LogitsOnly:
    """Mixed into a stock router: `forward` gives only the logits, since choosing is the variant's part.

    The mixture is a subclass of the stock router, so that `output_router_logits=True` still finds it.
    """

    weight: Tensor

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        """FP32 logits [T, E] of hidden [T, H]; on a CPU a row does not depend on the others."""
        return (linear_rows(hidden.float(), self.weight),)


class ParityMoE(nn.Module):
    """Takes the place of a stock MoE block: FP32 gate, one variant's layer for the routed experts, shared experts.

    `block_of` gives the subclass for a model type.
    """

    family: ClassVar[Family]
    router: ClassVar[type[nn.Module]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = self.router(config)
        self.shared_experts: nn.Module | None = None
        if self.family.mlp is not None and config.n_shared_experts:
            mlp = getattr(self.family.module, self.family.mlp)
            self.shared_experts = mlp(config, config.moe_intermediate_size * config.n_shared_experts)
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
        if self.shared_experts is None:
            return routed
        return routed + self.shared_experts(pad_rows(hidden))[: hidden.shape[0]]


class Silu(nn.Module):
    """SiLU whose result for a row does not depend on the batch (stock nn.SiLU's does, on a CPU)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return silu(x)


@cache
def block_of(model_type: str) -> type[ParityMoE]:
    """The ParityMoE of a model type of FAMILIES."""
    family = FAMILIES[model_type]
    router = type("ParityRouter", (_LogitsOnly, getattr(family.module, family.router)), {})
    return type("ParityMoE", (ParityMoE,), {"family": family, "router": router})


def router_bias(block: ParityMoE) -> Tensor | None:
    """FP32 [E] added to the scores for the choice only; None for routers without one."""
    return getattr(block.gate, "e_score_correction_bias", None)


def build(model_type: str, make: Callable[[], Any]) -> Any:
    """The result of `make()`, a model of `model_type` built by transformers with ParityMoE for its MoE blocks."""
    try:
        with _registered(model_type):
            return make()
    except ImportError:
        # transformers 5.17 imports every optional module it knows (torchvision, ...) in search of the class
        with _replaced(model_type):
            return make()


@contextmanager
def _replaced(model_type: str) -> Iterator[None]:
    """The stock block's name means ParityMoE inside; restored at the end, also after an error."""
    family = FAMILIES[model_type]
    original = getattr(family.module, family.block)
    with _patching:
        setattr(family.module, family.block, block_of(model_type))
        try:
            yield
        finally:
            setattr(family.module, family.block, original)


@contextmanager
def _registered(model_type: str) -> Iterator[None]:
    """ParityMoE is registered with transformers inside, whose from_config then builds it for the stock block."""
    family = FAMILIES[model_type]
    original = getattr(family.module, family.block)
    with _patching:
        register_patch_mapping({family.block: block_of(model_type)}, overwrite=True)
        try:
            yield
        finally:
            unregister_patch_mapping([family.block])
            setattr(family.module, family.block, original)  # transformers does not restore it after an error


def use_invariant_silu(model: Any, device: torch.device) -> None:
    """On a CPU, dense MLPs and shared experts get a SiLU whose rows do not depend on the batch."""
    if device.type != "cpu" or model.config.hidden_act != "silu":
        return
    for layer in model.model.layers:
        mlp = layer.mlp.shared_experts if isinstance(layer.mlp, ParityMoE) else layer.mlp
        if mlp is not None:
            mlp.act_fn = Silu()
