"""Finds tile shapes for `fp8/triton` and `nvfp4/triton` on this GPU; writes moe_kernels/variants/configs/*.json."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from moe_kernels import bench, numerics
from moe_kernels.registry import parse
from moe_kernels.variants.triton import nvfp4_pipeline, pipeline
from moe_kernels.variants.triton.config import (
    CONFIGS,
    GemmConfig,
    NvFp4Config,
    lookup,
    lookup_nvfp4,
    table_name,
)
from moe_kernels.variants.triton_fp8 import Fp8TritonLayer
from moe_kernels.variants.triton_nvfp4 import NvFp4TritonLayer


@dataclass(frozen=True)
class One:
    """Parameters of the first GEMM."""

    block_m: int
    swap: bool
    block_n: int
    warps: int
    stages: int
    special: bool = False
    group: int = 1
    registers: bool = False
    tma: bool = False
    corrected: bool = False


def first_candidates(rows: float) -> list[One]:
    """FP8 GEMM 1, by mean rows an expert."""
    found = []
    if rows <= 16:
        found += [One(16, True, 128, w, s) for w, s in [(4, 3), (4, 4), (4, 6), (8, 3), (8, 4), (8, 6)]]
    if 4 <= rows <= 48:
        found += [One(32, True, 128, w, s) for w, s in [(4, 3), (8, 3), (8, 4), (8, 5)]]
    if rows > 16:
        found += [One(64, True, 128, 8, 3), One(64, False, 128, 8, 4)]
    if rows > 24:
        found += [One(128, False, 128, 4, s, True) for s in (3, 4)]
        found += [One(128, False, 128, 4, s, True, group, registers, corrected=True) for s in (3, 4)
                  for group in (1, 2, 3, 6, 12) for registers in (False, True) if s == 4 or group == 1]
    return found


def second_candidates(rows: float) -> list[One]:
    """FP8 GEMM 2."""
    found = []
    if rows <= 16:
        found += [One(16, True, n, w, s) for n, w, s in
                  [(64, 4, 4), (64, 4, 8), (128, 4, 3), (128, 4, 4), (128, 4, 6), (128, 4, 8), (128, 8, 4)]]
    if 4 <= rows <= 48:
        found += [One(32, True, 128, w, s) for w, s in [(4, 3), (4, 4), (4, 6)]]
    if rows > 16:
        found += [One(64, True, 128, 4, 4), One(64, False, 128, 4, 4)]
    if rows > 24:
        found += [One(128, False, 256, 4, s, True, group, registers, tma)
                  for s in (3, 4) for group in (1, 3, 8) for registers in (False, True) for tma in (False, True)
                  if s == 4 or group == 1]
    return found


def nvfp4_candidates(rows: float) -> list[One]:
    """Either NVFP4 GEMM; `special` means the decode kernel."""
    ranges = ((8, 0, 12, (2, 4, 6)), (16, 2, 40, (2, 4)), (32, 8, 1e9, (1, 2)), (64, 24, 1e9, (1,)))
    found = [One(m, True, 64, w, s, True) for m, least, most, ahead in ranges if least <= rows <= most
             for w in (2, 4) for s in ahead]
    if 4 <= rows <= 48:
        found += [One(32, True, n, w, s) for n, w, s in [(64, 4, 4), (128, 4, 3)]]
    if rows > 16:
        found += [One(64, True, n, w, s) for n, w, s in [(64, 4, 3), (128, 8, 3)]]
    if rows > 48:
        found += [One(128, True, n, w, s) for n, w, s in [(64, 4, 3), (128, 8, 3)]]
    return found


def fp8_config(a: One, b: One) -> GemmConfig:
    """Both GEMMs' choices as a configuration."""
    return GemmConfig(a.block_m, a.swap, a.warps, a.stages, b.swap, b.block_n, b.warps, b.stages, a.special, b.special,
                      a.group, b.group, a.registers, b.registers, b.tma, a.corrected)


def nvfp4_config(a: One, b: One) -> NvFp4Config:
    """Both GEMMs' choices as a configuration."""
    return NvFp4Config(a.block_m, a.block_n, a.warps, a.stages, b.block_n, b.warps, b.stages, a.special)


class Stages:
    """One layer's stages with inputs prepared, so that each can be run alone."""

    def __init__(self, layer: Fp8TritonLayer | NvFp4TritonLayer, data: list) -> None:
        self.layer, self.data = layer, data
        self._orders: dict[int, list] = {}
        self.fp8 = isinstance(layer, Fp8TritonLayer)

    def orders(self, block_m: int) -> list:
        """(routing, order, x_q, x_scale) per input."""
        if block_m not in self._orders:
            self._orders[block_m] = [
                pipeline.route_sort_quantise(g, self.layer.bias, h if self.fp8 else None, self.layer.config, block_m)
                for h, g in self.data
            ]
        return self._orders[block_m]

    def gemm1(self, config) -> list[bench.Call]:  # type: ignore[no-untyped-def]
        """Calls of GEMM 1 alone."""
        w = self.layer.weights
        if self.fp8:
            return [lambda q=q, s=s, o=o: pipeline.gemm1(w, q, s, o, config)
                    for _, o, q, s in self.orders(config.block_m)]
        return [lambda h=h, o=o: nvfp4_pipeline.gemm1(w, h, None, o, config)
                for (h, _), (_, o, _, _) in zip(self.data, self.orders(config.block_m), strict=True)]

    def gemm2(self, config) -> list[bench.Call]:  # type: ignore[no-untyped-def]
        """Calls of GEMM 2 alone, on random intermediates."""
        w, shape = self.layer.weights, self.layer.shape
        calls: list[bench.Call] = []
        for number, (_, order, _, _) in enumerate(self.orders(config.block_m)):
            pairs, device = order.slots.numel(), order.slots.device
            torch.manual_seed(number)
            h = torch.randn(pairs, shape.intermediate_size, device=device)
            if self.fp8:
                q = (h * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
                s = torch.rand(shape.intermediate_size // 128, pairs, device=device) + 0.5
                calls.append(lambda q=q, s=s, o=order: pipeline.gemm2(w, q, s, o, config, torch.bfloat16))
            else:
                x = h.bfloat16()
                calls.append(lambda x=x, o=order: nvfp4_pipeline.gemm2(w, x, None, o, config, torch.bfloat16))
        return calls


def make_layer(shape: bench.BenchShape, fmt: str, record):  # type: ignore[no-untyped-def]
    """The Triton layer of a format."""
    cls = Fp8TritonLayer if fmt == "fp8" else NvFp4TritonLayer
    return cls(record, shape.routing, bench.correction_bias(shape, record.w13.device), parse(f"{fmt}/triton"))


def _compile(task: tuple) -> str:
    """In a worker process: run kernels once on small inputs of the same widths, filling Triton's disk cache."""
    kind, name, fmt, what = task
    full = bench.SHAPES[name]
    device = torch.device("cuda")
    try:
        if kind == "route":
            tokens, block_m, pair = what
            hidden, logits = bench.inputs(full, tokens, 1, device)[0]
            bias = bench.correction_bias(full, device)
            for b, column_major in [(bias, True)] + [(bias.bfloat16(), False)] * pair:
                routing, _, _, _ = pipeline.route_sort_quantise(
                    logits, b, hidden if fmt == "fp8" else None, full.routing, block_m, column_major=column_major)
            pipeline.sort_by_expert(routing.ids, full.experts, block_m)
            pipeline.route_sort_quantise(logits, bias, None, full.routing, 16, sort=False)
            pipeline.quantise_hidden(hidden)
            y = torch.randn(tokens * full.top_k, full.hidden, device=device).bfloat16()
            pipeline.combine(y, routing.weights, torch.bfloat16)
        else:
            small = bench.BenchShape(name, full.hidden, full.intermediate, 8, full.top_k, full.scaling)
            if (name, fmt) not in _LAYERS:
                layer = make_layer(small, fmt, bench.random_record(small, fmt, device))
                _LAYERS[name, fmt] = Stages(layer, bench.inputs(small, 3, 1, device))
            stages = _LAYERS[name, fmt]
            stages.gemm1(what)[0]()
            stages.gemm2(what)[0]()
        torch.cuda.synchronize()
        return ""
    except Exception as error:  # too much shared memory, say: the tuner skips it
        return f"{task}: {type(error).__name__}: {str(error)[:200]}"


_LAYERS: dict[tuple[str, str], Stages] = {}


def precompile(tasks: list[tuple], workers: int = 14) -> None:
    """Compile in parallel; prints what failed."""
    start = time.time()
    tasks = list(dict.fromkeys(tasks))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = [e for e in pool.map(_compile, tasks, chunksize=1) if e]
    print(f"compiled {len(tasks)} in {time.time() - start:.1f} s; failed: {failed[:4]}", flush=True)


def representative(tokens: int) -> int:
    """A token count whose routing kernels are the same compilations."""
    return triton.next_power_of_2(tokens) if tokens <= 32 else 64 if tokens <= 512 else 1024 if tokens <= 2048 else 4096


def forward_tasks(shape: bench.BenchShape, fmt: str, tokens: list[int], pair: bool = True) -> list[tuple]:
    """What a layer's forward needs at these token counts; `pair` adds the path before the change."""
    rule = lookup if fmt == "fp8" else lookup_nvfp4
    found: list[tuple] = []
    for t in tokens:
        config = rule(shape.moe, t, torch.cuda.get_device_name(), 90)
        found += [("route", shape.name, fmt, (representative(t), config.block_m, pair and fmt == "fp8")),
                  ("gemm", shape.name, fmt, config)]
    return found


def tune_tasks(shape: bench.BenchShape, fmt: str, tokens: list[int]) -> list[tuple]:
    """Every candidate of both GEMMs, and routing for every tile height."""
    build = fp8_config if fmt == "fp8" else nvfp4_config
    found: list[tuple] = []
    for t in tokens:
        a, b = candidates(fmt, t * shape.top_k / shape.experts)
        found += [("gemm", shape.name, fmt, build(x or a[0], y or b[0])) for x, y in itertools.zip_longest(a, b)]
        # (for NVFP4 the two lists are the same, so the pairs have one kernel)
        found += [("route", shape.name, fmt, (representative(t), m, False)) for m in {x.block_m for x in a}]
    return found


ALLOWED: set[str] = set()  # what `special_works` has seen to pass


def allowed(option: One) -> bool:
    """Whether every feature of the warp-specialised kernel that an option needs has passed."""
    needed = {"special"} if option.special else set()
    needed |= {"group"} if option.group > 1 else set()
    needed |= {"registers"} if option.registers else set()
    needed |= {"corrected"} if option.corrected else set()
    return needed | ({"tma"} if option.tma else set()) <= ALLOWED


def candidates(fmt: str, rows: float) -> tuple[list[One], list[One]]:
    """Candidates of both GEMMs."""
    if fmt == "fp8":
        a, b = first_candidates(rows), second_candidates(rows)
        return [x for x in a if allowed(x)], [x for x in b if allowed(x)]
    return nvfp4_candidates(rows), nvfp4_candidates(rows)


def special_works(shape: bench.BenchShape, tokens: list[int], out: Path) -> bool:
    """The warp-specialised kernel and each of its choices against the plain one, bit by bit.

    Run it under a time limit, since a bug there can hang; features that passed so far are in `out` at any time.
    """
    device = torch.device("cuda")
    plain = One(128, False, 128, 8, 3)
    special = replace(plain, special=True)
    features = {"special": special, "group": replace(special, group=3), "registers": replace(special, registers=True),
                "tma": replace(special, tma=True), "corrected": replace(special, corrected=True),
                "together": replace(special, stages=4, group=12, registers=True, tma=True, corrected=True)}
    precompile([("gemm", shape.name, "fp8", fp8_config(x, x)) for x in (plain, *features.values())])
    layer = make_layer(shape, "fp8", bench.random_record(shape, "fp8", device))
    stages = {t: Stages(layer, bench.inputs(shape, t, 1, device)) for t in tokens}

    def bits(t: int, stage: str, choice: One) -> list[torch.Tensor]:
        value = getattr(stages[t], stage)(fp8_config(choice, choice))[0]()
        torch.cuda.synchronize()
        return [v.view(torch.uint8) for v in (value if isinstance(value, tuple) else (value,))]

    cases = [(t, stage) for t in tokens for stage in ("gemm1", "gemm2")]
    wanted = {case: bits(*case, plain) for case in cases}
    passed: list[str] = []
    for feature, choice in features.items():
        equal = {case: all(map(torch.equal, bits(*case, choice), wanted[case])) for case in cases}
        print(f"special {shape.name} {feature}: equal bits {list(equal.values())} for {cases}", flush=True)
        if all(equal.values()):
            passed.append(feature)
        out.write_text(json.dumps(passed) + "\n")
    return len(passed) == len(features)


def overlap_helps(layer: Fp8TritonLayer, data: list, block_m: int, log: list[dict], tokens: int) -> bool:
    """Whether quantising on a second stream makes routing, sort and quantisation faster; both are timed in turn."""
    calls: list[list[bench.Call]] = [
        [lambda h=h, g=g, o=o: pipeline.route_sort_quantise(g, layer.bias, h, layer.config, block_m, overlap=o)
         for h, g in data] for o in (False, True)]
    apart, beside = (us for us, _, _ in bench.alternate_us(calls, 20))
    print(f"   route, sort, quantise {apart:.1f}, with overlap {beside:.1f}", flush=True)
    log.append({"format": "fp8", "tokens": tokens, "stage": "route_sort_quantise", "us": apart, "overlap_us": beside})
    return beside < apart


def tune(shape: bench.BenchShape, fmt: str, tokens: list[int], out: Path, log: list[dict], deadline: float) -> None:
    """Time every candidate alone at every token count; write the best pair per token count."""
    device = torch.device("cuda")
    rows_of = {t: t * shape.top_k / shape.experts for t in tokens}
    layer = make_layer(shape, fmt, bench.random_record(shape, fmt, device))
    build = fp8_config if fmt == "fp8" else nvfp4_config
    name = table_name(shape.moe, fmt, torch.cuda.get_device_name())
    known = CONFIGS / name  # token counts that this run does not tune keep their entries
    best: dict[str, dict] = json.loads(known.read_text())["configs"] if known.is_file() else {}
    for t in tokens:
        stages = Stages(layer, bench.inputs(shape, t, bench.input_count(t), device))
        a, b = candidates(fmt, rows_of[t])
        timed: dict[str, dict[One, float]] = {"gemm1": {}, "gemm2": {}}
        for stage, options in (("gemm1", a), ("gemm2", b)):
            reference = None
            for option in options:
                if time.time() > deadline:
                    break
                other = replace(option, swap=True) if fmt == "nvfp4" else b[0] if stage == "gemm1" else a[0]
                other = replace(other, block_m=option.block_m)
                config = build(option, other) if stage == "gemm1" else build(other, option)
                try:
                    value = getattr(stages, stage)(config)[0]()
                    value = torch.cat([v.float().flatten() for v in value]) if isinstance(value, tuple) else value
                    reference = value if reference is None else reference
                    rel = numerics.relative_l2(value, reference)
                    us = bench.graph_us(getattr(stages, stage)(config), replays=5, warmup=1)[0]
                except Exception as error:
                    print("skip", stage, option, type(error).__name__, str(error)[:80], flush=True)
                    continue
                timed[stage][option] = us
                log.append({"shape": shape.name, "format": fmt, "tokens": t, "stage": stage, "us": us, "rel": rel,
                            "equal_bits": torch.equal(value, reference), **vars(option)})
                if not rel < 1e-2:
                    print("WRONG", stage, t, option, rel, flush=True)
                    del timed[stage][option]
        whole = {(x, y): timed["gemm1"][x] + timed["gemm2"][y]
                 for x in timed["gemm1"] for y in timed["gemm2"]
                 if x.block_m == y.block_m and (fmt == "fp8" or x.special == y.special)}
        if whole:
            x, y = min(whole, key=whole.__getitem__)
            chosen = build(x, y)
            if fmt == "fp8" and t > pipeline.FUSED_TOKENS:
                chosen = replace(chosen, overlap=overlap_helps(layer, stages.data, x.block_m, log, t))
            best[str(t)] = chosen.to_json()
            print(f"{fmt} T={t}: gemm1 {timed['gemm1'][x]:.1f} {x}\n   gemm2 {timed['gemm2'][y]:.1f} {y}", flush=True)
        torch.cuda.empty_cache()
        text = {"tool": "benchmarks/h200_tune.py", "device": torch.cuda.get_device_name(),
                "torch": torch.__version__, "triton": triton.__version__, "configs": best}
        (out / name).write_text(json.dumps(text, indent=1) + "\n")
