"""Request bodies of the HTTP surface: types and ranges; what a field means to the engine is in params.py."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

INT64 = 2**63 - 1


def _integral(value: Any) -> Any:
    """JSON has one number type, so 5.0 is an integer; true and "5" are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> Any:
    """Refuse lone surrogates, which JSON can spell but no tokenizer or UTF-8 answer can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("the text holds a lone surrogate, which is not valid Unicode") from None
    return value


Int = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, BeforeValidator(_text), Field(strict=True)]
Count = Annotated[Int, Field(ge=0, le=INT64)]
TokenId = Annotated[Int, Field(ge=0, le=2**31 - 1)]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# Checked by prompts.py, which can say more about a wrong value than a union of four types can.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "text, texts, token ids, or lists of token ids",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ],
        }
    ),
]


class Body(BaseModel):
    """Unknown fields are accepted, as OpenAI and vLLM do; params.py refuses those that would change results."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Body):
    """`include_usage` adds a last chunk with usage; `continuous_usage_stats` puts usage in every chunk."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class Sampled(Body):
    """What completions and chat share. Defaults are OpenAI's, never those of a generation_config.json."""

    model: Text | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    n: Annotated[Int, Field(ge=1, le=INT64)] | None = None
    seed: Annotated[Int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Flag | None = None
    min_tokens: Count | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    return_token_ids: Flag | None = None
    return_routing: Flag | None = None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Prompt
    echo: Flag | None = None
    logprobs: Count | None = None
    add_special_tokens: Flag | None = None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: Flag | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    add_special_tokens: Flag | None = None
    separate_reasoning: Flag | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[TokenId]


class ErrorDetail(BaseModel):
    """`param` is the request field at fault, `code` is for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer other than 200."""

    error: ErrorDetail
