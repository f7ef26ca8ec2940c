"""The Triton variants on the CPU through the interpreter, one JSON object of measurements a case. Run by pytest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kernels import triton_interpreter

triton_interpreter.install()

import torch  # noqa: E402

from moe_kernels import numerics  # noqa: E402
from moe_kernels.quant import fp8, nvfp4  # noqa: E402
from moe_kernels.records import ExpertWeights, RoutingConfig  # noqa: E402
from moe_kernels.registry import layer_class, parse  # noqa: E402
from moe_kernels.routing import route  # noqa: E402
from moe_kernels.variants.triton import pipeline  # noqa: E402
from moe_kernels.variants.triton.config import GemmConfig  # noqa: E402


def fp8_record(e: int, h: int, i: int, g: torch.Generator) -> ExpertWeights:
    """Random block-FP8 experts."""
    w13, s13 = fp8.quantize_weight_blocks(torch.randn(e, 2 * i, h, generator=g) * h**-0.5)
    w2, s2 = fp8.quantize_weight_blocks(torch.randn(e, h, i, generator=g) * i**-0.5)
    return ExpertWeights("fp8", w13, w2, s13, s2)


def nvfp4_record(e: int, h: int, i: int, g: torch.Generator) -> ExpertWeights:
    """Random NVFP4 experts whose gate and up have scalars far apart, so that mixing them up shows."""
    halves, scales, scalars = [], [], []
    for factor in (1.0, 3.0):
        w = torch.randn(e, i, h, generator=g) * h**-0.5
        scalar = nvfp4.global_scale(w, 1) * factor
        q, s = nvfp4.quantize(w, scalar[:, None, None])
        halves.append(q)
        scales.append(s.view(torch.uint8))
        scalars.append(scalar)
    w = torch.randn(e, h, i, generator=g) * i**-0.5
    s2 = nvfp4.global_scale(w, 1)
    q, s = nvfp4.quantize(w, s2[:, None, None])
    s13 = torch.cat(scales, 1).view(fp8.E4M3)
    return ExpertWeights("nvfp4", torch.cat(halves, 1), q, s13, s, torch.stack(scalars, 1), s2)


def layer_case(
    variant: str, tokens: int, e: int, k: int, h: int, i: int, block_m: int, swap: bool, limit: float | None = None
) -> dict:
    """One layer against the emulated variant (activations not quantised: against the oracle)."""
    g = torch.Generator().manual_seed(1000 * tokens + e)
    spec = parse(variant)
    record = (fp8_record if spec.format == "fp8" else nvfp4_record)(e, h, i, g)
    record.swiglu_limit = limit
    config = RoutingConfig(e, k, routed_scaling_factor=2.5)
    bias = 7 + torch.rand(e, generator=g) / 4
    hidden = torch.randn(tokens, h, generator=g).bfloat16()
    logits = torch.randn(tokens, e, generator=g)
    layer = layer_class(spec)(record, config, bias, spec)
    if spec.format == "fp8":
        layer.override = GemmConfig(block_m, swap, 4, 3, swap, 128, 4, 3)
    before = hidden.clone(), logits.clone()
    y, routing = layer.forward(hidden, logits)
    reference = parse(variant.replace("triton", "emulated").replace(":act=nvfp4", ""))
    if variant == "nvfp4/triton":
        reference = parse("nvfp4/reference")
    other = layer_class(reference)(record, config, bias, reference)
    expected, expected_routing = other.forward(hidden.float(), logits)
    untouched = torch.equal(before[0], hidden) and torch.equal(before[1], logits)
    return {
        "rel": numerics.relative_l2(y, expected), "calc_diff": numerics.calc_diff(y, expected),
        "ids_equal": torch.equal(routing.ids, expected_routing.ids),
        "weights_max": (routing.weights - expected_routing.weights).abs().max().item(),
        "apart_equal": torch.equal(layer.experts(hidden, layer.route(logits)), y), "untouched": untouched,
        "dtype": str(y.dtype), "ids_dtype": str(routing.ids.dtype),
    }


def quantise_case(tokens: int) -> dict:
    """Bytes and scales against the torch quantiser, in both layouts; zeros, large values and NaN included."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 384, generator=g).bfloat16()
    x[0, :128] = 0
    x[-1, 128:256] *= 1e30
    x[tokens // 2, 300] = float("nan")
    q, s = pipeline.quantise_hidden(x)
    row_q, row_s = pipeline.quantise_hidden(x, column_major=False)
    want_q, want_s = fp8.quantize_activations(x)
    clean = torch.ones_like(q.float(), dtype=torch.bool)
    clean[tokens // 2, 256:] = False
    same = (q.view(torch.uint8) == want_q.view(torch.uint8))[clean].all()
    return {
        "bytes_equal": bool(same), "layouts_equal": torch.equal(q.view(torch.uint8), row_q.view(torch.uint8)),
        "scales_equal": torch.equal(s.t()[:, :2], want_s[:, :2]) and torch.equal(row_s[:, :2], want_s[:, :2]),
        "column_shape": list(s.shape), "column_contiguous": s.is_contiguous(),
        "nan_kept": bool(q[tokens // 2, 256:].float().isnan().any()),
    }


def sort_case(tokens: int, e: int, k: int, block_m: int, prefix: bool) -> dict:
    """Slots are sorted by expert and stable, tiles cover every row once; also with experts that get nothing."""
    g = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, e, generator=g)
    logits[:, e // 2 :] -= 100  # half of the experts stay empty
    config = RoutingConfig(e, k)
    pipeline.PREFIX_CHUNKS = 0 if prefix else 64
    routing, order, _, _ = pipeline.route_sort_quantise(logits, None, None, config, block_m)
    other = pipeline.sort_by_expert(routing.ids, e, block_m)
    flat = routing.ids.flatten()
    want = torch.sort(flat, stable=True).indices.int()
    covered = []
    count = int(order.tiles[0, 3])
    for expert, first, end in order.tiles[:count, :3].tolist():
        rows = list(range(first, min(first + block_m, end)))
        covered += rows
        if any(int(flat[order.slots[r]]) != expert for r in rows):
            covered.append(-1)
    return {
        "slots_equal": torch.equal(order.slots, want), "other_equal": torch.equal(other.slots, want),
        "tiles_equal": torch.equal(order.tiles[:count, :3], other.tiles[:count, :3]),
        "covered": sorted(covered) == list(range(tokens * k)),
    }


def routing_case() -> dict:
    """Ties go to the lowest id, NaN shows in the weights, far negative logits give no NaN, padding is harmless."""
    config = RoutingConfig(12, 4, routed_scaling_factor=2.0)
    logits = torch.zeros(3, 12)
    logits[1] = -200.0
    logits[2, 7] = float("nan")
    got = pipeline.route_sort_quantise(logits, None, None, config, 16, sort=False)[0]
    random = torch.randn(37, 12, generator=torch.Generator().manual_seed(3))
    bias = 7 + torch.rand(12, generator=torch.Generator().manual_seed(4)) / 4
    rounded = pipeline.route_sort_quantise(random, bias.bfloat16(), None, config, 16, sort=False)[0]
    want = route(random, bias, config, bias_dtype=torch.bfloat16)
    exact = route(random, bias, config)
    return {
        "ties": got.ids[0].tolist(), "underflow_finite": bool(got.weights[1].isfinite().all()),
        "nan_shows": bool(got.weights[2].isnan().any()), "bf16_bias_equal": torch.equal(rounded.ids, want.ids),
        "bf16_bias_differs": not torch.equal(exact.ids, want.ids),
    }


CASES = {
    "fp8_T1_swap": lambda: layer_case("fp8/triton", 1, 8, 2, 256, 128, 16, True),
    "fp8_T5_swap": lambda: layer_case("fp8/triton", 5, 20, 4, 128, 256, 16, True),
    "fp8_T7_plain": lambda: layer_case("fp8/triton", 7, 12, 4, 256, 128, 16, False),
    "fp8_T70_plain": lambda: layer_case("fp8/triton", 70, 8, 2, 128, 128, 64, False),
    "fp8_before": lambda: layer_case("fp8/triton:bias=bf16,scales=copied", 7, 16, 4, 256, 128, 16, True),
    "fp8_limit": lambda: layer_case("fp8/triton", 7, 8, 2, 128, 128, 16, True, limit=0.3),
    "nvfp4_limit": lambda: layer_case("nvfp4/triton", 5, 8, 2, 128, 128, 16, True, limit=0.3),
    "nvfp4_T1": lambda: layer_case("nvfp4/triton", 1, 8, 2, 256, 128, 16, True),
    "nvfp4_T37": lambda: layer_case("nvfp4/triton", 37, 8, 2, 128, 128, 16, True),
    "nvfp4_T5_act": lambda: layer_case("nvfp4/triton:act=nvfp4", 5, 8, 2, 256, 128, 16, True),
    "quantise_T1": lambda: quantise_case(1),
    "quantise_T37": lambda: quantise_case(37),
    "sort_one_chunk": lambda: sort_case(9, 16, 4, 16, False),
    "sort_one_token": lambda: sort_case(1, 16, 4, 16, False),
    "sort_chunks": lambda: sort_case(75, 24, 4, 16, False),
    "sort_prefix": lambda: sort_case(75, 24, 4, 16, True),
    "routing": routing_case,
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items()}))
