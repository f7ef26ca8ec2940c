"""POST /v1/completions: one or many prompts, echo and log-probabilities as lm-eval's loglikelihood reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.api import choices
from service.api.job import EncodedPrompt, Job, require_positive, wants_usage
from service.api.params import check_length, max_tokens, refuse_unsupported, sampling
from service.api.prompts import Prompt, check_ids, parse_prompt
from service.api.schemas import CompletionRequest
from service.api.state import Loaded, Service
from service.api.stream import EventStream, Json, while_connected
from service.engine.types import StepEvent

router = APIRouter()
DEFAULT_MAX_TOKENS = 16  # OpenAI's
_OFF_LOOP = 16384  # texts longer than this many characters are tokenised in a thread


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt `n` times."""
    service: Service = request.app.state.service
    loaded = service.require()
    service.check_model(body.model)
    refuse_unsupported(body)
    wanted = max_tokens(body, DEFAULT_MAX_TOKENS)
    params = sampling(body, wanted, loaded.vocab, service.settings.max_logprobs)
    prompts = await _encode(parse_prompt(body.prompt), body, loaded, service, wanted)
    job = Job(service, loaded, request, body, "cmpl", "completions", prompts, params)
    job.start()
    if body.stream:
        return EventStream(_chunks(job, body), job.close)
    return await while_connected(request.receive, _answer(job, body), job.close)


async def _encode(
    prompts: list[Prompt], body: CompletionRequest, loaded: Loaded, service: Service, wanted: int
) -> list[EncodedPrompt]:
    """Ids and echo text of every prompt, each checked against the length limit."""
    special, skip = body.add_special_tokens is not False, body.skip_special_tokens is not False
    out = []
    for prompt in prompts[: service.settings.max_sequences + 1]:  # one too many is enough for the refusal
        if isinstance(prompt, str):
            encode = loaded.encoder.encode
            if len(prompt) > _OFF_LOOP:
                ids = await asyncio.to_thread(encode, prompt, special, loaded.max_model_len)
            else:
                ids = encode(prompt, special, loaded.max_model_len)
            encoded = EncodedPrompt(tuple(ids), prompt)
        else:
            check_length(len(prompt), wanted, loaded.max_model_len)
            check_ids(prompt, loaded.vocab)
            text = (
                loaded.tokenizer.decode(prompt, skip_special_tokens=skip)
                if body.echo or service.settings.log_prompts
                else ""
            )
            encoded = EncodedPrompt(tuple(prompt), text)
        require_positive(encoded, "prompt")
        check_length(len(encoded.ids), wanted, loaded.max_model_len)
        out.append(encoded)
    return out


class _Choice:
    """Turns the events of one sequence into the deltas of one choice; a whole choice is their sum."""

    def __init__(self, job: Job, body: CompletionRequest, index: int) -> None:
        self._job, self._body, self._index = job, body, index
        self._prompt = job.prompt_of(index)
        self._first = True
        tokenizer, skip = job.loaded.tokenizer, job.params.skip_special_tokens
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = choices.LogprobsBuilder(
                tokenizer, body.logprobs, bool(body.return_tokens_as_token_ids), skip, self._prompt.ids
            )

    def deltas(self, event: StepEvent) -> list[dict[str, Any]]:
        """A delta for the echoed prompt, then one per token even where its text is held back."""
        out = []
        if self._first:
            self._first = False
            opening = self._opening(event)
            if opening is not None:
                out.append(opening)
        tokens = event.new_tokens
        apart = tokens[:-1] if self._body.stream else []  # several tokens come at once where nothing is streamed
        for token in apart:
            out.append(self._delta("", [token]))
        if tokens or event.text_delta or not event.finished or not out:
            out.append(self._delta(event.text_delta, tokens[len(apart) :]))
        if event.finished:
            last = out[-1]
            last["finish_reason"], last["stop_reason"] = event.finish_reason, event.stop_reason
            if event.routing is not None:
                last["routing"] = choices.routing_field(event.routing)
        return out

    def _opening(self, event: StepEvent) -> dict[str, Any] | None:
        body, prompt, scored = self._body, self._prompt, event.prompt_logprobs
        extra: dict[str, Any] = {}
        if body.return_token_ids:
            extra["prompt_token_ids"] = list(prompt.ids)
        if body.prompt_logprobs is not None and scored is not None:
            extra["prompt_logprobs"] = choices.prompt_logprobs(self._job.loaded.tokenizer, scored, body.prompt_logprobs)
        if not body.echo and not extra:
            return None
        delta = self._delta(prompt.text if body.echo else "", [])
        if body.echo and self._logprobs is not None and scored is not None:
            delta["logprobs"] = self._logprobs.prompt(prompt.ids, prompt.text, scored)
        return {**delta, **extra}

    def _delta(self, text: str, tokens: list[Any]) -> dict[str, Any]:
        delta: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs.generated(tokens) if self._logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._body.return_token_ids:
            delta["token_ids"] = [token.token_id for token in tokens]
        return delta


def _add(whole: dict[str, Any] | None, delta: dict[str, Any]) -> dict[str, Any]:
    """Append a delta to a choice."""
    if whole is None:
        return delta
    whole["text"] += delta.pop("text")
    logprobs = delta.pop("logprobs")
    if logprobs is not None:
        choices.extend_logprobs(whole["logprobs"], logprobs)
    whole.setdefault("token_ids", []).extend(delta.pop("token_ids")) if "token_ids" in delta else None
    whole.update(delta)
    return whole


async def _answer(job: Job, body: CompletionRequest) -> Response:
    total = len(job.prompts) * job.n
    states = [_Choice(job, body, i) for i in range(total)]
    whole: list[dict[str, Any] | None] = [None] * total
    async for index, event in job.events():
        for delta in states[index].deltas(event):
            whole[index] = _add(whole[index], delta)
    return Json({**job.header("text_completion"), "choices": whole, "usage": job.usage()})


async def _chunks(job: Job, body: CompletionRequest) -> AsyncGenerator[dict[str, Any], None]:
    usage_at_end, usage_always = wants_usage(body)
    header = job.header("text_completion")
    states = [_Choice(job, body, i) for i in range(len(job.prompts) * job.n)]
    async for index, event in job.events():
        for delta in states[index].deltas(event):
            chunk = {**header, "choices": [delta]}
            if usage_always:
                chunk["usage"] = job.usage()
            yield chunk
    if usage_at_end:
        yield {**header, "choices": [], "usage": job.usage()}
