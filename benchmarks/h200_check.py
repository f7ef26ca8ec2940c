"""Correctness of the Triton variants on a GPU: against the emulated variants, the oracle, and themselves."""

from __future__ import annotations

import gc
import os
import time

import torch
from torch import Tensor

from moe_kernels import bench, numerics
from moe_kernels.records import ExpertWeights, Routing
from moe_kernels.registry import MoELayer, layer_class, parse
from moe_kernels.variants.triton import pipeline
from moe_kernels.variants.weights import CACHE_VARIABLE


def build(variant: str, shape: bench.BenchShape, record: ExpertWeights, bias: Tensor) -> MoELayer:
    """A layer without the device gate, so that the emulated ones run on the GPU too."""
    spec = parse(variant)
    return layer_class(spec)(record, shape.routing, bias, spec)


def poison() -> None:
    """Fill memory that the allocator will hand out next with NaN bytes (0xFF is NaN in E4M3, BF16 and FP32)."""
    sizes = [*(2**k for k in range(9, 24) for _ in range(4)), *(2**25,) * 8, *(2**k for k in range(26, 30))]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks


class Prepared:
    """One shape and format: the Triton layer, the emulation and the oracle, dequantised once and kept.

    Rows are independent of each other in all three, so one reference of the most tokens serves every smaller count as
    a prefix; `prefix_difference` says how far a reference of the prefix alone is from that.
    """

    def __init__(self, shape: bench.BenchShape, fmt: str, device: str = "cuda") -> None:
        self.shape, self.device = shape, torch.device(device)
        gc.collect()  # what the shape before this one kept
        os.environ[CACHE_VARIABLE] = "110"  # both references of GLM-5's shape take 77 GB in FP32
        record = bench.random_record(shape, fmt, self.device)  # type: ignore[arg-type]
        bias = bench.correction_bias(shape, self.device)
        self.layer = build(f"{fmt}/triton" if fmt == "fp8" else f"{fmt}/triton:act=nvfp4", shape, record, bias)
        self.plain = self.layer if fmt == "fp8" else build("nvfp4/triton", shape, record, bias)
        self.emulated = build(f"{fmt}/emulated", shape, record, bias)
        self.oracle = build(f"{fmt}/reference", shape, record, bias)

    def seed(self, seed: int, most: int) -> tuple[Tensor, Tensor, Tensor, Routing, Tensor]:
        """hidden, logits, emulated output, its routing, and the oracle's output of `most` tokens."""
        generator = torch.Generator(self.device).manual_seed(1000 + seed)
        hidden = torch.randn(most, self.shape.hidden, generator=generator, device=self.device).bfloat16()
        logits = torch.randn(most, self.shape.experts, generator=generator, device=self.device)
        ref, routing = self.emulated.forward(hidden, logits)
        return hidden, logits, ref, routing, self.oracle.experts(hidden.float(), routing)

    def prefix_difference(self, tokens: list[int], most: int) -> float:
        """Largest relative L2 between a prefix of the emulated output and the emulation of the prefix."""
        hidden, logits, ref, _, _ = self.seed(0, most)
        return max((numerics.relative_l2(self.emulated.forward(hidden[:t], logits[:t])[0], ref[:t]) for t in tokens),
                   default=0.0)

    def case(
        self, hidden: Tensor, logits: Tensor, ref: Tensor, ref_routing: Routing, true: Tensor
    ) -> dict[str, object]:
        """Parity of one token count; relative L2 of the whole output and of the worst row; repeat, graph, apart."""
        layer = self.layer
        poison()
        hidden, logits = hidden.clone(), logits.clone()  # NaN behind the last token
        y, routing = layer.forward(hidden, logits)
        poison()
        again, _ = layer.forward(hidden, logits)
        apart = layer.experts(hidden, layer.route(logits))
        replayed = replay(layer, hidden, logits)
        p = y if self.plain is layer else self.plain.forward(hidden, logits)[0]
        row = (y.double() - ref.double()).norm(dim=1) / ref.double().norm(dim=1)
        return {
            "ids_equal": torch.equal(routing.ids, ref_routing.ids),
            "sets_equal": torch.equal(routing.ids.sort(dim=1).values, ref_routing.ids.sort(dim=1).values),
            "weights_max": (routing.weights - ref_routing.weights).abs().max().item(),
            "rel_emulated": numerics.relative_l2(y, ref), "worst_row": row.max().item(),
            "calc_diff": numerics.calc_diff(y, ref), "rel_oracle": numerics.relative_l2(p, true),
            "emulated_vs_oracle": numerics.relative_l2(ref, true),
            "repeat_equal": torch.equal(y, again), "apart_equal": torch.equal(y, apart),
            "graph_equal": torch.equal(y, replayed), "finite": bool(y.isfinite().all()),
        }


def replay(layer: MoELayer, hidden: Tensor, logits: Tensor) -> Tensor:
    """The output of a captured forward's second replay; captured without emptying the allocator, which costs 0.1 s."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = layer.forward(hidden, logits)[0]
        graph.capture_end()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out.clone()


def check(shape: bench.BenchShape, fmt: str, tokens: list[int], seeds: int, deadline: float) -> list[dict]:
    """Parity per token count and seed; the memory that the layer gets holds NaN before each call."""
    prepared = Prepared(shape, fmt)
    most, found = max(tokens), []
    for seed in range(seeds):  # outermost: a time limit cuts seeds, not token counts
        if time.time() > deadline:
            break
        torch.cuda.empty_cache()  # the memory of graphs that are gone
        hidden, logits, ref, routing, true = prepared.seed(seed, most)
        for t in tokens:
            head = Routing(routing.ids[:t], routing.weights[:t])
            found.append({"shape": shape.name, "format": fmt, "tokens": t, "seed": seed,
                          **prepared.case(hidden[:t], logits[:t], ref[:t], head, true[:t])})
    if found:
        found[0]["prefix_difference"] = prepared.prefix_difference([t for t in tokens if t in (1, 7, 128)], most)
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
