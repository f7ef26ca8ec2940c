"""Reads one HTTP answer: what the model said, how it ended, and whether the answer can be trusted at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evals.extraction import strip_reasoning
from evals.records import Status

# Other servers' words for the two endings we accept (TGI, older SGLang, llama.cpp's native route).
_ENDINGS = {
    "stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "eos": "stop",
    "length": "length", "max_tokens": "length",
}


class BadReply(ValueError):
    """The body is not an answer: half a JSON, NaN, missing or inconsistent fields. Asking again may help."""


@dataclass(frozen=True)
class Reply:
    """One answer. `status` "error" has `error` set and nothing to score."""

    status: Status
    text: str = ""
    finish_reason: str | None = None
    matched_stop: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning: str | None = None
    logprobs: list[float] | None = None
    tokens: list[str] | None = None
    gaps: list[float | None] | None = None
    model: str | None = None
    error: str | None = None
    seconds: float = 0.0
    attempts: int = 1


def _no_constant(name: str) -> Any:
    raise BadReply(f"the answer holds {name}: the model's numbers have broken down")


def load(payload: bytes) -> dict[str, Any]:
    """The JSON object of a body; NaN and infinities are refused although Python would read them."""
    try:
        found = json.loads(payload, parse_constant=_no_constant)
    except BadReply:
        raise
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the answer is not whole JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadReply("the answer is not a JSON object")
    return found


def classify(text: str, finish_reason: str, reasoning: str | None) -> Status:
    """How an answered item ended (`finish_reason` is "stop" or "length").

    Reasoning that never ends is its own class and is never read for an answer; a cut answer is truncated even
    when a number could be read from it; an answer of nothing but white space is empty.
    """
    outside = strip_reasoning(text)
    if outside is None:
        return "truncated_in_reasoning"
    if finish_reason == "length":
        return "truncated_in_reasoning" if reasoning and not text.strip() else "truncated"
    return "completed" if outside.strip() else "empty"


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _clean(text: str) -> str:
    """Text that can be written as UTF-8: JSON may carry half a surrogate pair, which no file can."""
    return text.encode("utf-8", "replace").decode()


def _finite(values: list[Any]) -> list[float]:
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        raise BadReply("a logprob of the completion is not a finite number")
    return [float(v) for v in values]


def _gap(top: list[float]) -> float | None:
    best = sorted(top, reverse=True)
    return round(best[0] - best[1], 6) if len(best) > 1 else None


def _logprobs(found: Any, chat: bool) -> tuple[list[float], list[str], list[float | None]]:
    if not isinstance(found, Mapping):
        raise BadReply("logprobs were asked for and the answer has none; run with --no-logprobs")
    if chat:
        entries = found.get("content") or []
        tokens = [_clean(str(e.get("token"))) for e in entries]
        values = _finite([e.get("logprob") for e in entries])
        tops = [_finite([t.get("logprob") for t in e.get("top_logprobs") or []]) for e in entries]
    else:
        tokens = [_clean(str(t)) for t in found.get("tokens") or []]
        values = _finite(list(found.get("token_logprobs") or []))
        tops = [_finite(list((t or {}).values())) for t in found.get("top_logprobs") or [{}] * len(values)]
    if not len(tokens) == len(values) == len(tops):
        raise BadReply(
            f"logprobs do not line up: {len(tokens)} tokens, {len(values)} values, {len(tops)} alternatives"
        )
    return [round(v, 6) for v in values], tokens, [_gap(t) for t in tops]


def cut_at_stop(reply: Reply, stops: Sequence[str]) -> Reply:
    """An answer that runs past a stop string (a server that ignores stops, or returns the string) ends before it.

    lm-eval's own backends do the same. Such an answer did end, even when the server then ran into its limit.
    """
    found = [(reply.text.index(stop), stop) for stop in stops if stop in reply.text]
    if not found or reply.status == "error":
        return reply
    end, stop = min(found)
    text = reply.text[:end]
    keep, length = 0, 0
    for token in reply.tokens or []:
        if length >= end:
            break
        keep, length = keep + 1, length + len(token)
    return replace(
        reply, text=text, finish_reason="stop", matched_stop=stop, status=classify(text, "stop", reply.reasoning),
        logprobs=reply.logprobs and reply.logprobs[:keep], tokens=reply.tokens and reply.tokens[:keep],
        gaps=reply.gaps and reply.gaps[:keep],
    )


def parse(payload: bytes, *, chat: bool, logprobs: bool) -> Reply:
    """The answer in a 200 body of `/v1/completions` or `/v1/chat/completions`.

    Raises `BadReply` for everything that cannot be an answer to one prompt with n = 1: such a reply is asked
    again and never scored.
    """
    found = load(payload)
    if found.get("error"):
        raise BadReply(f"the server reports an error in a 200 answer: {str(found['error'])[:200]}")
    choices = found.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadReply("the answer must hold exactly one choice")
    choice = choices[0]
    if choice.get("index", 0) != 0:
        raise BadReply(f"the only choice has index {choice.get('index')}: it answers another prompt")
    reasoning = None
    if chat:
        message = choice.get("message")
        if not isinstance(message, Mapping):
            raise BadReply("the choice has no message")
        text = message.get("content")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        text = "" if text is None else text
    else:
        text = choice.get("text")
    if not isinstance(text, str) or not isinstance(reasoning, str | None):
        raise BadReply("the choice has no text")
    ending = _ENDINGS.get(str(choice.get("finish_reason")))
    if ending is None:
        raise BadReply(f"finish_reason is {choice.get('finish_reason')!r}, neither stop nor length: not final")
    values = tokens = gaps = None
    if logprobs:
        values, tokens, gaps = _logprobs(choice.get("logprobs"), chat)
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    usage = found.get("usage")
    return Reply(
        status=classify(text, ending, reasoning),
        text=_clean(text),
        finish_reason=ending,
        matched_stop=None if stop is None else _clean(str(stop)),
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        reasoning=None if reasoning is None else _clean(reasoning),
        logprobs=values,
        tokens=tokens,
        gaps=gaps,
        model=found.get("model") if isinstance(found.get("model"), str) else None,
    )
