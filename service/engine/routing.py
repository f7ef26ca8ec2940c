"""Reads the experts a step chose, when a request asks for them; costs nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RoutingTap:
    """Captures chosen expert ids during a forward, from our own MoE blocks or from stock transformers' routers.

    Ours are read through `moe_kernels.hf.capture_routing`, since a kernel may route inside itself; stock blocks by a
    hook on their router, which returns (logits, weights, ids).
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._gates = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers)
                       if isinstance(getattr(layer.mlp, "gate", None), nn.Module)}
        self.layers = tuple(self._gates)
        self._ours = any(type(layer.mlp).__name__ == "ParityMoE" for layer in model.model.layers)

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Tensor]]:
        """Yields a function that, after the forward, gives int16 [T, MoE layers, top_k]."""
        if self._ours:
            from moe_kernels.hf import capture_routing

            with capture_routing(self._model) as trace:
                yield trace.ids
            return
        seen: dict[int, Tensor] = {}

        def watch(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen[layer] = output[2].to(torch.int16)
            return hook

        handles = [gate.register_forward_hook(watch(layer)) for layer, gate in self._gates.items()]
        try:
            yield lambda: torch.stack([seen[layer] for layer in self.layers], dim=1)
        finally:
            for handle in handles:
                handle.remove()
