"""The agreement that `test_gpu_device.py` asks of the GPU holds on CPU tensors, and breaks under real faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_kernels import embedded
from moe_kernels.hf import load_model
from service import attention
from service.tokenizer import Tokenizer
from tests.service import agreement
from tests.service.engine_tools import Running

COUNT = 16


def scores(change: Callable[[Any], None] | None = None, **config: Any):
    """Of the embedded model's held-out texts, after `change` was made to the runner."""
    attention.register()
    _, whole = agreement.texts(Tokenizer.load(embedded.resolve("mini")), COUNT)
    model = load_model(embedded.resolve("mini"), "bf16/reference", attn_implementation=attention.NAME)
    with Running(model, max_seqs=8, **config) as engine:
        if change is not None:
            change(engine.runner)
        return agreement.scores(engine, whole)


@pytest.fixture(scope="module")
def transformers():
    return scores(forward="transformers")


def moe_layers(runner: Any) -> list[Any]:
    return [layer.moe for layer in runner.weights.layers if layer.moe is not None]


def wrong_scaling(runner: Any) -> None:
    """`routed_scaling_factor` a tenth too small."""
    for moe in moe_layers(runner):
        moe.config = replace(moe.config, routed_scaling_factor=0.9 * moe.config.routed_scaling_factor)


def wrong_rope(runner: Any) -> None:
    """GLM-4.5's theta in place of the model's."""
    half = runner.forward.cos.shape[1]
    angles = torch.arange(runner.forward.cos.shape[0])[:, None] / 1e6 ** (torch.arange(half) / half)
    runner.forward.cos, runner.forward.sin = angles.cos().to(runner.dtype), angles.sin().to(runner.dtype)


def no_bias(runner: Any) -> None:
    """Experts chosen without the correction bias."""
    for moe in moe_layers(runner):
        moe.bias.zero_()


def test_agrees(transformers) -> None:
    assert agreement.agree(scores(forward="own", graph_sizes=(8,)), transformers)


@pytest.mark.parametrize("fault", [wrong_scaling, wrong_rope, no_bias])
def test_faults_show(transformers, fault: Callable[[Any], None]) -> None:
    mine = scores(fault, forward="own", graph_sizes=(8,))
    assert not agreement.agree(mine, transformers), agreement.gaps(mine, transformers)


def test_nan_never_agrees(transformers) -> None:
    mine = transformers.copy()
    mine[3] = float("nan")
    assert not agreement.agree(mine, transformers)
