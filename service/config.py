"""Engine settings, checked once when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.errors import MoeParityError


class ConfigError(MoeParityError):
    """A setting is out of range; the message names it and the allowed values."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes that bound memory and latency.

    `max_model_len` tokens (prompt + generated) a sequence may hold; None takes the model's `max_position_embeddings`,
    cut to what the KV cache holds. `kv_block` tokens a block; `kv_blocks` blocks in all (None: enough for `max_seqs`
    sequences of average length, see `LoadedSizes`). `max_batch_tokens` tokens forwarded in one step; a longer prompt is
    prefilled in chunks. `max_seqs` sequences running at once. `max_waiting` requests queued before QueueFull.
    `max_logprobs` bounds `logprobs` and `prompt_logprobs`. `cuda_graph` decodes by CUDA graphs where device and kernels
    allow (no effect elsewhere). `forward`: "transformers", "own" (`service.gpu`), or "auto": own on a GPU.
    `graph_sizes` are the batch sizes decoding is padded to there (None: 1, 2, 4, multiples of 8, up to `max_seqs`).
    `prefill_sizes` are the token counts that short prefills are padded to, for CUDA graphs (None: 256 to 2,048 where
    there are graphs; empty: none).
    `replay`: where decoding has kernels of its own, a preempted sequence's own tokens are decoded again one by one, so
    that its keys keep their bits; False prefills them at once: faster, rounded differently.
    `admit_interval`: while others run, waiting requests are admitted at most every so many seconds (0: every step).
    """

    max_model_len: int | None = None
    kv_block: int = 16
    kv_blocks: int | None = None
    max_batch_tokens: int = 512
    max_seqs: int = 64
    max_waiting: int = 4096
    max_logprobs: int = 100
    prefix_cache: bool = False
    cuda_graph: bool = True
    forward: str = "auto"
    graph_sizes: tuple[int, ...] | None = None
    prefill_sizes: tuple[int, ...] | None = None
    admit_interval: float = 0.0
    replay: bool = True

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_block", "kv_blocks", "max_batch_tokens", "max_seqs", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.admit_interval <= 10:
            raise ConfigError(f"admit_interval must be between 0 and 10 seconds, got {self.admit_interval}")
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be at least 0, got {self.max_logprobs}")
        if self.graph_sizes is not None and (not self.graph_sizes or min(self.graph_sizes) < 1
                                             or max(self.graph_sizes) < self.max_seqs):
            raise ConfigError(f"graph_sizes {self.graph_sizes} must be positive and reach max_seqs {self.max_seqs}")
        if self.prefill_sizes and min(self.prefill_sizes) < 1:
            raise ConfigError(f"prefill_sizes {self.prefill_sizes} must be positive")
        if self.forward not in ("auto", "transformers", "own"):
            raise ConfigError(f"forward must be auto, transformers or own, got '{self.forward}'")
        if self.prefix_cache:
            raise ConfigError("prefix_cache is not available: evaluation runs never share computed prefixes")
