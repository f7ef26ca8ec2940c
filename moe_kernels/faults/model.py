"""Faults around the routed experts: shared experts, RoPE, and those the service's engine implements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_kernels.faults.base import Fault, register

Add = Callable[[Tensor, Tensor], Tensor]  # routed + shared experts, from (routed, hidden)


def shared_dropped(add: Add, routed: Tensor, hidden: Tensor) -> Tensor:
    """The shared experts are left out."""
    return routed


def shared_doubled(add: Add, routed: Tensor, hidden: Tensor) -> Tensor:
    """The shared experts are added twice."""
    return add(add(routed, hidden), hidden)


def shared_scaled(add: Add, routed: Tensor, hidden: Tensor) -> Tensor:
    """Fused into the routed experts and scaled like them the wrong way: times 0.4."""
    return routed + 0.4 * add(torch.zeros_like(routed), hidden)


@contextmanager
def rope_bf16(model: Any) -> Iterator[None]:
    """RoPE's inverse frequencies rounded to BF16, as `.to(bfloat16)` on a loaded model does."""
    rotary = model.model.rotary_emb
    original = rotary.inv_freq
    rotary.inv_freq = original.to(torch.bfloat16).float()
    try:
        yield
    finally:
        rotary.inv_freq = original


_MODEL = ("logprobs",)
register(
    Fault(
        "shared_dropped",
        "SGLang #38963, vLLM #51632",
        "shared expert dropped",
        12,
        shared=shared_dropped,
        expected=_MODEL,
    )
)
register(Fault("shared_doubled", "ATOM #1076", "shared expert added twice", 12, shared=shared_doubled, expected=_MODEL))
register(
    Fault(
        "shared_scaled",
        "SGLang #28237",
        "shared expert scaled by 1/routed_scaling_factor",
        11,
        shared=shared_scaled,
        expected=_MODEL,
    )
)
register(
    Fault(
        "rope_bf16",
        "transformers: model.to(bfloat16) casts inv_freq",
        "RoPE frequencies in BF16",
        None,
        model=rope_bf16,
        expected=("contract",),
    )
)
register(
    Fault(
        "kv_block_truncated",
        "SGLang #29264-like truncation; paged attention",
        "the oldest KV block is not attended to",
        None,
        engine="kv_block_truncated",
        expected=_MODEL,
    )
)
register(
    Fault(
        "wrong_eos",
        "GLM has three EOS ids; lm-eval #2847",
        "generation does not stop at the end of the answer",
        None,
        engine="wrong_eos",
        expected=("length",),
    )
)
register(
    Fault(
        "short_reasoning",
        "FlashInfer #3589",
        "answers end early: EOS becomes likelier",
        5,
        engine="short_reasoning",
        expected=("length",),
    )
)
