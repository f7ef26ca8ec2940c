"""Runs the GPU forward for the engine: packed chunks eagerly, decoding rows through CUDA graphs over padded sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_kernels.capture import RoutingTrace
from moe_kernels.errors import VariantError
from moe_kernels.registry import MoELayer, VariantSpec, parse
from service.config import EngineConfig
from service.engine.batch import padded_tokens
from service.engine.flight import Pending
from service.engine.routing import packed
from service.engine.sampler import Row
from service.engine.scheduler import Chunk
from service.engine.sequence import Sequence
from service.gpu import sampling
from service.gpu.forward import ChunkRows, Forward
from service.gpu.graphs import DecodeSteps, graph_sizes
from service.gpu.kv import GpuKV, Rows, to_device
from service.gpu.prefill import PrefillSteps, prefill_sizes
from service.gpu.weights import ModelWeights, from_transformers

ROW_MULTIPLE = 16  # packed rows: Triton compiles a kernel again for counts that 16 does not divide


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """One packed forward; chunk i owns rows from starts[i] on. `ids`, `positions`, `slots` int64 [T] with padding."""

    chunks: list[Chunk]
    starts: list[int]
    tokens: int
    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: ChunkRows


class GpuRunner:
    """The same methods as `service.engine.runner.ModelRunner`; also works on a CPU, for tests."""

    forward_name = "own"
    overlapped = True

    def __init__(self, loaded: Any, blocks: int, config: EngineConfig, max_model_len: int) -> None:
        self.weights: ModelWeights = getattr(loaded, "weights", None) or from_transformers(loaded.model)
        w = self.weights
        self.device, self.dtype, self.vocab = w.device, w.dtype, int(w.config.vocab_size)
        self.block = config.kv_block
        self.kv = GpuKV(len(w.layers), blocks, config.kv_block, w.kv_heads, w.head_dim, w.dtype, w.device)
        self.forward = Forward(w, self.kv, max_model_len)
        width = -(-max_model_len // config.kv_block)
        self.rows = Rows(config.max_seqs, width, self.kv.pad_block, w.device)
        self.routing = OwnRoutingTap(self.forward)
        self.variants = [_spec_of(w)]
        self._layers: list[list[MoELayer]] = [[layer.moe for layer in w.layers if layer.moe is not None]]
        self._sizes = list(config.graph_sizes or graph_sizes(config.max_seqs))
        self._wants_graph = config.cuda_graph
        self._prefill_sizes = config.prefill_sizes
        self._most = config.max_batch_tokens
        self._steps = [self._new_steps()]
        self._prefills = [self._new_prefills()]
        self.variant = 0
        self.attention_name = "paged_triton" if self.device.type == "cuda" else "paged_reference"
        self.kernels = {"ops": "triton" if self.device.type == "cuda" else "reference", **w.formats}

    # ---- variants ---------------------------------------------------------------------------------------------------

    def shares(self, spec: VariantSpec) -> bool:
        """Whether `add_variant` takes this variant."""
        try:
            for layer in self._layers[0]:
                layer.sibling(spec)
        except VariantError:
            return False
        return True

    def add_variant(self, name: str) -> int:
        """Another variant over the same weights, for comparing within one process; returns its number for `use`.

        Raises VariantError where the variant's prepared weights would be others.
        """
        spec = parse(name)
        layers = [layer.sibling(spec) for layer in self._layers[0]]
        self._layers.append(layers)
        self.variants.append(spec)
        self._switch(len(self.variants) - 1)
        self._steps.append(self._new_steps())
        self._prefills.append(self._new_prefills())
        self._switch(self.variant)
        return len(self.variants) - 1

    def use(self, variant: int) -> None:
        """Run this variant from the next step on; call it on the engine thread, between two steps."""
        self.variant = variant
        self._switch(variant)

    def _switch(self, variant: int) -> None:
        layers = iter(self._layers[variant])
        for layer in self.weights.layers:
            if layer.moe is not None:
                layer.moe = next(layers)

    def _new_steps(self) -> DecodeSteps:
        return DecodeSteps(self.forward, self.rows, self._sizes, graphs=self._wants_graph)

    def _new_prefills(self) -> PrefillSteps:
        """Beside the newest decoding steps, whose graphs' memory they share."""
        graphs, sizes = self._steps[-1].graphs, self._prefill_sizes
        if sizes is None:
            sizes = tuple(prefill_sizes(self._most)) if graphs else ()
        return PrefillSteps(self.forward, self.rows, list(sizes), graphs=graphs, pool=self._steps[-1].pool)

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """Token counts that short prefills are padded to."""
        return tuple(self._prefills[self.variant].sizes)

    @property
    def cuda_graph(self) -> bool:
        """Whether decoding runs through CUDA graphs."""
        return self._steps[0].graphs

    # ---- a step -----------------------------------------------------------------------------------------------------

    def split(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Prefill, and whatever needs its hidden states or routing, is packed; single tokens are decoded."""
        together: list[Chunk] = []
        decoding: list[Chunk] = []
        for chunk in chunks:
            sequence = chunk.sequence
            quick = (chunk.count == 1 and sequence.computed >= sequence.prompt_length
                     and not sequence.params.return_routing and not sequence.wants_prompt_rows)
            (decoding if quick else together).append(chunk)
        self.rows.update([chunk.sequence for chunk in chunks])
        return together, decoding

    def decode(self, chunks: list[Chunk], rows: list[Row]) -> Pending:
        """One token of every sequence, whose `computed` already counts it; the first `len(rows)` are due for the next.
        """
        block, row = self.block, self.rows
        known, positions, slots, where = [], [], [], []
        for chunk in chunks:
            sequence = chunk.sequence
            at = sequence.computed - 1
            known.append(sequence.ids[at] if at < len(sequence.ids) else -1)
            positions.append(at)
            slots.append(sequence.blocks[at // block] * block + at % block)
            where.append(row[sequence])
        out, logits = self._steps[self.variant](np.asarray([known, positions, slots, where], dtype=np.int64))
        return self._pending(out, logits, rows, [chunk.sequence for chunk in chunks[: len(rows)]])

    def padded_prefill(self, chunks: list[Chunk]) -> bool:
        """Whether `prefill` takes these chunks: a size holds them, and nothing but their last rows is wanted."""
        steps = self._prefills[self.variant]
        return bool(steps.sizes) and steps.size_of(sum(c.count for c in chunks), len(chunks)) is not None and all(
            c.sequence.computed + c.count <= len(c.sequence.ids) and not c.sequence.params.return_routing
            and not c.sequence.wants_prompt_rows for c in chunks)

    def prefill(self, chunks: list[Chunk], rows: list[Row]) -> Pending:
        """Chunks of prompts, their blocks on the device already; the first `len(rows)` of them are due for a token."""
        steps, block, due = self._prefills[self.variant], self.block, len(rows)
        size = steps.size_of(sum(chunk.count for chunk in chunks), len(chunks))
        assert size is not None  # `padded_prefill` said so
        inputs = steps.padding(size)
        tokens, spans, at = inputs.tokens, inputs.spans, 0
        for i, chunk in enumerate(chunks):
            sequence, count, first = chunk.sequence, chunk.count, chunk.sequence.computed
            where = np.arange(first, first + count)
            tokens[0, at : at + count] = sequence.ids[first : first + count]
            tokens[1, at : at + count] = where
            tokens[2, at : at + count] = np.asarray(sequence.blocks)[where // block] * block + where % block
            inputs.starts[i] = at
            at += count
            row = self.rows[sequence]
            spans[:, i] = first + count, row, at - 1, row if i < due else self.rows.pad
        inputs.starts[len(chunks) :] = at
        out, logits = steps(inputs)
        return self._pending(out, logits, rows, [chunk.sequence for chunk in chunks[:due]])

    def sample(self, logits: Tensor, rows: list[Row], due: list[Sequence]) -> Pending:
        """Tokens of packed rows; they are also kept on the device for the next step."""
        where = to_device(np.asarray([self.rows[s] for s in due], dtype=np.int64), self.device)
        out = sampling.greedy_kept(logits.to(self.dtype), where, self.rows.last_token)  # exact: `logits` widened them
        return self._pending(out, logits, rows, due)

    def _pending(self, out: Tensor, logits: Tensor, rows: list[Row], due: list[Sequence]) -> Pending:
        """What the first `len(rows)` rows sampled: greedily already, or by their own rules, kept for the next step."""
        out, logits = out[:, : len(rows)], logits[: len(rows)]
        extra = sampling.special(logits, rows)
        if extra is not None:
            out = extra.out
            self._remember(due, out[0])
        return sampling.DevicePending(out, rows, extra)

    def _remember(self, sequences: list[Sequence], chosen: Tensor) -> None:
        where = to_device(np.asarray([self.rows[s] for s in sequences], dtype=np.int64), self.device)
        self.rows.last_token.index_copy_(0, where, chosen.long())

    def pack(self, chunks: list[Chunk]) -> GpuBatch:
        """Flat tensors for a forward over chunks."""
        self.rows.update([chunk.sequence for chunk in chunks])
        total = sum(chunk.count for chunk in chunks)
        padded = -(-padded_tokens(total) // ROW_MULTIPLE) * ROW_MULTIPLE
        flat = np.zeros((3, padded), dtype=np.int64)
        flat[2] = self.kv.pad_slot
        starts, lengths, unknown, at = [], [], [], 0
        for chunk in chunks:
            sequence, count, first = chunk.sequence, chunk.count, chunk.sequence.computed
            where = np.arange(first, first + count)
            ids = sequence.ids[first : first + count]
            flat[0, at : at + len(ids)] = ids
            if len(ids) < count:  # its last token is known to the device only
                unknown.append((at + count - 1, self.rows[sequence]))
            flat[1, at : at + count] = where
            blocks = np.asarray(sequence.blocks)[where // self.block]
            flat[2, at : at + count] = blocks * self.block + where % self.block
            starts.append(at)
            lengths.append(first + count)
            at += count
        inputs = to_device(flat, self.device)
        if unknown:
            pairs = to_device(np.asarray(unknown, dtype=np.int64).T.copy(), self.device)
            inputs[0].index_copy_(0, pairs[0], self.rows.last_token[pairs[1]])
        numbers = [[*starts, total], [*lengths, 0], [*(self.rows[chunk.sequence] for chunk in chunks), 0]]
        spans = to_device(np.asarray(numbers, dtype=np.int64), self.device)
        narrow = -(-max(lengths) // self.block)
        table = self.rows.table.index_select(0, spans[2, :-1])[:, :narrow].contiguous()
        rows = ChunkRows(table, spans[0].int(), spans[1, :-1].int(), max(chunk.count for chunk in chunks))
        return GpuBatch(chunks, starts, total, inputs[0], inputs[1], inputs[2], rows)

    def hidden(self, batch: GpuBatch) -> Tensor:
        """Final hidden states [T, hidden], padding included; writes the KV pool."""
        return self.forward(batch.ids, batch.positions, batch.slots, batch.rows)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """FP32 logits [R, vocab] of the chosen rows (all when None)."""
        if rows is None:
            return self.forward.logits(hidden)
        return self.forward.logits(hidden.index_select(0, to_device(rows.numpy(), self.device)))

    def first_bad_layer(self, sequence: Sequence, step: int) -> str:
        """Recompute a sequence's tokens, `step` at a time, and name the first part whose output is not finite."""
        found: list[str] = []
        done, sequence.computed = sequence.computed, 0
        try:
            while sequence.computed < min(done, len(sequence.ids)) and not found:
                count = min(step, min(done, len(sequence.ids)) - sequence.computed)
                batch = self.pack([Chunk(sequence, count)])

                def watch(name: str, output: Tensor, count: int = count) -> None:
                    rows = output[..., :count, :]
                    if not found and not torch.isfinite(rows).all():
                        found.append(name)

                self.forward(batch.ids, batch.positions, batch.slots, batch.rows, watch)
                sequence.computed += count
        finally:
            sequence.computed = done
        return found[0] if found else "lm_head"


class OwnRoutingTap:
    """Reads the experts that the GPU forward chose, when a request asks for them."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._moe = [layer for layer in forward.weights.layers if layer.moe is not None]
        self.layers = tuple(layer.index for layer in self._moe)

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Tensor]]:
        """As `service.engine.routing.RoutingTap.capture`."""
        blocks = {layer.index: SimpleNamespace(layer=layer.moe) for layer in self._moe}
        top_k = self._moe[0].moe.config.top_k if self._moe and self._moe[0].moe else 0
        trace = RoutingTrace(self.layers, top_k, blocks)
        self._forward.observe = trace._observe
        try:
            yield lambda: packed(trace.ids(), trace.gaps())
        finally:
            self._forward.observe = None


def _spec_of(weights: ModelWeights) -> VariantSpec:
    return next((layer.moe.spec for layer in weights.layers if layer.moe is not None), parse("bf16/reference"))


