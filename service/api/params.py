"""Maps a request's fields to the engine's sampling parameters, refusing by name what would change results silently."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from service.api.schemas import ChatRequest, CompletionRequest, Sampled
from service.engine.types import SamplingParams
from service.errors import invalid, unsupported

MAX_STOPS = 64

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields known from OpenAI, vLLM and SGLang that change what is generated and that this service does not implement,
# with the values that mean "off". Anything else unknown is harmless and ignored.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "suffix",
            "use_beam_search",
            "early_stopping",
            "truncate_prompt_tokens",
            "bad_words",
            "allowed_token_ids",
            "logits_processors",
            "custom_logit_processor",
            "custom_params",
            "prompt_embeds",
            "input_embeds",
            "lora_path",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_whitespace_pattern",
            "guided_decoding_backend",
            "structured_outputs",
            "regex",
            "ebnf",
            "json_schema",
            "structural_tag",
            "stop_regex",
            "no_stop_trim",
            "min_new_tokens",
            "max_new_tokens",
            "tools",
            "functions",
            "function_call",
            "audio",
            "prediction",
            "chat_template",
            "documents",
            "web_search_options",
            "kv_transfer_params",
            "thinking_token_budget",
            "typical_p",
            "top_a",
            "tfs",
            "dry_multiplier",
            "xtc_probability",
        ),
        _OFF,
    ),
    "best_of": (None, 1),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "no_repeat_ngram_size": _OFF,
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "function_call": (None, "none", "auto"),
    "truncation": (None, "disabled", False),
    "include_stop_str": _OFF,
    "prefix": _OFF,
    "assistant_prefix": _OFF,
}


def refuse_unsupported(body: Sampled) -> None:
    """Raise ApiError 400 for the first field that would change results and is not implemented."""
    extra = body.model_extra or {}
    for name, neutral in UNSUPPORTED.items():
        if name in extra and extra[name] not in neutral:
            raise unsupported(
                name, f"{name} is not supported and would change the result; leave it out (or at its neutral value)"
            )
    if isinstance(body, ChatRequest):
        for name in ("echo", "prompt"):
            if extra.get(name):
                raise unsupported(name, f"{name} is not supported on /v1/chat/completions; use /v1/completions")


def max_tokens(body: Sampled, default: int) -> int:
    """`max_tokens`, or its newer name `max_completion_tokens`; they must not contradict each other."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_completion_tokens", f"max_tokens is {old} but max_completion_tokens is {new}; give one")
    return next((value for value in (new, old) if value is not None), default)


def check_length(prompt: int, wanted: int, limit: int, where: str = "prompt") -> None:
    """Prompt and output must fit together: nothing is ever truncated."""
    if prompt + wanted > limit:
        raise invalid(
            "max_tokens" if prompt < limit else where,
            f"{where} has {prompt} tokens and max_tokens is {wanted}: together {prompt + wanted}, but this service "
            f"holds at most {limit} tokens in one sequence; nothing was truncated",
            "context_length_exceeded",
        )


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings: one, many, or none; an empty string would stop everything and is refused."""
    found = (value,) if isinstance(value, str) else tuple(value or ())
    if any(not text for text in found):
        raise invalid("stop", "stop holds an empty string")
    if len(found) > MAX_STOPS:
        raise invalid("stop", f"stop holds {len(found)} strings, at most {MAX_STOPS} are accepted")
    return found


def derived_seed(seed: int | None, sample: int) -> int | None:
    """The seed of sample j of `n`: the given one for the first, independent and reproducible ones for the others."""
    if seed is None:
        return None
    if sample == 0:
        return seed % 2**63
    digest = hashlib.sha256(f"{seed}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63


def _bounded(name: str, value: int | None, limit: int) -> int | None:
    if value is not None and value > limit:
        raise invalid(name, f"{name} is {value}, this service gives at most {limit}")
    return value


def sampling(body: Sampled, wanted: int, vocab: int, max_logprobs: int) -> SamplingParams:
    """Sampling parameters of sample 0; `wanted` is the number of tokens to generate at most."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream")
    if body.min_tokens is not None and body.min_tokens > wanted:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}, more than max_tokens, {wanted}")
    prompt_logprobs = _bounded("prompt_logprobs", body.prompt_logprobs, max_logprobs)
    if isinstance(body, CompletionRequest):
        logprobs = _bounded("logprobs", body.logprobs, max_logprobs)
        if body.echo and logprobs is not None:
            prompt_logprobs = max(logprobs, prompt_logprobs or 0)
        if wanted == 0 and not (body.echo or body.prompt_logprobs is not None or body.return_routing):
            raise invalid("max_tokens", "max_tokens 0 needs echo, prompt_logprobs or return_routing")
    else:
        assert isinstance(body, ChatRequest)
        logprobs = _bounded("top_logprobs", body.top_logprobs or 0, max_logprobs) if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if wanted == 0:
            raise invalid("max_tokens", "max_tokens must be at least 1 on /v1/chat/completions")
    for token in body.stop_token_ids or ():
        if token >= vocab:
            raise invalid("stop_token_ids", f"stop_token_ids holds {token}, outside the vocabulary of {vocab} tokens")
    return SamplingParams(
        max_tokens=wanted,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(body.top_k or 0, 0),
        min_p=float(body.min_p or 0.0),
        seed=derived_seed(body.seed, 0),
        stop=stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_routing=bool(body.return_routing),
        include_stop_str=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
