"""Benchmark tools: streams as vLLM's and SGLang's read them; guidellm, aiperf and sgl-eval themselves where installed.

The tools clash with the development environment's packages; install each in its own environment and put their folders
into MOE_PARITY_TOOLS (separated by colons), then run with `-m slow`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED
from tests.service.conftest import RealServer, start_service

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Question: {{ m.content }}\nAnswer:"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
)


def events(server: RealServer, **body: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        lines = client.post("/v1/completions", json={"stream": True, **body}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_vllm_bench_reading(real_server: RealServer) -> None:
    """It needs `root`, at least one event with choices, and takes usage only from events without choices."""
    with real_server.client() as client:
        model = client.get("/v1/models").json()["data"][0]
    body = {"model": model["id"], "prompt": "Question:", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 6,
            "logprobs": None, "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    text, seen, tokens = "", 0, None
    for event in events(real_server, **body):
        if event["choices"]:
            seen += 1
            text += event["choices"][0].get("text") or ""
        elif event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    assert model["root"] and seen == tokens == 6 and text


def test_sglang_bench_reading(real_server: RealServer) -> None:
    """It reads `choices[0]` of every event, so none may be without; it sends best_of 1 and does not ask for usage."""
    body = {"model": real_server.model, "prompt": "Question:", "temperature": 0.0, "best_of": 1, "max_tokens": 5,
            "ignore_eos": True}  # fmt: skip
    assert sum(event["choices"][0]["text"] is not None for event in events(real_server, **body)) == 5


def tool(name: str) -> str:
    path = os.pathsep.join([os.environ.get("MOE_PARITY_TOOLS", ""), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or pytest.skip(f"{name} is not installed (see MOE_PARITY_TOOLS)")


def run(*command: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}  # aiperf reads no folder with it
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def chat_server(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The checkpoint with a chat template that asks as it was trained."""
    folder = tmp_path_factory.mktemp("chat") / "chat-model"
    folder.mkdir()
    for file in real_checkpoint.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((real_checkpoint / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with start_service(folder, folder.parent / "log") as server:
        yield server


@pytest.mark.slow
def test_guidellm(chat_server: RealServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    path = str(Path(chat_server.process.args[4]))  # type: ignore[index]
    run(tool("guidellm"), "run", "--backend", f"kind=openai_http,target={chat_server.url},model={chat_server.model}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={path}", "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output", f"kind=json,path={report}", "--disable-progress")  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 6 and totals["errored"] == 0, totals


@pytest.mark.slow
def test_aiperf(chat_server: RealServer, tmp_path: Path) -> None:
    path = str(Path(chat_server.process.args[4]))  # type: ignore[index]
    run(tool("aiperf"), "profile", "--model", chat_server.model, "--tokenizer", path, "--url", chat_server.url,
        "--endpoint-type", "completions", "--streaming", "--concurrency", "2", "--request-count", "6",
        "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--ui", "none",
        "--output-artifact-dir", str(tmp_path))  # fmt: skip
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == 6 and not figures.get("error_summary")


@pytest.mark.slow
def test_sgl_eval(chat_server: RealServer, tmp_path: Path) -> None:
    heldout = SHARED / "data" / "mini-heldout.jsonl"
    docs = [json.loads(line) for line in heldout.open()][:2] if heldout.exists() else []
    rows = [{"id": i, "problem": d["question"], "expected_answer": d["answer"].rpartition("#### ")[2]}
            for i, d in enumerate(docs)] or [{"id": 0, "problem": "1+1?", "expected_answer": "2"}]  # fmt: skip
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompt.yaml").write_text('user: "{problem}"\n')
    out = run(tool("sgl-eval"), "run", "gsm8k", "--base-url", chat_server.url + "/v1", "--max-tokens", "64",
              "--from-dataset", str(tmp_path / "docs.jsonl"), "--prompt", str(tmp_path / "prompt.yaml"),
              "--temperature", "0", "--num-threads", "2", "--out-dir", str(tmp_path))  # fmt: skip
    assert "error_rate           =  0.00%" in out and f"{len(rows)} examples" in out
