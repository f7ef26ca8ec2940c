"""Asks the missing items of an arm and writes each answer to the journal before it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.client import Ask, Client, Endpoint, Retries, request_body
from evals.journal import Journal, item_key
from evals.records import Protocol, sha256_hex
from evals.replies import Reply

ALONE = "#alone"  # suffix of the rows that asked a few items one at a time


@dataclass(frozen=True)
class Job:
    """One arm in one repeat: where to ask, who answers (for the keys), and how to tell that it is dead."""

    arm: str
    repeat: int
    endpoint: Endpoint
    identity: Mapping[str, Any]
    seed: int
    dead: Callable[[], str | None] | None = field(default=None, compare=False)

    def key(self, protocol: Protocol, ask: Ask) -> str:
        """The journal key of an item for this job."""
        return item_key(ask.prompt, request_body(protocol, ask, self.endpoint.model, self.seed), self.identity)

    def missing(self, protocol: Protocol, asks: Sequence[Ask], journal: Journal) -> list[Ask]:
        """Items without a final answer; raises `JournalError` when another server gave one."""
        return [a for a in asks if journal.get(self.arm, self.repeat, a.item, self.key(protocol, a)) is None]


def row(job: Job, ask: Ask, key: str, reply: Reply) -> dict[str, Any]:
    """One journal line."""
    line: dict[str, Any] = {
        "key": key, "arm": job.arm, "repeat": job.repeat, "item": ask.item, "doc_id": ask.doc_id,
        "prompt_sha256": sha256_hex(ask.prompt), "status": reply.status, "text": reply.text,
        "finish_reason": reply.finish_reason, "matched_stop": reply.matched_stop,
        "prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens,
        "seconds": round(reply.seconds, 4), "attempts": reply.attempts, "error": reply.error,
    }
    optional = {
        "model": reply.model, "reasoning": reply.reasoning, "logprobs": reply.logprobs,
        "tokens": reply.tokens, "gaps": reply.gaps,
    }
    return line | {k: v for k, v in optional.items() if v is not None}


class _Recorder:
    """Writes rows that became ready together with one fsync; `put` returns when its row is on the disk."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pending: list[tuple[dict[str, Any], asyncio.Future[None]]] = []

    async def put(self, line: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._pending:
            loop.call_soon(self.flush)
        self._pending.append((line, done))
        await done

    def flush(self) -> None:
        batch, self._pending = self._pending, []
        try:
            self._journal.append([line for line, _ in batch])
        except Exception as error:  # a full disk must stop the workers, not the loop's callback
            for _, done in batch:
                if not done.done():
                    done.set_exception(error)
            return
        for _, done in batch:
            if not done.done():
                done.set_result(None)


async def _collect(
    job: Job, protocol: Protocol, asks: Sequence[Ask], journal: Journal, retries: Retries,
    concurrency: int, on_row: Callable[[Job, dict[str, Any]], None],
) -> None:
    recorder = _Recorder(journal)
    client = Client(
        job.endpoint, protocol, seed=job.seed, scope=f"{job.arm}:{job.repeat}", retries=retries, dead=job.dead
    )

    async def sink(ask: Ask, reply: Reply) -> None:
        line = row(job, ask, job.key(protocol, ask), reply)
        await recorder.put(line)
        on_row(job, line)

    try:
        async with client:
            await client.ask_all(asks, sink, min(concurrency, len(asks)))
    finally:
        recorder.flush()


def collect(
    jobs: Sequence[Job],
    protocol: Protocol,
    asks: Sequence[Ask],
    journal: Journal,
    *,
    make_retries: Callable[[], Retries] = Retries,
    concurrency: int | None = None,
    on_row: Callable[[Job, dict[str, Any]], None] = lambda job, line: None,
) -> None:
    """Ask every job's missing items; several jobs run side by side, each with the protocol's concurrency."""
    width = concurrency or protocol.concurrency
    work = [(job, missing) for job in jobs if (missing := job.missing(protocol, asks, journal))]
    if not work:
        return

    async def main() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for job, missing in work:
                    group.create_task(
                        _collect(job, protocol, missing, journal, make_retries(), width, on_row)
                    )
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    asyncio.run(main())
