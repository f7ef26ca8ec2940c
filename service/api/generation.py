"""Carries requests to the engine thread and its events back to the event loop, for one HTTP request at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from service.engine.types import EngineError, EngineStats, EngineStopped, GenerationRequest, StepEvent

Sink = Callable[[StepEvent], None]


class EngineLike(Protocol):
    """What the HTTP surface needs of an engine; tests bring a fake one."""

    @property
    def healthy(self) -> bool: ...
    def submit(self, request: GenerationRequest, sink: Sink, *, every_step: bool = True) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def stop(self, drain_seconds: float = 0.0) -> None: ...


class Mailbox:
    """Events from the engine thread to the loop, with one wake-up for all events of a step rather than one each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Generation, int, StepEvent]] = deque()
        self._scheduled = False
        self.active: set[Generation] = set()

    def fail_all(self, reason: str) -> None:
        """Fail every open generation: the engine will send nothing more."""
        for generation in list(self.active):
            generation.fail(EngineStopped(reason))

    def post(self, target: Generation, index: int, event: StepEvent) -> None:
        """Called in the engine thread; must not block and must not raise."""
        self._items.append((target, index, event))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has closed: nobody is left to read
                self._items.clear()

    def _deliver(self) -> None:
        self._scheduled = False  # before reading, so that a post from now on schedules again
        while self._items:
            target, index, event = self._items.popleft()
            target._receive(index, event)


class Generation:
    """The sequences of one HTTP request; its owner must `cancel` when it stops reading early."""

    def __init__(
        self, engine: EngineLike, mailbox: Mailbox, requests: Sequence[GenerationRequest], every_step: bool = True
    ) -> None:
        self._every_step = every_step  # False: one event a sequence, when it ends
        self._engine = engine
        self._mailbox = mailbox
        self._requests = list(requests)
        self._open: set[int] = set()
        self._ready: deque[tuple[int, StepEvent]] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._failure: EngineError | None = None

    def submit(self) -> None:
        """Queue all sequences or none; raises the engine's QueueFull, RequestInvalid or EngineStopped."""
        self._mailbox.active.add(self)
        for index, request in enumerate(self._requests):
            self._open.add(index)
            try:
                self._engine.submit(request, self._sink(index), every_step=self._every_step)
            except EngineError:
                self._open.discard(index)
                self.cancel()
                raise

    def _sink(self, index: int) -> Sink:
        return lambda event: self._mailbox.post(self, index, event)

    def cancel(self) -> None:
        """Give up every unfinished sequence; the engine frees their KV blocks at its next step."""
        self._closed = True
        self._mailbox.active.discard(self)
        for index in self._open:
            self._engine.cancel(self._requests[index].request_id)
        self._open.clear()
        self._wake.set()

    async def events(self) -> AsyncIterator[tuple[int, StepEvent]]:
        """(sequence index, event) until every sequence has finished; raises the first sequence error."""
        while True:
            while self._ready:
                index, event = self._ready.popleft()
                if event.error is not None:
                    self.cancel()
                    raise event.error
                yield index, event
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise EngineStopped("the request was cancelled")
            if not self._open:
                self._mailbox.active.discard(self)
                return
            self._wake.clear()
            await self._wake.wait()

    def fail(self, error: EngineError) -> None:
        """End the generation with an error, from the event loop."""
        self._failure = error
        self.cancel()

    def _receive(self, index: int, event: StepEvent) -> None:
        if self._closed or index not in self._open:
            return  # late events of a cancelled sequence
        if event.finished:
            self._open.discard(index)
        self._ready.append((index, event))
        self._wake.set()
