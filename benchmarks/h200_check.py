"""Correctness of the Triton variants on a GPU: against the emulated variants, the oracle, and themselves."""

from __future__ import annotations

import time

import torch

from moe_kernels import bench, numerics
from moe_kernels.registry import layer_class, parse
from moe_kernels.variants.triton import pipeline


def build(variant: str, shape: bench.BenchShape, record, bias):  # type: ignore[no-untyped-def]
    """A layer without the device gate, so that the emulated ones run on the GPU too."""
    spec = parse(variant)
    return layer_class(spec)(record, shape.routing, bias, spec)


def poison(gigabytes: float = 2.0) -> None:
    """Fill memory that the allocator will hand out next with NaN bytes (0xFF is NaN in E4M3, BF16 and FP32)."""
    blocks = [torch.full((int(gigabytes * 2**20 * 64),), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    blocks += [torch.full((2**k,), 255, dtype=torch.uint8, device="cuda") for k in range(9, 24) for _ in range(4)]
    del blocks


def check(shape: bench.BenchShape, fmt: str, tokens: list[int], seeds: int, deadline: float) -> list[dict]:
    """Parity per token count and seed; relL2 of the whole output and of the worst row."""
    device = torch.device("cuda")
    record = bench.random_record(shape, fmt, device)  # type: ignore[arg-type]
    bias = bench.correction_bias(shape, device)
    variant = f"{fmt}/triton" if fmt == "fp8" else f"{fmt}/triton:act=nvfp4"
    layer = build(variant, shape, record, bias)
    plain = layer if fmt == "fp8" else build("nvfp4/triton", shape, record, bias)
    emulated, oracle = build(f"{fmt}/emulated", shape, record, bias), build(f"{fmt}/reference", shape, record, bias)
    found = []
    for seed in range(seeds):  # outermost: a time limit cuts seeds, not token counts
        for t in tokens:
            if time.time() > deadline:
                return found
            hidden, logits = bench.inputs(shape, t, 1, device, seed=100 * t + seed)[0]
            poison(0.5)
            y, routing = layer.forward(hidden, logits)
            poison(0.5)
            again, _ = layer.forward(hidden, logits)
            apart = layer.experts(hidden, layer.route(logits))
            ref, ref_routing = emulated.forward(hidden, logits)
            true = oracle.experts(hidden.float(), ref_routing)
            p = y if plain is layer else plain.forward(hidden, logits)[0]
            row = (y.double() - ref.double()).norm(dim=1) / ref.double().norm(dim=1)
            found.append({
                "shape": shape.name, "format": fmt, "tokens": t, "seed": seed,
                "ids_equal": bool((routing.ids == ref_routing.ids).all()),
                "weights_max": (routing.weights - ref_routing.weights).abs().max().item(),
                "rel_emulated": numerics.relative_l2(y, ref), "worst_row": row.max().item(),
                "calc_diff": numerics.calc_diff(y, ref), "rel_oracle": numerics.relative_l2(p, true),
                "emulated_vs_oracle": numerics.relative_l2(ref, true),
                "repeat_equal": torch.equal(y, again), "apart_equal": torch.equal(y, apart),
                "finite": bool(y.isfinite().all()),
            })
    return found


def graph_equals_eager(shape: bench.BenchShape, variant: str, tokens: int) -> bool:
    """Replay of a captured forward gives the eager bits."""
    device = torch.device("cuda")
    record = bench.random_record(shape, parse(variant).format, device)  # type: ignore[arg-type]
    layer = build(variant, shape, record, bench.correction_bias(shape, device))
    hidden, logits = bench.inputs(shape, tokens, 1, device)[0]
    eager, _ = layer.forward(hidden, logits)
    kept: list = []
    graph = bench.capture([lambda: kept.append(layer.forward(hidden, logits)[0])])
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(eager, kept[-1])


def batch_invariant(shape: bench.BenchShape, variant: str, tokens: list[int]) -> dict[int, float]:
    """Share of a token's outputs that keep their bits when it is run alone and among `tokens` others."""
    device = torch.device("cuda")
    record = bench.random_record(shape, parse(variant).format, device)  # type: ignore[arg-type]
    layer = build(variant, shape, record, bench.correction_bias(shape, device))
    hidden, logits = bench.inputs(shape, max(tokens), 1, device)[0]
    alone = torch.cat([layer.forward(hidden[i : i + 1], logits[i : i + 1])[0] for i in range(8)])
    return {t: (layer.forward(hidden[:t], logits[:t])[0][:8] == alone[: min(8, t)]).float().mean().item()
            for t in tokens}


def option_equality(shape: bench.BenchShape, tokens: list[int]) -> bool:
    """`scales=copied` gives the same bits as `scales=direct`."""
    device = torch.device("cuda")
    record = bench.random_record(shape, "fp8", device)
    bias = bench.correction_bias(shape, device)
    direct, copied = (build(f"fp8/triton{o}", shape, record, bias) for o in ("", ":scales=copied"))
    data = [bench.inputs(shape, t, 1, device, seed=t)[0] for t in tokens]
    return all(torch.equal(direct.forward(h, g)[0], copied.forward(h, g)[0]) for h, g in data)


def tensor_core_error(shape: bench.BenchShape, tokens: int = 64) -> dict[str, float]:
    """Relative L2 of GEMM 2 in FP32 output against FP64 on the same quantised operands: the hardware's own error."""
    device = torch.device("cuda")
    record = bench.random_record(shape, "fp8", device)
    layer = build("fp8/triton", shape, record, bench.correction_bias(shape, device))
    hidden, logits = bench.inputs(shape, tokens, 1, device)[0]
    config = layer.gemm_config(tokens)
    routing, order, x_q, x_s = pipeline.route_sort_quantise(logits, layer.bias, hidden, layer.config, config.block_m)
    h_q, h_s = pipeline.gemm1(layer.weights, x_q, x_s, order, config)
    y = pipeline.gemm2(layer.weights, h_q, h_s, order, config, torch.float32)
    errors, norms = 0.0, 0.0
    ids = routing.ids.flatten()
    for row in range(0, 32):
        slot = int(order.slots[row])
        expert = int(ids[slot])
        a = h_q[row].double() * h_s[:, row].double().repeat_interleave(128)
        w = record.w2[expert].double() * record.w2_scale[expert].double().repeat_interleave(128, 0).repeat_interleave(
            128, 1)
        exact = w @ a
        errors += (y[slot].double() - exact).square().sum().item()
        norms += exact.square().sum().item()
    return {"gemm2_fp32_rel": (errors / norms) ** 0.5, "block_m": config.block_m}
