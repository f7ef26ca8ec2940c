"""Tokenizer wrapper and incremental detokeniser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.errors import CheckpointError
from service.tokenizer import Detokenizer, Tokenizer
from tests.service.engine_tools import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def feed(tokenizer: Tokenizer, ids: list[int], tail: list[int] = [], skip: bool = True) -> tuple[str, list[str]]:  # noqa: B006
    stream = Detokenizer(tokenizer, tail, skip)
    deltas = [stream.add(i) for i in ids]
    return "".join(deltas) + stream.flush(), deltas


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_text_round_trips_byte_by_byte(tokenizer: Tokenizer, text: str) -> None:
    """One token a byte: every character arrives whole, none early."""
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    whole, deltas = feed(tokenizer, ids)
    assert whole == text
    if "�" not in text:
        assert "�" not in "".join(deltas)
        seen, count = "", 0
        for delta, byte in zip(deltas, text.encode(), strict=True):
            seen, count = seen + delta, count + 1
            assert text.encode()[:count].decode(errors="ignore") == seen, byte


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=40), st.lists(st.integers(0, 257), max_size=6), st.booleans())
def test_any_ids_equal_decoding_at_once(tokenizer: Tokenizer, ids: list[int], tail: list[int], skip: bool) -> None:
    """Invalid UTF-8 and special tokens included; the prompt's tail is context, not output."""
    tail = [*tail, *tokenizer.encode("x")]  # a prompt that ends in a whole character
    whole, _ = feed(tokenizer, ids, tail, skip)
    before = tokenizer.decode(tail, skip_special_tokens=skip)
    assert before + whole == tokenizer.decode(tail + ids, skip_special_tokens=skip)


def test_decoding_is_transformers(mini_checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(mini_checkpoint)
    text = "Anna has 17 toys.\nYusuf has 17+21=<<17+21=38>>38 — naïve 你好 🙂\n#### 38\n\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, clean_up_tokenization_spaces=False) == text
    assert feed(tokenizer, ids)[0] == text
    assert tokenizer.token_text(0) == "<|endoftext|>" and tokenizer.is_special(0) and tokenizer.eos_id == 0
    assert tokenizer.decode([0, *ids, 0]) == text
    assert not tokenizer.has_chat_template and len(tokenizer.sha256()) == 64


def test_sentencepiece_style_left_context(tmp_path: Path) -> None:
    """A decoder that strips the first token's leading space (Metaspace) still gives spaces in the middle."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers

    rust = Rust(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode([0, 1, 2, 0]) == "a bc a"
    assert feed(tokenizer, [0, 1, 2, 0])[0] == "a bc a"
    assert feed(tokenizer, [1, 2, 0], tail=[0])[0] == " bc a"


def test_errors_name_the_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    shutil.copy(tokenizer.path / "tokenizer.json", tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).encode("hi") == tokenizer.encode("hi")
    assert Tokenizer.load(tmp_path).sha256() != tokenizer.sha256()  # the config file is missing here
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.load(tmp_path)
