"""The unmodified openai-python client against the service: the real engine, and the fake one for faults and chat."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from service.engine.types import EngineError
from service.tokenizer import Tokenizer
from tests.service.conftest import RealServer

PROMPT = "Question: Anna has 17 toys. Omar has 3 toys more than Anna has. How many toys does Omar have?\nAnswer:"


def client_of(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120, **{"max_retries": 0, **options})


def test_models(real_server: RealServer) -> None:
    client = client_of(real_server)
    (model,) = client.models.list().data
    assert model.id == real_server.model and client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completions_and_streams_agree(real_server: RealServer) -> None:
    client = client_of(real_server)
    options: dict[str, Any] = dict(model=real_server.model, prompt=PROMPT, max_tokens=60, temperature=0, stop=["\n\n"])
    whole = client.completions.create(**options)
    (choice,) = whole.choices
    if real_server.trained:
        assert choice.text.endswith("#### 20") and choice.finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens == len(real_server.tokenizer.encode(PROMPT))
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == choice.text
    assert chunks[-1].usage == whole.usage and len(chunks) == whole.usage.completion_tokens + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason


def test_list_of_prompts_ids_n_and_logprobs(real_server: RealServer) -> None:
    client, encode = client_of(real_server), real_server.tokenizer.encode
    prompts = [PROMPT, "Question: 1+1", "2"]
    texts = client.completions.create(model=real_server.model, prompt=prompts, max_tokens=8, temperature=0, logprobs=2)
    ids = client.completions.create(model=real_server.model, prompt=[encode(p) for p in prompts], max_tokens=8,
                                    temperature=0, logprobs=2)  # fmt: skip
    assert [c.text for c in texts.choices] == [c.text for c in ids.choices]
    for a, b in zip(texts.choices, ids.choices, strict=True):
        assert a.logprobs is not None and a.logprobs == b.logprobs and a.logprobs.token_logprobs is not None
        assert all(v <= 0 for v in a.logprobs.token_logprobs)
    sampled = [
        client.completions.create(
            model=real_server.model, prompt="Question:", n=3, seed=5, temperature=1, max_tokens=12
        )
        for _ in range(2)
    ]
    first = [c.text for c in sampled[0].choices]
    assert first == [c.text for c in sampled[1].choices] and len(set(first)) > 1


def test_extensions_through_extra_body(real_server: RealServer) -> None:
    extensions = {"ignore_eos": True, "min_tokens": 4, "top_k": 5, "return_token_ids": True, "return_routing": True}
    answer = client_of(real_server).completions.create(
        model=real_server.model, prompt="Question:", max_tokens=4, temperature=0, extra_body=extensions
    )
    extra = answer.choices[0].model_extra
    assert extra is not None and len(extra["token_ids"]) == 4
    assert extra["prompt_token_ids"] == real_server.tokenizer.encode("Question:")
    assert extra["routing"]["shape"][0] == len(extra["prompt_token_ids"]) + 3


def test_errors_are_mapped(real_server: RealServer) -> None:
    client = client_of(real_server)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=real_server.model, prompt="a" * 10**6)
    assert too_long.value.code == "context_length_exceeded" and too_long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as penalty:
        client.completions.create(model=real_server.model, prompt="a", presence_penalty=1)
    assert penalty.value.param == "presence_penalty" and "presence_penalty" in penalty.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=real_server.model, messages=[{"role": "user", "content": "hi"}])


def test_chat(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("2 and 2\n</think>4")
    client = client_of(fake_server(script=[*ids, byte_tokenizer.eos_id]))
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    options: dict[str, Any] = dict(
        model="fake", messages=messages, max_completion_tokens=50, logprobs=True, top_logprobs=1
    )
    answer = client.chat.completions.create(**options)
    message = answer.choices[0].message
    assert message.content == "4" and message.model_extra == {"reasoning_content": "2 and 2\n"}
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].logprobs is not None
    chunks = list(client.chat.completions.create(stream=True, **options))
    deltas = [c.choices[0].delta for c in chunks]
    assert deltas[0].role == "assistant" and "".join(d.content or "" for d in deltas) == "4"
    off = client.chat.completions.create(
        model="fake", messages=messages, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert off.choices[0].message.content == "2 and 2\n</think>4"


def test_server_errors(fake_server: Any) -> None:
    broken = client_of(fake_server(fault=lambda request, step: EngineError("broke") if step == 2 else None))
    with pytest.raises(openai.InternalServerError, match="broke"):
        broken.completions.create(model="fake", prompt="a")
    got = []
    with pytest.raises(openai.APIError, match="broke"):
        for chunk in broken.completions.create(model="fake", prompt="a", stream=True):
            got.append(chunk.choices[0].text)
    assert len(got) == 2
    with pytest.raises(openai.AuthenticationError):
        client_of(fake_server(settings={"api_key": "k"})).models.list()


def test_a_full_queue_is_retried_by_the_client(fake_server: Any) -> None:
    server = fake_server(max_waiting=1, step_seconds=0.01)
    background = client_of(server).completions.create(model="fake", prompt="a", max_tokens=60, stream=True)
    next(iter(background))
    with pytest.raises(openai.RateLimitError):
        client_of(server).completions.create(model="fake", prompt="b")
    assert client_of(server, max_retries=5).completions.create(model="fake", prompt="b").choices[0].text
