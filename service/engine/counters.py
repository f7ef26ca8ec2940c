"""Counts what the engine did; written by the engine thread, read by any."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from service.engine.types import EngineStats

RATE_WINDOW = 10.0  # seconds over which tokens per second are averaged


@dataclass
class Counters:
    """Totals since start, and the recent rate of generated tokens."""

    prompt: int = 0
    generated: int = 0
    steps: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    last_step: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def stepped(self, seconds: float) -> None:
        """One step ended."""
        self.steps += 1
        self.last_step = seconds

    def made(self, tokens: int) -> None:
        """`tokens` were generated just now."""
        self.generated += tokens
        now = time.monotonic()
        self._recent.append((now, tokens))
        while now - self._recent[0][0] > RATE_WINDOW:
            self._recent.popleft()

    def rate(self) -> float:
        """Generated tokens a second over the last RATE_WINDOW seconds."""
        now = time.monotonic()
        recent = [(when, n) for when, n in tuple(self._recent) if now - when <= RATE_WINDOW]
        if len(recent) < 2:
            return 0.0
        return sum(n for _, n in recent[1:]) / max(now - recent[0][0], 1e-3)

    def stats(self, **now: Any) -> EngineStats:
        """A snapshot; `now` gives the fields that are not counted here."""
        return EngineStats(
            prompt_tokens_total=self.prompt, generated_tokens_total=self.generated, steps_total=self.steps,
            last_step_seconds=self.last_step, tokens_per_second=self.rate(), requests_finished_total=self.finished,
            requests_failed_total=self.failed, requests_cancelled_total=self.cancelled, **now,
        )
