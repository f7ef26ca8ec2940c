"""Training documents as packed token rows: step `s` of seed `n` always trains on the same batch, whoever makes it.

A document is a completion prompt with its answer (most), a chat exchange in the model's template, or a few-shot prompt.
Rows are plain causal packing: documents follow one another and may look back at earlier ones.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evals.mini.generator import VERSION, Problem, draw
from evals.mini.rng import Rng
from evals.mini.tokenizer import END, MODEL_DIR, USER, chat_prompt, prompt

CHAT_SHARE, FEW_SHOT_SHARE = 0.10, 0.06
# The class of a token as a training target sits in the two high bits: answer (full loss), question (a little), none.
ANSWER, QUESTION, NONE = 0, 1 << 14, 1 << 15
TOKEN_MASK = (1 << 14) - 1
_PIECES = re.compile(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+")
OPEN_ROWS, GIVE_UP = 24, 40


@dataclass
class Encoder:
    """Our tokenizer through a cache of words: same ids as `tokenizers`, an order of magnitude faster in one thread."""

    directory: Path = MODEL_DIR
    cache: dict[str, list[int]] = field(default_factory=dict)
    _tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        """The ids of plain ASCII text; special tokens are recognised only where a whole piece spells one."""
        ids: list[int] = []
        cache = self.cache
        for piece in _PIECES.findall(text):
            known = cache.get(piece)
            if known is None:
                known = cache[piece] = self.slow(piece)
            ids += known
        return ids

    def slow(self, text: str) -> list[int]:
        """The ids by the tokenizers library."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _mark(ids: list[int], kind: int) -> list[int]:
    return [i | kind for i in ids]


def completion_document(encoder: Encoder, problem: Problem) -> list[int]:
    """`Question: …\\nAnswer: …#### N<|endoftext|>`."""
    question = _mark(encoder.encode(prompt(problem.question)), QUESTION)
    return question + encoder.encode(f" {problem.answer}") + [END | ANSWER]


def chat_document(encoder: Encoder, problem: Problem) -> list[int]:
    """One exchange in the chat template, ended as GLM ends it, by `<|user|>`."""
    head = encoder.slow(chat_prompt(""))  # [gMASK]<sop><|user|>\n<|assistant|>\n
    question = head[:4] + encoder.encode(problem.question) + head[4:]
    return _mark(question, QUESTION) + encoder.encode(problem.answer) + [USER | ANSWER]


def few_shot_document(encoder: Encoder, problems: list[Problem]) -> list[int]:
    """Several problems joined by blank lines; nothing is learned about what follows an earlier problem's answer."""
    blank = _mark(encoder.encode("\n") * 2, NONE)  # how the tokenizer splits a blank line before a word
    tokens: list[int] = []
    for problem in problems:
        document = completion_document(encoder, problem)
        tokens += document[:-1] + blank
    return tokens[: -len(blank)] + [END | ANSWER]


def batch(seed: int, step: int, rows: int, length: int, encoder: Encoder | None = None) -> np.ndarray:
    """The packed rows of one training step: uint16 [rows, length + 1], marked with target classes."""
    encoder = encoder or _encoder()
    rng = Rng("gsm8k-mini", VERSION, "train", seed, step)
    width = length + 1
    full: list[list[int]] = []
    open_rows: list[list[int]] = []
    opened = misses = 0
    while misses < GIVE_UP:
        kind = rng.between(1, 1000) / 1000
        if kind <= CHAT_SHARE:
            document = chat_document(encoder, draw(rng, held_out=False))
        elif kind <= CHAT_SHARE + FEW_SHOT_SHARE:
            shots = [draw(rng, held_out=False, steps=rng.between(2, 4)) for _ in range(rng.between(2, 3))]
            document = few_shot_document(encoder, shots)
        else:
            document = completion_document(encoder, draw(rng, held_out=False))
        size = len(document)
        if size > width:
            continue
        best, room = -1, width + 1
        for index, row in enumerate(open_rows):
            left = width - len(row)
            if size <= left < room:
                best, room = index, left
        if best >= 0:
            open_rows[best] += document
            misses = 0
        elif opened < rows:
            open_rows.append(document)
            opened += 1
            if len(open_rows) > OPEN_ROWS:
                fullest = max(range(len(open_rows)), key=lambda i: len(open_rows[i]))
                full.append(open_rows.pop(fullest))
        else:
            misses += 1
    out = np.full((rows, width), END | NONE, dtype=np.uint16)
    for index, row in enumerate(full + open_rows):
        out[index, : len(row)] = row
    return out


_ENCODER: Encoder | None = None


def _encoder() -> Encoder:
    global _ENCODER
    if _ENCODER is None:
        _ENCODER = Encoder()
    return _ENCODER


def _work(job: tuple[int, int, int, int]) -> np.ndarray:
    return batch(*job)


def batches(
    seed: int, first: int, last: int, rows: int, length: int, workers: int
) -> Generator[np.ndarray, None, None]:
    """The batches of steps first..last-1 in order, made ahead by `workers` processes (0: made here)."""
    jobs = ((seed, step, rows, length) for step in range(first, last))
    if workers == 0:
        yield from map(_work, jobs)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        waiting = deque(pool.apply_async(_work, (job,)) for job in itertools.islice(jobs, 16 * workers))
        while waiting:
            yield waiting.popleft().get()
            waiting.extend(pool.apply_async(_work, (job,)) for job in itertools.islice(jobs, 1))
