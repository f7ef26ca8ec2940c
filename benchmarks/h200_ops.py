"""Times the serving operations on one GPU by CUDA-graph replay and tries launch parameters; JSON goes to --out.

python3 benchmarks/h200_ops.py --out DIR --phases linear,decode,prefill,rest,layer --budget 150
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, nothing installed

import torch
import torch.nn.functional as F
import triton

from moe_kernels import bench, ops
from moe_kernels.ops import attention, runtime
from moe_kernels.ops.linear import Tile, streams, tile_of

AIR = {"qkv": (14336, 4096), "o": (4096, 12288), "gate_up": (2816, 4096), "down": (4096, 1408),
       "lm_head": (151552, 4096)}
HEADS, KV_HEADS, DIM, PAGE, HIDDEN = 96, 8, 128, 16, 4096
ROWS: list[dict[str, Any]] = []
READ = 4.47e12  # replaced by what this run measures
DEADLINE = 0.0
DEFAULTS = False  # --defaults: time what the model uses and no other candidate


def keep(op: str, us: tuple[float, float, float], nbytes: float = 0, flops: float = 0, **detail: object) -> None:
    """Print and remember one number."""
    row = {"op": op, **detail, "us": round(us[0], 2), "p10_us": round(us[1], 2), "p90_us": round(us[2], 2)}
    if nbytes:
        row["share_of_read"] = round(nbytes / READ / (us[0] * 1e-6), 3)
    if flops:
        row["tflops"] = round(flops / us[0] * 1e-6, 1)
    ROWS.append(row)
    print(" ".join(f"{k}={v}" for k, v in row.items() if not k.startswith("p")), flush=True)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    """Random on the GPU."""
    return torch.randn(*size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def fp8_layer(rows: int, columns: int, bias: bool = False) -> ops.Fp8Linear:
    """Random block-FP8 weights without zeros."""
    q = randn(rows, columns, seed=rows).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scale = (0.5 + torch.rand(-(-rows // 128), columns // 128, device="cuda")) / 100 * columns**-0.5
    return ops.Fp8Linear(q, scale, torch.randn(rows, device="cuda").bfloat16() if bias else None)


def make(name: str, kind: str) -> ops.Fp8Linear | ops.Bf16Linear:
    """A layer of one of GLM-4.5-Air's shapes."""
    rows, columns = AIR[name]
    if kind == "fp8":
        return fp8_layer(rows, columns, name == "qkv")
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0, columns**-0.5)
    return ops.Bf16Linear(weight, torch.randn(rows, device="cuda").bfloat16() if name == "qkv" else None)


def call_of(layer: Any, tokens: int, seed: int = 0) -> Callable[[], object]:
    """One call, split sums kept where the model keeps them."""
    x = randn(tokens, layer.columns, seed=seed).bfloat16()
    if isinstance(layer, ops.Fp8Linear):
        values = ops.quantise(x)
        return lambda: layer.split(values)
    return lambda: layer.split(x)


def tiles(kind: str, tokens: int) -> list[Tile]:
    """Candidates."""
    if DEFAULTS:
        return [tile_of(tokens, 1 if kind == "fp8" else 2, streams(torch.device("cuda")))]
    base = tile_of(tokens, 1 if kind == "fp8" else 2)
    if tokens > 128:
        return [Tile(64, 128, 4, 4), Tile(128, 128, 8, 4)] if kind == "fp8" else [Tile(64, 128, 4, 3)]
    if kind == "bf16":
        return [Tile(base.rows, n, 4, s) for n, s in itertools.product((64, 128), (3, 4))]
    shapes = {16: [(64, 4, 6), (64, 4, 8), (64, 4, 10), (128, 4, 4), (128, 4, 6), (128, 8, 4), (128, 8, 6)],
              32: [(64, 4, 5), (64, 4, 8), (128, 4, 4), (128, 8, 6)], 128: [(64, 4, 3), (64, 4, 4), (128, 8, 3)]}
    found = [Tile(base.rows, n, w, s, True) for n, w, s in shapes[base.rows]]
    return found + ([Tile(8, 64, 4, 8, True), Tile(8, 128, 8, 6, True)] if tokens <= 8 else [])


def compile_task(task: tuple) -> str:
    """Run one kernel once in a process of its own, so that the cache on disk holds it."""
    try:
        what, *rest = task
        if what == "linear":
            name, kind, tokens, tile, pdl = rest
            runtime.PDL = pdl
            rows, columns = AIR[name]
            layer = make(name if name != "lm_head" else "o", kind)
            if name == "lm_head":
                layer.rows, layer.columns = rows, columns
                return ""  # too large to build in every process
            layer.override = tile
            call_of(layer, tokens)()
        elif what == "decode":
            tokens, chunk, config = rest
            attention.CHUNK, attention.DECODE = chunk, config
            decode_calls(tokens, 300, 1)[0]()
        elif what == "prefill":
            attention.PREFILL = rest[0]
            prefill_call(1, 256)[0]()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{task}: {type(error).__name__} {str(error)[:300]}"


def precompile(tasks: list[tuple]) -> None:
    """In parallel; prints what failed."""
    began = time.time()
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = [e for e in pool.map(compile_task, tasks, chunksize=2) if e]
    print(f"compiled {len(tasks)} in {time.time() - began:.1f} s; failed: {failed[:6]}", flush=True)


LINEARS = [(n, "fp8", t) for t in (1, 8, 32, 128, 2048) for n in ("qkv", "o", "gate_up", "down")] + [
    (n, "bf16", t) for t in (1, 2048) for n in ("qkv", "o")]


def linears() -> None:
    """Every candidate on every shape; weights rotate so that L2 does not serve them."""
    for name, kind, tokens in [*LINEARS, *(("lm_head", "bf16", t) for t in (1, 8, 32, 128))]:
        if time.time() > DEADLINE:
            return
        rows, columns = AIR[name]
        nbytes = rows * columns * (1 if kind == "fp8" else 2)
        layers = [make(name, kind) for _ in range(max(2, min(24, int(3e8 // nbytes))) if tokens <= 128 else 2)]
        candidates = tiles(kind, tokens)
        if name == "lm_head":
            candidates = candidates[:3] if tokens > 1 else candidates
        for tile, pdl in [(t, True) for t in candidates] + [(None, False)]:
            runtime.PDL = pdl
            for layer in layers:
                layer.override = tile
            try:
                us = bench.graph_us([call_of(layer, tokens, i) for i, layer in enumerate(layers)], 10)
                keep("linear", us, nbytes, 2.0 * tokens * rows * columns if tokens > 128 else 0, name=name, kind=kind,
                     tokens=tokens, tile=vars(tile) if tile else "default", pdl=pdl)
            except Exception as error:
                print("failed", name, kind, tokens, tile, type(error).__name__, str(error)[:200], flush=True)
        runtime.PDL = True
        if kind == "bf16":
            x = randn(tokens, columns).bfloat16()
            us = bench.graph_us([lambda w=layer.weight, x=x: F.linear(x, w) for layer in layers], 10)
            keep("linear", us, nbytes, 2.0 * tokens * rows * columns if tokens > 128 else 0, name=name,
                 kind="cublas bf16", tokens=tokens)
        del layers
        torch.cuda.empty_cache()


def decode_calls(batch: int, length: int, count: int) -> list[Callable[[], object]]:
    """`count` calls with different sequences, quantised output as the model wants it."""
    pages = -(-length // PAGE)
    pool = [torch.empty(batch * pages * count + 1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").normal_()
            for _ in range(2)]
    order = torch.randperm(batch * pages * count, device="cuda").int() + 1
    tables = torch.zeros(count, batch, 160, dtype=torch.int32, device="cuda")
    tables[:, :, :pages] = order.view(count, batch, pages)
    q = randn(batch, HEADS, DIM).bfloat16()
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return [lambda t=t: ops.paged_decode_quantised(q, *pool, t, lengths, DIM**-0.5) for t in tables]


DECODES = [(chunk, {"BN": bn, "STAGES": s, "num_warps": w}) for chunk, bn, s, w in [
    (256, 64, 2, 4), (256, 64, 3, 4), (256, 64, 4, 4), (256, 128, 2, 4), (256, 128, 3, 4), (256, 128, 2, 8),
    (128, 64, 2, 4), (128, 64, 3, 4), (128, 32, 4, 4)]]


def decodes() -> None:
    """Split sizes and tiles against batch."""
    for batch, length, count in ((1, 1536, 16), (8, 1536, 8), (32, 1536, 3), (128, 1536, 1)):
        for chunk, config in [(attention.CHUNK, attention.DECODE)] if DEFAULTS else DECODES:
            if time.time() > DEADLINE:
                return
            attention.CHUNK, attention.DECODE = chunk, config
            us = bench.graph_us(decode_calls(batch, length, count), 10)
            keep("decode", us, 2.0 * batch * length * KV_HEADS * DIM * 2, batch=batch, length=length, chunk=chunk,
                 config=config)


def prefill_call(sequences: int, length: int) -> list[Callable[[], object]]:
    """Whole prompts."""
    pages = length // PAGE
    pool = [torch.empty(sequences * pages + 1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").normal_()
            for _ in range(2)]
    table = (torch.randperm(sequences * pages, device="cuda").int() + 1).view(sequences, pages)
    q = randn(sequences * length, HEADS, DIM).bfloat16()
    starts = torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device="cuda")
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    return [lambda: ops.paged_prefill(q, *pool, table, starts, lengths, DIM**-0.5, length)]


PREFILLS = [{"BM": m, "BN": n, "STAGES": s, "num_warps": w} for m, n, s, w in [
    (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 128, 3, 8), (64, 64, 3, 4), (64, 64, 4, 4)]]


def prefills() -> None:
    """TFLOP/s count the visible half."""
    for sequences, length in ((1, 1024), (8, 1024), (1, 8192)):
        for config in PREFILLS:
            if time.time() > DEADLINE:
                return
            attention.PREFILL = config
            us = bench.graph_us(prefill_call(sequences, length), 5)
            keep("prefill", us, 0, 2.0 * sequences * length**2 * HEADS * DIM, sequences=sequences, length=length,
                 config=config)


def rest() -> None:
    """Norms, rope, activation, router, argmax."""
    weight, gate = randn(HIDDEN).bfloat16(), randn(128, HIDDEN)
    cos, sin = ops.rope_table(1e6, 64, 4096, "cuda")
    pools = [torch.zeros(300, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for tokens in (1, 8, 32, 128, 2048):
        x, r = randn(tokens, HIDDEN).bfloat16(), randn(tokens, HIDDEN, seed=1).bfloat16()
        parts, shared = randn(4, tokens, HIDDEN), randn(2, tokens, HIDDEN)
        qkv, gate_up = randn(tokens, 112 * DIM).bfloat16(), randn(4, tokens, 2816)
        at = torch.arange(tokens, device="cuda")
        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm_quantised split": lambda r=r, p=parts: ops.add_rms_norm_quantised(p, r, weight, 1e-5),
            "add_rms_norm_quantised x2": lambda x=x, r=r, s=shared: ops.add_rms_norm_quantised(x, r, weight, 1e-5, s),
            "rope": lambda q=qkv, a=at: ops.qk_norm_rope_store(q, a, cos, sin, a, *pools, HEADS),
            "swiglu_quantised split": lambda g=gate_up: ops.swiglu_quantised(g),
            "router": lambda x=x: ops.router_logits(x, gate), "router torch": lambda x=x: F.linear(x.float(), gate)}
        for name, call in calls.items():
            keep("rest", bench.graph_us([call] * 8, 10), name=name, tokens=tokens)
        if tokens <= 128:
            logits = randn(tokens, 151552)
            keep("rest", bench.graph_us([lambda z=logits: z.argmax(-1)] * 4, 10), name="argmax", tokens=tokens)


def layers() -> None:
    """All of GLM-4.5-Air's decoder layer but the MoE block: 12 layers in one graph, with and without overlap."""
    count, weight, gate = 12, randn(HIDDEN).bfloat16(), randn(128, HIDDEN)
    stack = [{n: make(n, "fp8") for n in ("qkv", "o", "gate_up", "down")} for _ in range(count)]
    cos, sin = ops.rope_table(1e6, 64, 4096, "cuda")
    for batch, length, pdl in itertools.product((1, 8, 32, 128), (1536,), (True, False)):
        runtime.PDL = pdl
        pages = length // PAGE
        pools = [[torch.empty(batch * pages + 1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").normal_()
                  for _ in range(2)] for _ in range(count if batch <= 32 else 2)]
        table = (torch.arange(batch * pages, device="cuda").int() + 1).view(batch, pages)
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        positions, slots = lengths - 1, table[:, -1].long() * PAGE + PAGE - 1
        start = randn(batch, HIDDEN).bfloat16()

        def chain(n: int, start=start, pools=pools, table=table, lengths=lengths, positions=positions,  # type: ignore
                  slots=slots) -> None:
            m = stack[n]
            _, r, values = ops.add_rms_norm_quantised(start, start, weight, 1e-5)
            k_pool, v_pool = pools[n % len(pools)]
            q = ops.qk_norm_rope_store(m["qkv"](values), positions, cos, sin, slots, k_pool, v_pool, HEADS)
            a = ops.paged_decode_quantised(q, k_pool, v_pool, table, lengths, DIM**-0.5)
            y, r, values = ops.add_rms_norm_quantised(m["o"].split(a), r, weight, 1e-5)
            ops.router_logits(y, gate)
            m["down"].split(ops.swiglu_quantised(m["gate_up"].split(values)))

        us = bench.graph_us([lambda n=n: chain(n) for n in range(count)], 10)
        nbytes = sum(r * c for n, (r, c) in AIR.items() if n != "lm_head") + 2e6 + 4.0 * batch * length * KV_HEADS * DIM
        keep("layer without MoE", us, nbytes, batch=batch, length=length, pdl=pdl)
        del pools
        torch.cuda.empty_cache()
    runtime.PDL = True


PHASES = {"layer": layers, "rest": rest, "linear": linears, "decode": decodes, "prefill": prefills}


def main() -> None:
    """Run the phases asked for; each may fail alone."""
    global READ, DEADLINE, DEFAULTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", default="layer,rest,linear,decode,prefill")
    parser.add_argument("--budget", type=float, default=150)
    parser.add_argument("--defaults", action="store_true", help="no sweep: the tiles that the model uses")
    args = parser.parse_args()
    DEFAULTS = args.defaults
    began = time.time()
    DEADLINE = began + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.phases.split(",")
    tasks: list[tuple] = []
    if "linear" in wanted:
        tasks += [("linear", n, k, t, tile, True) for n, k, t in LINEARS if t != 8 for tile in tiles(k, t)]
    if "decode" in wanted:
        tasks += [("decode", b, *d) for b in (1, 8) for d in DECODES]
    if "prefill" in wanted:
        tasks += [("prefill", p) for p in PREFILLS]
    if tasks and not DEFAULTS:
        precompile(tasks)
    READ = bench.measure_ceilings(torch.device("cuda")).read
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, f"{READ / 1e12:.2f} TB/s", flush=True)
    saved = attention.CHUNK, attention.DECODE, attention.PREFILL
    for name in wanted:
        try:
            PHASES[name]()
        except Exception:
            traceback.print_exc()
        attention.CHUNK, attention.DECODE, attention.PREFILL = saved
        runtime.PDL = True
        meta = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "read_bytes_per_s": READ}
        (args.out / "h200-ops.json").write_text(json.dumps({"meta": meta, "rows": ROWS}, indent=1) + "\n")
        print(f"{name} done at {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
