"""Decides which tokens of which sequences the next step computes, and who gives up KV blocks when they run out."""

from __future__ import annotations

import bisect
import time
from collections import deque
from dataclasses import dataclass

from service.config import EngineConfig
from service.engine.kv_cache import BlockPool
from service.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence, starting at its `computed`."""

    sequence: Sequence
    count: int


class Scheduler:
    """First come, first served: running sequences first, then admissions, within the step's token budget.

    A sequence that finds no free block takes those of the youngest running one, which goes back to the head of the
    queue and is recomputed later from all its tokens; so nothing it has said changes. With `replay` only its prompt is
    recomputed at once, and its own tokens one a step as they were made: for runners that decode with other kernels.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, *, replay: bool = False) -> None:
        self.config = config
        self.pool = pool
        self.replay = replay
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._admitted = 0.0  # when sequences were last looked at for admission
        self.dirty: list[int] = []  # freed blocks that may hold NaN: the engine wipes them before the next step

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """Chunks for one step, their blocks allocated; empty when there is nothing to do."""
        budget = self.config.max_batch_tokens
        chunks: list[Chunk] = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.exhausted:
                index += 1
                continue
            count = min(self._ahead(sequence), budget)
            if (sequence.computed + count > len(sequence.blocks) * self.config.kv_block
                    and not self._make_room(sequence, count)):
                break  # it was the youngest itself and has been preempted
            chunks.append(Chunk(sequence, count))
            budget -= count
            index += 1
        if chunks and self.config.admit_interval:
            # A prefill takes about as long for one short prompt as for many: arrivals are collected while others run.
            now = time.monotonic()
            if now - self._admitted < self.config.admit_interval:
                return chunks
            self._admitted = now
        while self.waiting and budget > 0 and len(self.running) < self.config.max_seqs:
            sequence = self.waiting[0]
            # Admit only what fits whole, plus one block to grow into: half-admitted prompts would evict each other.
            # Alone it is always admitted, since no sequence is longer than the pool.
            whole = self._blocks_for(len(sequence.ids)) + (1 if self.running else 0)
            if whole > self.pool.free:
                break
            count = min(self._ahead(sequence), budget)
            # A replayed sequence takes the blocks of all its tokens at once: others would grow into them meanwhile.
            self._make_room(sequence, len(sequence.ids) if self.replay else count)
            self.waiting.popleft()
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)  # a preempted one keeps its rank
            chunks.append(Chunk(sequence, count))
            budget -= count
        return chunks

    def _ahead(self, sequence: Sequence) -> int:
        """Tokens that may be computed in one step."""
        ahead = sequence.known - sequence.computed
        if not self.replay:
            return ahead
        return min(ahead, max(1, sequence.prompt_length - sequence.computed))

    def roomy(self) -> bool:
        """Whether the running sequences' next chunks certainly find free blocks."""
        if self.pool.free > len(self.running) + self.config.max_batch_tokens // self.config.kv_block:
            return True
        need = sum(self._blocks_for(sequence.known) - len(sequence.blocks) for sequence in self.running)
        return need <= self.pool.free

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.kv_block)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        need = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
        while need > 0:
            taken = self.pool.allocate(need)
            if taken is not None:
                sequence.blocks += taken
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = sequence.checked = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.checked < sequence.computed:
            self.dirty += sequence.blocks
        self.pool.release(sequence.blocks)
        sequence.blocks = []
