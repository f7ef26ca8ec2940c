"""Fixtures of the service tests: a byte-level tokenizer, an app on a fake engine, and a real server process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from service.api.app import create_app
from service.api.prompts import PromptEncoder
from service.api.server import Server, protocol_class
from service.api.state import ApiSettings, Loaded, Service
from service.tokenizer import Tokenizer
from tests.conftest import SHARED
from tests.service.fake_engine import FakeEngine

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "</think>{% else %}<think>{% endif %}{% endif %}"
)


def build_tokenizer(out: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level tokenizer without merges: 256 byte tokens, an end-of-text token and two role tokens."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    rust = Rust(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>"])
    out.mkdir(parents=True, exist_ok=True)
    rust.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template:
        config["chat_template"] = template
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with a chat template that opens `<think>`."""
    return Tokenizer.load(build_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bytes"))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, without a chat template."""
    return Tokenizer.load(build_tokenizer(tmp_path_factory.mktemp("tokenizer") / "plain", template=None))


FINGERPRINT = {
    "schema": 1,
    "format": "bf16",
    "weights_sha256": "0" * 64,
    "device": "cpu",
    "device_name": "test",
    "dtype": "bfloat16",
    "variant": {"requested": "bf16/reference", "resolved": {"1": "bf16/reference"}, "fallbacks": 0},
    "engine": {},
    "id": "f" * 64,
}


@dataclass
class FakeServer:
    """An app on a fake engine behind a real socket."""

    url: str
    engine: FakeEngine
    service: Service

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **kwargs)


@pytest.fixture(scope="session")
def _quick_server(byte_tokenizer: Tokenizer) -> Iterator[FakeServer]:
    yield from _serve_fake(byte_tokenizer)


@pytest.fixture
def server(_quick_server: FakeServer) -> FakeServer:
    """A server with default settings, shared by tests that change nothing about it; its records are emptied."""
    engine = _quick_server.engine
    assert not engine.live, "an earlier test left sequences in the engine"
    engine.submitted.clear()
    engine.cancelled.clear()
    return _quick_server


def _serve_fake(
    tokenizer: Tokenizer,
    settings: dict[str, Any] | None = None,
    ready: bool = True,
    max_model_len: int = 512,
    timeouts: dict[str, float] | None = None,
    **options: Any,
) -> Iterator[FakeServer]:
    engine = FakeEngine(tokenizer, **options)
    names = {"model_name": "fake", "model_path": "/models/fake", "variant": "bf16/reference"}
    service = Service(ApiSettings(**{**names, **(settings or {})}))
    if ready:
        vocab = len(tokenizer)
        service.ready(Loaded(engine, tokenizer, PromptEncoder(tokenizer), max_model_len, vocab, FINGERPRINT))
    server, thread, port = serve_in_thread(service, **(timeouts or {}))
    yield FakeServer(f"http://127.0.0.1:{port}", engine, service)
    engine.stop()
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def fake_server(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., FakeServer]]:
    """`fake_server(settings={...}, tokenizer=..., **engine options)` starts a server in a thread."""
    running = []

    def start(tokenizer: Tokenizer = byte_tokenizer, **options: Any) -> FakeServer:
        running.append(_serve_fake(tokenizer, **options))
        return next(running[-1])

    yield start
    for one in running:
        next(one, None)


def serve_in_thread(service: Service, **timeouts: float) -> tuple[uvicorn.Server, threading.Thread, int]:
    """Serve an app on a free port with the production protocol class."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        http=protocol_class(**timeouts),
        timeout_graceful_shutdown=2,
        lifespan="on",
    )
    server = Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server thread died at start"
        time.sleep(0.01)
    return server, thread, sock.getsockname()[1]


@dataclass
class RealServer:
    """The service as its own process, on a real engine."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    model: str
    tokenizer: Tokenizer
    trained: bool  # the mini checkpoint, which answers sensibly; else a tiny random one

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **kwargs)

    def post(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        with self.client() as client:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return client.get("/server_info").json()["stats"]


@contextmanager
def start_service(path: Path, log: Path, *options: str, variant: str = "bf16/reference") -> Iterator[RealServer]:
    """Run `python -m service` on a free port until the block ends; fails with the log when it does not start."""
    command = [sys.executable, "-m", "service", "--model", str(path), "--variant", variant, "--port", "0", *options]
    # One thread: with two, every barrier waits for whatever else runs on the machine's cores.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("listening on http://"), f"{line!r}\n{log.read_text()[-3000:]}"
            url = line.removeprefix("listening on ").strip()
            yield RealServer(url, process, log, path.name, Tokenizer.load(path), path.name == "glm4moe-mini")
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.fixture(scope="session")
def real_checkpoint(request: pytest.FixtureRequest) -> Path:
    """The mini checkpoint when it is there, else the tiny random one with a byte-level tokenizer."""
    mini = SHARED / "checkpoints" / "glm4moe-mini"
    if mini.exists():
        return mini
    return build_tokenizer(request.getfixturevalue("tiny_checkpoint"), template=None)


@pytest.fixture(scope="session")
def real_server(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all client tests of a session."""
    with start_service(real_checkpoint, tmp_path_factory.mktemp("service") / "log.jsonl") as server:
        yield server
