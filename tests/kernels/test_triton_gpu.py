"""The Triton variants on a GPU: parity with the emulated ones, every kernel family, determinism, graph replay."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import bench, numerics
from moe_kernels.registry import MoELayer, layer_class, parse
from moe_kernels.variants.triton.config import GemmConfig, NvFp4Config

pytestmark = pytest.mark.gpu
SHAPE = bench.BenchShape("small", 512, 256, 16, 4, 2.5)
FAMILIES = {
    "fp8/triton": {
        "swapped": GemmConfig(16, True, 4, 3, True, 128, 4, 3), "plain": GemmConfig(64, False, 8, 3, False, 128, 8, 3),
        "special": GemmConfig(128, False, 4, 3, False, 256, 4, 3, True, True),
        "special-choices": GemmConfig(128, False, 4, 4, False, 256, 4, 4, True, True, 3, 4, True, True, True, True,
                                        True),
    },
    "nvfp4/triton:act=nvfp4": {
        "tiled": NvFp4Config(16), "decode": NvFp4Config(8, warps1=2, stages1=4, stages2=2, decode=True),
    },
}
CASES = [(variant, family) for variant, found in FAMILIES.items() for family in found]


def build(variant: str) -> MoELayer:
    """A layer of the small shape on the GPU."""
    spec = parse(variant)
    device = torch.device("cuda")
    record = bench.random_record(SHAPE, spec.format, device)  # type: ignore[arg-type]
    return layer_class(spec)(record, SHAPE.routing, bench.correction_bias(SHAPE, device), spec)


@pytest.mark.parametrize(("variant", "family"), CASES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 31, 64, 129, 1024])
def test_parity_determinism_and_graph_replay(variant: str, family: str, tokens: int) -> None:
    """FP8's tensor cores sum with few bits (docs/kernels.md), which moves some roundings of the intermediate."""
    if family.startswith("special") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the warp-specialised kernel is Hopper's")
    layer = build(variant)
    layer.override = FAMILIES[variant][family]  # type: ignore[attr-defined]
    hidden, logits = bench.inputs(SHAPE, tokens, 1, torch.device("cuda"), seed=tokens)[0]
    y, routing = layer.forward(hidden, logits)
    expected, expected_routing = build(variant.partition(":")[0].replace("triton", "emulated")).forward(hidden, logits)
    assert torch.equal(routing.ids, expected_routing.ids)
    assert numerics.calc_diff(y, expected) < 1e-3
    assert torch.equal(layer.forward(hidden, logits)[0], y)
    assert torch.equal(layer.experts(hidden, layer.route(logits)), y)
    kept: list[torch.Tensor] = []
    graph = bench.capture([lambda: kept.append(layer.forward(hidden, logits)[0])])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(kept[-1], y)


def test_copied_scales_give_the_same_bits() -> None:
    """`scales=copied` differs in launches only."""
    hidden, logits = bench.inputs(SHAPE, 7, 1, torch.device("cuda"))[0]
    direct, copied = (build(f"fp8/triton{option}") for option in ("", ":scales=copied"))
    assert torch.equal(direct.forward(hidden, logits)[0], copied.forward(hidden, logits)[0])


def test_choices_of_the_specialised_kernel_give_the_same_bits() -> None:
    """Tile order, operand in registers, TMA for rows, corrected division, quantiser on another stream."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the warp-specialised kernel is Hopper's")
    hidden, logits = bench.inputs(SHAPE, 1027, 1, torch.device("cuda"))[0]
    layer, bits = build("fp8/triton"), []
    for family in ("plain", "special", "special-choices"):
        layer.override = FAMILIES["fp8/triton"][family]  # type: ignore[attr-defined]
        bits.append(layer.forward(hidden, logits)[0])
    assert torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2])
