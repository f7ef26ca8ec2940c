"""A crowd of good and bad clients for one server, and what must still be true of the server afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

ODD_TEXTS = ["\x00", "\u2028", "👩‍👩‍👧‍👦" * 20, "\ufeffabc", "e\u0301" * 50, "\U0010ffff", "שלום", "\r\n\t", "�" * 9]
BAD_BODIES = [b"", b"{", b"[1,2", b'{"prompt": }', b'{"prompt": "\\ud800"}', b"\xff\xfe\x00", b"[" * 50_000]


@dataclass(frozen=True)
class Question:
    """A request body and the choice an idle server gives for it."""

    body: dict[str, Any]
    text: str
    logprobs: list[float]


def ask_idle(url: str, bodies: list[dict[str, Any]]) -> list[Question]:
    """Answers of the server while nobody else asks, one after the other."""
    out = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for body in bodies:
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            out.append(Question(body, choice["text"], choice["logprobs"]["token_logprobs"]))
    return out


@dataclass
class Tally:
    """What the crowd saw."""

    seen: Counter[str] = field(default_factory=Counter)  # kind/outcome
    sent: set[str] = field(default_factory=set)  # X-Request-Ids of honest requests
    answered: Counter[str] = field(default_factory=Counter)
    response_ids: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    largest_difference: float = 0.0
    killed_clients: int = 0

    def check(
        self,
        question: Question,
        request_id: str,
        echoed: str | None,
        response_id: str,
        text: str,
        logprobs: list[float],
    ) -> None:
        """Record one honest answer."""
        self.answered[request_id] += 1
        self.response_ids[response_id] += 1
        if echoed != request_id:
            self.wrong.append(f"X-Request-Id {request_id} came back as {echoed}")
        if text != question.text:
            self.wrong.append(f"{question.body['prompt'][-40:]!r}: idle {question.text!r}, under fire {text!r}")
        else:
            pairs = zip(logprobs, question.logprobs, strict=True)
            self.largest_difference = max([self.largest_difference, *(abs(a - b) for a, b in pairs)])


class Crowd:
    """Runs clients of many kinds against `url` until the time is over; each finishes what it began."""

    def __init__(self, url: str, questions: list[Question], seed: int = 0) -> None:
        self.url, self.questions, self.tally = url, questions, Tally()
        self.port = int(url.rpartition(":")[2])
        self.rng = random.Random(seed)
        self.end = 0.0

    async def run(self, clients: int, seconds: float, killed: int = 0) -> Tally:
        """`clients` concurrent clients for `seconds`, `killed` client processes killed with SIGKILL on the way."""
        self.end = time.monotonic() + seconds
        kinds = [self.honest, self.honest, self.streaming, self.streaming, self.leaving, self.leaving, self.half_open,
                 self.slow_reader, self.malformed, self.huge, self.odd]  # fmt: skip
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
            tasks = [asyncio.create_task(self._loop(kinds[i % len(kinds)], session)) for i in range(clients)]
            tasks += [asyncio.create_task(self.killed_client()) for _ in range(killed)]
            await asyncio.gather(*tasks)
        return self.tally

    async def _loop(self, kind: Any, session: aiohttp.ClientSession) -> None:
        await asyncio.sleep(self.rng.random() * min(1.0, max(self.end - time.monotonic(), 0) / 2))
        while time.monotonic() < self.end:
            try:
                outcome = await kind(session)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                outcome = type(error).__name__
            self.tally.seen[f"{kind.__name__}/{outcome}"] += 1

    async def honest(self, session: aiohttp.ClientSession) -> str:
        """Waits for the whole answer and compares it with the idle server's; retries when told to."""
        question, request_id = self.rng.choice(self.questions), uuid.uuid4().hex
        self.tally.sent.add(request_id)
        while True:
            async with session.post(self.url + "/v1/completions", json=question.body,
                                    headers={"X-Request-Id": request_id}) as response:  # fmt: skip
                body = await response.json()
                if response.status == 429:
                    self.tally.seen["honest/429"] += 1
                    await asyncio.sleep(float(response.headers["Retry-After"]) * (0.5 + self.rng.random()))
                    continue
                if response.status != 200:
                    self.tally.wrong.append(f"status {response.status}: {body}")
                    return str(response.status)
                choice = body["choices"][0]
                self.tally.check(
                    question,
                    request_id,
                    response.headers.get("X-Request-Id"),
                    body["id"],
                    choice["text"],
                    choice["logprobs"]["token_logprobs"],
                )
                return "200"

    async def streaming(self, session: aiohttp.ClientSession) -> str:
        """The same, as a stream."""
        question, request_id = self.rng.choice(self.questions), uuid.uuid4().hex
        self.tally.sent.add(request_id)
        while True:
            text, logprobs, ids, done = "", [], set(), 0
            async with session.post(self.url + "/v1/completions", json={**question.body, "stream": True},
                                    headers={"X-Request-Id": request_id}) as response:  # fmt: skip
                if response.status == 429:
                    self.tally.seen["streaming/429"] += 1
                    await asyncio.sleep(float(response.headers["Retry-After"]) * (0.5 + self.rng.random()))
                    continue
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        done += 1
                    elif line.startswith(b"data: "):
                        chunk = json.loads(line[6:])
                        ids.add(chunk["id"])
                        text += chunk["choices"][0]["text"]
                        logprobs += chunk["choices"][0]["logprobs"]["token_logprobs"]
            if response.status != 200 or done != 1 or len(ids) != 1:
                self.tally.wrong.append(f"stream with status {response.status}, {done} DONE, ids {ids}")
                return "broken"
            self.tally.check(question, request_id, response.headers.get("X-Request-Id"), ids.pop(), text, logprobs)
            return "200"

    async def leaving(self, session: aiohttp.ClientSession) -> str:
        """Asks for a long answer and goes away: before it, or in the middle of the stream."""
        stream = self.rng.random() < 0.7
        long = {"max_tokens": 400, "ignore_eos": True, "stop": None, "n": self.rng.choice((1, 3)), "stream": stream}
        body = {**self.rng.choice(self.questions).body, **long}
        try:
            async with asyncio.timeout(0.05 + 2 * self.rng.random()):
                async with session.post(self.url + "/v1/completions", json=body) as response:
                    if response.status == 429:
                        await asyncio.sleep(0.5)
                        return "429"
                    wanted = self.rng.randrange(1, 20)
                    async for _ in response.content:
                        wanted -= 1
                        if wanted < 0:
                            response.close()
                            return "left the stream"
        except TimeoutError:
            return "left before the end"
        return "finished early"

    async def half_open(self, session: aiohttp.ClientSession) -> str:
        """Opens a connection, says part of a request, and stays silent."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        parts = [
            b"",
            b"POST /v1/comp",
            b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt',
        ]
        writer.write(self.rng.choice(parts))
        await asyncio.sleep(min(1 + 4 * self.rng.random(), max(self.end - time.monotonic(), 0.1)))
        if self.rng.random() < 0.5:
            writer.transport.abort()  # a reset instead of a polite end
        writer.close()
        return "held"

    async def slow_reader(self, session: aiohttp.ClientSession) -> str:
        """Reads its stream a few bytes at a time through a small buffer, and then leaves."""
        body = json.dumps({**self.rng.choice(self.questions).body, "max_tokens": 200, "ignore_eos": True, "stop": None,
                           "stream": True, "logprobs": 5}).encode()  # fmt: skip
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.closing(sock):
            await loop.sock_connect(sock, ("127.0.0.1", self.port))
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            await loop.sock_sendall(sock, f"{head}{len(body)}\r\n\r\n".encode() + body)
            for _ in range(self.rng.randrange(5, 40)):
                if time.monotonic() > self.end:
                    break
                await asyncio.sleep(0.1)
                with contextlib.suppress(BlockingIOError):
                    if not sock.recv(64):
                        break
        return "left"

    async def malformed(self, session: aiohttp.ClientSession) -> str:
        """Sends what is no JSON and expects a 400."""
        async with session.post(self.url + "/v1/completions", data=self.rng.choice(BAD_BODIES),
                                headers={"Content-Type": "application/json"}) as response:  # fmt: skip
            if response.status != 400 or "error" not in await response.json():
                self.tally.wrong.append(f"malformed JSON gave {response.status}")
        await asyncio.sleep(0.2 * self.rng.random())
        return str(response.status)

    async def huge(self, session: aiohttp.ClientSession) -> str:
        """A prompt of 10 MB: refused with both numbers, never cut."""
        await asyncio.sleep(5 * self.rng.random())
        async with session.post(self.url + "/v1/completions", json={"prompt": "word " * 2_000_000}) as response:
            body = await response.json()
            if response.status != 429 and (
                response.status != 400 or body["error"]["code"] != "context_length_exceeded"
            ):
                self.tally.wrong.append(f"a 10 MB prompt gave {response.status} {str(body)[:200]}")
        return str(response.status)

    async def odd(self, session: aiohttp.ClientSession) -> str:
        """Unicode edge cases, echoed whole."""
        text = self.rng.choice(ODD_TEXTS)
        body = {"prompt": text, "echo": True, "max_tokens": 3, "temperature": 1}
        async with session.post(self.url + "/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status == 200 and not answer["choices"][0]["text"].startswith(text):
                self.tally.wrong.append(f"{text!r} was echoed as {answer['choices'][0]['text']!r}")
            elif response.status not in (200, 429):
                self.tally.wrong.append(f"{text!r} gave {response.status} {answer}")
        return str(response.status)

    async def killed_client(self) -> None:
        """A client process with streams open, killed with SIGKILL, again and again."""
        code = (
            "import http.client, json, sys\n"
            "host, body = sys.argv[1], sys.argv[2]\n"
            "all = [http.client.HTTPConnection(host) for _ in range(8)]\n"
            "for c in all: c.request('POST', '/v1/completions', body, {'Content-Type': 'application/json'})\n"
            "for c in all: c.getresponse().read(10)\n"
            "print('up', flush=True)\n"
            "import time; time.sleep(60)\n"
        )
        body = {**self.questions[0].body, "max_tokens": 400, "ignore_eos": True, "stop": None, "stream": True}
        while time.monotonic() < self.end:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, self.url.removeprefix("http://"), json.dumps(body), stdout=subprocess.PIPE
            )
            await asyncio.sleep(min(0.5 + 2 * self.rng.random(), max(self.end - time.monotonic(), 0.3)))
            process.send_signal(signal.SIGKILL)
            await process.wait()
            self.tally.killed_clients += 1


def wait_until_idle(url: str, seconds: float = 60) -> dict[str, Any]:
    """The engine's statistics once nothing runs, waits or holds a block; fails when that does not come."""
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=30) as client:
        while True:
            stats = client.get("/server_info").json()["stats"]
            if not (stats["running"] or stats["waiting"] or stats["kv_used"]):
                return stats
            assert time.monotonic() < end, f"still busy {seconds} s after the last client left: {stats}"
            time.sleep(0.1)


def requests_by_state(url: str) -> Counter[str]:
    """`moe_parity_requests_total` by state."""
    out: Counter[str] = Counter()
    for line in httpx.get(url + "/metrics", timeout=30).text.splitlines():
        if line.startswith("moe_parity_requests_total{"):
            out[line.partition('state="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return out
