"""asyncio client for OpenAI-style servers: bounded workers, retries for infrastructure errors only."""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from evals.errors import ServerError
from evals.records import Protocol, canonical, sha256_hex
from evals.replies import BadReply, Reply, cut_at_stop, parse

# Answers that say "not now" rather than "no".
_RETRIED = frozenset({408, 409, 425, 429})
_FATAL = {401: "give --api-key", 403: "give --api-key", 404: "check the URL, --model-name and --endpoint"}


@dataclass(frozen=True)
class Ask:
    """One prompt to send. For the chat endpoint `prompt` is the JSON text of the messages."""

    item: str
    doc_id: int
    prompt: str


@dataclass(frozen=True)
class Endpoint:
    """Where and how to reach a server. `base` has no `/v1`; `tls` False turns certificate checks off."""

    base: str
    model: str | None = None
    api_key: str | None = None
    tls: bool | str = True
    timeout: float = 300.0

    def url(self, route: str) -> str:
        """The address of a route, e.g. `/v1/completions`."""
        return self.base + route

    def headers(self) -> dict[str, str]:
        """Authorization when there is a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def ssl(self) -> ssl.SSLContext | bool:
        """aiohttp's `ssl=`: checked, unchecked, or checked against a CA file."""
        if isinstance(self.tls, str):
            return ssl.create_default_context(cafile=self.tls)
        return self.tls


def base_url(url: str) -> str:
    """A server's root from any of the spellings people paste (…, …/v1, …/v1/chat/completions)."""
    text = url.strip().rstrip("/")
    for tail in ("/chat/completions", "/completions", "/v1"):
        text = text.removesuffix(tail)
    if not text.startswith(("http://", "https://")):
        raise ServerError(f"'{url}' is not a server URL; it must begin with http:// or https://")
    return text


@dataclass
class Retries:
    """How often to ask again. `budget` is shared by a whole arm: a broken server must not be asked for hours.

    `breaker` failures in a row, over all workers, end the arm: what is left gets "error" without being sent.
    """

    per_item: int = 5
    budget: int = 200
    breaker: int = 50
    first_delay: float = 0.5
    longest_delay: float = 20.0
    spent: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)

    def delay(self, item: str, attempt: int, retry_after: float | None) -> float:
        """Exponential with a jitter that depends on the item only; a server's Retry-After wins if longer."""
        jitter = 0.5 + int(sha256_hex(f"{item}:{attempt}")[:8], 16) / 2**33
        wait = min(self.first_delay * 2 ** (attempt - 1), self.longest_delay) * jitter
        return max(wait, min(retry_after or 0.0, 120.0))


class Retry(Exception):
    """An infrastructure error that may pass; `after` is the server's Retry-After in seconds."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


def request_body(protocol: Protocol, ask: Ask, model: str | None, seed: int) -> dict[str, Any]:
    """The request for an item: depends on the item and the protocol, never on concurrency or order."""
    chat = protocol.endpoint == "chat"
    body: dict[str, Any] = dict(protocol.extra_body)
    if model is not None:
        body["model"] = model
    body |= {"messages": json.loads(ask.prompt)} if chat else {"prompt": ask.prompt}
    body |= {
        "max_tokens": protocol.max_tokens,
        "temperature": protocol.temperature,
        "seed": seed,
        "stop": list(protocol.stops),
    }
    if protocol.top_p is not None:
        body["top_p"] = protocol.top_p
    if protocol.chat_template_kwargs:
        body["chat_template_kwargs"] = dict(protocol.chat_template_kwargs)
    if protocol.logprobs:  # two alternatives: the gap between them is shown where arms part
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    return body


def encode(body: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a request."""
    return canonical(body).encode()


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
        except (TypeError, ValueError):
            return None


def error_text(payload: bytes) -> str:
    """What an error body says, in one line, whatever the server's dialect."""
    text = payload.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        inner = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except ValueError:
        pass
    return " ".join(text.split())[:300]


class Client:
    """Asks one server one protocol's items. Use as an async context manager.

    `dead` (if given) is called after a failed connection and returns why the server cannot come back, or None.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        protocol: Protocol,
        *,
        seed: int | None = None,
        scope: str = "",
        retries: Retries | None = None,
        dead: Callable[[], str | None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.protocol = protocol
        self.seed = protocol.seed if seed is None else seed
        self.scope = scope
        self.retries = retries or Retries()
        self.gone: str | None = None
        self.models_seen: set[str] = set()
        self._dead = dead
        self._sent: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        route = "/v1/chat/completions" if protocol.endpoint == "chat" else "/v1/completions"
        self._url = endpoint.url(route)

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.endpoint.ssl()),
            headers=self.endpoint.headers() | {"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=self.endpoint.timeout),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request this client sends for an item."""
        return request_body(self.protocol, ask, self.endpoint.model, self.seed)

    def read(self, payload: bytes, ask: Ask) -> Reply:
        """What a 200 body says; `BadReply` for everything that is no answer."""
        found = parse(payload, chat=self.protocol.endpoint == "chat", logprobs=self.protocol.logprobs)
        return cut_at_stop(found, self.protocol.stops)

    async def _once(self, data: bytes, request_id: str, ask: Ask) -> Reply:
        if self._session is None:
            raise RuntimeError("use Client as an async context manager")
        try:
            async with self._session.post(self._url, data=data, headers={"X-Request-Id": request_id}) as answer:
                payload = await answer.read()
        except (TimeoutError, aiohttp.ServerTimeoutError):
            raise Retry(f"no answer within {self.endpoint.timeout:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerError(f"TLS: {error}; give --ca FILE or --insecure") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Retry(f"connection failed: {error or type(error).__name__}") from None
        if answer.status in _RETRIED or answer.status >= 500:
            raise Retry(f"HTTP {answer.status}: {error_text(payload)}", _retry_after(answer.headers))
        if answer.status in _FATAL:
            said = error_text(payload)
            raise ServerError(f"{self._url} answers {answer.status} ({said}); {_FATAL[answer.status]}")
        if answer.status != 200:  # our own fault or the server's rule: asking again cannot help
            return Reply("error", error=f"HTTP {answer.status}: {error_text(payload)}")
        echoed = answer.headers.get("X-Request-Id")
        # A gateway may give ids of its own; one that we gave to another request is a mix-up.
        if echoed != request_id and echoed in self._sent:
            raise Retry(f"the answer carries the id {echoed} of another request of ours")
        try:
            return self.read(payload, ask)
        except BadReply as error:
            raise Retry(str(error)) from None

    async def ask(self, ask: Ask) -> Reply:
        """The answer to one item; after the retries an "error" reply, never an exception for it."""
        data = encode(self.body(ask))
        request_id = sha256_hex(self.scope.encode() + b"\0" + data)[:32]  # the same on every attempt
        self._sent.add(request_id)
        attempt = 1
        while True:
            if self.gone:
                return Reply("error", error=self.gone, attempts=attempt - 1)
            start = time.monotonic()
            try:
                reply = await self._once(data, request_id, ask)
            except Retry as failure:
                reason, after = str(failure), failure.after
            else:
                self.retries.in_a_row = 0
                if reply.model:
                    self.models_seen.add(reply.model)
                return replace(reply, seconds=time.monotonic() - start, attempts=attempt)
            self._note_failure(reason)
            r = self.retries
            if self.gone or attempt > r.per_item or r.spent >= r.budget:
                return Reply("error", error=self.gone or reason, attempts=attempt, seconds=time.monotonic() - start)
            r.spent += 1
            await asyncio.sleep(r.delay(ask.item, attempt, after))
            attempt += 1

    def _note_failure(self, reason: str) -> None:
        self.retries.in_a_row += 1
        why = self._dead() if self._dead else None
        if why:
            self.gone = why
        elif self.retries.in_a_row >= self.retries.breaker:
            self.gone = f"given up after {self.retries.in_a_row} failures in a row (last: {reason})"

    async def ask_all(
        self,
        asks: Iterable[Ask],
        sink: Callable[[Ask, Reply], Awaitable[None]],
        concurrency: int,
    ) -> None:
        """Ask everything with at most `concurrency` requests in flight; `sink` is awaited for each answer.

        The iterable is consumed as workers become free, so memory does not grow with its length. The first
        exception (an unusable server, a full disk, Ctrl-C) cancels the rest.
        """
        source = iter(asks)

        async def work() -> None:
            for ask in source:
                await sink(ask, await self.ask(ask))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
