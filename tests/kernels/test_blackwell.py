"""TRT-LLM kernels on SM100/SM103. **These tests have never run**: our machines have no Blackwell GPU.

Run them with `make gpu-check` on a B200. Bounds: against fp8/emulated calc_diff < 1e-3 (DeepGEMM's FP8 bound; the
two differ in FP32 summation order and in BF16 expert weights), against the FP32 oracle 5e-3; NVFP4 5e-2 (vLLM's).
"""

from __future__ import annotations

import pytest
import torch

from moe_kernels import registry
from moe_kernels.numerics import calc_diff
from moe_kernels.records import RoutingConfig
from tests.kernels import trtllm_case as case

pytestmark = [pytest.mark.blackwell]
TOKENS = (1, 2, 3, 5, 7, 8, 16, 31, 64, 128, 1024)
CONFIG = RoutingConfig(num_experts=32, top_k=4, routed_scaling_factor=2.5)
SHAPE = dict(e=32, h=1024, i=256)
BIAS = torch.linspace(6.82, 7.06, 32)
BOUND = {"fp8": 1e-3, "nvfp4": 5e-2}


def layers(name: str, device: str = "cuda"):
    spec = registry.parse(name)
    record = (case.fp8_record if spec.format == "fp8" else case.nvfp4_record)(0, **SHAPE).to(device)
    emulated = registry.parse(f"{spec.format}/emulated" + (":bias=bf16" if spec.option("bias") == "bf16" else ""))
    bias = BIAS.to(device)
    return (
        registry.layer_class(spec)(record, CONFIG, bias, spec),
        registry.layer_class(emulated)(record, CONFIG, bias, emulated),
    )


def inputs(tokens: int, seed: int = 0):
    g = torch.Generator().manual_seed(1000 * seed + tokens)
    hidden = torch.randn(tokens, 1024, generator=g).bfloat16().cuda()
    return hidden, torch.randn(tokens, 32, generator=g).cuda()


NAMES = [
    f"{fmt}:{options}" if options else fmt
    for fmt, all_options in (
        (
            "fp8/trtllm",
            ("", "layout=blockmajork", "routing=inside", "bias=bf16,scales=copied", "bias=bf16,routing=inside"),
        ),
        ("nvfp4/trtllm", ("", "routing=inside")),
    )
    for options in all_options
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_parity_with_the_emulation(name: str, tokens: int) -> None:
    kernel, emulated = layers(name)
    for seed in range(3):
        hidden, logits = inputs(tokens, seed)
        got, chosen = kernel.forward(hidden, logits)
        want, reference = emulated.forward(hidden, logits)
        assert torch.isfinite(got).all()
        assert torch.equal(chosen.ids.sort(-1).values, reference.ids.sort(-1).values)
        assert calc_diff(got.float(), want.float()) < BOUND[kernel.spec.format]


@pytest.mark.parametrize("name", ["fp8/trtllm", "nvfp4/trtllm"])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_autotuned_tactics_agree_with_the_fallback(name: str, tokens: int) -> None:
    from flashinfer.autotuner import autotune

    kernel, emulated = layers(name)
    hidden, logits = inputs(tokens)
    before, _ = kernel.forward(hidden, logits)
    with autotune(True):
        kernel.forward(hidden, logits)
    after, _ = kernel.forward(hidden, logits)
    want, _ = emulated.forward(hidden, logits)
    assert calc_diff(after.float(), before.float()) < 1e-3
    assert calc_diff(after.float(), want.float()) < BOUND[kernel.spec.format]


@pytest.mark.parametrize("name", ["fp8/trtllm:routing=inside", "nvfp4/trtllm:routing=inside"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_graph_replay_equals_eager_and_repeats(name: str, tokens: int) -> None:
    kernel, _ = layers(name)
    hidden, logits = inputs(tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            kernel.forward(hidden, logits)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernel.forward(hidden, logits)
    fresh_hidden, fresh_logits = inputs(tokens, seed=9)
    hidden.copy_(fresh_hidden)
    logits.copy_(fresh_logits)
    eager, _ = kernel.forward(fresh_hidden, fresh_logits)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, eager)


def test_column_major_scales_are_bit_equal_to_copied_ones() -> None:
    direct, _ = layers("fp8/trtllm")
    copied, _ = layers("fp8/trtllm:scales=copied")
    for tokens in TOKENS:
        hidden, logits = inputs(tokens)
        assert torch.equal(direct.forward(hidden, logits)[0], copied.forward(hidden, logits)[0])
