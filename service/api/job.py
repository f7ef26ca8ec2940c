"""One generation request from checked body to engine events; completions and chat share it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from service.api.generation import Generation
from service.api.params import derived_seed
from service.api.schemas import Sampled
from service.api.state import Loaded, Service, Track
from service.engine.types import EngineError, GenerationRequest, SamplingParams, StepEvent
from service.errors import from_engine, invalid

log = logging.getLogger("service.api")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's ids, and the text to echo."""

    ids: tuple[int, ...]
    text: str


class Job:
    """Submits prompts times `n` sequences; sequence i is sample i % n of prompt i // n, as OpenAI numbers choices."""

    def __init__(
        self,
        service: Service,
        loaded: Loaded,
        request: Request,
        body: Sampled,
        kind: str,
        endpoint: str,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
    ) -> None:
        settings = service.settings
        self.service, self.loaded, self.body, self.params = service, loaded, body, params
        self.prompts = list(prompts)
        self.n = body.n or 1
        if self.n > settings.max_n:
            raise invalid("n", f"n is {self.n}, this service gives at most {settings.max_n}")
        count = self.n * len(self.prompts)
        if count > settings.max_sequences:
            raise invalid(
                "prompt",
                f"{len(self.prompts)} prompts times n {self.n} are {count} sequences; "
                f"one request may ask for at most {settings.max_sequences}",
            )
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.track = Track(self.id, endpoint, sequences=count, prompt_tokens=sum(len(p.ids) for p in self.prompts))
        request.scope["moe_parity.track"] = self.track
        requests = [
            GenerationRequest(
                f"{self.id}-{i}",
                self.prompts[i // self.n].ids,
                replace(params, seed=derived_seed(body.seed, i % self.n)),
            )
            for i in range(count)
        ]
        assert service.mailbox is not None
        self.generation = Generation(loaded.engine, service.mailbox, requests, every_step=bool(body.stream))

    def prompt_of(self, index: int) -> EncodedPrompt:
        """The prompt of a sequence."""
        return self.prompts[index // self.n]

    def start(self) -> None:
        """Queue everything in the engine; raises ApiError (429, 503, 400)."""
        self.service.begin(self.track)
        if self.service.settings.log_prompts:
            for prompt in self.prompts:
                log.info("prompt", extra={"fields": {"id": self.id, "prompt": prompt.text}})
        try:
            self.generation.submit()
        except EngineError as error:
            refusal = from_engine(error)
            self._close("refused", refusal.code)
            raise refusal from error

    async def events(self) -> AsyncIterator[tuple[int, StepEvent]]:
        """Engine events in order; raises ApiError for the first that failed."""
        track = self.track
        try:
            async for index, event in self.generation.events():
                if event.new_tokens:
                    if track.first_token is None and self.body.stream:  # otherwise all tokens come at once
                        track.first_token = time.monotonic()
                        self.service.metrics.first_token.labels(track.endpoint).observe(
                            track.first_token - track.started
                        )
                    track.completion_tokens += len(event.new_tokens)
                if event.finished:
                    track.finish_reasons.append(str(event.finish_reason))
                yield index, event
        except EngineError as error:
            failure = from_engine(error)
            self._close("failed", failure.code)
            raise failure from error
        self._close("finished")

    def close(self) -> None:
        """Cancel what still runs (the client left, or an error); harmless after a normal end."""
        self.generation.cancel()
        self._close("cancelled")

    def _close(self, state: str, error: str | None = None) -> None:
        if self.track.ended is None:
            self.track.state = state  # type: ignore[assignment]
            self.track.error = error
            self.service.end(self.track)

    def usage(self) -> dict[str, int]:
        """Token counts: each prompt once, all generated tokens."""
        prompt, completion = self.track.prompt_tokens, self.track.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def header(self, kind: str) -> dict[str, Any]:
        """The fields every answer and chunk begins with."""
        return {"id": self.id, "object": kind, "created": self.track.created, "model": self.service.settings.model_name}


def require_positive(prompt: EncodedPrompt, where: str) -> None:
    """A sequence needs at least one token to continue."""
    if not prompt.ids:
        raise invalid(where, f"{where} is empty: it has no tokens to continue")


def wants_usage(body: Sampled) -> tuple[bool, bool]:
    """(usage chunk at the end, usage in every chunk)."""
    options = body.stream_options
    return bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
