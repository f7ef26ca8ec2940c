"""Helpers of the engine tests: a byte tokenizer, models, and a driver that collects a request's events."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from service.config import EngineConfig
from service.engine.engine import Engine
from service.engine.types import GenerationRequest, SamplingParams, StepEvent, TokenOutput
from service.tokenizer import Tokenizer

GREEDY = dict(temperature=0.0)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Ids 2..257 are the 256 bytes, 0 and 1 special tokens: every split inside a character happens."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    # GPT-2's printable stand-ins for bytes, in byte order (the order of `bytes_to_unicode`).
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(other)}
    assert set(char.values()) == set(ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1} | {char[b]: b + 2 for b in range(256)}
    rust = Rust(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<pad>", "<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
    return Tokenizer.load(folder)


def stock(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Stock transformers' model, the oracle."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def loaded_stock(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Stock transformers' model in the shape the engine takes."""
    model = stock(path, dtype)
    return SimpleNamespace(model=model, config=model.config)


@dataclass
class Answer:
    """All that one request's events said."""

    events: list[StepEvent] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: StepEvent) -> None:
        assert not self.done.is_set(), "an event after the last one"
        self.events.append(event)
        if event.finished:
            self.done.set()

    def wait(self, seconds: float = 60.0) -> Answer:
        assert self.done.wait(seconds), "the request did not finish"
        return self

    @property
    def last(self) -> StepEvent:
        return self.events[-1]

    @property
    def tokens(self) -> list[TokenOutput]:
        return [token for event in self.events for token in event.new_tokens]

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [token.logprob for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text_delta for event in self.events)

    @property
    def prompt_logprobs(self) -> list[TokenOutput | None]:
        first, *rest = [event.prompt_logprobs for event in self.events]
        assert first is not None and all(item is None for item in rest), "prompt_logprobs come once, at first"
        return first


def submit(
    engine: Engine, name: str, prompt: list[int] | tuple[int, ...], every_step: bool = True, **params: Any
) -> Answer:
    """Queue a request; wait on the answer yourself."""
    answer = Answer()
    params = {"max_tokens": 16, **params}
    engine.submit(GenerationRequest(name, tuple(prompt), SamplingParams(**params)), answer, every_step=every_step)
    return answer


def generate(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Answer]:
    """Run prompts together and wait for all."""
    answers = [submit(engine, f"r{i}", prompt, **params) for i, prompt in enumerate(prompts)]
    return [answer.wait() for answer in answers]


class Running:
    """An engine started and stopped around a test; all blocks must be free at the end."""

    def __init__(self, loaded: Any, tokenizer: Tokenizer | None = None, **config: Any) -> None:
        self.engine = Engine(loaded, tokenizer, EngineConfig(**config))

    def __enter__(self) -> Engine:
        self.engine.start()
        return self.engine

    def __exit__(self, *error: object) -> None:
        self.engine.stop()
        assert self.engine.pool.used == 0, "KV blocks leaked"
        assert self.engine.pool.free == self.engine.pool.total


def prompts_of(lengths: list[int], vocab: int = 512, seed: int = 0) -> list[list[int]]:
    """Random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]
