"""Limits, cancellation, failures: nothing leaks, nothing is answered wrongly, the engine says what happened."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from service.config import ConfigError, EngineConfig
from service.engine.engine import Engine
from service.engine.types import (
    EngineError,
    EngineStopped,
    GenerationRequest,
    NonFiniteLogits,
    QueueFull,
    RequestInvalid,
    RequestTooLong,
    SamplingParams,
)
from tests.service.engine_tools import GREEDY, Answer, Running, generate, loaded_stock, prompts_of, submit

LONG = dict(max_tokens=500, ignore_eos=True, **GREEDY)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path):
    return loaded_stock(tiny_checkpoint)


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def test_cancel_frees_blocks_and_spares_the_others(model) -> None:
    prompts = prompts_of([20, 30, 25])
    with Running(model) as engine:
        (want,) = generate(engine, prompts[1:2], max_tokens=30, ignore_eos=True, **GREEDY)
        doomed = [submit(engine, f"c{i}", prompts[i], **LONG) for i in (0, 2)]
        kept = submit(engine, "kept", prompts[1], max_tokens=30, ignore_eos=True, **GREEDY)
        until(lambda: all(len(a.events) >= 2 for a in doomed))
        for name in ("c0", "c2", "unknown"):
            engine.cancel(name)
        assert kept.wait().ids == want.ids
        until(lambda: engine.pool.used == 0)
        counts = [len(a.events) for a in doomed]
        time.sleep(0.05)
        assert counts == [len(a.events) for a in doomed] and not any(a.done.is_set() for a in doomed)
        stats = engine.stats()
        assert (stats.requests_cancelled_total, stats.running, stats.waiting) == (2, 0, 0)


def test_cancel_within_one_step(model) -> None:
    """Driven by hand: a cancelled sequence's blocks are free after the message is handled, before the next step."""
    engine = Engine(model, None, EngineConfig())
    answer = submit(engine, "a", [5, 6, 7], **LONG)
    for _ in range(3):
        messages, engine._inbox = engine._inbox, type(engine._inbox)()
        engine._handle(messages)
        engine.step()
    assert len(answer.events) == 3 and engine.pool.used == 1
    engine.cancel("a")
    engine._handle(engine._inbox)
    assert engine.pool.used == 0


def test_limits(model) -> None:
    with Running(model, max_model_len=64, max_waiting=2, max_seqs=1, max_logprobs=5) as engine:
        with pytest.raises(RequestTooLong, match=r"40 tokens and max_tokens is 25: together 65.*at most 64") as caught:
            submit(engine, "a", [3] * 40, max_tokens=25)
        assert (caught.value.prompt, caught.value.max_tokens, caught.value.limit) == (40, 25, 64)
        for bad, match in (
            (dict(max_tokens=-1), "max_tokens"),
            (dict(top_p=0.0), "top_p"),
            (dict(temperature=-1.0), "temperature"),
            (dict(logprobs=6), "logprobs"),
            (dict(stop_token_ids=(512,)), "512"),
        ):
            with pytest.raises(RequestInvalid, match=match):
                submit(engine, "a", [3], **bad)
        for prompt, match in (([], "empty"), ([3, 512], "512"), ([-1], "-1")):
            with pytest.raises(RequestInvalid, match=match):
                submit(engine, "a", prompt)
        assert engine.stats().waiting == 0
        answers = [submit(engine, "x0", [3, 4], max_tokens=60, ignore_eos=True, **GREEDY)]
        until(lambda: answers[0].events)
        with pytest.raises(RequestInvalid, match="already in use"):
            submit(engine, "x0", [3])
        answers += [submit(engine, f"x{i}", [3, 4], max_tokens=4, **GREEDY) for i in (1, 2)]
        with pytest.raises(QueueFull):
            submit(engine, "x3", [3, 4], max_tokens=4)
        for answer in answers:
            assert answer.wait().last.error is None


def test_config_errors(model) -> None:
    with pytest.raises(ConfigError, match="kv_block"):
        EngineConfig(kv_block=0)
    with pytest.raises(ConfigError, match="1024 positions"):
        Engine(model, None, EngineConfig(max_model_len=5000))
    with pytest.raises(ConfigError, match="raise kv_blocks"):
        Engine(model, None, EngineConfig(max_model_len=512, kv_blocks=4))
    engine = Engine(model, None, EngineConfig(kv_blocks=4))
    assert engine.max_model_len == 64


def test_many_requests_through_a_tiny_pool(model) -> None:
    """Far more work than blocks: everything finishes, in any order, and equals the unhurried answers."""
    prompts = prompts_of([10, 40, 25, 8, 33, 17, 50, 12] * 3)
    with Running(model, max_seqs=64) as engine:
        want = generate(engine, prompts, max_tokens=14, ignore_eos=True, **GREEDY)
    with Running(model, kv_blocks=9, kv_block=8, max_batch_tokens=24) as engine:
        got = generate(engine, prompts, max_tokens=14, ignore_eos=True, **GREEDY)
        assert engine.stats().preemptions_total > 0
    assert [a.ids for a in got] == [a.ids for a in want]


def test_step_exception_fails_its_requests_only(model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(model) as engine:
        (want,) = generate(engine, [[5, 6, 7]], max_tokens=5, **GREEDY)
        real = engine.runner.hidden
        calls = iter([False, False, True])

        def broken(*args, **kwargs):
            if next(calls, False):
                raise RuntimeError("the kernel fell over")
            return real(*args, **kwargs)

        monkeypatch.setattr(engine.runner, "hidden", broken)
        answer = submit(engine, "bad", [5, 6, 7], **LONG).wait()
        assert isinstance(answer.last.error, EngineError) and answer.last.finish_reason is None
        assert "bad" in str(answer.last.error) and "the kernel fell over" in str(answer.last.error)
        assert engine.healthy and engine.pool.used == 0
        (again,) = generate(engine, [[5, 6, 7]], max_tokens=5, **GREEDY)
        assert again.ids == want.ids and again.logprobs == want.logprobs
        assert engine.stats().requests_failed_total == 1


def test_repeated_step_failures_make_it_unhealthy(model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(model) as engine:
        monkeypatch.setattr(engine.runner, "hidden", lambda *a, **k: 1 / 0)
        for i in range(3):
            assert engine.healthy
            assert submit(engine, f"r{i}", [5]).wait().last.error is not None
        until(lambda: not engine.healthy)
        assert isinstance(engine.fatal, ZeroDivisionError)
        with pytest.raises(EngineStopped, match="division"):
            submit(engine, "late", [5])


def test_nan_is_an_error_naming_request_and_layer(tiny_checkpoint: Path) -> None:
    """A NaN that one token's embedding brings fails the request that has it, and no other, then or later."""
    model = loaded_stock(tiny_checkpoint)
    poison = 77
    clean = [[5, 6, 7, 8] * 6, [9] * 30]
    with Running(model, kv_blocks=12) as engine:
        want = generate(engine, clean, max_tokens=12, ignore_eos=True, **GREEDY)

        def spoil(module, args, out):  # NaN for exactly the rows of the poisoned token
            return torch.where(args[0].abs().amax(-1, keepdim=True) > 1e4, torch.nan, out)

        model.model.model.embed_tokens.weight.data[poison] = 1e5
        model.model.model.layers[1].post_attention_layernorm.register_forward_hook(spoil)
        others = [
            submit(engine, f"ok{i}", prompt, max_tokens=12, ignore_eos=True, **GREEDY) for i, prompt in enumerate(clean)
        ]
        bad = submit(engine, "poisoned", [5, poison, 6, 8], max_tokens=100, **GREEDY).wait()
        error = bad.last.error
        assert isinstance(error, NonFiniteLogits) and bad.text == "" and bad.ids == []
        assert "poisoned" in str(error) and "model.layers.1.post_attention_layernorm" in str(error)
        assert [a.wait().ids for a in others] == [a.ids for a in want]
        # The poisoned blocks are used again: nothing of the NaN may be left in them.
        again = generate(engine, clean * 2, max_tokens=12, ignore_eos=True, **GREEDY)
        assert [a.ids for a in again] == [a.ids for a in want] * 2


def test_poisoned_padding_token_harms_nobody(tiny_checkpoint: Path) -> None:
    """Padding rows run through the model as token 0; what they compute must not reach any sequence."""
    model = loaded_stock(tiny_checkpoint)
    prompts = [[5, 6, 7], [9] * 21]
    with Running(model) as engine:
        want = generate(engine, prompts, max_tokens=12, ignore_eos=True, **GREEDY)
        model.model.model.embed_tokens.weight.data[0] = torch.nan
        got = generate(engine, prompts, max_tokens=12, ignore_eos=True, **GREEDY)
        for one, other in zip(got, want, strict=True):
            assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert isinstance(generate(engine, [[5, 0]], **GREEDY)[0].last.error, NonFiniteLogits)


def test_failing_receiver_is_dropped(model) -> None:
    def broken(event) -> None:
        raise ValueError("receiver")

    with Running(model) as engine:
        engine.submit(GenerationRequest("r", (5, 6), SamplingParams(**LONG)), broken)
        until(lambda: engine.stats().requests_cancelled_total == 1)
        assert engine.pool.used == 0
        assert generate(engine, [[5, 6]], max_tokens=3)[0].last.error is None


def test_stop_drains_then_fails_the_rest(model) -> None:
    engine = Engine(model, None, EngineConfig())
    engine.start()
    short = submit(engine, "short", [5, 6], max_tokens=10, ignore_eos=True, **GREEDY)
    engine.stop(drain_seconds=20)
    assert short.done.is_set() and short.last.error is None and len(short.ids) == 10
    with pytest.raises(EngineStopped):
        submit(engine, "late", [5])

    engine = Engine(model, None, EngineConfig())
    engine.start()
    endless = submit(engine, "endless", [5, 6], **LONG)
    engine.stop()
    assert isinstance(endless.wait().last.error, EngineStopped) and engine.pool.used == 0


def test_submit_from_many_threads(model) -> None:
    """Forty threads at once, with random cancels: every kept request is answered once and correctly."""
    prompts = prompts_of([3 + i % 9 for i in range(40)])
    with Running(model, max_seqs=16) as engine:
        want = [a.ids for a in generate(engine, prompts, max_tokens=8, ignore_eos=True, **GREEDY)]
        answers: dict[int, Answer] = {}

        def client(i: int) -> None:
            answers[i] = submit(engine, f"t{i}", prompts[i], max_tokens=8, ignore_eos=True, **GREEDY)
            if i % 5 == 0:
                engine.cancel(f"t{i}")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, answer in answers.items():
            if i % 5:
                assert answer.wait().ids == want[i]
        until(lambda: engine.pool.used == 0)
        stats = engine.stats()
        assert stats.requests_finished_total + stats.requests_cancelled_total == 80
        assert stats.generated_tokens_total >= 72 * 8 and stats.kv_used == 0
