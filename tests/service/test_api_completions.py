"""/v1/completions on the fake engine: shapes, sums of deltas, logprobs, limits, refusals."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from service.engine.types import TokenOutput
from service.tokenizer import Tokenizer
from tests.service.conftest import FakeServer


def ask(server: FakeServer, **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/completions", json={"model": "fake", "prompt": "hello", "temperature": 0, **body})


def stream(server: FakeServer, **body: Any) -> list[dict[str, Any]]:
    response = ask(server, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_defaults_are_openais(server: FakeServer) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "hello"}).json()
    assert answer["object"] == "text_completion" and answer["model"] == "fake"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert len(choice["text"]) == 16
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (1.0, 1.0, 0, 0.0, None)
    assert params.max_tokens == 16 and params.logprobs is None and params.prompt_logprobs is None


def test_prompt_forms_agree(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.encode("hello"), byte_tokenizer.encode("you")]
    texts = [c["text"] for c in ask(server, prompt=["hello", "you"]).json()["choices"]]
    assert [c["text"] for c in ask(server, prompt=ids).json()["choices"]] == texts
    assert ask(server, prompt="hello").json()["choices"][0]["text"] == texts[0]
    assert ask(server, prompt=ids[1]).json()["choices"][0]["text"] == texts[1]
    assert ask(server, prompt=[float(i) for i in ids[1]]).json()["choices"][0]["text"] == texts[1]


def test_n_numbers_choices_by_prompt_and_derives_seeds(server: FakeServer) -> None:
    answer = ask(server, prompt=["a", "b"], n=3, seed=7, temperature=1).json()
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 96
    requests = {r.request_id.rpartition("-")[2]: r for r in server.engine.submitted}
    assert requests["0"].prompt_ids == requests["2"].prompt_ids != requests["3"].prompt_ids
    seeds = [requests[str(i)].params.seed for i in range(6)]
    assert seeds[0] == 7 and seeds[:3] == seeds[3:] and len(set(seeds[:3])) == 3
    again = ask(server, prompt=["b"], n=3, seed=7, temperature=1).json()
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"][3:]]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 1, "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"stop": ["a", "zz"], "max_tokens": 64, "logprobs": 0},
        {"prompt": ["x", "yy"], "n": 2, "logprobs": 1, "return_token_ids": True},
        {"return_routing": True, "return_tokens_as_token_ids": True, "logprobs": 3},
    ],
)
def test_stream_sums_to_the_whole(server: FakeServer, extra: dict[str, Any]) -> None:
    whole = ask(server, **extra).json()
    chunks = stream(server, stream_options={"include_usage": True}, **extra)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in c and len(c["choices"]) == 1 for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(d["text"] for d in mine) == choice["text"]
        assert [d["finish_reason"] for d in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for d in mine for v in d["logprobs"][key]] == values
        assert mine[-1].get("routing") == choice.get("routing")
        if "token_ids" in choice:
            assert [i for d in mine for i in d.get("token_ids", [])] == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_stream_has_a_chunk_per_token_and_usage_only_when_asked(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("a€😀b")  # 1 + 3 + 4 + 1 bytes
    server = fake_server(script=ids)
    chunks = stream(server, max_tokens=len(ids))
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "", "", "€", "", "", "", "😀", "b"]
    assert all("usage" not in c for c in chunks)
    continuous = stream(server, max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert [c["usage"]["completion_tokens"] for c in continuous] == [1, 2, 3]


def test_stop_string_is_held_back_and_named(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    server = fake_server(script=byte_tokenizer.encode("one\n\nQuestion: two"))
    body = {"stop": ["\n\nQuestion:", "zzz"], "max_tokens": 30}
    choice = ask(server, **body).json()["choices"][0]
    assert choice["text"] == "one" and choice["finish_reason"] == "stop" and choice["stop_reason"] == "\n\nQuestion:"
    texts = [c["choices"][0]["text"] for c in stream(server, **body)]
    assert "".join(texts) == "one" and len(texts) == len("one\n\nQuestion:")
    kept = ask(server, include_stop_str_in_output=True, **body).json()["choices"][0]
    assert kept["text"] == "one\n\nQuestion:"


def test_eos_and_stop_token_ids(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    eos = byte_tokenizer.eos_id
    server = fake_server(script=[*byte_tokenizer.encode("ab"), eos, *byte_tokenizer.encode("c")])
    ended = ask(server).json()
    assert ended["choices"][0]["text"] == "ab" and ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] is None and ended["usage"]["completion_tokens"] == 3
    ignored = ask(server, ignore_eos=True, max_tokens=4).json()["choices"][0]
    assert ignored["finish_reason"] == "length"
    b = byte_tokenizer.encode("b")[0]
    assert ask(server, stop_token_ids=[b]).json()["choices"][0]["stop_reason"] == b


def test_echo_logprobs_as_lm_eval_reads_them(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("2+2=4")
    choice = ask(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(v) for v in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for i in range(1, len(ids) + 1):
        own, top = logprobs["token_logprobs"][i], logprobs["top_logprobs"][i]
        assert top[logprobs["tokens"][i]] == own and len(top) <= 2
        token = ids[i] if i < len(ids) else server.engine.next_token(server.engine.submitted[0], [])
        assert own == server.engine.score(ids[:i], token)
    assert choice["text"].startswith("2+2=4") and logprobs["text_offset"] == list(range(len(ids) + 1))


def test_text_offsets_follow_the_text(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    server = fake_server(script=byte_tokenizer.encode("é😀!"))
    choice = ask(server, prompt="ü?", echo=True, logprobs=0, max_tokens=7).json()["choices"][0]
    assert choice["text"] == "ü?é😀!"
    #                                           ü     ?  é     😀          !
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 3, 3, 3, 3, 4]
    alone = ask(server, prompt="ü?", logprobs=0, max_tokens=7).json()["choices"][0]
    assert alone["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


def test_tokens_with_equal_text_do_not_hide_each_other(fake_server: Any, byte_tokenizer: Tokenizer) -> None:
    one = byte_tokenizer.encode("€")
    server = fake_server(script=one)
    server.engine.output = lambda history, token, count: TokenOutput(token, -2.0, 2, ((one[1], -1.0), (token, -2.0)))
    top = ask(server, logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top == {"�": -2.0, f"token_id:{one[1]}": -1.0}
    named = ask(server, logprobs=2, max_tokens=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{one[0]}"]
    assert named["top_logprobs"] == [{f"token_id:{one[0]}": -2.0, f"token_id:{one[1]}": -1.0}]


def test_prompt_logprobs_in_vllms_shape(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    choice = ask(server, prompt_logprobs=2, echo=True, logprobs=4, max_tokens=0).json()["choices"][0]
    rows, ids = choice["prompt_logprobs"], byte_tokenizer.encode("hello")
    assert rows[0] is None and len(rows) == 5 and choice["text"] == "hello" and choice["finish_reason"] == "length"
    for i, row in enumerate(rows[1:], start=1):
        assert 2 <= len(row) <= 3
        own = row[str(ids[i])]
        assert own["logprob"] == server.engine.score(ids[:i], ids[i]) == choice["logprobs"]["token_logprobs"][i]
        assert own["decoded_token"] == "hello"[i]
        ranked = sorted(row.values(), key=lambda e: e["rank"])
        assert [e["rank"] for e in ranked][:2] == [1, 2]
        assert [e["logprob"] for e in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
    assert all(2 <= len(top) <= 5 for top in choice["logprobs"]["top_logprobs"][1:])


def test_routing_field(server: FakeServer) -> None:
    routing = ask(server, return_routing=True, max_tokens=3).json()["choices"][0]["routing"]
    assert routing["dtype"] == "int16" and routing["layers"] == [1, 2] and routing["shape"] == [7, 2, 2]
    ids = np.frombuffer(base64.b64decode(routing["data"]), dtype="<i2").reshape(routing["shape"])
    assert np.array_equal(ids.ravel(), np.arange(28))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"lora_path": "x"}, "lora_path"),
    ],
)
def test_fields_that_would_change_results_are_refused_by_name(
    server: FakeServer, body: dict[str, Any], param: str
) -> None:
    error = refusal(ask(server, **body))
    assert error["param"] == param and error["code"] == "unsupported_parameter" and param in error["message"]
    assert not server.engine.submitted


def test_neutral_and_unknown_fields_are_accepted(server: FakeServer) -> None:
    plain = ask(server).json()["choices"]
    extra = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1,
             "suffix": None, "logprobs": None, "stop": None, "user": "me", "lora_path": None, "response_format": None,
             "metadata": {"a": 1}, "top_k": -1, "max_completion_tokens": 16, "stop_token_ids": []}  # fmt: skip
    assert ask(server, **extra).json()["choices"] == plain


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [[]]}, "prompt", "no token ids"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": 5}, "prompt", "a number"),
        ({"prompt": ["a", 5]}, "prompt", "prompt[1] is a number"),
        ({"prompt": [5, "a"]}, "prompt", "prompt[1] is a string"),
        ({"prompt": [[5], 6]}, "prompt", "prompt[1] is a number"),
        ({"prompt": [True]}, "prompt", "a boolean"),
        ({"prompt": [5, 100000]}, "prompt", "token id 100000 at position 1"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"temperature": -0.1}, "temperature", "greater than or equal"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"logprobs": 101}, "logprobs", "at most 100"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a"] * 65}, "stop", "65 strings"),
        ({"stop": [1]}, "stop", "string"),
        ({"stop_token_ids": [999999]}, "stop_token_ids", "999999"),
        ({"min_tokens": 17}, "min_tokens", "17"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "max_tokens is 5"),
        ({"seed": 2**63}, "seed", "less than or equal"),
    ],
)  # fmt: skip
def test_wrong_values_are_400_naming_the_field(server: FakeServer, body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(ask(server, **body))
    assert error["param"] == param and says in error["message"], error
    assert error["type"] == "invalid_request_error" and not server.engine.submitted


def test_t40_messages_in_prompt_name_the_chat_model(server: FakeServer) -> None:
    error = refusal(ask(server, prompt=[{"role": "user", "content": "hi"}]))
    assert "--model local-chat-completions" in error["message"] and error["param"] == "prompt"


def test_nothing_is_truncated(server: FakeServer) -> None:
    error = refusal(ask(server, prompt="x" * 500, max_tokens=13))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert "500 tokens" in error["message"] and "13" in error["message"] and "512" in error["message"]
    assert ask(server, prompt="x" * 500, max_tokens=12).status_code == 200
    assert refusal(ask(server, prompt=[5] * 513, max_tokens=1))["param"] == "prompt"
    huge = refusal(ask(server, prompt="x" * 10_000_000))
    assert huge["code"] == "context_length_exceeded" and "nothing was truncated" in huge["message"]


def test_unicode(server: FakeServer) -> None:
    for text in ("\x00", "\u2028\u2029", "👩‍👩‍👧‍👦", "\ufeff", "e\u0301", "\U0010ffff", "שלום", "\r\n\t"):
        choice = ask(server, prompt=text, echo=True).json()["choices"][0]
        assert choice["text"].startswith(text)
    with server.client() as client:
        lone = client.post("/v1/completions", content=b'{"prompt": "a\\ud800b"}',
                           headers={"content-type": "application/json"})  # fmt: skip
        assert "lone surrogate" in refusal(lone)["message"]
        stop = client.post("/v1/completions", content=b'{"prompt": "a", "stop": "\\udfff"}',
                           headers={"content-type": "application/json"})  # fmt: skip
        assert refusal(stop)["param"] == "stop"
