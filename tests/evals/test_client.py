"""The client against a server with every fault we know of: retried, never scored, nothing lost."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from evals.client import Ask, Client, Endpoint, Retries, base_url, encode, error_text, request_body
from evals.errors import ServerError
from evals.records import Protocol
from evals.replies import BadReply, Reply, classify, parse
from tests.evals.mock_server import Mock

Serve = Callable[..., tuple[Mock, str]]


def protocol(**changes: Any) -> Protocol:
    fields: dict[str, Any] = {
        "task": "t", "dataset_sha256": "d", "items": (), "shots": 0, "shots_sha256": "s", "template_sha256": "t",
        "endpoint": "completions", "max_tokens": 64, "stops": ("\n\nQuestion:",), "temperature": 0.0, "seed": 3,
        "extractor": "e", "concurrency": 4, "lm_eval_version": "0",
    }
    return Protocol(**(fields | changes))


def asks(gold: dict[str, str], count: int, chat: bool = False) -> list[Ask]:
    out = []
    for n, question in enumerate(list(gold)[:count]):
        prompt = f"Question: {question}\nAnswer:"
        out.append(Ask(f"i{n}", n, json.dumps([{"role": "user", "content": prompt}]) if chat else prompt))
    return out


def run(url: str, todo: list[Ask], retries: Retries | None = None, concurrency: int = 4, timeout: float = 5.0,
        dead: Callable[[], str | None] | None = None, api_key: str | None = None,
        **changes: Any) -> tuple[dict[str, Reply], Client]:
    found: dict[str, Reply] = {}

    async def sink(ask: Ask, reply: Reply) -> None:
        assert ask.item not in found
        found[ask.item] = reply

    async def main() -> Client:
        endpoint = Endpoint(url, model="mock", timeout=timeout, api_key=api_key)
        quick = retries or Retries(first_delay=0.01)
        async with Client(endpoint, protocol(**changes), retries=quick, dead=dead) as client:
            await client.ask_all(todo, sink, concurrency)
            return client

    return found, asyncio.run(main())


def test_answers_and_what_the_server_says_of_them(serve: Serve, gold: dict[str, str]) -> None:
    _, url = serve()
    found, client = run(url, asks(gold, 5), logprobs=True)
    assert [found[f"i{n}"].text for n in range(5)] == list(gold.values())[:5]
    one = found["i0"]
    assert one.status == "completed" and one.finish_reason == "stop" and one.matched_stop == "\n\nQuestion:"
    assert one.prompt_tokens and one.completion_tokens == len(one.tokens or []) == len(one.logprobs or [])
    assert "".join(one.tokens or []) == one.text and set(one.gaps or []) == {1.0}
    assert client.models_seen == {"mock"}


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "half", "nan", "wrongid", "index", "nofinish"])
def test_passing_faults_are_asked_again(serve: Serve, gold: dict[str, str], fault: str) -> None:
    mock, url = serve(faults=(f"{fault}@2-3",))
    found, _ = run(url, asks(gold, 6))
    assert [found[f"i{n}"].text for n in range(6)] == list(gold.values())[:6]
    assert all(r.status == "completed" for r in found.values())
    assert mock.posts == 8 and sorted(mock.ids.values()) in ([1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 3])


@pytest.mark.parametrize(
    ("fault", "said"),
    [("500", "HTTP 500: injected 500"), ("429", "HTTP 429: slow down"), ("drop", "connection failed"),
     ("half", "not whole JSON"), ("nan", "NaN"), ("wrongid", "of another request of ours"), ("index", "index 1"),
     ("nofinish", "neither stop nor length")],
)
def test_lasting_faults_become_error_rows(serve: Serve, gold: dict[str, str], fault: str, said: str) -> None:
    _, url = serve(faults=(f"{fault}@*",))
    found, _ = run(url, asks(gold, 2), Retries(per_item=1, first_delay=0.01))
    for reply in found.values():
        assert reply.status == "error" and said in (reply.error or "") and reply.text == "" and reply.attempts == 2


def test_a_gateways_own_request_ids_are_no_mistake(serve: Serve, gold: dict[str, str]) -> None:
    mock, url = serve(faults=("gateway@*",))
    assert {r.status for r in run(url, asks(gold, 4))[0].values()} == {"completed"} and mock.posts == 4


@pytest.mark.parametrize("fault", ["runon", "runonlength"])
def test_text_past_a_stop_is_cut(serve: Serve, gold: dict[str, str], fault: str) -> None:
    _, url = serve(faults=(f"{fault}@*",))
    found, _ = run(url, asks(gold, 2), logprobs=True)
    for reply, answer in zip(found.values(), gold.values(), strict=False):
        assert reply.text == answer and reply.matched_stop == "\n\nQuestion:"
        assert (reply.status, reply.finish_reason) == ("completed", "stop")
        assert "".join(reply.tokens or []).strip() == answer and len(reply.logprobs or []) == len(reply.tokens or [])


def test_hang_is_a_timeout(serve: Serve, gold: dict[str, str]) -> None:
    _, url = serve(faults=("hang@1",))
    found, _ = run(url, asks(gold, 2), timeout=0.5)
    assert all(r.status == "completed" for r in found.values())
    _, url = serve(faults=("hang@*",))
    found, _ = run(url, asks(gold, 2), Retries(per_item=1, first_delay=0.01), timeout=0.2)
    assert {r.error for r in found.values()} == {"no answer within 0.2 s"}


def test_400_is_final_and_not_repeated(serve: Serve, gold: dict[str, str]) -> None:
    mock, url = serve(faults=("400@1",))
    found, _ = run(url, asks(gold, 1))
    assert found["i0"].status == "error" and found["i0"].error == "HTTP 400: injected 400" and mock.posts == 1


def test_retry_after_is_obeyed(serve: Serve, gold: dict[str, str]) -> None:
    _, url = serve(faults=("429@1",))  # Retry-After: 0.2
    start = time.monotonic()
    run(url, asks(gold, 1))
    assert time.monotonic() - start >= 0.2
    assert Retries().delay("i", 1, 7.0) == 7.0
    assert Retries().delay("i", 1, 9999.0) == 120.0
    assert Retries().delay("i", 3, None) <= 2.0


def test_budget_is_shared_and_breaker_ends_a_dead_server(serve: Serve, gold: dict[str, str]) -> None:
    mock, url = serve(faults=("500@*",))
    found, _ = run(url, asks(gold, 60), Retries(per_item=9, budget=5, breaker=1000, first_delay=0.001))
    assert len(found) == 60 and mock.posts == 65
    mock, url = serve(faults=("500@*",))
    found, client = run(url, asks(gold, 100), Retries(per_item=0, breaker=20, first_delay=0.001))
    assert len(found) == 100 and mock.posts < 30 and "given up after" in (client.gone or "")


def test_dead_process_ends_the_arm_at_once(gold: dict[str, str]) -> None:
    start = time.monotonic()
    found, _ = run("http://127.0.0.1:9", asks(gold, 50), Retries(), dead=lambda: "exit code 3")
    assert {r.error for r in found.values()} == {"exit code 3"} and time.monotonic() - start < 5


@pytest.mark.parametrize(("status", "remedy"), [(401, "--api-key"), (404, "--model-name")])
def test_useless_server_is_an_error_at_once(serve: Serve, gold: dict[str, str], status: int, remedy: str) -> None:
    mock, url = serve(api_key="secret")
    base = url if status == 401 else url + "/nowhere"
    with pytest.raises(ServerError, match=remedy):
        run(base, asks(gold, 50))
    assert mock.posts <= 4
    assert all(r.status == "completed" for r in run(url, asks(gold, 3), api_key="secret")[0].values())


def test_body_is_the_same_at_every_concurrency(serve: Serve, gold: dict[str, str]) -> None:
    seen = []
    for concurrency in (1, 64):
        mock, url = serve()
        run(url, asks(gold, 80), concurrency=concurrency)
        seen.append(sorted(mock.bodies))
        assert mock.most_in_flight <= concurrency
    assert seen[0] == seen[1] and len(set(seen[0])) == 80


def test_bodies_of_both_endpoints() -> None:
    made = protocol(top_p=0.9, chat_template_kwargs={"enable_thinking": False}, extra_body={"top_k": 1}, logprobs=True)
    body = request_body(made, Ask("i", 0, "p"), "m", 5)
    assert body == {
        "model": "m", "prompt": "p", "max_tokens": 64, "temperature": 0.0, "seed": 5, "stop": ["\n\nQuestion:"],
        "top_p": 0.9, "chat_template_kwargs": {"enable_thinking": False}, "top_k": 1, "logprobs": 2,
    }
    said = [{"role": "user", "content": "é"}]
    chat = request_body(protocol(endpoint="chat", logprobs=True), Ask("i", 0, json.dumps(said)), None, 5)
    assert chat["messages"] == said and "prompt" not in chat and "model" not in chat
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 2)
    assert encode({"b": 1, "a": "é"}) == '{"a":"é","b":1}'.encode()


def test_chat_with_reasoning(serve: Serve, gold: dict[str, str]) -> None:
    _, url = serve(reasoning=True, faults=("truncate@2",))
    found, _ = run(url, asks(gold, 2, chat=True), concurrency=1, endpoint="chat", logprobs=True)
    assert found["i0"].status == "completed" and found["i0"].reasoning == "let me see: 5"
    assert found["i1"].status == "truncated_in_reasoning" and found["i1"].text == ""
    assert found["i0"].logprobs and len(found["i0"].logprobs) == len(found["i0"].tokens or [])


def test_t29_ten_thousand_items_in_bounded_memory_and_width(serve: Serve, gold: dict[str, str]) -> None:
    """T29: the client's own memory does not grow with the number of items (answers here are not kept)."""
    mock, url = serve(keep_bodies=False)
    question = next(iter(gold))
    made = 0
    ahead: list[int] = []
    done = 0

    def source() -> Any:
        nonlocal made
        for n in range(10_000):
            made += 1
            ahead.append(made - done)
            yield Ask(f"i{n}", n, f"{'x' * 2000} {n} Question: {question}\nAnswer:")

    async def sink(ask: Ask, reply: Reply) -> None:
        nonlocal done
        assert reply.status == "completed"
        done += 1

    async def main() -> None:
        async with Client(Endpoint(url, model="mock"), protocol(max_tokens=8)) as client:
            await client.ask_all(source(), sink, 64)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(main())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB; the mock runs in here too
    assert done == made == 10_000
    assert max(ahead) <= 64 and mock.most_in_flight <= 64
    assert grown < 60_000


# --- reading answers ----------------------------------------------------------------------------------


def body(**changes: Any) -> bytes:
    choice = {"index": 0, "text": "t", "finish_reason": "stop"} | changes.pop("choice", {})
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}} | changes).encode()


@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "status"),
    [
        ("#### 1", "stop", None, "completed"), ("#### 1", "length", None, "truncated"), (" \n", "stop", None, "empty"),
        ("", "length", None, "truncated"), ("<think>4", "length", None, "truncated_in_reasoning"),
        ("<think>4", "stop", None, "truncated_in_reasoning"), ("<think>4</think>", "stop", None, "empty"),
        ("<think>4</think>5", "stop", None, "completed"), ("", "length", "hm", "truncated_in_reasoning"),
        ("", "stop", "hm", "empty"), ("5", "length", "hm", "truncated"),
    ],
)
def test_statuses(text: str, finish: str, reasoning: str | None, status: str) -> None:
    assert classify(text, finish, reasoning) == status


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"{", b'{"choices":[]}', body(choices=[]), body(choices=None), body(choice={"text": None}),
        body(choice={"index": 1}), body(choice={"finish_reason": None}), body(choice={"finish_reason": "abort"}),
        body(error={"message": "oom"}), body()[:-4], b'{"choices": [{"text": "a", "finish_reason": "stop"}], "x": NaN}',
        b"[" * 100_000, b"\xff\xfe", body(choices=[{"text": "a"}] * 2),
    ],
)
def test_what_is_no_answer(payload: bytes) -> None:
    with pytest.raises(BadReply):
        parse(payload, chat=False, logprobs=False)


@pytest.mark.parametrize(
    "logprobs",
    [None, {"tokens": ["t"], "token_logprobs": [], "top_logprobs": []},
     {"tokens": ["t"], "token_logprobs": [None], "top_logprobs": [None]},
     {"tokens": ["t"], "token_logprobs": ["-1"], "top_logprobs": [{}]},
     {"tokens": ["t", "u"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{}]}],
)
def test_t35_logprobs_asked_for_must_line_up(logprobs: Any) -> None:
    with pytest.raises(BadReply):
        parse(body(choice={"logprobs": logprobs}), chat=False, logprobs=True)


def test_half_a_surrogate_can_be_written() -> None:
    reply = parse(b'{"choices":[{"text":"a\\ud800b","finish_reason":"stop"}]}', chat=False, logprobs=False)
    assert reply.text == "a?b" and reply.text.encode()


def test_other_servers_words() -> None:
    assert parse(body(choice={"finish_reason": "eos_token"}), chat=False, logprobs=False).finish_reason == "stop"
    assert parse(body(usage=None), chat=False, logprobs=False).prompt_tokens is None
    for payload in (b'{"error":{"message":"m"}}', b'{"message":"m"}', b'{"detail":"m"}', b"m\n"):
        assert error_text(payload) == "m"


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"])
def test_base_url(tail: str) -> None:
    assert base_url("http://h:1" + tail) == "http://h:1"


def test_base_url_refuses_nonsense() -> None:
    with pytest.raises(ServerError, match="http://"):
        base_url("localhost:8000")
