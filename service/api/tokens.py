"""POST /tokenize and /detokenize, GET /tokenizer_info: what lm-eval's remote tokenizer and vLLM's clients call."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.api.chat_prompt import render
from service.api.prompts import check_ids
from service.api.schemas import DetokenizeRequest, TokenizeRequest
from service.api.state import Service
from service.api.stream import Json
from service.errors import invalid

router = APIRouter()
_LIMIT = 2**31  # no length limit here: /tokenize also serves to find out how long a text is


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Ids of a prompt (special tokens added unless told not to) or of a rendered chat (none added)."""
    service: Service = request.app.state.service
    loaded = service.require()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        chat = render(
            loaded,
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
        text, special = chat.text, bool(body.add_special_tokens)
    ids = await asyncio.to_thread(loaded.encoder.encode, text, special, _LIMIT)
    out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": loaded.max_model_len, "token_strs": None}
    if body.return_token_strs:
        out["token_strs"] = [loaded.tokenizer.token_text(i) for i in ids]
    return Json(out)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Text of ids, special tokens included."""
    service: Service = request.app.state.service
    loaded = service.require()
    service.check_model(body.model)
    check_ids(body.tokens, loaded.vocab, "tokens")
    text = await asyncio.to_thread(loaded.tokenizer.decode, body.tokens, False)
    return Json({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens and chat template."""
    return Json(request.app.state.service.require().tokenizer.info())
