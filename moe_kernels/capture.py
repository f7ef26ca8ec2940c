"""Records what the MoE blocks of a loaded model see and choose, while a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moe_kernels.records import Routing
from moe_kernels.routing import near_tie_gap, selection_scores

# Called after every MoE block with (layer index, hidden [T, H], router logits FP32 [T, E], routing).
Observer = Callable[[int, Tensor, Tensor, Routing], None]


class Observable(Protocol):
    """What this module needs of a ParityMoE block."""

    observers: list[Observer]
    layer_index: int
    top_k: int


def moe_blocks(model: nn.Module) -> dict[int, Observable]:
    """The model's ParityMoE blocks by layer index, in forward order."""
    found = [cast(Observable, m) for m in model.modules() if hasattr(m, "observers") and hasattr(m, "layer_index")]
    blocks = {block.layer_index: block for block in found}
    if not blocks:
        raise ValueError("the model has no ParityMoE block: load it with moe_kernels.hf.load_model")
    return dict(sorted(blocks.items()))


@contextmanager
def _observed(model: nn.Module, observer: Observer) -> Iterator[None]:
    blocks = moe_blocks(model).values()
    for block in blocks:
        block.observers.append(observer)
    try:
        yield
    finally:
        for block in blocks:
            block.observers.remove(observer)


class RoutingTrace:
    """Expert ids of every token forwarded while the trace was open."""

    def __init__(self, layers: tuple[int, ...], top_k: int, blocks: dict[int, Any] | None = None) -> None:
        self.layers = layers
        self.top_k = top_k
        self._ids: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._gaps: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._blocks = blocks or {}

    def ids(self) -> Tensor:
        """int16 [T, n_moe_layers, top_k] on the CPU, in forward order; ids in the router's order."""
        per_layer = [torch.cat(parts) for parts in self._ids.values() if parts]
        if not per_layer:
            return torch.empty(0, len(self.layers), self.top_k, dtype=torch.int16)
        return torch.stack(per_layer, dim=1)

    def gaps(self) -> Tensor:
        """FP16 [T, n_moe_layers]: last chosen minus first rejected selection key, as the FP32 bias has it.

        How near each choice was to another one; rounding that moves a key by less cannot have changed it.
        """
        per_layer = [torch.cat(parts) for parts in self._gaps.values() if parts]
        if not per_layer:
            return torch.empty(0, len(self.layers), dtype=torch.float16)
        return torch.stack(per_layer, dim=1)

    def clear(self) -> None:
        """Forget what was recorded so far."""
        for parts in [*self._ids.values(), *self._gaps.values()]:
            parts.clear()

    def _observe(self, layer: int, hidden: Tensor, logits: Tensor, routing: Routing) -> None:
        self._ids[layer].append(routing.ids.to("cpu", torch.int16))
        block = self._blocks.get(layer)
        if block is not None:
            _, keys = selection_scores(logits, block.layer.bias, block.layer.config)
            gap = near_tie_gap(keys, self.top_k, torch.float32).gap
            self._gaps[layer].append(gap.clamp(max=torch.finfo(torch.float16).max).to("cpu", torch.float16))


@contextmanager
def capture_routing(model: nn.Module) -> Iterator[RoutingTrace]:
    """Record the chosen experts of every forward inside the `with`; costs a list append per layer and step."""
    blocks = moe_blocks(model)
    trace = RoutingTrace(tuple(blocks), next(iter(blocks.values())).top_k, dict(blocks))
    with _observed(model, trace._observe):
        yield trace


@contextmanager
def capture_moe_inputs(model: nn.Module, max_tokens: int | None = None) -> Iterator[dict[int, list[Tensor]]]:
    """Record each MoE block's inputs: {layer: [hidden [T, H], router logits FP32 [T, E]]}.

    The dict is filled when the `with` ends. `max_tokens` keeps only the first tokens of each layer.
    """
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in moe_blocks(model)}
    left = dict.fromkeys(seen, max_tokens)

    def observe(layer: int, hidden: Tensor, logits: Tensor, routing: Routing) -> None:
        room = left[layer]
        if room is not None:
            hidden, logits = hidden[:room], logits[:room]
            left[layer] = room - hidden.shape[0]
        if hidden.shape[0]:
            seen[layer].append((hidden.clone(), logits.clone()))

    inputs: dict[int, list[Tensor]] = {}
    with _observed(model, observe):
        yield inputs
    for layer, parts in seen.items():
        if parts:
            inputs[layer] = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
