"""Emulated layers against slow_emulation.py: other code, per token and per block, FP64 sums."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.records import RoutingConfig
from tests.kernels.records import bf16_record, make_layer, quantised
from tests.parity import slow_emulation

# Both sides use the same quantised input, since the scales are formed by the same FP32 divisions. FP32 sums of up
# to 384 products err by about 1e-6 of the sum (measured: at most 4e-6 of a token's norm in the 160 runs below).
# The intermediate, formed from those sums, is rounded again: where a value lies nearer than TIE to the middle of
# two codes either code is right, and such a token is left out.
LIMIT, TIE = 1e-5, 5e-6
SHAPES = [(256, 128), (384, 96), (192, 144), (128, 256)]  # 96, 144, 192: ragged last blocks


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_emulated_layer(fmt: str, seed: int) -> None:
    hidden_size, inter = SHAPES[seed % 4]
    record = quantised(bf16_record(6, hidden_size, inter, seed, limit=2.0 if seed % 5 == 4 else None), fmt)
    config = RoutingConfig(6, 2 + seed % 2, routed_scaling_factor=2.5)
    layer = make_layer(f"{fmt}/emulated", record, config)
    g = torch.Generator().manual_seed(seed)
    compared = left_out = 0
    for tokens in (1, 3, 5, 7):
        hidden = torch.randn(tokens, hidden_size, generator=g)
        hidden[0, :160] = 0  # a zero block
        if seed % 3 == 0:
            hidden[-1] *= 1e-3  # far below the others, and for NVFP4 near the smallest block scale
        hidden = hidden if seed % 2 else hidden.bfloat16().float()  # as a BF16 model would give it
        out, routing = layer.forward(hidden, torch.randn(tokens, 6, generator=g))
        expected, margin = slow_emulation.layer(record, hidden, routing.ids, routing.weights)
        clear = margin > TIE
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        assert (error[clear] < LIMIT).all(), f"{tokens} tokens: {error.tolist()}, tie margins {margin.tolist()}"
        compared, left_out = compared + int(clear.sum()), left_out + int((~clear).sum())
    assert left_out <= compared / 4


def test_the_slow_emulation_rounds_as_defined() -> None:
    """Guards the oracle itself: tables against torch's casts, ties to even, saturation, zero."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert (codes == slow_emulation.E4M3).all() and slow_emulation.E4M3[-1] == 448
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 60
    x = torch.cat([x, x / 1e4, torch.tensor([464.0, -1e9, 0.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])])
    ours, _ = slow_emulation.nearest(x.numpy(), slow_emulation.E4M3)
    assert (ours == x.clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()).all()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -5.0, -0.25])
    got, margin = slow_emulation.nearest(ties.numpy(), slow_emulation.E2M1)
    assert got.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -4.0, -0.0]
    assert (margin[:7] == 0).all()
