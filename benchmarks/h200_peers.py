"""Other implementations of the same layer, timed in the same run where they can be imported."""

from __future__ import annotations

import torch

from benchmarks import h200_tune
from moe_kernels import bench

DEEPGEMM = {1: 82.8, 8: 258.7, 32: 541, 128: 610, 1024: 719, 4096: 1031, 16384: 4070}  # shared design.md §6


def scaled_mm_loop(shape: bench.BenchShape, tokens: list[int]) -> list[bench.Row]:
    """A loop of torch products over the experts that are hit, which the host knows beforehand."""
    device = torch.device("cuda")
    rows: list[bench.Row] = []
    record = bench.random_record(shape, "fp8", device)
    layer = h200_tune.make_layer(shape, "fp8", record)
    one = torch.ones((), device=device)
    for t in tokens:
        calls: list[bench.Call] = []
        for _, logits in bench.inputs(shape, t, min(4, bench.input_count(t)), device):
            ids = layer.route(logits).ids.flatten()
            counts = torch.bincount(ids, minlength=shape.experts).tolist()
            parts = [(e, (torch.randn(n, shape.hidden, device=device)).to(torch.float8_e4m3fn),
                      (torch.randn(n, shape.intermediate, device=device)).to(torch.float8_e4m3fn))
                     for e, n in enumerate(counts) if n]

            def loop(parts=parts, w13=record.w13, w2=record.w2) -> None:  # type: ignore[no-untyped-def]
                for e, x, h in parts:
                    torch._scaled_mm(x, w13[e].t(), one, one, out_dtype=torch.bfloat16)
                    torch._scaled_mm(h, w2[e].t(), one, one, out_dtype=torch.bfloat16)

            calls.append(loop)
        us = bench.graph_us(calls, replays=10)[0]
        rows.append(bench.Row(shape.name, t, "torch _scaled_mm loop, one scale a tensor, GEMMs only, routing known to "
                              "the host", "layer", us))
    return rows


def transformers_experts(shape: bench.BenchShape, tokens: list[int]) -> list[bench.Row]:
    """The stock model's experts in BF16 through torch's grouped product."""
    device = torch.device("cuda")
    rows: list[bench.Row] = []
    import transformers
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    config = transformers.Glm4MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.intermediate, n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k)
    config._experts_implementation = "grouped_mm"
    cls = getattr(glm, "Glm4MoeNaiveMoe", None) or glm.Glm4MoeExperts  # renamed between 5.x releases
    module = cls(config).to(device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for t in tokens:
            router = bench.inputs(shape, t, min(4, bench.input_count(t)), device)
            calls = []
            for hidden, logits in router:
                weights, ids = logits.sigmoid().topk(shape.top_k)
                calls.append(lambda h=hidden, i=ids, w=weights.bfloat16(): module(h, i, w))
            us = bench.graph_us(calls, replays=10)[0]
            rows.append(bench.Row(shape.name, t, f"transformers {transformers.__version__} {cls.__name__}, BF16, "
                                  "grouped_mm, no routing", "layer", us))
    return rows


def peers(shape: bench.BenchShape, tokens: list[int]) -> list[bench.Row]:
    """All of them; one that fails is reported and left out."""
    rows: list[bench.Row] = []
    for measure in (scaled_mm_loop, transformers_experts):
        try:
            rows += measure(shape, tokens)
        except Exception as error:  # a peer that does not run must not cost the rest
            print(measure.__name__, type(error).__name__, str(error)[:300], flush=True)
        torch.cuda.empty_cache()
    return rows
