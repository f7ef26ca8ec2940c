"""From a sampled token to what the client hears: stop conditions, text, prompt log-probabilities, events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from service.engine.runner import ModelRunner
from service.engine.sampler import Row, describe
from service.engine.sequence import Sequence
from service.engine.types import FinishReason, StepEvent, TokenOutput
from service.tokenizer import Tokenizer

SLICE_ELEMENTS = 1 << 22  # prompt logits are made in slices of at most this many FP32 values (16 MiB)


def sampling_row(sequence: Sequence, eos_ids: frozenset[int]) -> Row:
    """What the sampler needs to know of a sequence that is due for a token."""
    params = sequence.params
    if params.temperature <= 0 and not params.min_tokens:  # the same at every position
        if sequence.greedy_row is None:
            sequence.greedy_row = Row(params, sequence.seed, 0)
        return sequence.greedy_row
    banned: tuple[int, ...] = ()
    position = sequence.generated + sequence.inflight
    if position < params.min_tokens:
        banned = tuple(eos_ids.union(params.stop_token_ids))
    return Row(params, sequence.seed, position, banned)


def apply_token(sequence: Sequence, token: TokenOutput, eos_ids: frozenset[int]) -> StepEvent | None:
    """Append a token (none when max_tokens is 0) and decide whether the sequence ends with it.

    None where nothing is to be told yet: the client hears of the end only, and this is not it.
    """
    params = sequence.params
    if params.max_tokens == 0:
        return StepEvent(sequence.request_id, finished=True, finish_reason="length")
    token_id, text = token.token_id, sequence.text
    sequence.ids.append(token_id)
    sequence.outputs.append(token)
    generated = len(sequence.ids) - sequence.prompt_length
    stops = generated >= params.min_tokens
    delta = ""
    reason: FinishReason | None = None
    stop_reason: str | int | None = None
    if stops and token_id in params.stop_token_ids:
        reason, stop_reason = "stop", token_id
    elif stops and not params.ignore_eos and token_id in eos_ids:
        reason = "stop"
    else:
        delta = text.add(token_id, look_for_stops=stops)
        if text.matched is None and generated >= params.max_tokens:
            reason = "length"
    if reason is not None:
        delta += text.finish(look_for_stops=stops)
    if text.matched is not None:
        reason, stop_reason = "stop", text.matched
    if reason is None and not sequence.every_step:
        sequence.pending_text += delta
        return None
    return StepEvent(sequence.request_id, [token], delta, reason is not None, reason, stop_reason)


def take_event(sequence: Sequence, event: StepEvent) -> StepEvent:
    """The event to send now: with `every_step` this one, else the only one, with everything."""
    if not sequence.every_step:
        event.text_delta, event.new_tokens = sequence.pending_text + event.text_delta, list(sequence.outputs)
    if sequence.prompt_logprobs is not None and sequence.delivered == 0:
        event.prompt_logprobs = sequence.prompt_logprobs
    sequence.delivered += 1
    event.prompt_tokens, event.completion_tokens = sequence.prompt_length, sequence.generated
    return event


def collect_prompt_logprobs(runner: ModelRunner, sequence: Sequence, count: int, start: int, hidden: Tensor) -> None:
    """Add the log-probabilities of the prompt tokens that this chunk's rows predict.

    The row of position p predicts token p + 1. Tokens seen before a preemption are not computed again.
    """
    known = sequence.prompt_logprobs
    top = sequence.params.prompt_logprobs
    if known is None or top is None:
        return
    first = max(len(known), sequence.computed + 1)  # first target position still missing
    last = min(sequence.computed + count, sequence.prompt_length - 1)  # last target position within the prompt
    slice_rows = max(8, SLICE_ELEMENTS // runner.vocab)
    for target in range(first, last + 1, slice_rows):
        end = min(target + slice_rows, last + 1)
        row = start + target - 1 - sequence.computed
        logprobs = runner.logits(hidden[row : row + end - target]).log_softmax(-1)
        chosen = torch.tensor(sequence.ids[target:end], device=hidden.device)
        known.extend(describe(logprobs, chosen, [top] * (end - target)))


def eos_ids(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every end-of-sequence id named by generation_config.json, config.json or the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return frozenset(found)

