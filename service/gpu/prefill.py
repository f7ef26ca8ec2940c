"""Prefills of short prompts over padded sizes, captured as CUDA graphs: a forward's launches become one."""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.gpu import sampling
from service.gpu.forward import ChunkRows, Forward
from service.gpu.graphs import Captured, to_step
from service.gpu.kv import Rows

log = logging.getLogger("service.gpu")

SIZES = (256, 512, 1024, 2048)  # tokens; larger prefills keep the device busy for longer than the host launches them
TOKENS_A_PROMPT = 32  # a size takes so many tokens for every prompt: empty ones cost the attention kernel's grid


def prefill_sizes(most: int) -> list[int]:
    """The sizes that `max_batch_tokens` of `most` can fill."""
    return [size for size in SIZES if size <= most]


def prompts_in(size: int) -> int:
    """Prompts that a prefill of `size` tokens takes."""
    return max(1, size // TOKENS_A_PROMPT)


@dataclass(frozen=True)
class Inputs:
    """Views of one int64 buffer, so that a step is one copy: T tokens, S prompts.

    `tokens` [3, T] ids, positions and slots; `starts` [S + 1]; `spans` [4, S]: the sequence's tokens with this chunk,
    its row of the block table, the chunk's last row, and where its sampled token is kept (the pad row: nowhere).
    """

    buffer: Any
    tokens: Any
    starts: Any
    spans: Any

    @staticmethod
    def of(buffer: Any, size: int) -> Inputs:
        """Of a NumPy array or a tensor of `length(size)` numbers."""
        prompts = prompts_in(size)
        spans = buffer[3 * size + prompts + 1 :]
        return Inputs(buffer, buffer[: 3 * size].reshape(3, size), buffer[3 * size : 3 * size + prompts + 1],
                      spans.reshape(4, prompts))

    @staticmethod
    def length(size: int) -> int:
        """Numbers in the buffer."""
        return 3 * size + 5 * prompts_in(size) + 1


class PrefillSteps:
    """Prefills chunks of several sequences and samples greedily after each one's last row, all on the device.

    Padding rows write to the pad block; prompts that are not there have no rows. Neither changes anybody's result.
    Works without graphs as well (on a CPU), for tests.
    """

    def __init__(self, forward: Forward, rows: Rows, sizes: list[int], *, graphs: bool, pool: Any = None) -> None:
        self.forward, self.rows, self.sizes = forward, rows, sorted(sizes)
        self._captured: dict[int, Captured] = {}
        if graphs:
            self._capture(pool)

    def size_of(self, tokens: int, prompts: int) -> int | None:
        """The smallest size that holds them, None where none does."""
        at = bisect.bisect_left(self.sizes, tokens)
        return next((size for size in self.sizes[at:] if prompts <= prompts_in(size)), None)

    def padding(self, size: int) -> Inputs:
        """Inputs of `size` tokens that are nobody's."""
        inputs = Inputs.of(np.zeros(Inputs.length(size), dtype=np.int64), size)
        inputs.tokens[2] = self.forward.kv.pad_slot
        inputs.spans[1] = inputs.spans[3] = self.rows.pad
        return inputs

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(FP64 [4, S] as `sampling.greedy`, logits [S, vocab]) of each prompt's last row; valid until the next call.

        Never waits for the device.
        """
        size = inputs.tokens.shape[1]
        host = torch.from_numpy(inputs.buffer)
        captured = self._captured.get(size)
        if captured is None:
            return self._step(to_step(host, self.forward.weights.device), size)
        return captured.replay(host)

    def _step(self, buffer: Tensor, size: int) -> tuple[Tensor, Tensor]:
        inputs = Inputs.of(buffer, size)
        ids, positions, slots = inputs.tokens
        lengths, row, last, target = inputs.spans
        rows = ChunkRows(self.rows.table.index_select(0, row), inputs.starts.int(), lengths.int(), size)
        hidden = self.forward(ids, positions, slots, rows)
        logits = self.forward.weights.head(hidden.index_select(0, last))
        return sampling.greedy_kept(logits, target, self.rows.last_token), logits

    @torch.inference_mode()
    def _capture(self, pool: Any) -> None:
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            inputs = torch.from_numpy(self.padding(size).buffer).to(self.forward.weights.device)
            self._captured[size] = captured = Captured.of(partial(self._step, size=size), inputs, pool, warm_ups=1)
            pool = pool or captured.graph.pool()
        if self.sizes:
            log.info("captured prefill graphs of %d sizes up to %d tokens", len(self.sizes), self.sizes[-1])
