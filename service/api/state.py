"""The service as the routes see it: settings, phase (loading, ready, draining, failed), model, recent requests."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from service.api.generation import EngineLike, Mailbox
from service.api.metrics import Metrics
from service.api.prompts import PromptEncoder
from service.errors import ApiError, unavailable
from service.tokenizer import Tokenizer

Phase = Literal["loading", "ready", "draining", "failed"]
RequestState = Literal["in progress", "finished", "cancelled", "refused", "failed"]


@dataclass(frozen=True)
class ApiSettings:
    """What the HTTP surface is told at start. Sizes in bytes, times in seconds.

    `max_sequences` bounds prompts times `n` of one request; `max_logprobs` bounds logprobs, top_logprobs and
    prompt_logprobs. `api_key` None leaves the service open (it binds to 127.0.0.1 by default).
    """

    model_name: str
    model_path: str
    variant: str
    api_key: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_sequences: int = 1024
    max_n: int = 128
    max_logprobs: int = 100
    log_prompts: bool = False
    selftest: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model that is ready. `vocab` counts the embedding's rows: ids at or beyond it are refused."""

    engine: EngineLike
    tokenizer: Tokenizer
    encoder: PromptEncoder
    max_model_len: int
    vocab: int
    fingerprint: dict[str, Any]


@dataclass
class Track:
    """One generation request's life, for metrics, log lines and the status page. Holds no text."""

    id: str
    endpoint: str
    started: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    state: RequestState = "in progress"
    sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    ended: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Time since the request was accepted, or until it ended."""
        return (self.ended or time.monotonic()) - self.started


class Service:
    """Everything a route needs; one per process, kept in `app.state.service`."""

    def __init__(self, settings: ApiSettings, metrics: Metrics | None = None) -> None:
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.phase: Phase = "loading"
        self.failure: str | None = None
        self.loaded: Loaded | None = None
        self.mailbox: Mailbox | None = None  # made when the event loop runs
        self.started = time.time()
        self.live: dict[str, Track] = {}
        self.recent: deque[Track] = deque(maxlen=50)

    def ready(self, loaded: Loaded) -> None:
        """Begin to answer."""
        self.loaded = loaded
        self.phase = "ready"
        self.metrics.describe(self.settings.model_name, loaded.fingerprint)
        self.metrics.watch(loaded.engine)

    def require(self) -> Loaded:
        """The loaded model, or ApiError 503 saying why there is none."""
        self.check_engine()
        if self.phase == "ready" and self.loaded is not None:
            return self.loaded
        raise self.why_not()

    def check_engine(self) -> None:
        """Notice an engine that died."""
        if self.phase == "ready" and self.loaded is not None and not self.loaded.engine.healthy:
            self.phase = "failed"
            self.failure = "the engine stopped after a fatal error; see the log and restart the service"

    def why_not(self) -> ApiError:
        """The 503 for a service that is not ready."""
        match self.phase:
            case "loading":
                return unavailable("the model is still loading", "loading")
            case "draining":
                return unavailable("the service is shutting down", "draining")
            case _:
                return unavailable(self.failure or "the service has failed", "failed")

    def check_model(self, name: str | None) -> None:
        """404 unless the request names the served model (by name or by path) or none."""
        if name is not None and name not in (self.settings.model_name, self.settings.model_path):
            raise ApiError(
                404,
                f"model '{name[:200]}' is not served; this service has '{self.settings.model_name}'",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )

    def begin(self, track: Track) -> None:
        """Count a generation request in."""
        self.live[track.id] = track
        self.recent.appendleft(track)

    def end(self, track: Track) -> None:
        """Count it out, once."""
        if self.live.pop(track.id, None) is not None:
            track.ended = time.monotonic()
            self.metrics.finished(
                track.endpoint, track.state, track.prompt_tokens, track.completion_tokens, track.seconds
            )
