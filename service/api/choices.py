"""What a choice says about its tokens: texts, offsets, log-probabilities, routing, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from service.engine.types import RoutingResult, TokenOutput
from service.tokenizer import Detokenizer, Tokenizer


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """A token's text, or `token_id:N` on request since different ids can have the same text."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def top_of(token: TokenOutput, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest (id, logprob) by falling logprob, and the token itself with its identical float."""
    best = list(token.top[:count])
    if all(token_id != token.token_id for token_id, _ in best):
        best.append((token.token_id, token.logprob))
    return best


def top_dict(tokenizer: Tokenizer, token: TokenOutput, count: int, as_id: bool) -> dict[str, float]:
    """`top_logprobs` of one position. The token's own name maps to its own float; another id with a name already taken
    (two halves of characters both show as U+FFFD) is listed as `token_id:N`, so that no entry is lost."""
    result = {token_name(tokenizer, token.token_id, as_id): token.logprob}
    others = {}
    for token_id, logprob in top_of(token, count):
        if token_id == token.token_id:
            continue
        name = token_name(tokenizer, token_id, as_id)
        others[f"token_id:{token_id}" if name in result or name in others else name] = logprob
    return {**result, **others}


class LogprobsBuilder:
    """OpenAI's `logprobs` object of a completion choice, built as tokens arrive.

    `text_offset` is where a token's text begins in the choice's text; bytes of one character share its offset. Offsets
    go by the undivided text, so a token that belongs to a matched stop string may begin at or after the text's end.
    """

    def __init__(
        self, tokenizer: Tokenizer, count: int, as_id: bool, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer, self._count, self._as_id = tokenizer, count, as_id
        self._skip = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt_ids[-8:], skip_special_tokens)
        self._offset = 0

    def prompt(self, ids: Sequence[int], text: str, scored: Sequence[TokenOutput | None]) -> dict[str, list[Any]]:
        """Entries for an echoed prompt: the first has no logprob. Later tokens' offsets continue after `text`."""
        plain = self._tokenizer.decode(ids, skip_special_tokens=False) == text
        offsets, detokenizer, at = [], Detokenizer(self._tokenizer, (), not plain), 0
        for token_id in ids:
            offsets.append(at)
            at += len(detokenizer.add(token_id))
        self._offset = len(text)
        names = [token_name(self._tokenizer, i, self._as_id) for i in ids]
        return {
            "tokens": names,
            "token_logprobs": [None if t is None else t.logprob for t in scored],
            "top_logprobs": [
                None if t is None else top_dict(self._tokenizer, t, self._count, self._as_id) for t in scored
            ],
            "text_offset": offsets,
        }

    def generated(self, tokens: Iterable[TokenOutput]) -> dict[str, list[Any]]:
        """Entries for newly generated tokens."""
        out = empty_logprobs()
        for token in tokens:
            out["tokens"].append(token_name(self._tokenizer, token.token_id, self._as_id))
            out["token_logprobs"].append(token.logprob)
            out["top_logprobs"].append(top_dict(self._tokenizer, token, self._count, self._as_id))
            out["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.add(token.token_id))
        return out


def empty_logprobs() -> dict[str, list[Any]]:
    """A `logprobs` object without tokens, to extend."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def extend_logprobs(into: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    """Append one `logprobs` object to another."""
    for key, values in more.items():
        into[key].extend(values)


def prompt_logprobs(
    tokenizer: Tokenizer, scored: Sequence[TokenOutput | None], count: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token a map id -> {logprob, rank, decoded_token}; null for the first."""
    out: list[dict[str, Any] | None] = []
    for token in scored:
        if token is None:
            out.append(None)
            continue
        entry = {}
        for place, (token_id, logprob) in enumerate(top_of(token, count), start=1):
            rank = token.rank if token_id == token.token_id else place
            entry[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        out.append(entry)
    return out


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenOutput], count: int, as_id: bool) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice: exactly the `count` likeliest in `top_logprobs`, as OpenAI gives them."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token_id, as_id),
            "logprob": logprob,
            "bytes": token_bytes(tokenizer, token_id),
        }

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(i, p) for i, p in t.top[:count]]} for t in tokens]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: visible Latin-1 characters stand for themselves, the others begin at U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """The bytes of a token: exact for byte-level vocabularies even where a token is part of a character."""
    piece = tokenizer.hf.convert_ids_to_tokens(token_id)
    text = tokenizer.token_text(token_id)
    if "�" in text and piece is not None and all(c in _BYTES for c in piece):
        return [_BYTES[c] for c in piece]
    return list(text.encode("utf-8", "replace"))


def routing_field(routing: RoutingResult) -> dict[str, Any]:
    """The `routing` field: chosen expert ids, int16 little-endian [T, layers, top_k], base64.

    `gaps` likewise, float16 [T, layers]: how far the last chosen expert was from the first rejected one.
    """
    ids = routing.ids.cpu().contiguous()
    field = {
        "dtype": "int16",
        "shape": list(ids.shape),
        "layers": list(routing.layers),
        "data": base64.b64encode(ids.numpy().astype("<i2").tobytes()).decode("ascii"),
    }
    if routing.gaps is not None:
        gaps = routing.gaps.cpu().numpy().astype("<f2").tobytes()
        field["gaps"] = base64.b64encode(gaps).decode("ascii")
    return field
