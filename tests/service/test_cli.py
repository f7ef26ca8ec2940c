"""The service's command line: one-line errors with exit code 2, readiness line, graceful drain, kill -9."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.__main__ import main
from service.api.server import bind
from service.errors import StartupError
from tests.service.conftest import RealServer, build_tokenizer, start_service


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "service", *options], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})  # fmt: skip


def refused(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """Run `main` in this process and return its one line on stderr."""
    capfd.readouterr()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        code = main([*options])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:  # main sends logs to the stderr of this moment
        root.handlers[:], root.level = handlers, level
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("{")]
    assert code == 2 and out == "" and len(errors) == 1 and errors[0].startswith("service: error: "), (code, out, err)
    return errors[0]


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A tiny checkpoint of one's own, with a tokenizer."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    return build_tokenizer(tmp_path / "model", template=None)


def test_usage_errors(capfd: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    model = ("--model", str(checkpoint))
    assert "--variant" in refused(capfd, *model)
    assert "--help" in refused(capfd)
    assert "no such folder" in refused(capfd, "--model", "/no/where", "--variant", "bf16/reference")
    assert "config.json" in refused(capfd, "--model", str(checkpoint.parent), "--variant", "bf16/reference")
    unknown = refused(capfd, *model, "--variant", "fp9/magic", "--port", "0")
    assert "fp9/magic" in unknown and "fp8/emulated" in unknown and "nvfp4/emulated" in unknown
    assert "bias" in refused(capfd, *model, "--variant", "fp8/emulated:bais=bf16", "--port", "0")
    assert "65535" in refused(capfd, *model, "--variant", "bf16/reference", "--port", "70000")
    assert "at least 1" in refused(capfd, *model, "--variant", "bf16/reference", "--max-seqs", "0")
    assert "never runs code" in refused(capfd, *model, "--variant", "bf16/reference", "--trust-remote-code")
    assert "float16" in refused(capfd, *model, "--variant", "bf16/reference", "--dtype", "float16")


def test_occupied_port(capfd: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        began = time.monotonic()
        line = refused(capfd, "--model", str(checkpoint), "--variant", "bf16/reference", "--port", port)
    assert port in line and "in use" in line and "--port" in line
    assert time.monotonic() - began < 10  # before any weights are read


def test_unreachable_host(capfd: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    options = ("--model", str(checkpoint), "--variant", "bf16/reference")
    assert "203.0.113.5" in refused(capfd, *options, "--host", "203.0.113.5")
    assert "no-such-host" in refused(capfd, *options, "--host", "no-such-host.invalid")


def test_bad_checkpoints(capfd: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    options = ("--model", str(checkpoint), "--variant", "bf16/reference", "--port", "0")
    weights = next(checkpoint.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert weights.name in refused(capfd, *options)
    weights.write_bytes(whole[:5])
    assert weights.name in refused(capfd, *options)
    weights.write_bytes(whole)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "llama", "architectures": ["Llama"]}))
    assert "llama" in refused(capfd, *options)
    (checkpoint / "config.json").write_text("{")
    assert "config.json" in refused(capfd, *options)
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(capfd, *options)


def test_a_model_without_moe(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "dense")
    build_tokenizer(tmp_path / "dense", template=None)
    line = refused(capfd, "--model", str(tmp_path / "dense"), "--variant", "bf16/reference", "--port", "0")
    assert "qwen2" in line


def test_as_a_process_errors_are_one_line_and_nothing_stays(checkpoint: Path) -> None:
    next(checkpoint.glob("*.safetensors")).write_bytes(b"short")
    done = run("--model", str(checkpoint), "--variant", "bf16/reference", "--port", "0")
    assert done.returncode == 2 and done.stdout == ""
    assert [line[:15] for line in done.stderr.splitlines()] == ["service: error:"], done.stderr


def test_serve_drain_and_exit_code(checkpoint: Path, tmp_path: Path) -> None:
    with start_service(checkpoint, tmp_path / "log", "--served-model-name", "tiny", "--drain-seconds", "20") as server:
        assert server.url.startswith("http://127.0.0.1:")
        with server.client() as client:
            fingerprint = client.get("/fingerprint").json()
            assert fingerprint["variant"]["requested"] == "bf16/reference" and fingerprint["weights_sha256"]
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        body = {"prompt": [[5, 6, 7]], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        thread, answers = in_background(server.url, body, {})
        wait_until_running(server, {})
        server.process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 400
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
    with pytest.raises(StartupError), socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))) as free:
        bind("127.0.0.1", free.getsockname()[1])  # the port was free again, and is now taken


def test_a_short_drain_fails_what_is_left(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_PARITY_API_KEY", "k1-secret")
    key = {"authorization": "Bearer k1-secret"}
    with start_service(checkpoint, tmp_path / "log", "--drain-seconds", "0", "--kv-blocks", "5000") as server:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        body = {"prompt": [[5, 6, 7]], "max_tokens": 1000, "ignore_eos": True, "n": 20, "temperature": 1}
        thread, answers = in_background(server.url, body, key)
        wait_until_running(server, key)
        server.process.send_signal(signal.SIGINT)
        thread.join(30)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_stopped"
        assert server.process.wait(20) == 0
    assert "k1-secret" not in (tmp_path / "log").read_text()


def in_background(
    url: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a completion request from a thread; its answer lands in the list."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def wait_until_running(server: RealServer, headers: dict[str, str]) -> None:
    """Until the engine works on something."""
    for _ in range(500):
        if httpx.get(server.url + "/server_info", headers=headers).json()["stats"]["running"]:
            return
        time.sleep(0.02)
    raise AssertionError("the request did not start")
