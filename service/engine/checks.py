"""Refuses requests that no engine state could serve, before they are queued."""

from __future__ import annotations

from collections.abc import Iterable

from service.engine.types import GenerationRequest, RequestInvalid, RequestTooLong


def check_request(request: GenerationRequest, max_model_len: int, vocab: int, max_logprobs: int, *,
                  has_tokenizer: bool) -> None:
    """Raise RequestTooLong or RequestInvalid naming the field and its bounds."""
    params, prompt = request.params, request.prompt_ids
    if not prompt:
        raise RequestInvalid("the prompt is empty: send at least one token")
    if params.max_tokens < 0:
        raise RequestInvalid(f"max_tokens must be at least 0, got {params.max_tokens}")
    if len(prompt) + params.max_tokens > max_model_len:
        raise RequestTooLong(len(prompt), params.max_tokens, max_model_len)
    _in_vocabulary("prompt token id", prompt, vocab)
    _in_vocabulary("stop token id", params.stop_token_ids, vocab)
    if params.stop and not has_tokenizer:
        raise RequestInvalid("stop strings need a tokenizer, and this engine has none")
    if "" in params.stop:
        raise RequestInvalid("a stop string is empty")
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0 and 0 <= params.min_p <= 1):
        raise RequestInvalid(
            f"temperature {params.temperature} must be >= 0, top_p {params.top_p} in (0, 1], "
            f"top_k {params.top_k} >= 0 and min_p {params.min_p} in [0, 1]")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= max_logprobs:
            raise RequestInvalid(f"{name} must be between 0 and {max_logprobs}, got {value}")


def _in_vocabulary(what: str, ids: Iterable[int], vocab: int) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise RequestInvalid(f"{what} {bad} is outside the vocabulary of {vocab}")
