"""An OpenAI-style server that answers from a gold table, with faults on request; in a thread or as a process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

QUESTION = re.compile(r"Question: (.*?)\nAnswer:", re.DOTALL)


def read_gold(path: Path) -> dict[str, str]:
    """question -> answer of a JSONL file or of every JSONL file in a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    return {row["question"]: row["answer"] for row in rows}


def share(*parts: str) -> float:
    """A number in [0, 1) that depends on the parts only."""
    return int(hashlib.sha256(":".join(parts).encode()).hexdigest()[:12], 16) / 16**12


@dataclass
class Mock:
    """Behaviour. A fault is `KIND@WHEN`: the n-th POST (`500@3`), a range (`500@3-5`), all (`500@*`), from n on
    (`die@7-`), or every attempt at a share of the questions (`empty@10%`)."""

    gold: dict[str, str]
    variant: str = "fp8/mock"
    wrong: float = 0.0
    faults: tuple[str, ...] = ()
    delay: float = 0.0
    fingerprint: bool = True
    resolved: str | None = None
    fallbacks: int = 0
    change_after: int | None = None
    weights: str = "w" * 64
    max_model_len: int = 4096
    model: str = "mock"
    extra_tokens: int = 0
    double_bos: bool = False
    reasoning: bool = False
    api_key: str | None = None
    versions: str = "1"
    bodies: list[bytes] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    posts: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    keep_bodies: bool = True

    def fault(self, number: int, question: str) -> str | None:
        """The fault for the n-th POST, if any."""
        for spec in self.faults:
            kind, _, when = spec.partition("@")
            if when == "*":
                return kind
            if when.endswith("%"):
                if share(kind, question) < float(when[:-1]) / 100:
                    return kind
            elif "-" in when:
                low, high = when.split("-")
                if int(low) <= number <= (int(high) if high else 10**9):
                    return kind
            elif number == int(when):
                return kind
        return None

    def answer(self, question: str) -> str:
        """Gold, or gold plus one in the last line for a share of the questions that depends on the variant."""
        gold = self.gold.get(question, "I do not know.\n#### 0")
        if share("wrong", self.variant, question) < self.wrong:
            head, _, last = gold.rpartition("#### ")
            return f"{head}#### {int(last.replace(',', '')) + 1}"
        return gold

    def tokens(self, text: str) -> list[int]:
        """Four characters a token, after a BOS (7) or two."""
        bos = [7, 7] if self.double_bos else [7]
        return bos + [100 + i % 50 for i in range(len(text) // 4)] + [9] * self.extra_tokens

    def card(self) -> dict[str, Any]:
        """`/fingerprint` as the service gives it."""
        changed = self.change_after is not None and self.posts >= self.change_after
        return {
            "schema": 1,
            "model": self.model,
            "path": "/somewhere",
            "weights_sha256": self.weights,
            "tokenizer_sha256": "t" * 64,
            "format": "fp8",
            "variant": {
                "requested": self.variant,
                "resolved": {"1": self.resolved or self.variant, "2": self.variant},
                "fallbacks": self.fallbacks,
            },
            "versions": {"moe_parity": "2" if changed else self.versions},
            "device": "cpu",
            "device_name": "mock",
            "dtype": "bfloat16",
            "max_model_len": self.max_model_len,
            "engine": {"kv_block": 16},
            "determinism": {"batch_invariant": True, "probe": "mock"},
            "id": "x" * 64,
        }


def app(mock: Mock) -> web.Application:
    """The routes."""
    routes = web.RouteTableDef()

    def error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
        body = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
        return web.json_response(body, status=status, headers=headers)

    @routes.get("/health")
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    @routes.get("/v1/models")
    async def models(request: web.Request) -> web.Response:
        if mock.api_key and request.headers.get("Authorization") != f"Bearer {mock.api_key}":
            return error(401, "wrong key")
        card = {"id": mock.model, "object": "model", "root": mock.model, "max_model_len": mock.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    @routes.get("/fingerprint")
    async def fingerprint(request: web.Request) -> web.Response:
        return web.json_response(mock.card()) if mock.fingerprint else error(404, "no such route")

    @routes.post("/tokenize")
    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("prompt") or "".join(m["content"] for m in body.get("messages", []))
        tokens = mock.tokens(text)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": mock.max_model_len})

    @routes.post("/v1/completions")
    @routes.post("/v1/chat/completions")
    async def complete(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        mock.posts += 1
        number = mock.posts
        if mock.keep_bodies:
            mock.bodies.append(raw)
        request_id = request.headers.get("X-Request-Id", "")
        mock.ids[request_id] += 1
        if mock.api_key and request.headers.get("Authorization") != f"Bearer {mock.api_key}":
            return error(401, "wrong key")
        body = json.loads(raw)
        chat = request.path.endswith("/chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        whole = "".join(m["content"] for m in body["messages"]) if chat else prompt
        question = QUESTION.findall(prompt)[-1]
        mock.asked[question] += 1
        mock.in_flight += 1
        mock.most_in_flight = max(mock.most_in_flight, mock.in_flight)
        try:
            if mock.delay:
                await asyncio.sleep(mock.delay)
            return await reply(request, body, chat, whole, question, number, request_id)
        finally:
            mock.in_flight -= 1

    async def reply(
        request: web.Request, body: dict[str, Any], chat: bool, whole: str, question: str, number: int, request_id: str
    ) -> web.StreamResponse:
        kind = mock.fault(number, question)
        text, finish = mock.answer(question), "stop"
        prompt_tokens = len(mock.tokens(whole))
        if prompt_tokens + body["max_tokens"] > mock.max_model_len:
            return error(400, f"{prompt_tokens} prompt tokens + {body['max_tokens']} > {mock.max_model_len}")
        if kind == "die":
            os._exit(3)
        if kind == "drop":
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind in ("500", "503", "400"):
            return error(int(kind), f"injected {kind}")
        if kind == "429":
            return error(429, "slow down", {"Retry-After": "0.2"})
        if kind == "empty":
            text = ""
        if kind == "garbage":
            text = "!!!! !!!! !!!!"
        if kind == "truncate":
            text, finish = text[: len(text) // 2], "length"
        if kind == "think":
            text, finish = "<think>first 7 and then " + text.split("####")[0] + "4", "length"
        if kind in ("runon", "runonlength"):
            finish = "length" if kind == "runonlength" else finish
            text += "\n\nQuestion: and 3 cats?\nAnswer: 3\n#### 3"
        if kind == "wrong":
            text = "#### 123456789"
        if kind == "batch":  # what a kernel that is not batch-invariant does: other words, same answer
            text = "So. " + text
        if kind == "nofinish":
            finish = ""
        pieces = re.findall(r"\S+\s*|\s+", text)
        choice: dict[str, Any] = {
            "index": 1 if kind == "index" else 0,
            "finish_reason": finish or None,
            "stop_reason": "\n\nQuestion:" if finish == "stop" else None,
        }
        values = [-round(share(p, question), 4) for p in pieces]
        if kind == "nan" and values:
            values[0] = float("nan")
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if mock.reasoning:
                message["reasoning_content"] = "let me see: 5"
                if kind == "truncate":
                    message["content"] = None
            choice["message"] = message
            if body.get("logprobs"):
                choice["logprobs"] = {
                    "content": [
                        {
                            "token": p,
                            "logprob": v,
                            "top_logprobs": [{"token": p, "logprob": v}, {"token": "?", "logprob": v - 1}],
                        }
                        for p, v in zip(pieces, values, strict=True)
                    ]
                }
        else:
            choice["text"] = text
            if body.get("logprobs"):
                choice["logprobs"] = {
                    "tokens": pieces,
                    "token_logprobs": values,
                    "top_logprobs": [{p: v, "?": v - 1} for p, v in zip(pieces, values, strict=True)],
                }
            elif kind == "nan":
                choice["score"] = float("nan")
        answer = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "model": mock.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(pieces),
                "total_tokens": prompt_tokens + len(pieces),
            },
        }
        data = json.dumps(answer).encode()
        headers = {"X-Request-Id": request_id}
        if kind == "wrongid":  # an answer that got mixed up with another request's
            await asyncio.sleep(0.05)
            headers["X-Request-Id"] = next((i for i in mock.ids if i != request_id), request_id)
        if kind == "gateway":  # a proxy that gives ids of its own
            headers["X-Request-Id"] = f"gateway-{number}"
        if kind == "half":
            data = data[: len(data) // 2]
        return web.Response(body=data, content_type="application/json", headers=headers)

    made = web.Application(client_max_size=64 << 20)
    made.add_routes(routes)
    return made


@contextlib.contextmanager
def running(mock: Mock) -> Iterator[str]:
    """The mock in a thread of this process; gives its base URL."""
    loop = asyncio.new_event_loop()
    started: list[str] = []
    ready = threading.Event()

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(app(mock), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        started.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def target() -> None:
        asyncio.set_event_loop(loop)
        runners.append(loop.run_until_complete(serve()))
        loop.run_forever()

    runners: list[web.AppRunner] = []
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("mock server did not start")
    try:
        yield started[0]
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def main() -> None:
    """As a process: `python mock_server.py --gold F --variant V` prints "listening on URL"."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gold", type=Path, required=True)
    parser.add_argument("--variant", default="fp8/mock")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--wrong", action="append", default=[], help="VARIANT=SHARE")
    parser.add_argument("--fault", action="append", default=[], help="VARIANT=KIND@WHEN")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--fail-start", default="", help="print this and exit 2")
    parser.add_argument("--count", type=Path, help="append one line per POST")
    parser.add_argument("--child", action="store_true", help="start a grandchild that outlives SIGTERM")
    options = parser.parse_args()
    if options.fail_start:
        raise SystemExit(options.fail_start)
    if options.child:
        import subprocess
        import sys

        stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", stubborn])

    def mine(pairs: list[str]) -> list[str]:
        return [p.partition("=")[2] for p in pairs if options.variant.startswith(p.partition("=")[0])]

    mock = Mock(
        read_gold(options.gold),
        options.variant,
        wrong=float((mine(options.wrong) or ["0"])[0]),
        faults=tuple(mine(options.fault)),
        delay=options.delay,
        keep_bodies=False,
    )
    made = app(mock)
    if options.count:

        @web.middleware
        async def count(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.method == "POST" and "completions" in request.path:
                with options.count.open("a") as file:
                    file.write(f"{options.variant}\t{time.time()}\n")
            answer: web.StreamResponse = await handler(request)
            return answer

        made.middlewares.append(count)

    async def serve() -> None:
        runner = web.AppRunner(made, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
