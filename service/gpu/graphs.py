"""Decoding steps over padded batch sizes, captured as CUDA graphs where device and kernels allow."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.gpu import sampling
from service.gpu.forward import DecodeRows, Forward
from service.gpu.kv import Rows

log = logging.getLogger("service.gpu")

CAPTURABLE = ("fp8/triton", "nvfp4/triton", "fp8/trtllm", "nvfp4/trtllm")  # no host synchronisation in their layers


def graph_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 128 and of 32 above, the last one at least `most`."""
    sizes = [n for n in (1, 2, 4, *range(8, 129, 8), *range(160, 4097, 32)) if n < most]
    return [*sizes, most]


@dataclass
class Captured:
    """A graph and the tensors it reads and writes."""

    inputs: Tensor
    out: Tensor
    logits: Tensor
    graph: Any

    @classmethod
    def of(cls, step: Callable[[Tensor], tuple[Tensor, Tensor]], inputs: Tensor, pool: Any, warm_ups: int) -> Captured:
        """Run `step` on device tensor `inputs` a few times, which compiles its kernels, then capture it into `pool`."""
        stream = torch.cuda.Stream(inputs.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(inputs.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out, logits = step(inputs)
        return cls(inputs, out, logits, graph)

    def replay(self, host: Tensor) -> tuple[Tensor, Tensor]:
        """The step's results for other inputs, valid until the next call; never waits for the device."""
        self.inputs.copy_(host.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.out, self.logits


def to_step(host: Tensor, device: torch.device) -> Tensor:
    """Inputs of a step that is not captured, on its device."""
    return host.pin_memory().to("cuda", non_blocking=True) if device.type == "cuda" else host


class DecodeSteps:
    """Decodes up to max(sizes) rows: pads to the next size, forwards, samples greedily, all on the device.

    A row's inputs are token id (-1: the one the device sampled last for this row), position, slot and block-table row.
    Padding rows use the pad row: no length, and the pad block's slots, so that they touch nobody.
    """

    def __init__(self, forward: Forward, rows: Rows, sizes: list[int], *, graphs: bool) -> None:
        self.forward, self.rows, self.sizes = forward, rows, sorted(sizes)
        self._captured: dict[int, Captured] = {}
        self.pool: Any = None  # of the graphs' memory: one for all, since they never run at the same time
        kernels = {str(layer.moe.spec.base) for layer in forward.weights.layers if layer.moe is not None}
        self.graphs = graphs and forward.weights.device.type == "cuda" and kernels <= set(CAPTURABLE)
        if self.graphs:
            self._capture()

    def __call__(self, inputs: np.ndarray) -> tuple[Tensor, Tensor]:
        """(FP64 [4, n] as `sampling.greedy`, logits [n, vocab]) of int64 inputs [4, n]; valid until the next call.

        Never waits for the device.
        """
        count = inputs.shape[1]
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        padded = self.padding(size)
        padded[:, :count] = inputs
        host = torch.from_numpy(padded)
        captured = self._captured.get(size)
        if captured is None:
            out, logits = self._step(to_step(host, self.forward.weights.device))
        else:
            out, logits = captured.replay(host)
        return out[:, :count], logits[:count]

    def padding(self, size: int) -> np.ndarray:
        """Inputs of `size` rows that are nobody's."""
        inputs = np.zeros((4, size), dtype=np.int64)
        inputs[2], inputs[3] = self.forward.kv.pad_slot, self.rows.pad
        return inputs

    def _step(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        given, positions, slots, row = inputs
        last = self.rows.last_token
        if inputs.is_cuda:
            from service.gpu import triton_steps

            ids, lengths = triton_steps.step_inputs(inputs, last, self.rows.pad)
        else:
            ids = torch.where(given < 0, last[row], given)
            lengths = torch.where(row == self.rows.pad, 0, positions + 1).int()
        table = self.rows.table.index_select(0, row)
        hidden = self.forward(ids, positions, slots, DecodeRows(table, lengths))
        logits = self.forward.weights.head(hidden)
        return sampling.greedy_kept(logits, row, last), logits

    @torch.inference_mode()
    def _capture(self) -> None:
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            inputs = torch.from_numpy(self.padding(size)).to(self.forward.weights.device)
            self._captured[size] = captured = Captured.of(self._step, inputs, self.pool, warm_ups=2)
            self.pool = self.pool or captured.graph.pool()
        log.info("captured decode graphs of %d sizes up to %d rows", len(self.sizes), self.sizes[-1])
