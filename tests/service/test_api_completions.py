"""/v1/completions on the fake engine."""

from __future__ import annotations


def ask(server, **body):
    with server.client() as client:
        return client.post("/v1/completions", json={"model": "fake", "prompt": "hello", **body})


def test_defaults(fake_server):
    server = fake_server()
    answer = ask(server).json()
    assert answer["object"] == "text_completion" and answer["model"] == "fake"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert len(choice["text"]) == 16
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, None)
