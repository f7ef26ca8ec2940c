"""Checks, tunes and times the Triton MoE kernels on one GPU within a time budget; results go to --out.

python3 benchmarks/h200_moe.py --out DIR --phases check,tune,time --budget 240
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, nothing installed

import torch
import triton
import triton.language as tl

from benchmarks import h200_check, h200_tune
from benchmarks.h200_peers import DEEPGEMM, peers
from moe_kernels import bench
from moe_kernels.variants.triton import config as triton_config
from moe_kernels.variants.triton import pipeline

AIR = bench.SHAPES["glm-4.5-air"]


def save(out: Path, name: str, value: object) -> None:
    """Write JSON; at most 8 files come back from the device machine."""
    (out / name).write_text(json.dumps(value, indent=1) + "\n")


def stages(shape: bench.BenchShape, tokens: list[int], ceilings: bench.Ceilings) -> list[bench.Row]:
    """Every launch of `fp8/triton` alone."""
    device = torch.device("cuda")
    record = bench.random_record(shape, "fp8", device)
    layer = h200_tune.make_layer(shape, "fp8", record)
    rows = []
    for t in tokens:
        data = bench.inputs(shape, t, bench.input_count(t), device)
        config = layer.gemm_config(t)
        prepared = h200_tune.Stages(layer, data)
        orders = prepared.orders(config.block_m)
        ys = [torch.randn(t * shape.top_k, shape.hidden, device=device).bfloat16() for _ in data]
        sets: dict[str, list[bench.Call]] = {
            "route_sort_quantise": [
                lambda h=h, g=g, c=config: pipeline.route_sort_quantise(
                    g, layer.bias, h, layer.config, c.block_m, overlap=c.overlap)
                for h, g in data],
            "gemm1": prepared.gemm1(config), "gemm2": prepared.gemm2(config),
            "combine": [lambda y=y, o=o: pipeline.combine(y, o[0].weights, torch.bfloat16)
                        for y, o in zip(ys, orders, strict=True)],
        }
        hit = round(sum(bench.experts_hit(o[0].ids) for o in orders) / len(orders))
        for name, calls in sets.items():
            us, low, high = bench.graph_us(calls)
            floor = bench.floor_us(shape, record, t, hit, ceilings, name) if name.startswith("gemm") else None
            rows.append(bench.Row(shape.name, t, "fp8/triton", name, us, floor, detail={"p10_us": low, "p90_us": high}))
        torch.cuda.empty_cache()
    return rows


@triton.jit
def _reread(x, out, total, BLOCK: tl.constexpr):
    """Every program reads all of x, from its own starting place; x fits the L2 cache."""
    pid = tl.program_id(0)
    start = pid * 37
    acc = tl.zeros([BLOCK], dtype=tl.int32)
    for n in range(total):
        acc += tl.load(x + ((start + n) % total) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + pid, tl.sum(acc, axis=0))


def l2_read_rate() -> float:
    """Bytes/s that all SMs together read from L2: the ceiling of a GEMM whose tiles come from there."""
    x = torch.randint(0, 100, (5 << 20,), dtype=torch.int32, device="cuda")  # 20 MB
    programs, block = 132 * 4, 4096
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    total = x.numel() // block
    us = bench.graph_us([lambda: _reread[(programs,)](x, out, total, BLOCK=block, num_warps=8)] * 3)[0]
    return programs * 4.0 * x.numel() / (us * 1e-6)


def sanitize() -> None:
    """Small layers through every kernel once; run under compute-sanitizer."""
    device, shape = torch.device("cuda"), bench.SHAPES["mini"]
    bias = bench.correction_bias(shape, device)
    plain = triton_config.GemmConfig(64, False, 8, 3, False, 128, 8, 3)
    swapped = triton_config.GemmConfig(16, True, 4, 3, True, 128, 4, 3)
    special = triton_config.GemmConfig(128, False, 4, 3, False, 256, 4, 3, True, True)
    chosen = replace(special, group1=3, group2=4, registers1=True, registers2=True, tma2=True, corrected1=True,
                     overlap=True)
    nvfp4 = [triton_config.NvFp4Config(16), triton_config.NvFp4Config(8, warps1=2, stages2=4, decode=True)]
    for fmt, configs in (("fp8", [plain, swapped, special, chosen]), ("nvfp4", nvfp4)):
        layer = h200_check.build(f"{fmt}/triton", shape, bench.random_record(shape, fmt, device), bias)
        for config in configs:
            layer.override = config
            for t in (1, 5, 67, 523):
                hidden, logits = bench.inputs(shape, t, 1, device)[0]
                y, _ = layer.forward(hidden, logits)
                z = layer.experts(hidden, layer.route(logits))
                torch.cuda.synchronize()
                print(fmt, config.block_m, t, bool(y.isfinite().all()), torch.equal(y, z), flush=True)


def profile(tokens: int) -> None:
    """Three forwards for ncu; the first compiles."""
    device = torch.device("cuda")
    layer = h200_check.build("fp8/triton", AIR, bench.random_record(AIR, "fp8", device),
                             bench.correction_bias(AIR, device))
    for hidden, logits in bench.inputs(AIR, tokens, 3, device):
        layer.forward(hidden, logits)
    torch.cuda.synchronize()


def properties() -> dict[str, object]:
    """What is checked for one shape only: options, batch invariance, the tensor core's own error."""
    return {
        "batch_invariant_nvfp4": h200_check.batch_invariant(AIR, "nvfp4/triton", [2, 8, 33, 128]),
        "copied_equals_direct": h200_check.option_equality(AIR, [1, 3, 7, 33, 128, 1024]),
        "tensor_core_error": h200_check.tensor_core_error(AIR),
        "batch_invariant": h200_check.batch_invariant(AIR, "fp8/triton", [2, 8, 33, 128, 1024, 4096]),
    }


def check(plan: str, seeds: int, check_tokens: list[int], out: Path, deadline: float) -> None:
    """Parity for `format:shape` items, each with an equal share of the time left, then `properties`; check.json."""
    found: list[dict] = []
    items = [item.split(":") for item in plan.split(",")]
    for index, (fmt, name) in enumerate(items):
        began = time.time()
        share = (deadline - began) / (len(items) - index)
        mine = h200_check.check(bench.SHAPES[name], fmt, check_tokens, seeds, began + share)
        found += mine
        print(name, fmt, f"{len(mine)} cases {time.time() - began:.1f} s",
              *(f"{key} {max((f[key] for f in mine), default=-1):.2e}" for key in
                ("rel_emulated", "calc_diff", "worst_row", "rel_oracle", "emulated_vs_oracle", "weights_max")),
              *(f"{key} {all(f[key] for f in mine)}" for key in
                ("ids_equal", "repeat_equal", "apart_equal", "graph_equal", "finite")),
              "prefix", mine[0]["prefix_difference"] if mine else None, flush=True)
        save(out, "check.json", {"parity": found})
        torch.cuda.empty_cache()
    extra = properties()
    print(extra, flush=True)
    save(out, "check.json", {**extra, "parity": found})


PAIR = ["fp8/triton", "fp8/triton:bias=bf16,scales=copied"]  # after and before SGLang #28555
OTHER_TOKENS = [1, 8, 32, 128, 4096]


def main() -> None:
    """Run the phases asked for, stopping each when its share of the budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", default="check,tune,time")
    parser.add_argument("--budget", type=float, default=240, help="seconds for everything")
    parser.add_argument("--tokens", default="1,8,32,128,1024,4096,16384")
    parser.add_argument("--tune-shapes", default="glm-4.5-air", help="shape or shape:1+8+4096 (default: --tokens), ...")
    parser.add_argument("--tune-formats", default="fp8,nvfp4")
    parser.add_argument("--others", default="glm-4.7,glm-4.7-flash,glm-5", help="shapes of phase `others`")
    parser.add_argument("--rounds", type=int, default=200, help="paired rounds before and after, a third for others")
    parser.add_argument("--check-tokens", default="1,2,3,7,8,31,64,1024")
    parser.add_argument("--special", type=Path, help="what phase `special` wrote: features that may be tuned")
    parser.add_argument("--configs", type=Path, help="folder of tuned tables (default: the package's)")
    parser.add_argument("--seeds", type=int, default=1, help="of every item of --plan")
    parser.add_argument("--plan", default="fp8:mini,nvfp4:mini", help="phase `check`: items format:shape")
    args = parser.parse_args()
    start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.configs:
        triton_config.CONFIGS = args.configs
    if args.phases == "check":
        tokens = [int(t) for t in args.check_tokens.split(",")]
        items = [item.split(":") for item in args.plan.split(",")]
        h200_tune.precompile([t for f, n in items for t in h200_tune.forward_tasks(bench.SHAPES[n], f, tokens, False)])
        return check(args.plan, args.seeds, tokens, args.out, start + args.budget)
    if args.phases == "sanitize":
        return sanitize()
    if args.phases == "profile":
        return profile(int(args.tokens))
    if args.phases == "special":
        sys.exit(0 if h200_tune.special_works(AIR, [1, 37, 300, 4096], args.out / "special.json") else 1)
    if args.special and args.special.is_file():
        h200_tune.ALLOWED = set(json.loads(args.special.read_text()))
    deadline = start + args.budget
    out: Path = args.out
    if "tune" in args.phases:
        for table in h200_tune.CONFIGS.glob("*.json"):
            (out / table.name).write_bytes(table.read_bytes())  # formats and shapes that this run does not tune
        triton_config.CONFIGS = out
    tokens = [int(t) for t in args.tokens.split(",")]
    tuned = {name: [int(t) for t in text.split("+")] if text else tokens
             for name, _, text in (item.partition(":") for item in args.tune_shapes.split(","))}
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    ceilings = bench.measure_ceilings(torch.device("cuda"))
    print(f"read {ceilings.read / 1e12:.2f} TB/s, {ceilings.flops / 1e12:.0f} TFLOP/s ({ceilings.source})", flush=True)
    if "limits" in args.phases:
        print(f"L2 read {l2_read_rate() / 1e12:.2f} TB/s", flush=True)
    formats, others = args.tune_formats.split(","), args.others.split(",")
    tasks: list[tuple] = []
    if "others" in args.phases:
        tasks += [t for n in others
                  for t in h200_tune.forward_tasks(bench.SHAPES[n], "fp8", OTHER_TOKENS)]
    if "time" in args.phases or "pairs" in args.phases:
        tasks += [t for f in ("fp8", "nvfp4") for t in h200_tune.forward_tasks(AIR, f, tokens)]
    if "tune" in args.phases:
        tasks += [t for n, counts in tuned.items() for f in formats
                  for t in h200_tune.tune_tasks(bench.SHAPES[n], f, counts)]
    h200_tune.precompile(tasks)
    if "tune" in args.phases:
        log: list[dict] = []
        for name, counts in tuned.items():
            for fmt in formats:
                h200_tune.tune(bench.SHAPES[name], fmt, counts, out, log, deadline)
        save(out, "tune.json", log)
        triton_config._table.cache_clear()
    rows: list[bench.Row] = []
    cuda = torch.device("cuda")
    if "pairs" in args.phases:  # before and after with the same routing: what the two launches cost alone
        pairs = bench.time_layers(PAIR, AIR, tokens, cuda, ceilings, args.rounds, same_routing=True)
        save(out, "pairs.json", [row.to_json() for row in pairs])
        for row in pairs[::2]:
            print(f"same routing {row.tokens:6d} {row.us:9.1f} us saved {row.detail['saved_us']:7.2f} +- "
                  f"{row.detail['saved_ci95_us']:.2f}", flush=True)

    def keep(more: list[bench.Row]) -> None:
        for row in more:
            if row.variant.startswith("fp8/triton") and row.stage == "layer" and row.tokens in DEEPGEMM \
                    and row.shape == AIR.name:
                row.peer = "DeepGEMM 2.5.0, two GEMMs only, quoted, another run"
                row.peer_us = DEEPGEMM[row.tokens]
            flops = 6.0 * row.tokens * AIR.top_k * AIR.hidden * AIR.intermediate
            rate = f" {flops / row.us * 1e-6:6.0f} TFLOP/s" if row.stage == "layer" and row.shape == AIR.name else ""
            print(f"{row.shape:13s} {row.tokens:6d} {row.variant[:36]:36s} {row.stage:20s} {row.us:9.1f} us floor "
                  f"{row.floor_us or 0:8.1f}{rate}", flush=True)
        rows.extend(more)
        meta = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "read_bytes_per_s": ceilings.read, "flops": ceilings.flops, "source": ceilings.source}
        save(out, "h200-moe.json", [row.to_json() for row in rows])
        save(out, "meta.json", meta)
        torch.cuda.empty_cache()

    if "time" in args.phases:
        keep(bench.time_layers(PAIR, AIR, tokens, cuda, ceilings, args.rounds))
        keep(bench.time_layers(["nvfp4/triton"], AIR, [t for t in tokens if t <= 4096], cuda, ceilings, 10))
        keep(stages(AIR, tokens, ceilings))
    if "others" in args.phases:
        for name in others:
            if time.time() < deadline:
                keep(bench.time_layers(PAIR, bench.SHAPES[name], OTHER_TOKENS, cuda, ceilings, args.rounds // 3))
    if "peers" in args.phases and time.time() < deadline:
        keep(peers(AIR, [1, 8, 32, 128, 1024, 4096]))
    print(f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
