"""Reads the experts a step chose, when a request asks for them; costs nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from service.engine.batch import Batch
from service.engine.types import RoutingResult


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
        """Yields a function that, after the forward, gives int16 [T, MoE layers, top_k + 1].

        The last column holds the bits of the FP16 selection gap (NaN for stock blocks, which do not tell).
        """
        if self._ours:
            from moe_kernels.hf import capture_routing

            with capture_routing(self._model) as trace:
                yield lambda: packed(trace.ids(), trace.gaps())
            return
        seen: dict[int, Tensor] = {}

        def watch(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen[layer] = output[2].to(torch.int16)
            return hook

        handles = [gate.register_forward_hook(watch(layer)) for layer, gate in self._gates.items()]
        try:
            yield lambda: packed(torch.stack([seen[layer] for layer in self.layers], dim=1), None)
        finally:
            for handle in handles:
                handle.remove()


def packed(ids: Tensor, gaps: Tensor | None) -> Tensor:
    if gaps is None:
        gaps = torch.full(ids.shape[:2], torch.nan, dtype=torch.float16, device=ids.device)
    return torch.cat([ids, gaps.view(torch.int16).unsqueeze(-1)], dim=-1)


def unpacked(rows: Tensor, layers: tuple[int, ...]) -> RoutingResult:
    """Inverse of the packing above."""
    return RoutingResult(rows[..., :-1], layers, rows[..., -1].contiguous().view(torch.float16))


def keep_routing(batch: Batch, rows: Tensor) -> None:
    """File a step's captured rows [T, MoE layers, top_k + 1] under the sequences that asked for them, by position."""
    for chunk, start in zip(batch.chunks, batch.starts, strict=True):
        sequence = chunk.sequence
        if not sequence.params.return_routing:
            continue
        if sequence.routing is None:
            length = sequence.prompt_length + max(sequence.params.max_tokens, 1)
            sequence.routing = torch.zeros((length, *rows.shape[1:]), dtype=torch.int16)
        part = slice(sequence.computed, sequence.computed + chunk.count)
        sequence.routing[part] = rows[start : start + chunk.count].cpu()
