"""When an answer ends and which text the client gets: stop strings, ids, EOS, min_tokens, UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.engine import Engine
from service.engine.text import TextStream, held_back
from service.engine.types import RequestInvalid
from service.tokenizer import Tokenizer
from tests.service.engine_tools import GREEDY, Running, byte_tokenizer, generate, loaded_stock, prompts_of
from tests.tiny import glm4_moe

NEW = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory):
    """A random model over bytes: its greedy text is fixed nonsense, good enough to place stops in."""
    path: Path = glm4_moe(tmp_path_factory.mktemp("m") / "m", seed=5, vocab_size=258)
    with Running(loaded_stock(path), tokenizer) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return prompts_of([11], vocab=120, seed=3)[0]


@pytest.fixture(scope="module")
def free(engine: Engine, prompt: list[int]):
    """The answer without any stop."""
    return generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, **GREEDY)[0]


def test_text_is_the_decoded_tokens(free, tokenizer: Tokenizer) -> None:
    assert len(free.ids) == NEW and free.last.finish_reason == "length" and free.last.stop_reason is None
    assert free.text == tokenizer.decode(free.ids)
    assert len(free.events) == NEW  # one event a token, text or not


def test_one_event_when_not_streaming(engine: Engine, prompt: list[int], free) -> None:
    (answer,) = generate(engine, [prompt], every_step=False, max_tokens=NEW, ignore_eos=True, logprobs=2, **GREEDY)
    assert len(answer.events) == 1 and answer.ids == free.ids and answer.text == free.text
    assert answer.last.completion_tokens == NEW and answer.last.prompt_tokens == len(prompt)


@pytest.mark.parametrize("start", [0, 3, 10])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_cuts_the_text(engine: Engine, prompt: list[int], free, start: int, length: int) -> None:
    """A stop string made of several one-byte tokens: text ends before its first occurrence."""
    stop = free.text[start : start + length]
    at = free.text.find(stop)
    (answer,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, stop=("never there", stop), **GREEDY)
    assert answer.text == free.text[:at]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    assert answer.ids == free.ids[: len(answer.ids)]
    (kept,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, stop=(stop,), include_stop_str=True, **GREEDY)
    assert kept.text == free.text[: at + length]


def test_no_delta_ever_shows_part_of_a_stop_string(engine: Engine, prompt: list[int], free) -> None:
    stop = free.text[6:12]
    at = free.text.find(stop)
    (answer,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, stop=(stop,), **GREEDY)
    seen = ""
    for event in answer.events:
        seen += event.text_delta
        assert len(seen) <= at and free.text.startswith(seen)


def test_stop_token_ids_and_eos(engine: Engine, prompt: list[int], free) -> None:
    token = free.ids[4]
    first = free.ids.index(token)
    (answer,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, stop_token_ids=(token,), **GREEDY)
    assert answer.ids == free.ids[: first + 1]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", token)
    assert answer.text == engine.tokenizer.decode(free.ids[:first])  # type: ignore[union-attr]
    assert engine.eos_ids == {1}
    engine.eos_ids = frozenset({1, token})  # several EOS ids, as GLM has three
    try:
        (ended,) = generate(engine, [prompt], max_tokens=NEW, **GREEDY)
        assert ended.ids == answer.ids and ended.last.stop_reason is None and ended.last.finish_reason == "stop"
        (longer,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, **GREEDY)
        assert longer.ids == free.ids
        (late,) = generate(engine, [prompt], max_tokens=NEW, min_tokens=first + 3, **GREEDY)
        assert token not in late.ids[: first + 3] and len(late.ids) >= first + 3
        assert late.ids[:first] == free.ids[:first]
        assert late.logprobs[:first] == free.logprobs[:first]
    finally:
        engine.eos_ids = frozenset({1})


def test_min_tokens_delays_stop_strings(engine: Engine, prompt: list[int], free) -> None:
    stop = free.text[2]
    (answer,) = generate(engine, [prompt], max_tokens=NEW, ignore_eos=True, stop=(stop,), min_tokens=15, **GREEDY)
    assert len(answer.ids) >= 15 and answer.ids == free.ids[: len(answer.ids)]


def test_stop_strings_need_a_tokenizer(tiny_checkpoint: Path) -> None:
    with Running(loaded_stock(tiny_checkpoint)) as engine, pytest.raises(RequestInvalid, match="tokenizer"):
        generate(engine, [[5, 6]], stop=("x",))


def test_held_back() -> None:
    assert held_back("abc", ("cd",)) == 1
    assert held_back("abc", ("bcd", "c!")) == 2
    assert held_back("aaa", ("aaaa",)) == 3
    assert held_back("abc", ("xyz",)) == 0
    assert held_back("", ("x",)) == 0


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back_is_the_longest_beginning(text: str, stops: list[str]) -> None:
    """Against its definition: the longest end of the text that is a proper beginning of a stop string."""
    ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert held_back(text, tuple(stops)) == max(ends, default=0)


def test_earliest_stop_wins_and_ties_take_the_longer(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, (), ("lo wo", "o w", "zzz"), False, True)
    text = ""
    for token in tokenizer.encode("hello world"):
        text += stream.add(token)
        if stream.matched:
            break
    assert (text, stream.matched) == ("hell", "o w")  # "o w" is complete before "lo wo" is


def test_unfinished_stop_prefix_and_character_come_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, (), ("\n\nQ",), False, True)
    ids = tokenizer.encode("a\n\né")
    text = "".join(stream.add(token) for token in ids[:-1])
    assert text == "a"
    assert text + stream.finish() == "a\n\n�"
