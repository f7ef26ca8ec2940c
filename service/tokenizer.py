"""Tokenizer wrapper for any local Hugging Face tokenizer, and a detokeniser that never emits half a character."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_kernels.errors import CheckpointError

REPLACEMENT = "�"
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json",
          "merges.txt", "tokenizer.model")


class Tokenizer:
    """A fast tokenizer read from a folder; no network, no remote code."""

    def __init__(self, hf: Any, path: Path) -> None:
        self.hf = hf
        self.path = path
        self._decode = hf.backend_tokenizer.decode
        self._special = frozenset(int(i) for i in hf.all_special_ids)
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.gain = lru_cache(maxsize=1 << 17)(self._gain)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder; raises CheckpointError when there is none."""
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            raise CheckpointError(f"{path} has no tokenizer.json: copy the model's fast tokenizer files there")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if (path / "tokenizer_config.json").is_file():
                hf = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            else:
                hf = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception on malformed files
            raise CheckpointError(f"cannot read the tokenizer in {path}: {error}") from error
        if not getattr(hf, "is_fast", False):
            raise CheckpointError(f"the tokenizer in {path} has no fast (Rust) form, which this service needs")
        return cls(hf, path)

    def __len__(self) -> int:
        return len(self.hf)

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id (the engine also takes those of the model's configs)."""
        return self.hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether /v1/chat/completions can work."""
        return bool(getattr(self.hf, "chat_template", None))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return [int(i) for i in self.hf(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, nothing cleaned up; an incomplete character at the end shows as U+FFFD."""
        # The Rust tokenizer itself: transformers' wrapper adds 7 us a call, and there are two calls a token.
        return self._decode(ids, skip_special_tokens)

    def _token_text(self, token_id: int) -> str:
        """One token on its own, special tokens by name; unknown ids give an empty string."""
        return self.decode([token_id], skip_special_tokens=False)

    def _gain(self, before: int, token_id: int, skip_special_tokens: bool) -> str:
        """Text that a token adds behind one other; empty also where it ends in what may be an unfinished character."""
        text = self.decode([before, token_id], skip_special_tokens)
        if text.endswith(REPLACEMENT):
            return ""
        return text[len(self.decode([before], skip_special_tokens)) :]

    def is_special(self, token_id: int) -> bool:
        """Whether the id is one of the tokenizer's special tokens."""
        return token_id in self._special

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The chat template's text for a conversation (encode it without adding special tokens)."""
        return self.hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)

    def sha256(self) -> str:
        """Hash over the names and bytes of the tokenizer files in the folder."""
        digest = hashlib.sha256()
        for name in _FILES:
            file = self.path / name
            if file.is_file():
                digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def info(self) -> dict[str, Any]:
        """What lm-eval's remote tokenizer asks of GET /tokenizer_info."""
        return {
            "tokenizer_class": type(self.hf).__name__, "vocab_size": len(self.hf),
            "bos_token": self.hf.bos_token, "eos_token": self.hf.eos_token, "pad_token": self.hf.pad_token,
            "bos_token_id": self.hf.bos_token_id, "eos_token_id": self.hf.eos_token_id,
            "pad_token_id": self.hf.pad_token_id, "chat_template": getattr(self.hf, "chat_template", None),
        }


class Detokenizer:
    """Turns a growing list of ids into text deltas that, concatenated, equal decoding all ids at once.

    A delta is what a decoding that starts at an earlier token gained over the last one, so tokenizers that treat the
    first token of a text differently (a leading space stripped) do no harm. U+FFFD at the end may be an unfinished
    character, so up to four of them (a character's bytes) are held back until a later token decides or `flush`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail)
        self._start = 0  # decodings begin here
        self._sent = len(self._decode())  # characters of the decoding that are not news
        self._fresh = False  # decodings begin at the last token, whose text is sent: `_sent` is not kept then

    def add(self, token_id: int) -> str:
        """Text that becomes certain with this token (often all of it, sometimes none)."""
        self._ids.append(token_id)
        if self._fresh:  # nearly always: what this token adds depends on the one before it alone, and is remembered
            delta = self._tokenizer.gain(self._ids[-2], token_id, self._skip)
            if delta:
                self._start += 1
                return delta
        self._settle(len(self._ids) - 1)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            delta = text[self._sent :]
            if delta:
                # The next decoding starts at this token, which gives it left context.
                self._start = len(self._ids) - 1
                self._fresh = True
            return delta
        held = len(text) - len(text.rstrip(REPLACEMENT))
        return self._upto(text, len(text) - min(held, 4))

    def flush(self) -> str:
        """Whatever is still held back, an unfinished character as U+FFFD."""
        self._settle(len(self._ids))
        text = self._decode()
        return self._upto(text, len(text))

    def _settle(self, end: int) -> None:
        """Make `_sent` true: the text of the one token before `end`."""
        if self._fresh:
            self._fresh = False
            self._sent = len(self._tokenizer.decode(self._ids[end - 1 : end], skip_special_tokens=self._skip))

    def _upto(self, text: str, end: int) -> str:
        delta = text[self._sent : end]
        self._sent = max(self._sent, end)
        return delta

    def _decode(self) -> str:
        ids = self._ids[self._start :] if self._start else self._ids
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
