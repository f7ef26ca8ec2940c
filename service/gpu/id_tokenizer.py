"""A tokenizer for models that have none: token 17 is written `t17`, and text of that form reads back the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from service.tokenizer import Tokenizer


class IdTokenizer(Tokenizer):
    """Words `t0` to `t<vocab - 1>` separated by spaces; any other word is token 0."""

    def __init__(self, vocab: int) -> None:
        from tokenizers import Tokenizer as Rust
        from tokenizers import models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        rust = Rust(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
        rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=rust), Path())
        self._size = vocab

    def sha256(self) -> str:
        """Of the rule and the vocabulary's size."""
        return hashlib.sha256(f"ids:{self._size}".encode()).hexdigest()
