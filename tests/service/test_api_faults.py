"""Engine faults, clients that leave, stall or say half a request: on the fake engine, which can fail on demand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from service.engine.types import EngineError, NonFiniteLogits
from tests.service.conftest import FakeServer
from tests.service.test_api_completions import refusal


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def at_step(step: int, error: EngineError | None) -> Callable[[Any, int], EngineError | None]:
    return lambda request, now: error if now == step else None


@pytest.mark.parametrize(
    ("error", "code"),
    [(NonFiniteLogits("layer 3 of request x gave NaN"), "non_finite_logits"), (EngineError("broke"), "engine_error")],
)
def test_engine_errors_are_500_and_never_text(fake_server: Any, error: EngineError, code: str) -> None:
    late = fake_server(fault=at_step(3, error))
    with late.client() as client:
        answer = refusal(client.post("/v1/completions", json={"prompt": "a"}), 500)
        assert answer["code"] == code and answer["message"] == str(error) and answer["type"] == "server_error"
        lines = client.post("/v1/completions", json={"prompt": "a", "stream": True}).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert lines[-2] == "data: [DONE]" and len(events) == 4 and events[-1]["error"]["code"] == code
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert refusal(client.post("/v1/chat/completions", json=chat), 500)["code"] == code
    at_once = fake_server(fault=at_step(0, error))
    with at_once.client() as client:  # nothing was streamed yet, so the status can still tell
        assert refusal(client.post("/v1/completions", json={"prompt": "a", "stream": True}), 500)["code"] == code


def test_one_failed_sequence_cancels_its_siblings(fake_server: Any) -> None:
    def fault(request: Any, step: int) -> EngineError | None:
        return EngineError("third") if request.request_id.endswith("-2") and step == 1 else None

    server = fake_server(fault=fault, step_seconds=0.01)
    with server.client() as client:
        assert refusal(client.post("/v1/completions", json={"prompt": ["a"] * 5, "max_tokens": 200}), 500)
        until(lambda: not server.engine.live)
        assert len(server.engine.cancelled) == 4
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body", [{"stream": True}, {"stream": False}, {"n": 3, "stream": True}, {"prompt": ["a", "b"]}]
)
def test_a_client_that_leaves_frees_its_blocks(fake_server: Any, body: dict[str, Any]) -> None:
    server: FakeServer = fake_server(step_seconds=0.02)
    payload = json.dumps({"prompt": "hello", "max_tokens": 400, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + payload)
        until(lambda: server.engine.stats().kv_used > 0)
        if body.get("stream"):
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    left = time.monotonic()
    until(lambda: server.engine.stats().kv_used == 0)
    assert time.monotonic() - left < 2
    until(lambda: not server.service.live)
    assert server.service.recent[0].state == "cancelled"
    with server.client() as client:
        assert 'requests_total{endpoint="completions",state="cancelled"} 1.0' in client.get("/metrics").text


def test_http_client_timeout_cancels(fake_server: Any) -> None:
    server: FakeServer = fake_server(step_seconds=0.02)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 500}, timeout=0.3)
    until(lambda: not server.engine.live)


def test_a_dead_engine_fails_waiting_clients(fake_server: Any) -> None:
    server: FakeServer = fake_server(step_seconds=0.05)
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 500}))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: bool(server.engine.live))
    server.engine.die()
    thread.join(8)
    assert answers and refusal(answers[0], 503)


def test_half_open_and_stalled_connections_end(fake_server: Any) -> None:
    server: FakeServer = fake_server(timeouts={"request_timeout": 0.5, "write_timeout": 0.5})
    port = int(server.url.rsplit(":", 1)[1])
    beginnings = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"]
    for beginning in beginnings:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(beginning)
            sock.settimeout(5)
            began = time.monotonic()
            try:
                assert b"200" not in sock.recv(1000)
            except ConnectionResetError:
                pass
            assert 0.3 < time.monotonic() - began < 4
    with server.client() as client:  # keep-alive connections that do finish requests are left alone
        for _ in range(4):
            assert client.get("/health").status_code == 200
            time.sleep(0.2)


def test_slow_but_steady_requests_are_served_trickling_ones_end(fake_server: Any) -> None:
    server: FakeServer = fake_server(timeouts={"request_timeout": 0.4})
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": "a" * 30, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as sock:  # 1.2 s in all, never silent for 0.4 s
        for at in range(0, len(body) + 4, 9):
            whole = head.encode() + b"\r\n\r\n" + body
            start = 0 if at == 0 else len(head) + at
            sock.sendall(whole[start : len(head) + at + 9])
            time.sleep(0.2)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", port)) as sock, pytest.raises((ConnectionError, TimeoutError)):
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\n")  # a header for ever, byte by byte
        began = time.monotonic()
        while time.monotonic() - began < 10:
            sock.sendall(b"x")
            time.sleep(0.1)
    assert 3 < time.monotonic() - began < 9


def test_a_reader_that_stops_reading_is_dropped(fake_server: Any) -> None:
    server: FakeServer = fake_server(timeouts={"write_timeout": 0.5}, max_model_len=50_000)
    payload = json.dumps({"prompt": "a", "max_tokens": 40_000, "stream": True, "logprobs": 5}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                 + str(len(payload)).encode() + b"\r\n\r\n" + payload)  # fmt: skip
    until(lambda: bool(server.engine.submitted))
    until(lambda: bool(server.engine.cancelled), 10)
    sock.close()
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_a_fault_of_ours_is_a_500_with_a_body(fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server: FakeServer = fake_server()
    monkeypatch.setattr("service.api.completions.Job.usage", lambda self: 1 / 0)
    with server.client() as client:
        error = refusal(client.post("/v1/completions", json={"prompt": "a"}), 500)
        assert error["code"] == "internal_error" and "ZeroDivisionError" in error["message"]
        text = client.post("/v1/completions", json={"prompt": "a", "stream": True,
                                                    "stream_options": {"include_usage": True}}).text  # fmt: skip
        assert '"internal_error"' in text and text.endswith("data: [DONE]\n\n")
        assert client.get("/health").status_code == 200
