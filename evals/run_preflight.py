"""Before anything is asked: who is the server, and does every prompt fit with its budget?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from evals.client import Ask, Endpoint
from evals.errors import PreflightError, ServerError
from evals.records import Protocol

LONGEST = 8  # prompts that are counted beforehand; the server's own refusal and `usage` cover the rest


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. `observed` stands in where there is no fingerprint."""

    fingerprint: Mapping[str, Any] | None
    model: str | None
    max_model_len: int | None
    observed: Mapping[str, Any] = field(default_factory=dict)


class Http:
    """A few synchronous requests to one server; a context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        verify = endpoint.ssl() if endpoint.base.startswith("https") else False  # reading the CA file takes 70 ms
        self._http = httpx.Client(
            base_url=endpoint.base, headers=endpoint.headers(), verify=verify, trust_env=False,
            timeout=min(endpoint.timeout, 60.0),
        )

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def json(self, method: str, route: str, body: Any = None) -> Any:
        """The JSON answer, or None when the server has no such route (or it does not answer JSON)."""
        try:
            answer = self._http.request(method, route, json=body)
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.endpoint.base} does not answer ({error or type(error).__name__}); is the server running?"
            ) from None
        if answer.status_code in (401, 403):
            raise ServerError(f"{self.endpoint.base} refuses the key ({answer.status_code}); give --api-key")
        if answer.status_code != 200:
            return None
        try:
            return answer.json()
        except ValueError:
            return None


def inspect(endpoint: Endpoint) -> ServerInfo:
    """Fingerprint, served model name and length limit."""
    with Http(endpoint) as http:
        models = http.json("GET", "/v1/models")
        fingerprint = http.json("GET", "/fingerprint")
        if not isinstance(fingerprint, dict) or "variant" not in fingerprint:
            fingerprint = None
        version = None if fingerprint else http.json("GET", "/version")
    entries = models.get("data") if isinstance(models, dict) else None
    card: dict[str, Any] = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    limit = (fingerprint or {}).get("max_model_len") or card.get("max_model_len")
    name = endpoint.model or card.get("id")
    observed: dict[str, Any] = {}
    if fingerprint is None:
        observed = {"model": name, "root": card.get("root"), "max_model_len": limit, "version": version}
        observed = {k: v for k, v in observed.items() if v is not None}
    return ServerInfo(fingerprint, name, limit if isinstance(limit, int) else None, observed)


def with_model(endpoint: Endpoint, info: ServerInfo) -> Endpoint:
    """The endpoint with the served model's name in it."""
    return replace(endpoint, model=info.model)


def _count(http: Http, endpoint: Endpoint, protocol: Protocol, ask: Ask) -> list[int] | int | None:
    """Token ids of a prompt, or their number, or None when the server cannot say."""
    body: dict[str, Any] = {"add_special_tokens": True}
    if protocol.endpoint == "chat":
        body = {"messages": json.loads(ask.prompt), "add_generation_prompt": True}
        if protocol.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(protocol.chat_template_kwargs)
    else:
        body["prompt"] = ask.prompt
    if endpoint.model:
        body["model"] = endpoint.model
    found = http.json("POST", "/tokenize", body)
    if not isinstance(found, dict):
        return None
    tokens = found.get("tokens")
    # A server with another contract (llama.cpp reads "content") answers an empty list here.
    if isinstance(tokens, list) and tokens and all(isinstance(t, int) for t in tokens):
        return tokens
    count = found.get("count")
    return count if isinstance(count, int) and count > 0 else None


def check(endpoint: Endpoint, protocol: Protocol, asks: Sequence[Ask], info: ServerInfo) -> dict[str, Any]:
    """Count the longest prompts and refuse a budget that does not fit; returns what was found.

    Raises `PreflightError` when prompt + max_tokens passes the server's limit (nothing is ever cut to fit) or
    when the prompt begins twice with the same special tokens.
    """
    longest = sorted(asks, key=lambda a: len(a.prompt), reverse=True)[:LONGEST]
    most = 0
    with Http(endpoint) as http:
        for ask in longest:
            found = _count(http, endpoint, protocol, ask)
            if found is None:
                return {"longest_prompt": None, "max_model_len": info.max_model_len}
            if isinstance(found, list):
                if len(found) > 3 and (found[0] == found[1] or found[:2] == found[2:4]):
                    raise PreflightError(
                        f"the server's prompt begins twice with the same tokens ({found[:4]}): it adds BOS itself; "
                        "drop --prompt-prefix or its own BOS"
                    )
                found = len(found)
            most = max(most, found)
    limit = info.max_model_len
    if limit is not None and most + protocol.max_tokens > limit:
        raise PreflightError(
            f"the longest prompt has {most} tokens; with --max-tokens {protocol.max_tokens} that is "
            f"{most + protocol.max_tokens}, above the server's {limit}. Prompts are never cut: "
            f"use --max-tokens {max(limit - most, 0)} at most, fewer --shots, or a larger --max-model-len"
            if most < limit else
            f"the longest prompt has {most} tokens, the server takes {limit}; use fewer --shots or a larger "
            "--max-model-len"
        )
    return {"longest_prompt": most, "max_model_len": limit}


