"""From a sampled token to what the client hears: stop conditions, text, prompt log-probabilities, events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from service.engine.runner import ModelRunner
from service.engine.sampler import Row, describe
from service.engine.sequence import Sequence
from service.engine.types import StepEvent, TokenOutput
from service.tokenizer import Tokenizer

SLICE_ELEMENTS = 1 << 22  # prompt logits are made in slices of at most this many FP32 values (16 MiB)


def sampling_row(sequence: Sequence, eos_ids: frozenset[int]) -> Row:
    """What the sampler needs to know of a sequence that is due for a token."""
    params = sequence.params
    banned: tuple[int, ...] = ()
    position = sequence.generated + sequence.inflight
    if position < params.min_tokens:
        banned = tuple(eos_ids.union(params.stop_token_ids))
    return Row(params, sequence.seed, position, banned)


def apply_token(sequence: Sequence, token: TokenOutput, eos_ids: frozenset[int]) -> StepEvent:
    """Append a token (none when max_tokens is 0) and decide whether the sequence ends with it."""
    params = sequence.params
    event = StepEvent(sequence.request_id)
    if params.max_tokens == 0:
        event.finished, event.finish_reason = True, "length"
        return event
    sequence.ids.append(token.token_id)
    sequence.outputs.append(token)
    event.new_tokens.append(token)
    stops = sequence.generated >= params.min_tokens
    if stops and token.token_id in params.stop_token_ids:
        event.finished, event.finish_reason, event.stop_reason = True, "stop", token.token_id
    elif stops and not params.ignore_eos and token.token_id in eos_ids:
        event.finished, event.finish_reason = True, "stop"
    else:
        event.text_delta = sequence.text.add(token.token_id, look_for_stops=stops)
        if sequence.text.matched is None and sequence.generated >= params.max_tokens:
            event.finished, event.finish_reason = True, "length"
    if event.finished:
        event.text_delta += sequence.text.finish(look_for_stops=stops)
    if sequence.text.matched is not None:
        event.finished, event.finish_reason, event.stop_reason = True, "stop", sequence.text.matched
    return event


def take_event(sequence: Sequence, event: StepEvent) -> StepEvent | None:
    """The event to send now: with `every_step` this one, else one event with everything when the request ends."""
    if not sequence.every_step:
        sequence.pending_text += event.text_delta
        if not event.finished:
            return None
        event.text_delta, event.new_tokens = sequence.pending_text, list(sequence.outputs)
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

