"""Runs transformers' own model on packed batches and turns chosen rows into logits."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_kernels import native
from service import attention, native_attention
from service.config import EngineConfig
from service.engine.batch import Batch, pack
from service.engine.flight import Pending, Ready
from service.engine.forward import PackedForward
from service.engine.kinds import attention_kind
from service.engine.kv_cache import PagedKV, PagedLatent
from service.engine.native_forward import NativeForward, fitting
from service.engine.routing import RoutingTap
from service.engine.sampler import Row, sample
from service.engine.scheduler import Chunk
from service.engine.sequence import Sequence

log = logging.getLogger("service.engine")

DEFAULT_BLOCKS = 1024
PACKABLE = ("glm4_moe",)  # model types whose layers `PackedForward` knows
ROW_MULTIPLE = 8  # rows given to the output head: few shapes to compile, and FP32 rows are bit-equal from 8 on


class Loaded(Protocol):
    """What the engine needs of `moe_kernels.hf.LoadedModel`."""

    @property
    def model(self) -> Any:
        """transformers' causal language model."""


def own_forward(loaded: Loaded, config: EngineConfig) -> bool:
    """Whether the forward of `service.gpu` runs the model: asked for, or on a GPU where it knows the model type."""
    if config.forward == "auto":
        from service.gpu import MODEL_TYPES

        return (getattr(loaded, "weights", None) is not None
                or (next(loaded.model.parameters()).device.type == "cuda"
                    and loaded.model.config.model_type in MODEL_TYPES))
    return config.forward == "own"


def make_runner(loaded: Loaded, blocks: int, config: EngineConfig, max_model_len: int) -> Any:
    """The runner for this model and device; both kinds have the same methods."""
    if own_forward(loaded, config):
        from service.gpu.runner import GpuRunner

        return GpuRunner(loaded, blocks, config, max_model_len)
    return ModelRunner(loaded, blocks, config.kv_block)


def default_blocks(loaded: Loaded, config: EngineConfig, positions: int) -> int:
    """KV blocks where none are asked for: room for 1024 blocks and one whole sequence; on a GPU what memory holds."""
    if own_forward(loaded, config):
        from service.gpu.memory import blocks_that_fit

        fit = blocks_that_fit(loaded, config, positions)
        if fit is not None:
            return fit
    return max(DEFAULT_BLOCKS, -(-config.max_model_len // config.kv_block) if config.max_model_len else 0)


class ModelRunner:
    """The model, and the paged attention that fits it."""

    overlapped = False  # every token is read in the step that computes it
    cuda_graph = False
    forward_name = "transformers"
    kernels: Mapping[str, str] = {}
    padded_sizes: tuple[int, ...] = ()  # that `prefill` pads to

    def __init__(self, loaded: Loaded, blocks: int, block: int) -> None:
        model = loaded.model
        kind = attention_kind(model, blocks, block)
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype, self.kv = kind.dtype, kind.kv
        self.kind = kind
        self.vocab = model.config.vocab_size
        self.attention_name = kind.name
        if self.device.type == "cpu":
            self.kernels = {"cpu": "compiled" if native.library() else "torch"}
        self.block = block
        self.blocks = blocks
        self.routing = RoutingTap(model)
        # transformers 5.24 renamed `past_key_values` to `cache` everywhere.
        names = inspect.signature(inspect.unwrap(type(model.model.layers[0]).forward)).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.packed: PackedForward | None = None
        self.packed = self._try_packed()

    def split(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Chunks to pack into one forward, and chunks for `decode`: none here."""
        return chunks, []

    def padded_prefill(self, chunks: list[Chunk]) -> bool:
        """Whether `prefill` takes these chunks: never here."""
        return False

    def prefill(self, chunks: list[Chunk], rows: list[Row]) -> Pending:
        """Never called, since `padded_prefill` refuses."""
        raise NotImplementedError("this runner prefills packed")

    def decode(self, chunks: list[Chunk], rows: list[Row]) -> Pending:
        """Never called, since `split` gives it nothing."""
        raise NotImplementedError("this runner decodes packed")

    def sample(self, logits: Tensor, rows: list[Row], due: list[Sequence]) -> Pending:
        """Tokens of the sequences `due`, one row of logits [R, vocab] each."""
        return Ready(sample(logits, rows))

    def pack(self, chunks: list[Chunk]) -> Batch:
        """Flat tensors for a step."""
        return pack(chunks, self.block, self.kind.plan, self.device)

    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states [T, hidden] of all packed rows, padding included; writes the KV pool."""
        if self.packed is None:
            return self.stock_hidden(batch)
        self.kv.slots = batch.slots
        return self.packed(batch.ids, batch.positions, attention.PagedContext(self.kv, batch.attention))

    def stock_hidden(self, batch: Batch) -> Tensor:
        """The same by transformers' own forward."""
        self.kv.slots = batch.slots
        if isinstance(self.kv, PagedLatent):
            self.kv.plan = batch.attention
        out = self.model.model(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=True,
            paged=attention.PagedContext(self.kv, batch.attention), **{self._cache_name: self.kv}, **self.kind.inputs,
        )
        return out.last_hidden_state[0]

    @torch.inference_mode()
    def _try_packed(self) -> PackedForward | None:
        """The packed forward if it gives transformers' bits on random tokens: lone rows, a chunk, a mix."""
        if self.model.config.model_type not in PACKABLE or not isinstance(self.kv, PagedKV):
            return None
        generator = torch.Generator().manual_seed(1)
        batches = []
        for counts in ((1,), (17,), (1, 1, 1, 40)):
            chunks, first = [], 1
            for count in counts:
                sequence = SimpleNamespace(
                    ids=torch.randint(0, self.vocab, (count,), generator=generator).tolist(), computed=0,
                    blocks=list(range(first, first := first - (-count // self.block))))
                chunks.append(Chunk(sequence, count))  # type: ignore[arg-type]
            if first <= self.blocks + 1:
                batches.append(self.pack(chunks))
        want = [self.stock_hidden(batch) for batch in batches]
        self.packed = packed = self._make_packed()
        same = all(torch.equal(self.hidden(batch), stock) for batch, stock in zip(batches, want, strict=True))
        self.kv.zero(list(range(1, min(self.blocks, 64) + 1)))
        if not same:
            packed.undo()
            log.info("the packed forward's bits differ from transformers' here: using transformers' own")
        return packed if same else None

    def _make_packed(self) -> PackedForward:
        heads, kernels, kv = self.model.config.num_attention_heads, native.library(), self.kv
        assert isinstance(kv, PagedKV)
        if kernels is not None and self.kind.name == native_attention.NAME and fitting(self.model, kv):
            positions = min(self.model.config.max_position_embeddings, self.blocks * self.block)
            return NativeForward(self.model, heads, kv, kernels, positions)
        return PackedForward(self.model, heads, kv.heads, kv.head_dim)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """FP32 logits [R, vocab] of the chosen rows (all when None)."""
        picked = hidden if rows is None else hidden.index_select(0, rows.to(hidden.device))
        count = picked.shape[0]
        missing = -count % ROW_MULTIPLE
        if missing:
            picked = torch.cat([picked, picked[-1:].expand(missing, -1)])
        return self.model.lm_head(picked)[:count].float()

    def first_bad_layer(self, sequence: Sequence, step: int) -> str:
        """Recompute a sequence's tokens, `step` at a time, and name the first module whose output is not finite.

        Writes the same values to the sequence's own blocks again and leaves `computed` as it was.
        """
        found: list[str] = []
        count = 0

        def watch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if not found and not torch.isfinite(tensor[:, :count]).all():
                    found.append(name)
            return hook

        watched: list[tuple[str, nn.Module]] = [("model.embed_tokens", self.model.model.embed_tokens)]
        for index, layer in enumerate(self.model.model.layers):
            watched += [(f"model.layers.{index}.{part}", getattr(layer, part))
                        for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")]
        watched.append(("model.norm", self.model.model.norm))
        handles = [module.register_forward_hook(watch(name)) for name, module in watched]
        done, sequence.computed = sequence.computed, 0
        try:
            while sequence.computed < done and not found:
                count = min(step, done - sequence.computed)
                self.stock_hidden(self.pack([Chunk(sequence, count)]))
                sequence.computed += count
        finally:
            sequence.computed = done
            for handle in handles:
                handle.remove()
        return found[0] if found else "lm_head"
