"""Everything around a request: error bodies, key, sizes, ids, health, models, tokens, metrics, status page, logs."""

from __future__ import annotations

import http.client
import json
import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.api.logs import JsonLines
from service.tokenizer import Tokenizer
from tests.service.conftest import FINGERPRINT, FakeServer
from tests.service.test_api_completions import refusal

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"", JSON, "invalid_body"),
        (b"{", JSON, "invalid_json"),
        (b'{"prompt": "a",}', JSON, "invalid_json"),
        (b"\xff\xfe", JSON, None),
        (b"[]", JSON, "invalid_body"),
        (b'"text"', JSON, "invalid_body"),
        (b"null", JSON, "invalid_body"),
        (b"[" * 100_000, JSON, None),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", JSON, None),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, "invalid_body"),
        (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}, "invalid_body"),
    ],
)
def test_malformed_bodies_are_400(
    server: FakeServer, content: bytes, headers: dict[str, str], code: str | None
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        with server.client() as client:
            error = refusal(client.post(path, content=content, headers=headers))
        assert error["type"] == "invalid_request_error" and (code is None or error["code"] == code), error


def test_numbers_that_are_none(server: FakeServer) -> None:
    for field in ("temperature", "top_p", "min_p", "max_tokens", "n"):
        for value in (b"NaN", b"Infinity", b"1e999", b"1.5e-320" if field == "n" else b"-Infinity"):
            body = b'{"prompt": "a", "' + field.encode() + b'": ' + value + b"}"
            with server.client() as client:
                assert refusal(client.post("/v1/completions", content=body, headers=JSON))["param"] == field


def test_unknown_paths_methods_and_models(server: FakeServer) -> None:
    with server.client() as client:
        assert "/v1/nothing" in refusal(client.get("/v1/nothing"), 404)["message"]
        wrong = client.get("/v1/completions")
        assert refusal(wrong, 405)["type"] == "invalid_request_error" and wrong.headers["allow"] == "POST"
        assert refusal(client.delete("/health"), 405)
        for path in ("/", "/health", "/metrics"):
            head = client.head(path)
            assert head.status_code == 200 and head.content == b""
        error = refusal(client.post("/v1/completions", json={"model": "gpt", "prompt": "a"}), 404)
        assert error["param"] == "model" and error["code"] == "model_not_found" and "'fake'" in error["message"]
        assert refusal(client.get("/v1/models/gpt"), 404)
        assert client.get("/v1/models/fake").json()["id"] == "fake"
        assert client.get("/v1/models//models/fake").json()["id"] == "fake"
        assert client.post("/v1/completions", json={"model": "/models/fake", "prompt": "a"}).status_code == 200
        (model,) = client.get("/v1/models").json()["data"]
        assert model["root"] == "/models/fake" and model["max_model_len"] == 512 and model["object"] == "model"


def test_request_ids(server: FakeServer) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = client.get("/nothing").headers["x-request-id"]
        assert len(made) == 32 and client.get("/nothing").headers["x-request-id"] != made
        long = client.get("/health", headers={"X-Request-Id": "x" * 129}).headers["x-request-id"]
        assert len(long) == 32
        two = [client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "same"}) for _ in range(2)]
        assert two[0].json()["id"] != two[1].json()["id"] and two[0].headers["x-request-id"] == "same"


def test_api_key(fake_server: Any) -> None:
    server = fake_server(settings={"api_key": "s3cret-ü"})
    with server.client() as client:
        body = {"prompt": "a"}
        for given in (None, "Bearer wrong", "Bearer s3cret", "s3cret-ü".encode(), "Basic !!!", "Basic OnM="):
            response = client.post("/v1/completions", json=body, headers={"authorization": given} if given else {})
            error = refusal(response, 401)
            assert error["code"] == "invalid_api_key" and response.headers["www-authenticate"].startswith("Bearer")
        assert raw_post(server, "Bearer ").status == 401
        ok = client.post("/v1/completions", json=body, headers={"authorization": "Bearer s3cret-ü".encode()})
        assert ok.status_code == 200
        assert refusal(client.get("/metrics"), 401) and refusal(client.get("/nothing"), 401)
        assert client.get("/health").status_code == 200  # load balancers have no key
        page = client.get("/")
        assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic")
        assert client.get("/", auth=("anyone", "s3cret-ü")).status_code == 200


def raw_post(server: FakeServer, authorization: str) -> http.client.HTTPResponse:
    """httpx refuses to send an empty key; lm-eval does send it when OPENAI_API_KEY is unset."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", b'{"prompt": "a"}', {**JSON, "Authorization": authorization})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def test_without_a_key_an_empty_bearer_is_fine(server: FakeServer) -> None:
    assert raw_post(server, "Bearer ").status == 200


def test_body_limit(fake_server: Any) -> None:
    server = fake_server(settings={"max_body_bytes": 1000})
    big = json.dumps({"prompt": "x" * 2000}).encode()
    with server.client() as client:
        error = refusal(client.post("/v1/completions", content=big, headers=JSON), 413)
        assert "1000 bytes" in error["message"]
        chunked = client.post("/v1/completions", content=iter([big[:700], big[700:]]), headers=JSON)
        assert refusal(chunked, 413)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert len(server.engine.submitted) == 1


def test_queue_full_is_429_and_leaves_nothing_behind(fake_server: Any) -> None:
    server = fake_server(max_waiting=3, step_seconds=0.01)
    with server.client() as client:
        response = client.post("/v1/completions", json={"prompt": ["a"] * 4, "max_tokens": 50})
        error = refusal(response, 429)
        assert error["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
        assert not server.engine.live and len(server.engine.cancelled) == 3
        assert client.post("/v1/completions", json={"prompt": ["a"] * 3, "max_tokens": 2}).status_code == 200


def test_too_many_sequences(fake_server: Any) -> None:
    server = fake_server(settings={"max_sequences": 6})
    with server.client() as client:
        assert "8 sequences" in refusal(client.post("/v1/completions", json={"prompt": ["a"] * 4, "n": 2}))["message"]
        assert client.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 2}).status_code == 200


def test_phases(fake_server: Any) -> None:
    loading = fake_server(ready=False)
    with loading.client() as client:
        for call in (client.get("/health"), client.get("/ping"), client.get("/v1/models"), client.get("/fingerprint"),
                     client.post("/v1/completions", json={"prompt": "a"})):  # fmt: skip
            assert refusal(call, 503)["code"] == "loading" and "retry-after" in call.headers
        assert client.get("/server_info").json()["phase"] == "loading"
        assert "loading" in client.get("/").text
    dead = fake_server()
    dead.engine.die()
    with dead.client() as client:
        assert refusal(client.get("/health"), 503)["code"] == "failed"
        assert refusal(client.post("/v1/completions", json={"prompt": "a"}), 503)["code"] == "failed"


def test_information_routes(server: FakeServer) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"} and client.post("/ping").status_code == 200
        assert client.get("/fingerprint").json() == FINGERPRINT
        assert client.get("/version").json()["version"]
        info = client.get("/server_info").json()
        assert info["phase"] == "ready" and info["limits"]["max_model_len"] == 512 and "running" in info["stats"]


def test_tokenize_and_back(server: FakeServer, byte_tokenizer: Tokenizer) -> None:
    with server.client() as client:
        tokens = client.post("/tokenize", json={"model": "fake", "prompt": "añb", "return_token_strs": True}).json()
        assert tokens["tokens"] == byte_tokenizer.encode("añb") and tokens["count"] == 4
        assert tokens["max_model_len"] == 512 and tokens["token_strs"] == ["a", "�", "�", "b"]
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "añb"}
        chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert byte_tokenizer.decode(chat["tokens"], False) == "<|user|>hi<|assistant|><think>"
        assert refusal(client.post("/tokenize", json={}))["param"] == "prompt"
        assert refusal(client.post("/detokenize", json={"tokens": [10**6]}))["param"] == "tokens"
        info = client.get("/tokenizer_info").json()
        assert info["eos_token"] == "<|endoftext|>" and "<think>" in info["chat_template"]


def test_metrics(fake_server: Any) -> None:
    server = fake_server()
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "stream": True})
        client.get("/made/up/" + "x" * 50)
        client.post("/v1/completions", json={"prompt": "abc", "best_of": 9})
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("moe_parity_") for name in families)
    samples = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert samples["moe_parity_completion_tokens_total",] == 4 and samples["moe_parity_prompt_tokens_total",] == 3
    assert samples["moe_parity_requests_total", "completions", "finished"] == 1
    by_route = {(s.labels["route"], s.labels["status"]): s.value for s in families["moe_parity_http_requests"].samples
                if s.name.endswith("_total")}  # fmt: skip
    assert by_route["/v1/completions", "200"] == 1 and by_route["/v1/completions", "400"] == 1
    assert by_route["other", "404"] == 1 and "made" not in text
    assert samples["moe_parity_kv_blocks",] == 100_000 and samples["moe_parity_engine_healthy",] == 1
    assert samples["moe_parity_time_to_first_token_seconds_count", "completions"] == 1


def test_status_page(fake_server: Any) -> None:
    server = fake_server(settings={"model_name": "<b>fake</b>"}, step_seconds=0.01)
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "SECRET prompt", "max_tokens": 3})
        page = client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<script" not in page.text
    expected = ["&lt;b&gt;fake&lt;/b&gt;", "bf16/reference", "on layers 1", "finished", "(length)", "KV blocks"]
    for text in [*expected, "viewport", "prefers-color-scheme: dark"]:
        assert text in page.text, text
    assert "SECRET" not in page.text and "<b>fake" not in page.text


def test_log_lines_hold_no_prompt_text(fake_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="service")
    quiet, loud = fake_server(), fake_server(settings={"log_prompts": True})
    for server in (quiet, loud):
        with server.client() as client:
            client.post(
                "/v1/completions", json={"prompt": "CONFIDENTIAL", "max_tokens": 2}, headers={"X-Request-Id": "r1"}
            )
            client.post("/v1/completions", json={"prompt": ["CONFIDENTIAL", {"CONFIDENTIAL": 1}]})
            client.post("/v1/completions", json={"prompt": "CONFIDENTIAL " * 1000})
        lines = [json.loads(JsonLines().format(r)) for r in caplog.records if r.name.startswith("service")]
        text = json.dumps(lines)
        assert ("CONFIDENTIAL" in text) == (server is loud)
        done = next(line for line in lines if line.get("request_id") == "r1")
        assert done["status"] == 200 and done["route"] == "/v1/completions" and done["finish_reasons"] == ["length"]
        assert done["prompt_tokens"] == 12 and done["completion_tokens"] == 2 and done["state"] == "finished"
        caplog.clear()


def test_error_bodies_never_quote_long_or_broken_input(server: FakeServer) -> None:
    with server.client() as client:
        started = time.monotonic()
        response = client.post("/v1/completions", content=b'{"prompt": "a", "model": "\\ud83d' + b"m" * 10**6 + b'"}',
                               headers=JSON)  # fmt: skip
        assert refusal(response)["param"] == "model" and len(response.content) < 1000
        response = client.post("/v1/completions", json={"prompt": "a", "model": "m" * 10**6})
        assert refusal(response, 404) and len(response.content) < 1000
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_status_page_in_chromium(server: FakeServer, tmp_path: Path, scheme: str) -> None:
    """Renders on a phone's width in the colours the reader prefers."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    from matplotlib.image import imread

    shot = tmp_path / "page.png"
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--hide-scrollbars", "--window-size=390,900", f"--user-data-dir={tmp_path}", f"--screenshot={shot}",
               f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", server.url + "/"]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    pixels = imread(shot)[..., :3]
    corner = pixels[2, 2].mean()
    assert corner < 0.2 if scheme == "dark" else corner > 0.9
    inked = (abs(pixels - pixels[2, 2]).max(axis=-1) > 0.4).any(axis=1)  # rows with text
    assert inked.mean() > 0.2 and pixels.shape[1] == 390
