"""POST /v1/chat/completions: messages through the model's template, reasoning apart from content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.api import choices
from service.api.chat_prompt import RenderedChat, render
from service.api.job import EncodedPrompt, Job, require_positive, wants_usage
from service.api.params import check_length, max_tokens, refuse_unsupported, sampling
from service.api.reasoning import ReasoningSplitter
from service.api.schemas import ChatRequest
from service.api.state import Service
from service.api.stream import EventStream, Json, while_connected
from service.engine.types import StepEvent, TokenOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation `n` times."""
    service: Service = request.app.state.service
    loaded = service.require()
    service.check_model(body.model)
    refuse_unsupported(body)
    chat = await asyncio.to_thread(
        render,
        loaded,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )
    ids = await asyncio.to_thread(
        loaded.encoder.encode, chat.text, bool(body.add_special_tokens), loaded.max_model_len, "messages"
    )
    prompt = EncodedPrompt(tuple(ids), chat.text)
    require_positive(prompt, "messages")
    wanted = max_tokens(body, max(loaded.max_model_len - len(ids), 1))
    params = sampling(body, wanted, loaded.vocab, service.settings.max_logprobs)
    check_length(len(ids), wanted, loaded.max_model_len, "messages")
    job = Job(service, loaded, request, body, "chatcmpl", "chat", [prompt], params)
    job.start()
    if body.stream:
        return EventStream(_chunks(job, body, chat), job.close)
    return await while_connected(request.receive, _answer(job, body, chat), job.close)


class _Choice:
    """Turns the events of one sequence into message deltas."""

    def __init__(self, job: Job, body: ChatRequest, chat: RenderedChat, index: int) -> None:
        self._job, self._body, self._index = job, body, index
        split = chat.splits and body.separate_reasoning is not False
        self._splitter = ReasoningSplitter(chat.inside) if split else None

    def deltas(self, event: StepEvent) -> list[dict[str, Any]]:
        """One choice delta per token, even where its text is held back."""
        tokens = event.new_tokens
        out = [self._delta("", [token], False) for token in tokens[:-1]]
        if tokens or event.text_delta or event.finished:
            out.append(self._delta(event.text_delta, tokens[-1:], event.finished))
        if event.finished:
            out[-1].update(finish_reason=event.finish_reason, stop_reason=event.stop_reason)
            if event.routing is not None:
                out[-1]["routing"] = choices.routing_field(event.routing)
        return out

    def _delta(self, text: str, tokens: list[TokenOutput], last: bool) -> dict[str, Any]:
        reasoning, content = self._splitter.feed(text) if self._splitter else ("", text)
        if last and self._splitter:
            more_reasoning, more_content = self._splitter.flush()
            reasoning, content = reasoning + more_reasoning, content + more_content
        message: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if content or not reasoning:
            message["content"] = content
        delta: dict[str, Any] = {
            "index": self._index,
            "delta": message,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._job.params.logprobs is not None:
            delta["logprobs"] = {
                "content": choices.chat_logprobs(
                    self._job.loaded.tokenizer,
                    tokens,
                    self._job.params.logprobs,
                    bool(self._body.return_tokens_as_token_ids),
                )
            }
        if self._body.return_token_ids:
            delta["token_ids"] = [token.token_id for token in tokens]
        return delta


def _add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Append a delta to a whole choice."""
    message = whole["message"]
    for key, text in delta.pop("delta").items():
        message[key] = (message.get(key) or "") + text
    logprobs = delta.pop("logprobs")
    if logprobs is not None:
        whole["logprobs"]["content"].extend(logprobs["content"])
    if "token_ids" in delta:
        whole["token_ids"].extend(delta.pop("token_ids"))
    whole.update(delta)


def _prompt_fields(job: Job, body: ChatRequest, scored: list[TokenOutput | None] | None) -> dict[str, Any]:
    """What vLLM puts beside `choices` of a chat: the prompt's ids and log-probabilities, on request."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = list(job.prompts[0].ids)
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = choices.prompt_logprobs(job.loaded.tokenizer, scored or [], body.prompt_logprobs)
    return fields


async def _answer(job: Job, body: ChatRequest, chat: RenderedChat) -> Response:
    states = [_Choice(job, body, chat, i) for i in range(job.n)]
    whole: list[dict[str, Any]] = []
    for i in range(job.n):
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if chat.splits:
            message["reasoning_content"] = None
        whole.append(
            {
                "index": i,
                "message": message,
                "finish_reason": None,
                "logprobs": {"content": []} if body.logprobs else None,
                **({"token_ids": []} if body.return_token_ids else {}),
            }
        )
    scored = None
    async for index, event in job.events():
        scored = event.prompt_logprobs or scored
        for delta in states[index].deltas(event):
            _add(whole[index], delta)
    return Json(
        {**job.header("chat.completion"), "choices": whole, "usage": job.usage(), **_prompt_fields(job, body, scored)}
    )


async def _chunks(job: Job, body: ChatRequest, chat: RenderedChat) -> AsyncGenerator[dict[str, Any], None]:
    usage_at_end, usage_always = wants_usage(body)
    header = job.header("chat.completion.chunk")
    states = [_Choice(job, body, chat, i) for i in range(job.n)]
    greeted: set[int] = set()
    async for index, event in job.events():
        if index not in greeted:
            extra = {} if greeted else _prompt_fields(job, body, None)
            greeted.add(index)
            yield {
                **header,
                **extra,
                "choices": [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
            }
        for delta in states[index].deltas(event):
            chunk = {**header, "choices": [delta]}
            if usage_always:
                chunk["usage"] = job.usage()
            yield chunk
    if usage_at_end:
        yield {**header, "choices": [], "usage": job.usage()}
