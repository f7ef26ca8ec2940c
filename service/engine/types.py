"""Everything that crosses the border between the engine and the API: requests, step events, errors, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from moe_kernels.errors import MoeParityError

FinishReason = Literal["stop", "length"]
LOGPROB_FLOOR = -9999.0  # what -inf becomes, since JSON has no infinity (vLLM's convention)


class EngineError(MoeParityError):
    """A request failed inside the engine; `kind` tells the API which status to answer with."""

    kind = "internal"


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinite logits; the message names the request and the first bad layer."""

    kind = "non_finite"


class QueueFull(EngineError):
    """`max_waiting` requests are already queued: retry later (429 or 503)."""

    kind = "queue_full"


class EngineStopped(EngineError):
    """The engine is stopping, stopped, or unhealthy after a fatal error (503)."""

    kind = "stopped"


class RequestInvalid(EngineError):
    """A request that no engine state could serve, e.g. a token id outside the vocabulary (400)."""

    kind = "invalid"


class RequestTooLong(RequestInvalid):
    """Prompt plus `max_tokens` exceed what one sequence may hold; nothing is ever truncated (400)."""

    kind = "too_long"

    def __init__(self, prompt: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: together {prompt + max_tokens}, "
            f"but this service holds at most {limit} tokens a sequence; shorten the prompt or lower max_tokens"
        )
        self.prompt, self.max_tokens, self.limit = prompt, max_tokens, limit


@dataclass(frozen=True)
class SamplingParams:
    """How one request continues its prompt; the API fills in OpenAI's defaults.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 mean off. `seed` None draws a fresh seed.
    `max_tokens` 0 computes the prompt only (for `echo` and `prompt_logprobs`) and finishes with "length".
    `logprobs` n asks for the n best tokens beside each sampled one, `prompt_logprobs` the same for the prompt.
    Until `min_tokens` tokens exist, EOS and stop ids cannot be sampled and stop strings are not looked for.
    `stop_token_ids` stop whatever `ignore_eos` says. With `include_stop_str` the text keeps the stop string.
    `skip_special_tokens` leaves special tokens out of the text (never out of the token list).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routing: bool = False
    include_stop_str: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue; `n` > 1 is several requests with different ids and seeds."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class TokenOutput(NamedTuple):
    """One token with its raw (before temperature) log-probability.

    `rank` is 1 for the likeliest token. `top` holds (id, logprob) by falling logprob: the n asked for, plus this
    token if it is not among them, so up to n + 1 entries; this token's entry is the identical float. Empty unless
    asked for. Log-probabilities are clamped to -9999.0 from below.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RoutingResult:
    """Chosen experts of every token forwarded: `ids` int16 [T, len(layers), top_k], rows in position order.

    T = prompt + generated - 1 (the last sampled token is never forwarded). `gaps` FP16 [T, len(layers)]: last
    chosen minus first rejected selection key, NaN where the model does not tell.
    """

    ids: Tensor
    layers: tuple[int, ...]
    gaps: Tensor | None = None


@dataclass
class StepEvent:
    """What one engine step did for one request; the last event of a request has `finished` True.

    `text_delta` holds back incomplete UTF-8 and possible beginnings of stop strings, and ends before a stop string
    unless `include_stop_str`. The concatenation of all deltas is the text. `stop_reason` is the stop string or stop
    token id that matched; None for EOS and for "length". `prompt_logprobs` comes once, with the first event, one entry
    per prompt token and None for the first. `error` set means the request failed: finished, no finish_reason, and
    earlier deltas are void.
    """

    request_id: str
    new_tokens: list[TokenOutput] = field(default_factory=list)
    text_delta: str = ""
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenOutput | None] | None = None
    routing: RoutingResult | None = None
    error: EngineError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; totals count since start. `kv_*` are blocks, times in seconds."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    last_step_seconds: float = 0.0
    tokens_per_second: float = 0.0  # generated, over the last ten seconds at most
    requests_finished_total: int = 0
    requests_failed_total: int = 0
    requests_cancelled_total: int = 0
