"""A model-free engine with the real engine's interface: deterministic tokens, and faults on demand."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from service.engine.text import TextStream
from service.engine.types import (
    EngineError,
    EngineStats,
    EngineStopped,
    GenerationRequest,
    QueueFull,
    RoutingResult,
    StepEvent,
    TokenOutput,
)
from service.tokenizer import Tokenizer

BLOCK = 16


@dataclass
class _Sequence:
    request: GenerationRequest
    sink: Callable[[StepEvent], None]
    text: TextStream
    ids: list[int] = field(default_factory=list)


class _Gather:
    """A sink that passes on one event only, with everything of the earlier ones."""

    def __init__(self, sink: Callable[[StepEvent], None]) -> None:
        self._sink, self._tokens, self._text, self._first = sink, [], "", None

    def __call__(self, event: StepEvent) -> None:
        self._first = self._first or event
        self._tokens += event.new_tokens
        self._text += event.text_delta
        if event.finished:
            event.new_tokens, event.text_delta = self._tokens, self._text
            event.prompt_logprobs = self._first.prompt_logprobs
            self._sink(event)


class FakeEngine:
    """`script` (token ids) overrides what is generated; `fault(request, step)` may return an error or raise."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        step_seconds: float = 0.0,
        max_waiting: int = 4096,
        kv_blocks: int = 100_000,
        script: Sequence[int] | None = None,
        fault: Callable[[GenerationRequest, int], EngineError | None] | None = None,
    ) -> None:
        self.tokenizer, self.step_seconds, self.max_waiting, self.kv_blocks = (
            tokenizer,
            step_seconds,
            max_waiting,
            kv_blocks,
        )
        self.script, self.fault = script, fault
        self.vocab = len(tokenizer)
        self.live: dict[str, _Sequence] = {}
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.healthy = True
        self.steps = 0
        self._stopping = False
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Callable[[StepEvent], None], *, every_step: bool = True) -> None:
        if not every_step:
            sink = _Gather(sink)
        with self._lock:
            if self._stopping or not self.healthy:
                raise EngineStopped("the engine is stopping")
            if len(self.live) >= self.max_waiting:
                raise QueueFull(f"{len(self.live)} requests are waiting already")
            params = request.params
            self.submitted.append(request)
            self.live[request.request_id] = _Sequence(
                request,
                sink,
                TextStream(
                    self.tokenizer,
                    request.prompt_ids[-8:],
                    params.stop,
                    params.include_stop_str,
                    params.skip_special_tokens,
                ),
            )
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if self.live.pop(request_id, None) is not None:
                self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        with self._lock:
            used = sum(math.ceil((len(s.request.prompt_ids) + len(s.ids)) / BLOCK) for s in self.live.values())
            return EngineStats(
                running=len(self.live),
                kv_used=used,
                kv_total=self.kv_blocks,
                steps_total=self.steps,
                requests_cancelled_total=len(self.cancelled),
            )

    def stop(self, drain_seconds: float = 0.0) -> None:
        self._stopping = True
        end = time.monotonic() + drain_seconds
        while self.live and time.monotonic() < end:
            time.sleep(0.01)
        with self._lock:
            for key in list(self.live):
                self._fail(key, EngineStopped("the engine stopped"))
            self._lock.notify()

    def die(self) -> None:
        """Stop stepping without a word, as a crashed thread would."""
        self.healthy = False

    def _fail(self, key: str, error: EngineError) -> None:
        sequence = self.live.pop(key)
        sequence.sink(StepEvent(key, finished=True, error=error))

    def _run(self) -> None:
        while self.healthy:
            with self._lock:
                while not self.live and not self._stopping:
                    self._lock.wait(0.1)
                if self._stopping and not self.live:
                    return
                self.steps += 1
                for key in list(self.live):
                    if self.healthy:
                        self._step(key)
            time.sleep(self.step_seconds)

    def score(self, history: Sequence[int], token: int) -> float:
        """A made-up log-probability that depends on the history, in (-9, 0)."""
        digest = hashlib.sha256(repr((tuple(history[-4:]), token)).encode()).digest()
        return -9.0 * (int.from_bytes(digest[:4], "big") + 1) / 2**32

    def output(self, history: Sequence[int], token: int, count: int | None) -> TokenOutput:
        """A token scored among a few made-up rivals, in the shape the real engine gives."""
        rivals = sorted(
            ((i % self.vocab, self.score(history, i % self.vocab)) for i in range(40, 60)), key=lambda pair: -pair[1]
        )
        own = self.score(history, token)
        rank = 1 + sum(score > own for _, score in rivals)
        if count is None:
            return TokenOutput(token, own, rank)
        top = rivals[:count]
        if all(i != token for i, _ in top):
            top = sorted([*top, (token, own)], key=lambda pair: -pair[1])
            top = top[:count] if (token, own) in top[:count] else [*top[:count], (token, own)]
        return TokenOutput(token, own, rank, tuple(dict.fromkeys(top)))

    def next_token(self, request: GenerationRequest, ids: Sequence[int]) -> int:
        """Printable ASCII from a hash of seed and history; greedy ignores the seed."""
        if self.script is not None:
            return self.script[min(len(ids), len(self.script) - 1)]
        seed = request.params.seed if request.params.temperature > 0 else None
        digest = hashlib.sha256(repr((seed, request.prompt_ids, tuple(ids))).encode()).digest()
        letters = [self.tokenizer.encode(c, False)[0] for c in "abcdefgh ij\n"]
        return letters[digest[0] % len(letters)]

    def _step(self, key: str) -> None:
        sequence = self.live[key]
        request, params, step = sequence.request, sequence.request.params, len(sequence.ids)
        error = self.fault(request, step) if self.fault else None
        if error is not None:
            self._fail(key, error)
            return
        event = StepEvent(key, prompt_tokens=len(request.prompt_ids))
        if step == 0 and params.prompt_logprobs is not None:
            ids = request.prompt_ids
            event.prompt_logprobs = [
                None,
                *(self.output(ids[:i], ids[i], params.prompt_logprobs) for i in range(1, len(ids))),
            ]
        if params.max_tokens > 0:
            history = [*request.prompt_ids, *sequence.ids]
            token = self.next_token(request, sequence.ids)
            sequence.ids.append(token)
            event.new_tokens = [self.output(history, token, params.logprobs)]
            if not params.ignore_eos and token == self.tokenizer.eos_id:
                event.finish_reason = "stop"
            elif token in params.stop_token_ids:
                event.finish_reason, event.stop_reason = "stop", token
            else:
                event.text_delta = sequence.text.add(token)
                if sequence.text.matched is not None:
                    event.finish_reason, event.stop_reason = "stop", sequence.text.matched
        if event.finish_reason is None and len(sequence.ids) >= params.max_tokens:
            event.finish_reason = "length"
        if event.finish_reason is not None:
            event.finished = True
            event.text_delta += sequence.text.finish()
            if params.return_routing:
                rows = len(request.prompt_ids) + max(len(sequence.ids) - 1, 0)
                ids = torch.arange(rows * 2 * 2, dtype=torch.int16).reshape(rows, 2, 2)
                event.routing = RoutingResult(ids, (1, 2))
            self.live.pop(key)
        event.completion_tokens = len(sequence.ids)
        sequence.sink(event)
