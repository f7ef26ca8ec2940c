"""Renders the messages of a chat through the tokenizer's own template; text parts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.api.reasoning import CLOSE, OPEN
from service.api.state import Loaded
from service.errors import ApiError, invalid, unsupported

# Names that transformers' apply_chat_template takes itself; a request may only set the template's own variables.
_RESERVED = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    )
)


@dataclass(frozen=True)
class RenderedChat:
    """The prompt's text; `splits` when answers may hold reasoning, `inside` when the prompt ends within it."""

    text: str
    splits: bool
    inside: bool


def render(
    loaded: Loaded,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    reasoning_effort: str | None = None,
) -> RenderedChat:
    """The chat as the model reads it; raises ApiError 400 for messages the template cannot take."""
    tokenizer = loaded.tokenizer
    if not tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model's tokenizer has no chat template, so messages have no defined meaning: send "
            "text to /v1/completions (with lm-eval: --model local-completions)",
            param="messages",
            code="no_chat_template",
        )
    kwargs = dict(template_kwargs or {})
    for name in kwargs:
        if name in _RESERVED or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set '{name[:64]}'")
    template = str(tokenizer.hf.chat_template)
    if reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise unsupported("reasoning_effort", "this model's chat template does not know reasoning_effort")
        kwargs["reasoning_effort"] = reasoning_effort
    if continue_final_message:
        if add_generation_prompt:
            raise invalid("continue_final_message", "it excludes add_generation_prompt")
        if messages[-1].get("role") != "assistant":
            raise invalid("continue_final_message", "continue_final_message needs a last message of role assistant")
        kwargs["continue_final_message"] = True
    flat = [_message(m, i) for i, m in enumerate(messages)]
    generate = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    try:
        text = tokenizer.render_chat(flat, add_generation_prompt=generate, **kwargs)
    except Exception as error:  # a template may raise anything, mostly jinja2.TemplateError with its own message
        raise invalid("messages", f"the chat template refused these messages: {str(error)[:300]}") from error
    splits = (OPEN in template and CLOSE in template) or {OPEN, CLOSE} <= tokenizer.hf.get_vocab().keys()
    if continue_final_message:
        last = flat[-1]["content"]
        inside = last.rfind(OPEN) > last.rfind(CLOSE)
    else:
        inside = text.rstrip().endswith(OPEN)
    return RenderedChat(text, splits, inside)


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise invalid("messages", f"{where} has no role")
    if message.get("tool_calls") or message.get("function_call"):
        raise unsupported("messages", f"{where} holds tool calls, which this service does not render")
    return {**{k: _clean(v, where) for k, v in message.items()}, "content": _content(message.get("content"), where)}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return str(_clean(content, where))
    if not isinstance(content, list):
        raise invalid("messages", f"{where}.content must be a string or a list of text parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text") or not isinstance(text, str):
            raise invalid("messages", f"{where}.content holds a part that is not text; this model reads text only")
        texts.append(str(_clean(text, where)))
    return "".join(texts)


def _clean(value: Any, where: str) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid("messages", f"{where} holds a lone surrogate: not valid Unicode") from None
    return value
