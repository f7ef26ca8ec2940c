"""Fuzzes request bodies: whatever is sent, the answer is a result or an error body, and nothing stays in the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.conftest import FakeServer, RealServer

ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "stream", "stream_options", "prompt_logprobs",
    "skip_special_tokens", "include_stop_str_in_output", "return_tokens_as_token_ids", "return_token_ids",
    "return_routing", "echo", "logprobs", "top_logprobs", "add_special_tokens", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "separate_reasoning", "reasoning_effort", "tokens", "best_of",
    "presence_penalty", "logit_bias", "response_format", "tools", "return_token_strs", "unknown",
)  # fmt: skip

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["", "\x00", "😀", "<think>", "\ud800", 1e308, 5e-324, -0.0, 2**31, 2**63 - 1, 2**63, -(2**63)]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
# Values that are right most of the time, so that combinations get past the first check.
plausible = {
    "prompt": st.one_of(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 258), min_size=1, max_size=6),
                        st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3)),
    "messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]),
                                                "content": st.text(max_size=8)}), min_size=1, max_size=3),
    "tokens": st.lists(st.integers(0, 258), max_size=6),
    "max_tokens": st.integers(0, 6), "n": st.integers(1, 3), "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True), "top_k": st.integers(-1, 2**40), "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(st.text(min_size=1, max_size=2), st.lists(st.text(min_size=1))),
    "stop_token_ids": st.lists(st.integers(0, 258), max_size=3),
    "logprobs": st.one_of(st.integers(0, 20), st.booleans()),
    "top_logprobs": st.integers(0, 20), "prompt_logprobs": st.integers(0, 5), "min_tokens": st.integers(0, 3),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    **{name: st.booleans() for name in ("echo", "stream", "ignore_eos", "return_token_ids", "return_routing",
                                        "return_tokens_as_token_ids", "skip_special_tokens")},
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body with what its route requires, some plausible fields, and now and then a wild one."""
    required = draw(st.sampled_from([("prompt",), ("messages",), ("tokens",)]))
    names = set(required) | draw(st.sets(st.sampled_from(sorted(plausible)), max_size=6))
    body = {name: draw(plausible[name]) for name in sorted(names)}
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=1)):
        body[name] = draw(values)
    body.setdefault("max_tokens", 3)
    return body


def check_answer(response: httpx.Response, body: dict[str, Any]) -> None:
    """A result in the promised shape, or an error body; never a 422 or a 500."""
    assert response.status_code in (200, 400, 404), (response.status_code, response.text, body)
    assert response.headers["x-request-id"]
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [part.removeprefix("data: ") for part in response.text.split("\n\n")[:-1]]
        assert events[-1] == "[DONE]"
        parsed = [json.loads(event) for event in events[:-1]]
        assert not any("error" in event for event in parsed), (parsed, body)
        ended = [c["index"] for event in parsed for c in event["choices"] if c["finish_reason"]]
        assert len(ended) == len(set(ended)) > 0
        return
    answer = response.json()
    if response.status_code != 200:
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
        assert isinstance(answer["error"]["message"], str) and answer["error"]["message"]
    elif "choices" in answer:
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert [c["index"] for c in answer["choices"]] == list(range(len(answer["choices"])))
        assert all(c["finish_reason"] in ("stop", "length") for c in answer["choices"])
        for choice in answer["choices"]:
            logprobs = choice.get("logprobs") or {}
            assert len({len(v) for k, v in logprobs.items() if k != "content"}) <= 1


def post(client: httpx.Client, route: str, body: Any) -> httpx.Response:
    content = json.dumps(body).encode()  # ASCII with escapes, so that lone surrogates and NaN get through
    return client.post(route, content=content, headers={"Content-Type": "application/json"})


fuzz = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@settings(fuzz, max_examples=150)
@given(route=st.sampled_from(ROUTES), body=bodies())
def test_any_body_on_the_fake_engine(server: FakeServer, route: str, body: dict[str, Any]) -> None:
    with server.client() as client:
        check_answer(post(client, route, body), body)
    assert not server.engine.live and not server.service.live


@settings(fuzz, max_examples=40)
@given(body=bodies())
def test_any_body_on_the_real_engine(real_server: RealServer, body: dict[str, Any]) -> None:
    with real_server.client() as client:
        check_answer(post(client, "/v1/completions", body), body)


@settings(fuzz, max_examples=50)
@given(route=st.sampled_from(ROUTES), body=values)
def test_any_json(server: FakeServer, route: str, body: Any) -> None:
    with server.client() as client:
        check_answer(post(client, route, body), body)


@settings(fuzz, max_examples=50)
@given(route=st.sampled_from(ROUTES), content=st.binary(max_size=60))
def test_any_bytes(server: FakeServer, route: str, content: bytes) -> None:
    with server.client() as client:
        check_answer(
            client.post(route, content=content, headers={"Content-Type": "application/json"}), {"raw": content}
        )


def test_schemathesis_over_our_openapi_schema(server: FakeServer) -> None:
    """Bodies generated from the published schema; needs schemathesis (its pytest plugin is not used)."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(fuzz, max_examples=8)
        @given(case=operation.as_strategy())
        def conforms(case: Any) -> None:
            response = case.call()
            checks = [not_a_server_error, response_schema_conformance, status_code_conformance]
            case.validate_response(response, checks=checks)
            seen.add((case.operation.label, response.status_code))

        conforms()
    assert {label for label, _ in seen} >= {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"}
    assert {("POST /v1/completions", 400), ("GET /v1/models", 200), ("GET /v1/models/{model_id}", 404)} <= seen
