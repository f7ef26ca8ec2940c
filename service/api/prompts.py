"""Reads the `prompt` field: one or many texts or token-id lists, with a precise refusal for everything else."""

from __future__ import annotations

import json
from typing import Any

from service.errors import invalid
from service.tokenizer import Tokenizer

Prompt = str | list[int]

_SHAPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def parse_prompt(value: Any) -> list[Prompt]:
    """The prompts of a request, in order; raises ApiError 400 naming what is wrong."""
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        raise invalid("prompt", f"prompt must be {_SHAPES}, got {_kind(value)}")
    if not value:
        raise invalid("prompt", "prompt is an empty list; give at least one prompt")
    first = value[0]
    if isinstance(first, dict):
        raise invalid(
            "prompt",
            "prompt holds a list of messages, but /v1/completions takes text or token ids: send messages to "
            "/v1/chat/completions (with lm-eval: --model local-chat-completions)",
        )
    if isinstance(first, str):
        return [_text(v, f"prompt[{i}]") for i, v in enumerate(value)]
    if isinstance(first, list):
        return [_ids(v, f"prompt[{i}]") for i, v in enumerate(value)]
    return [_ids(value, "prompt")]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid("prompt", f"{where} is {_kind(value)} in a list that began with a string; do not mix kinds")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid("prompt", f"{where} holds a lone surrogate at character {error.start}") from None
    return value


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise invalid("prompt", f"{where} is {_kind(value)} where a list of token ids was expected; do not mix kinds")
    if not value:
        raise invalid("prompt", f"{where} has no token ids")
    ids = []
    for i, item in enumerate(value):
        if isinstance(item, float) and item.is_integer():
            item = int(item)
        if isinstance(item, bool) or not isinstance(item, int):
            raise invalid("prompt", f"{where}[{i}] is {_kind(item)} where a token id was expected")
        ids.append(item)
    return ids


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def check_ids(ids: list[int], vocab: int, where: str = "prompt") -> None:
    """Refuse ids outside the model's vocabulary, with the first offender's place."""
    for i, item in enumerate(ids):
        if not 0 <= item < vocab:
            raise invalid(
                where, f"token id {item} at position {i} of {where} is not in the vocabulary of {vocab} tokens"
            )


class PromptEncoder:
    """Turns texts into ids, and refuses a text that cannot fit before spending time on tokenising it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest = _longest_token(tokenizer)

    def at_least(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without tokenising it (0 when unknown)."""
        return -(-len(text) // self._longest) if self._longest else 0

    def encode(self, text: str, add_special_tokens: bool, limit: int, where: str = "prompt") -> list[int]:
        """Ids of a text; raises ApiError 400 when it certainly exceeds `limit` tokens."""
        bound = self.at_least(text)
        if bound > limit:
            raise invalid(
                where,
                f"{where} of {len(text)} characters has at least {bound} tokens, more than the {limit} this service "
                "holds in one sequence; nothing was truncated",
                "context_length_exceeded",
            )
        return self._tokenizer.encode(text, add_special_tokens)


def _longest_token(tokenizer: Tokenizer) -> int:
    """Length of the longest token in bytes or characters, or 0 where some step may drop characters of the text."""
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        return 0
    spec = json.loads(backend.to_str())
    steps = json.dumps(spec.get("pre_tokenizer"))
    loses = (
        spec.get("normalizer") is not None
        or '"ByteLevel"' not in steps
        or '"Removed"' in steps
        or spec.get("model", {}).get("unk_token") is not None
        or any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens", ()))
    )
    return 0 if loses else max((len(token) for token in tokenizer.hf.get_vocab()), default=0)
