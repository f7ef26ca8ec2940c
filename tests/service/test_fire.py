"""The service under fire: bad clients must cost it nothing, and good ones must get an idle server's answers."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import SHARED
from tests.service.conftest import RealServer, start_service
from tests.service.fire import Crowd, Question, Tally, ask_idle, requests_by_state, wait_until_idle


def bodies(tokens: int, count: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests with logprobs, of many prompt lengths."""
    heldout = SHARED / "data" / "mini-heldout.jsonl"
    if heldout.exists():
        questions = [json.loads(line)["question"] for line in heldout.open()][:count]
    else:
        questions = [f"How much is {i} and {i * i}?" * (1 + i % 5) for i in range(count)]
    base = {"max_tokens": tokens, "logprobs": 1, "stop": "\n\n"}
    return [
        {
            **base,
            "prompt": f"Question: {question}\nAnswer:",
            **({"temperature": 0} if i % 3 else {"seed": i, "top_p": 0.9}),
        }
        for i, question in enumerate(questions)
    ]


def check(tally: Tally, server: RealServer, before: Counter[str], logged_from: int) -> dict[str, Any]:
    """Everything that must be true after the last client has left; returns figures for the report."""
    stats = wait_until_idle(server.url)
    assert not tally.wrong, tally.wrong[:5]
    assert tally.sent and set(tally.answered) == tally.sent, f"lost: {len(tally.sent - set(tally.answered))}"
    assert set(tally.answered.values()) == {1} and set(tally.response_ids.values()) == {1}
    ended = requests_by_state(server.url)
    ended.subtract(before)
    assert ended["failed"] == 0 and ended["cancelled"] > 0 and ended["finished"] >= len(tally.sent)
    lines = [json.loads(line) for line in server.log.read_text()[logged_from:].splitlines() if line.startswith("{")]
    ok = Counter(
        line.get("request_id") for line in lines if line.get("status") == 200 and line.get("state") == "finished"
    )
    assert all(ok[request_id] == 1 for request_id in tally.sent), "the log shows a request answered twice or never"
    assert not [line for line in lines if line["level"] == "error"], "the service logged an error"
    return {"honest_requests": len(tally.sent), "by_state": dict(ended), "kv_blocks": stats["kv_total"],
            "largest_logprob_difference": tally.largest_difference, "killed_client_processes": tally.killed_clients,
            "preemptions": stats["preemptions_total"], "seen": dict(sorted(tally.seen.items()))}  # fmt: skip


def test_ten_seconds_under_fire(real_server: RealServer) -> None:
    questions = ask_idle(real_server.url, bodies(tokens=8, count=8))
    before, logged = requests_by_state(real_server.url), len(real_server.log.read_text())
    tally = asyncio.run(Crowd(real_server.url, questions).run(clients=44, seconds=8, killed=1))
    figures = check(tally, real_server, before, logged)
    kinds = {name.partition("/")[0] for name in figures["seen"]}
    assert kinds >= {"honest", "streaming", "leaving", "half_open", "slow_reader", "malformed", "huge", "odd"}
    if real_server.trained:
        assert figures["largest_logprob_difference"] <= 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_minutes_under_fire(real_checkpoint: Path, tmp_path: Path) -> None:
    """500 clients for two minutes; prints the figures of docs/reliability.md as JSON (run with -s)."""
    options = ("--max-waiting", "300", "--kv-blocks", "512", "--max-seqs", "64")
    with start_service(real_checkpoint, tmp_path / "log.jsonl", *options) as server:
        process = psutil.Process(server.process.pid)
        questions = ask_idle(server.url, bodies(tokens=24, count=24))
        # KV pages are first touched, and oneDNN keeps up to 1,024 compiled shapes, while the crowd is new.
        asyncio.run(Crowd(server.url, questions, seed=1).run(clients=500, seconds=60, killed=2))
        wait_until_idle(server.url)
        rss_before, fds_before, threads_before = process.memory_info().rss, process.num_fds(), process.num_threads()
        before, logged = requests_by_state(server.url), len(server.log.read_text())
        began = time.monotonic()
        tally = asyncio.run(Crowd(server.url, questions, seed=2).run(clients=500, seconds=120, killed=3))
        seconds = time.monotonic() - began
        figures = check(tally, server, before, logged)
        time.sleep(8)  # idle keep-alive connections end after five seconds
        rss_after = process.memory_info().rss
        again = ask_idle(server.url, [question.body for question in questions])
        assert [(q.text, q.logprobs) for q in again] == [(q.text, q.logprobs) for q in questions]
        rss = {
            "before_mb": rss_before >> 20,
            "after_mb": rss_after >> 20,
            "change": round(rss_after / rss_before - 1, 4),
        }
        figures |= {"seconds": round(seconds, 1), "rss": rss, "fds": [fds_before, process.num_fds()]}
        figures |= {"threads": [threads_before, process.num_threads()], **kill_the_server(server, questions)}
        print(json.dumps(figures, indent=1))
        assert rss_after <= 1.05 * rss_before
        assert figures["fds"][1] <= figures["fds"][0] + 5


def kill_the_server(server: RealServer, questions: list[Question]) -> dict[str, Any]:
    """SIGKILL under load: clients see a broken connection, never a made-up answer."""
    outcomes: list[str] = []

    def ask(question: Question) -> None:
        try:
            body = {**question.body, "max_tokens": 400, "ignore_eos": True, "stop": None}
            outcomes.append(str(httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code))
        except httpx.TransportError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    server.process.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == len(questions) and "200" not in outcomes
    return {"server_killed": dict(Counter(outcomes))}
