"""What one server said about one text, token by token."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evals.errors import ServerError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MISSING = -1  # id of an unused slot in `top_ids`


@dataclass(frozen=True)
class RoutingTrace:
    """Experts chosen for every token: `ids` [T, L, k], `layers` [L], `gaps` [T, L] or None.

    A gap is the last chosen minus the first rejected selection score, as the server's FP32 bias has it.
    """

    ids: Ints
    layers: tuple[int, ...]
    gaps: Floats | None


@dataclass(frozen=True)
class Scores:
    """One text under one server.

    `ids` int [T] and `logprobs` [T] (NaN for the first token, natural log); `top_ids` [T, m] with -1 in unused slots
    and `top_logprobs` [T, m] (-inf there) hold the most likely tokens, the text's own among them. `scored_from` is
    the first token of the part to compare, e.g. the gold solution after its prompt.
    """

    item: str
    ids: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats
    tokens: tuple[str, ...]
    scored_from: int = 1
    routing: RoutingTrace | None = None


def token_id(key: str, item: str) -> int:
    """`token_id:123` -> 123, the spelling that `return_tokens_as_token_ids` asks for."""
    head, _, number = key.rpartition(":")
    if head != "token_id" or not number.isdigit():
        raise ServerError(
            f"item {item}: the server answered with the token text {key!r} where ids were asked for; "
            "logprob comparison needs `return_tokens_as_token_ids` (vLLM and this project's service have it)"
        )
    return int(number)


def parse_scores(item: str, choice: Mapping[str, Any], prompt_tokens: int, text: str, scored_chars: int) -> Scores:
    """From a completions choice asked with `echo`, `logprobs` and `return_tokens_as_token_ids` about `text`.

    The one generated token is dropped. `scored_chars` is where the scored part begins in the text. Raises ServerError
    when lists have the wrong length, the way servers without `echo` fail silently (llama.cpp #27174), and when a
    logprob is null or NaN, naming the item and the token.
    """
    block = choice.get("logprobs") or {}
    names, values, tops = block.get("tokens"), block.get("token_logprobs"), block.get("top_logprobs")
    if not (isinstance(names, list) and isinstance(values, list) and isinstance(tops, list)):
        raise ServerError(f"item {item}: no logprobs of the prompt in the reply; the server must support `echo`")
    if not prompt_tokens <= len(names) <= prompt_tokens + 1 or not len(names) == len(values) == len(tops):
        raise ServerError(
            f"item {item}: logprobs of {len(names)} tokens for a prompt of {prompt_tokens}; the server does not echo"
        )
    ids = np.array([token_id(n, item) for n in names[:prompt_tokens]], dtype=np.int64)
    width = max((len(t) for t in tops[:prompt_tokens] if t), default=1)
    top_ids = np.full((prompt_tokens, width), MISSING, dtype=np.int64)
    top = np.full((prompt_tokens, width), -np.inf)
    for row, entry in enumerate(tops[:prompt_tokens]):
        for column, (key, value) in enumerate((entry or {}).items()):
            top_ids[row, column], top[row, column] = token_id(key, item), np.nan if value is None else value
    logprobs = np.array([np.nan if v is None else v for v in values[:prompt_tokens]], dtype=np.float64)
    offsets = _offsets(block.get("text_offset"), prompt_tokens, text)
    pieces = _pieces(names[:prompt_tokens], offsets, text)
    bad = np.isnan(logprobs) | np.isnan(top).any(-1)
    bad[0] = False
    if bad.any():
        at = int(bad.argmax())
        before = "".join(pieces[max(0, at - 8) : at])
        raise ServerError(
            f"item {item}: a logprob of token {at} ({pieces[at]!r} after {before!r}) is null or NaN; "
            "the model's numbers have broken down, see the server's log"
        )
    start = next((i for i, o in enumerate(offsets) if o >= scored_chars), 1) if scored_chars else 1
    routing = parse_routing(item, choice.get("routing"), prompt_tokens)
    return Scores(item, ids, logprobs, top_ids, top, pieces, max(1, start), routing)


def _offsets(given: Any, tokens: int, text: str) -> list[int]:
    """`text_offset` when it can be true; empty otherwise (vLLM counts the characters of `token_id:N` instead)."""
    offsets = list(given or [])[:tokens]
    rising = all(isinstance(o, int) for o in offsets) and all(a <= b for a, b in itertools.pairwise(offsets))
    return offsets if len(offsets) == tokens and rising and offsets[0] == 0 and offsets[-1] < len(text) else []


def _pieces(names: list[str], offsets: list[int], text: str) -> tuple[str, ...]:
    """The text of each token, or its id where offsets are not known."""
    if not offsets:
        return tuple(f" {n.removeprefix('token_id:')}" for n in names)
    return tuple(text[a:b] for a, b in itertools.pairwise([*offsets, len(text)]))


def parse_routing(item: str, field: Mapping[str, Any] | None, prompt_tokens: int) -> RoutingTrace | None:
    """From the service's `routing` field; None where the server has none."""
    if field is None:
        return None
    shape = tuple(field["shape"])
    ids = np.frombuffer(base64.b64decode(field["data"]), dtype="<i2").reshape(shape)
    if shape[0] < prompt_tokens:
        raise ServerError(f"item {item}: routing of {shape[0]} tokens for a prompt of {prompt_tokens}")
    gaps = None
    if field.get("gaps"):
        gaps = np.frombuffer(base64.b64decode(field["gaps"]), dtype="<f2").reshape(shape[:2])[:prompt_tokens]
    return RoutingTrace(
        ids[:prompt_tokens].astype(np.int64), tuple(field["layers"]), None if gaps is None else gaps.astype(np.float64)
    )
