"""Emulated layers of the other formats against slow_formats.py: other code, per token and per group, FP64 sums."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.numerics import calc_diff
from moe_kernels.records import RoutingConfig
from tests.kernels.records import bf16_record, make_layer, quantised
from tests.parity import slow_formats

# As in test_emulation.py: FP32 sums err by about 1e-6 of the sum; where a value of the intermediate lies nearer than
# TIE to the middle of two codes either code is right, and such a token is left out.
LIMIT, TIE = 1e-5, 5e-6
BF16_LIMIT = 2e-3  # act=bf16 rounds the intermediate to BF16, and FP32 sums decide ties that are 2^-9 apart
SHAPES = [(256, 128), (128, 96), (192, 160)]
CASES = {
    "mxfp8/emulated": "mxfp8",
    "mxfp4/emulated": "mxfp8",
    "mxfp4/emulated:act=mxfp4": "mxfp4",
    "mxfp4/emulated:act=bf16": "bf16",
    "fp8_channel/emulated": "token",
    "fp8_tensor/emulated": "static",
    "nvfp4/emulated:input_scale=expert": "nvfp4",
    "nvfp4/emulated": "nvfp4",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", CASES)
def test_emulated_layer(variant: str, seed: int) -> None:
    hidden_size, inter = SHAPES[seed % 3]
    record = quantised(bf16_record(6, hidden_size, inter, seed, limit=2.0 if seed % 3 == 2 else None),
                       variant.partition("/")[0])  # type: ignore[arg-type]
    layer = make_layer(variant, record, RoutingConfig(6, 2 + seed % 2, routed_scaling_factor=2.5))
    g = torch.Generator().manual_seed(seed)
    compared = left_out = 0
    for tokens in (1, 3, 5, 7):
        hidden = torch.randn(tokens, hidden_size, generator=g)
        hidden[0, :96] = 0  # zero groups
        if seed % 3 == 0:
            hidden[-1] *= 1e-3
        hidden = hidden if seed % 2 else hidden.bfloat16().float()
        out, routing = layer.forward(hidden, torch.randn(tokens, 6, generator=g))
        expected, margin = slow_formats.layer(
            record, hidden, routing.ids, routing.weights, CASES[variant], "input_scale=expert" in variant)
        clear = margin > TIE
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        limit = BF16_LIMIT if "act=bf16" in variant else LIMIT
        assert (error[clear] < limit).all(), f"{tokens} tokens: {error.tolist()}, tie margins {margin.tolist()}"
        compared, left_out = compared + int(clear.sum()), left_out + int((~clear).sum())
    assert left_out <= compared / 4


def test_the_slow_scale_is_the_definition() -> None:
    """Guards the oracle: powers of two by comparison with torch's own E8M0 cast, rounding up."""
    amax = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-9, 9, 500)
    for largest in (448.0, 6.0):
        for value in (*amax.tolist(), largest, largest * 4, largest / 1024):
            scale = slow_formats.mx_scale(value, largest)
            quotient = (torch.tensor(value) / largest).item()
            assert quotient <= scale < 2 * quotient and scale.hex().startswith("0x1.0000000000000p")
    assert slow_formats.mx_scale(0.0, 6.0) == 2.0**-127


@pytest.mark.parametrize(
    ("variant", "low", "high"),
    [
        ("mxfp8/emulated", 5e-4, 3e-3),
        ("mxfp4/emulated", 5e-4, 3e-3),
        ("mxfp4/emulated:act=mxfp4", 8e-3, 5e-2),
        ("mxfp4/emulated:act=bf16", 1e-7, 2e-5),
        ("fp8_channel/emulated", 5e-4, 2e-3),
        ("fp8_tensor/emulated", 1e-3, 1e-2),  # the records' input_scale cuts intermediates above 80
    ],
)
def test_emulation_is_near_the_oracle(variant: str, low: float, high: float) -> None:
    """The activations' error alone; see test_variants.py for the sizes of E4M3's and E2M1's."""
    fmt = variant.partition("/")[0]
    record = quantised(bf16_record(8, 256, 128), fmt)  # type: ignore[arg-type]
    config = RoutingConfig(8, 3, routed_scaling_factor=2.5)
    g = torch.Generator().manual_seed(0)
    hidden, logits = torch.randn(64, 256, generator=g), torch.randn(64, 8, generator=g)
    exact = make_layer(f"{fmt}/reference", record, config).forward(hidden, logits)[0]
    assert low < calc_diff(make_layer(variant, record, config).forward(hidden, logits)[0], exact) < high
