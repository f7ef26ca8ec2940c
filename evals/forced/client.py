"""Asks a server to score texts (echo, logprobs, routing) with the run client's retries and bounded workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.client import Ask, Client, Endpoint, Retries
from evals.errors import ServerError
from evals.forced.records import Scores, parse_scores
from evals.forced.texts import Text
from evals.records import Protocol
from evals.replies import BadReply, Reply

TOP = 20  # vLLM's default for --max-logprobs


@dataclass(frozen=True)
class ScoredReply(Reply):
    """A reply whose content is the scored text."""

    scores: Scores | None = None


class ForcedClient(Client):
    """Scores texts instead of asking for answers; one request a text, one generated token, dropped."""

    def __init__(
        self, endpoint: Endpoint, texts: Sequence[Text], *, routing: bool, retries: Retries | None = None,
        dead: Callable[[], str | None] | None = None,
    ) -> None:
        super().__init__(endpoint, _PROTOCOL, retries=retries, scope="forced", dead=dead)
        self._texts = {t.item: t for t in texts}
        self._routing = routing

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request for one text."""
        body: dict[str, Any] = {
            "prompt": ask.prompt, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }
        if self.endpoint.model is not None:
            body["model"] = self.endpoint.model
        if self._routing:  # other servers may refuse a field they do not know
            body["return_routing"] = True
        return body

    def read(self, payload: bytes, ask: Ask) -> Reply:
        """Scores from a 200 body. NaN is read here, so that the error can name the token."""
        try:
            found = json.loads(payload)
            choice, tokens = found["choices"][0], found["usage"]["prompt_tokens"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise BadReply("the answer is not a whole completion with `usage`") from None
        text = self._texts[ask.item]
        scores = parse_scores(ask.item, choice, int(tokens), text.text, text.scored_chars)
        return ScoredReply("completed", prompt_tokens=int(tokens), scores=scores)


# The client wants a protocol; only its endpoint matters here, the body is our own.
_PROTOCOL = Protocol(
    task="forced", dataset_sha256="", items=(), shots=0, shots_sha256="", template_sha256="", endpoint="completions",
    max_tokens=1, stops=(), temperature=0.0, seed=0, extractor="", concurrency=1, lm_eval_version="",
)


def score_texts(
    endpoint: Endpoint,
    texts: Sequence[Text],
    sink: Callable[[Scores], None],
    *,
    routing: bool,
    concurrency: int = 8,
    retries: Retries | None = None,
    dead: Callable[[], str | None] | None = None,
) -> None:
    """Score every text; `sink` gets the scores as they come, at most `concurrency` are in memory at a time.

    Raises ServerError for a text that the server cannot score (after the retries), naming it.
    """

    async def main() -> None:
        async with ForcedClient(endpoint, texts, routing=routing, retries=retries, dead=dead) as client:

            async def receive(ask: Ask, reply: Reply) -> None:
                if not isinstance(reply, ScoredReply) or reply.scores is None:
                    raise ServerError(f"{endpoint.base} cannot score item {ask.item}: {reply.error}")
                sink(reply.scores)

            asks = (Ask(t.item, number, t.text) for number, t in enumerate(texts))
            await client.ask_all(asks, receive, max(1, min(concurrency, len(texts))))

    asyncio.run(main())
