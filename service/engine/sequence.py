"""One request's state inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from service.engine.text import TextStream
from service.engine.types import GenerationRequest, SamplingParams, StepEvent, TokenOutput


@dataclass(eq=False)
class Sequence:
    """Token ids chasing their KV: there are no prefill and decode phases, only `computed` behind `len(ids)`."""

    request: GenerationRequest
    sink: Callable[[StepEvent], None]
    every_step: bool
    seed: int
    text: TextStream
    arrival: int
    ids: list[int]
    computed: int = 0  # tokens whose keys and values are in the cache (or will be, after the step in flight)
    inflight: int = 0  # tokens being computed that the host has not read yet
    checked: int = 0  # `computed` when its logits were last seen to be finite
    blocks: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    delivered: int = 0  # outputs already sent to the sink
    pending_text: str = ""  # text not yet sent (only when events are not sent every step)
    prompt_logprobs: list[TokenOutput | None] | None = None
    routing: Tensor | None = None
    preemptions: int = 0
    greedy_row: Any = None  # what the sampler is told of a greedy sequence, made once

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id  # read for every token: attributes, not properties
        self.params: SamplingParams = self.request.params
        self.prompt_length = len(self.request.prompt_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_length

    @property
    def known(self) -> int:
        """Tokens it has, those in flight included."""
        return len(self.ids) + self.inflight

    @property
    def exhausted(self) -> bool:
        """Whether the tokens in flight are the last it may have."""
        return self.inflight > 0 and self.generated + self.inflight >= self.params.max_tokens

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether some prompt token's log-probability is still missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length
