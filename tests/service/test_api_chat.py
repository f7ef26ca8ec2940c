"""/v1/chat/completions on the fake engine: template, reasoning split, streams, logprobs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.reasoning import ReasoningSplitter
from service.tokenizer import Tokenizer
from tests.service.conftest import FakeServer
from tests.service.test_api_completions import refusal

HI = [{"role": "user", "content": "hi"}]


def chat(server: FakeServer, **body: Any):
    with server.client() as client:
        return client.post("/v1/chat/completions", json={"model": "fake", "messages": HI, "temperature": 0, **body})


def stream(server: FakeServer, **body: Any) -> list[dict[str, Any]]:
    response = chat(server, stream=True, **body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def prompt_of(server: FakeServer, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def test_template_and_kwargs(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    chat(server, max_tokens=1)
    assert prompt_of(server, byte_tokenizer) == "<|user|>hi<|assistant|><think>"
    chat(server, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(server, byte_tokenizer) == "<|user|>hi<|assistant|></think>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    chat(server, max_tokens=1, messages=parts, add_generation_prompt=False)
    assert prompt_of(server, byte_tokenizer) == "<|user|>ab"
    go_on = [*HI, {"role": "assistant", "content": "<think>so"}]
    chat(server, max_tokens=1, messages=go_on, continue_final_message=True)
    assert prompt_of(server, byte_tokenizer) == "<|user|>hi<|assistant|><think>so"


def test_default_max_tokens_is_what_is_left(fake_server: Any) -> None:
    server = fake_server(max_model_len=64)
    answer = chat(server).json()
    assert answer["usage"]["total_tokens"] == 64 and answer["choices"][0]["finish_reason"] == "length"
    assert refusal(chat(server, max_completion_tokens=64))["code"] == "context_length_exceeded"
    assert chat(server, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (True, "so 2+2\n</think>\n\n4", "so 2+2\n", "\n\n4"),
        (True, "cut off in <thi", "cut off in <thi", ""),
        (False, "<think>again</think>4", "again", "4"),
        (False, "4 <think>x</think>", None, "4 <think>x</think>"),
        (False, "<thin", None, "<thin"),
    ],
)
def test_reasoning_is_split_whole_and_streamed(
    fake_server: Any, byte_tokenizer: Tokenizer, thinking: bool, text: str, reasoning: str | None, content: str
) -> None:
    ids = byte_tokenizer.encode(text)
    server = fake_server(script=ids)
    body = {"max_tokens": len(ids), "chat_template_kwargs": {"enable_thinking": thinking}}
    message = chat(server, **body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": content, "reasoning_content": reasoning}
    deltas = [c["choices"][0]["delta"] for c in stream(server, **body)]
    assert deltas[0] == {"role": "assistant", "content": ""} and len(deltas) == len(ids) + 1
    assert "".join(d.get("content", "") for d in deltas) == content
    assert "".join(d.get("reasoning_content", "") for d in deltas) == (reasoning or "")
    whole = chat(server, separate_reasoning=False, **body).json()["choices"][0]["message"]
    assert whole["content"] == text


@given(st.text(alphabet="<think/> ab\n", max_size=40), st.lists(st.integers(1, 6), max_size=12), st.booleans())
def test_splitter_does_not_depend_on_the_cuts(text: str, cuts: list[int], inside: bool) -> None:
    def run(parts: list[str]) -> tuple[str, str]:
        splitter = ReasoningSplitter(inside)
        out = [splitter.feed(part) for part in parts] + [splitter.flush()]
        return "".join(r for r, _ in out), "".join(c for _, c in out)

    parts, at = [], 0
    for cut in cuts:
        parts.append(text[at : at + cut])
        at += cut
    assert run([*parts, text[at:]]) == run([text]) == run(list(text))
    reasoning, content = run([text])
    removed = len(text) - len(reasoning) - len(content)
    assert removed == 0 or "<think>" in text or "</think>" in text


def test_n_logprobs_and_stream_agree(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    body = {"n": 2, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "seed": 1, "temperature": 1,
            "return_token_ids": True}  # fmt: skip
    whole = chat(server, **body).json()
    chunks = stream(server, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["usage"] == whole["usage"] and whole["usage"]["completion_tokens"] == 10
    for choice in whole["choices"]:
        entries = choice["logprobs"]["content"]
        assert len(entries) == 5
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and len(entry["top_logprobs"]) == 2
            assert bytes(entry["bytes"]).decode() == entry["token"]
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert [e for d in mine if d["logprobs"] for e in d["logprobs"]["content"]] == entries
        assert [i for d in mine for i in d.get("token_ids", [])] == choice["token_ids"]


def test_bytes_of_partial_characters(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    server = fake_server(script=byte_tokenizer.encode("€"))
    content = chat(server, max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == ["�"] * 3
    assert bytes(b for e in content for b in e["bytes"]).decode() == "€"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "x"}]}, "messages", "no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages", "tool calls"),
        ({"tools": [{"type": "function"}]}, "tools", "tools"),
        ({"echo": True}, "echo", "/v1/completions"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "template"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
    ],
)  # fmt: skip
def test_refusals(server: FakeServer, body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(chat(server, **body))
    assert error["param"] == param and says in error["message"], error
    assert not server.engine.submitted


def test_without_a_template(fake_server: Any, plain_tokenizer: Tokenizer) -> None:
    error = refusal(chat(fake_server(tokenizer=plain_tokenizer)))
    assert error["code"] == "no_chat_template" and "/v1/completions" in error["message"]
