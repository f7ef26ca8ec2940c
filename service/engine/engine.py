"""The engine: one thread that schedules, forwards, samples and reports, step by step."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from service.config import ConfigError, EngineConfig
from service.engine.checks import check_request
from service.engine.counters import Counters
from service.engine.flight import Flight
from service.engine.kv_cache import BlockPool
from service.engine.output import apply_token, collect_prompt_logprobs, eos_ids, sampling_row, take_event
from service.engine.routing import keep_routing, unpacked
from service.engine.runner import Loaded, default_blocks, make_runner
from service.engine.scheduler import Chunk, Scheduler
from service.engine.sequence import Sequence
from service.engine.text import TextStream
from service.engine.types import (
    EngineError,
    EngineStats,
    EngineStopped,
    GenerationRequest,
    NonFiniteLogits,
    QueueFull,
    RequestInvalid,
    StepEvent,
)
from service.tokenizer import Tokenizer

log = logging.getLogger("service.engine")
Sink = Callable[[StepEvent], None]

MAX_FAILED_STEPS = 3  # in a row: then the engine declares itself unhealthy instead of failing requests for ever
PROMPT_TAIL = 8  # prompt tokens the detokeniser starts from, for tokenizers whose text depends on the left context


class Engine:
    """Continuous batching of one model. `submit`, `cancel` and `stats` may be called from any thread."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer | None, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        self.loaded = loaded
        self.tokenizer = tokenizer
        positions = int(loaded.model.config.max_position_embeddings)
        if config.max_model_len and config.max_model_len > positions:
            raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's {positions} positions")
        wanted = config.max_model_len or positions
        blocks = config.kv_blocks or default_blocks(loaded, config, positions)
        self.max_model_len = min(wanted, blocks * config.kv_block)
        if config.max_model_len and self.max_model_len < config.max_model_len:
            raise ConfigError(
                f"kv_blocks {blocks} x kv_block {config.kv_block} hold {blocks * config.kv_block} tokens, fewer than "
                f"max_model_len {config.max_model_len}: raise kv_blocks or lower max_model_len")
        self.pool = BlockPool(blocks)
        self.runner = make_runner(loaded, blocks, config, self.max_model_len)
        self.scheduler = Scheduler(config, self.pool, replay=config.replay and self.runner.overlapped)
        self.eos_ids = eos_ids(loaded.model, tokenizer)
        self._live: dict[str, Sequence] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.threads = torch.get_num_threads()  # of torch on the engine's thread
        self._accepting = True
        self._stopping = False
        self._queued = 0  # submitted and not yet admitted
        self._arrivals = 0
        self._failed_steps = 0
        self._flight: Flight | None = None  # launched, its tokens not read yet
        self._fatal: BaseException | None = None
        self.counters = Counters()

    # ---- callable from any thread -----------------------------------------------------------------------------------

    def start(self, threads: int | None = None) -> None:
        """Start the engine thread, with that many of torch's threads (default: as the caller has); again: nothing."""
        if self._thread is None:
            self.threads = threads or self.threads
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for at most `drain_seconds`, fail the rest, end the thread."""
        self._accepting = False
        deadline = time.monotonic() + drain_seconds
        while self._live and self.healthy and self._thread is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            self._fail_all(EngineStopped("the service is stopping"))

    def submit(self, request: GenerationRequest, sink: Sink, *, every_step: bool = True) -> None:
        """Queue a request; `sink` gets its events from the engine thread and must return quickly.

        `every_step=False` sends one event only, when the request ends: cheaper, for answers that are not streamed.
        Raises RequestTooLong, RequestInvalid, QueueFull or EngineStopped; then no event follows.
        """
        check_request(request, self.max_model_len, self.runner.vocab, self.config.max_logprobs,
                      has_tokenizer=self.tokenizer is not None)
        params = request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        text = TextStream(self.tokenizer, request.prompt_ids[-PROMPT_TAIL:], params.stop, params.include_stop_str,
                          params.skip_special_tokens)
        with self._wake:
            if not self._accepting or not self.healthy:
                raise EngineStopped(f"the engine has failed: {self._fatal}" if self._fatal
                                    else "the service is stopping and takes no new requests")
            if self._queued >= self.config.max_waiting:
                raise QueueFull(f"{self._queued} requests are waiting already; retry later")
            if request.request_id in self._live:
                raise RequestInvalid(f"request id '{request.request_id}' is already in use")
            sequence = Sequence(request, sink, every_step, seed, text, self._arrivals, list(request.prompt_ids))
            self._arrivals += 1
            self._queued += 1
            self._live[request.request_id] = sequence
            self._inbox.append(("add", sequence))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Drop a request: its blocks are free after the current step, no event follows. Unknown ids are ignored."""
        with self._wake:
            self._inbox.append(("cancel", request_id))
            self._wake.notify()

    def call(self, work: Callable[[], Any], timeout: float = 600.0) -> Any:
        """Run `work` on the engine thread between two steps; returns or raises what it does."""
        done: Future[Any] = Future()
        with self._wake:
            self._inbox.append(("call", (work, done)))
            self._wake.notify()
        return done.result(timeout)

    @property
    def idle(self) -> bool:
        """No request is queued or running."""
        return not self._live

    @property
    def healthy(self) -> bool:
        """False after a fatal error."""
        return self._fatal is None

    @property
    def fatal(self) -> BaseException | None:
        """The error that made the engine unhealthy."""
        return self._fatal

    def stats(self) -> EngineStats:
        """A snapshot of counters."""
        running = len(self.scheduler.running)
        return self.counters.stats(
            running=running, waiting=max(0, len(self._live) - running), kv_used=self.pool.used,
            kv_total=self.pool.total, preemptions_total=self.scheduler.preemptions)

    # ---- engine thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        torch.set_num_threads(self.threads)
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._flight or self.scheduler.running
                           or self.scheduler.waiting):
                    self._wake.wait()
                messages, self._inbox = self._inbox, deque()
                stopping = self._stopping
            try:
                self._handle(messages)
                if stopping:
                    self._fail_all(EngineStopped("the service stopped before this request finished"))
                    return
                if self.healthy:
                    self.step()
            except Exception as error:  # outside a step's own handling: state can no longer be trusted
                log.exception("the engine thread failed")
                self._fatal = error
            if not self.healthy:
                self._fail_all(EngineStopped(f"the engine has failed: {self._fatal}"))

    def _handle(self, messages: Iterable[tuple[str, Any]]) -> None:
        for kind, value in messages:
            if kind == "add":
                self.scheduler.add(value)
            elif kind == "call":
                work, done = value
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
            elif (doomed := self._live.pop(value, None)) is not None:
                self.counters.cancelled += 1
                self.scheduler.finish(doomed)

    @torch.inference_mode()
    def step(self) -> None:
        """One step over whatever is scheduled; an exception fails the requests of the step, not the engine."""
        began = time.perf_counter()
        if self._flight is not None and not self.scheduler.roomy():
            self._finish_flight()  # somebody may be preempted, and must then know all of its tokens
        chunks = self.scheduler.schedule()
        self._queued = len(self.scheduler.waiting) + len(self._inbox)
        try:
            if self.scheduler.dirty:
                self.runner.kv.zero(self.scheduler.dirty)
                self.scheduler.dirty.clear()
            flight = self._launch(chunks) if chunks else None
        except Exception as error:
            self._step_failed([(chunk.sequence, chunk.count) for chunk in chunks], error)
            self._finish_flight()
        else:
            if self.runner.overlapped:
                # The device computes this step while the host reads the last one's tokens.
                self._finish_flight(flight)
            elif flight is not None:
                self._land(flight)
        self.counters.stepped(time.perf_counter() - began)

    def _launch(self, chunks: list[Chunk]) -> Flight:
        """Start a step; sequences due for a token get it when the flight lands."""
        flight = Flight()
        packed, decoding = self.runner.split(chunks)
        if packed:
            if self.runner.padded_prefill(packed):
                self._launch_prefill(packed, flight)
            else:
                self._launch_packed(packed, flight)
        if decoding:
            for chunk in decoding:
                chunk.sequence.computed += 1
            due = [chunk.sequence for chunk in decoding if chunk.sequence.computed == chunk.sequence.known]
            if len(due) < len(decoding):  # some decode tokens again that they had before a preemption
                decoding.sort(key=lambda chunk: chunk.sequence.computed < chunk.sequence.known)
            pending = self.runner.decode(decoding, [sampling_row(sequence, self.eos_ids) for sequence in due])
            if due:
                flight.add(due, pending)
        for sequence in flight.due:
            sequence.inflight += 1
        return flight

    def _launch_prefill(self, chunks: list[Chunk], flight: Flight) -> None:
        """Chunks of which nothing but the next token is wanted, those due for one first."""
        chunks = sorted(chunks, key=lambda c: c.sequence.computed + c.count < c.sequence.known)
        due = [c.sequence for c in chunks if c.sequence.computed + c.count == c.sequence.known]
        pending = self.runner.prefill(chunks, [sampling_row(sequence, self.eos_ids) for sequence in due])
        for chunk in chunks:
            sequence = chunk.sequence
            self.counters.prompt += max(0, min(sequence.prompt_length - sequence.computed, chunk.count))
            sequence.computed += chunk.count
        if due:
            flight.add(due, pending)

    def _launch_packed(self, chunks: list[Chunk], flight: Flight) -> None:
        batch = self.runner.pack(chunks)
        chunks = batch.chunks
        if any(chunk.sequence.params.return_routing for chunk in chunks):
            with self.runner.routing.capture() as ids:
                hidden = self.runner.hidden(batch)
            keep_routing(batch, ids())
        else:
            hidden = self.runner.hidden(batch)
        last_rows, due = [], []
        for chunk, start in zip(chunks, batch.starts, strict=True):
            sequence = chunk.sequence
            if sequence.wants_prompt_rows:
                collect_prompt_logprobs(self.runner, sequence, chunk.count, start, hidden)
            self.counters.prompt += max(0, min(sequence.prompt_length - sequence.computed, chunk.count))
            sequence.computed += chunk.count
            if sequence.computed == sequence.known:
                last_rows.append(start + chunk.count - 1)
                due.append(sequence)
        if due:
            logits = self.runner.logits(hidden, torch.tensor(last_rows))
            flight.add(due, self.runner.sample(logits, [sampling_row(sequence, self.eos_ids) for sequence in due], due))

    def _finish_flight(self, following: Flight | None = None) -> None:
        """Read the tokens of the step that is in flight; `following` is in flight from now on."""
        flight, self._flight = self._flight, following
        if flight is not None:
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Give every sequence of a flight its token; those that ended meanwhile get none."""
        try:
            tokens = flight.read()
        except Exception as error:
            self._step_failed([(sequence, 0) for sequence in flight.due], error)
            return
        self._failed_steps = 0
        made = 0
        for sequence, token in zip(flight.due, tokens, strict=True):
            sequence.inflight -= 1
            if self._live.get(sequence.request_id) is not sequence:
                continue  # ended or cancelled while this token was computed
            if token is None:
                self._fail_non_finite(sequence)
                continue
            sequence.checked = sequence.computed - sequence.inflight
            if sequence.params.max_tokens > 0:
                made += 1
            try:
                event = apply_token(sequence, token, self.eos_ids)
                if event is not None:
                    self._report(sequence, event)
            except Exception as error:
                self._step_failed([(sequence, 0)], error)
        self.counters.made(made)

    def _report(self, sequence: Sequence, event: StepEvent) -> None:
        if event.finished:
            self._live.pop(sequence.request_id, None)
            self.scheduler.finish(sequence)
            self.counters.finished += 1
            if sequence.routing is not None:
                forwarded = len(sequence.ids) - bool(sequence.generated)
                event.routing = unpacked(sequence.routing[:forwarded], self.runner.routing.layers)
        self._send(sequence, take_event(sequence, event))

    def _send(self, sequence: Sequence, event: StepEvent) -> None:
        try:
            sequence.sink(event)
        except Exception:
            log.exception("the receiver of request %s failed; the request is dropped", sequence.request_id)
            if self._live.pop(sequence.request_id, None) is not None:
                self.counters.cancelled += 1
                self.scheduler.finish(sequence)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _fail_non_finite(self, sequence: Sequence) -> None:
        sequence.checked = 0  # its blocks hold NaN: wipe them
        position, where = len(sequence.ids) - 1, "not found"
        try:
            where = self.runner.first_bad_layer(sequence, self.config.max_batch_tokens)
        except Exception:
            log.exception("could not locate the non-finite layer of request %s", sequence.request_id)
        self._fail(sequence, NonFiniteLogits(
            f"request {sequence.request_id}: the model's logits at position {position} are NaN or infinite; "
            f"first non-finite output: {where}"))

    def _step_failed(self, parts: list[tuple[Sequence, int]], error: Exception) -> None:
        """Fail the sequences of a step; each part is a sequence and the tokens whose KV may be half written."""
        self._failed_steps += 1
        log.exception("engine step failed with %d sequences", len(parts), exc_info=error)
        for sequence, count in parts:
            sequence.computed, sequence.checked = sequence.computed + count, 0  # unknown contents: wipe
            if self._live.get(sequence.request_id) is sequence:
                self._fail(sequence, EngineError(
                    f"request {sequence.request_id}: the engine step failed: {type(error).__name__}: {error}"))
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._fatal = error
            log.error("%d steps failed in a row: the engine is unhealthy", self._failed_steps)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._live.pop(sequence.request_id, None)
        self.counters.failed += 1
        self.scheduler.finish(sequence)
        self._send(sequence, StepEvent(sequence.request_id, finished=True, error=error,
                                       prompt_tokens=sequence.prompt_length, completion_tokens=sequence.generated))

    def _fail_all(self, error: EngineError) -> None:
        for sequence in list(self._live.values()):
            self._fail(sequence, error)
