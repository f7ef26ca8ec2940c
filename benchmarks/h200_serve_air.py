"""Phases of h200_serve.py on GLM-4.5-Air's shape: random block-FP8 weights, rates after and before the change."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from service.bench import local
from service.bench.rounds import Comparison, Ratio, Round, compare, make_load, measure, paired_ratio
from service.config import EngineConfig
from service.engine.engine import Engine
from service.gpu import random_model
from service.gpu.graphs import DecodeSteps

CONFIG = Path(__file__).resolve().parent / "configs" / "glm-4.5-air-random.json"
AFTER, BEFORE = "fp8/triton", "fp8/triton:bias=bf16,scales=copied"
GOALS = {1: 190.0, 8: 1300.0, 128: 5000.0}
PEER = {1: 150.9, 8: 1041.0}  # vLLM 0.26.0, CUDA graphs, no inductor (docs: design.md §6), another run
SIZES = (1, 8, 32, 128)


def build(report: Any, args: Any, attention: str = "fp8", sizes: tuple[int, ...] = SIZES,
          note: str = "air_memory", **settings: Any) -> Engine:
    """The model and its engine, with what they hold of the card."""
    began = time.time()
    model = random_model.build(CONFIG, AFTER, seed=1, device="cuda", attention_dtype=attention, num_layers=args.layers)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    weights = model.weights.bytes()
    report.say(f"built in {time.time() - began:.1f} s: {held / 1e9:.1f} GB on the card", weights)
    began = time.time()
    engine = Engine(model, None, EngineConfig(max_seqs=sizes[-1], max_batch_tokens=8192, max_model_len=2304,
                                              graph_sizes=sizes, prefill_sizes=(), **settings))
    engine.start()
    free, total = torch.cuda.mem_get_info()
    memory = {
        "weights_bytes": held, "weights": weights, "kv_bytes_per_token": model.weights.kv_bytes_per_token,
        "kv_blocks": engine.pool.total, "kv_tokens": engine.pool.total * engine.config.kv_block,
        "kv_bytes": 2 * engine.runner.kv.k.numel() * engine.runner.kv.k.element_size(),
        "free_after_capture": free, "card": total, "built_seconds": time.time() - began,
    }
    report.detail[note] = memory
    report.say(f"engine up in {time.time() - began:.1f} s: graphs {engine.runner.cuda_graph}", memory)
    report.save()
    return engine


@torch.inference_mode()
def step_times(engine: Engine, sizes: tuple[int, ...], context: int) -> dict[int, dict[str, float]]:
    """Milliseconds of a decode step by graph replay, and the experts each layer reads, at a context length."""
    runner = engine.runner
    steps, block = runner._steps[runner.variant], runner.kv.block
    wide = -(-context // block)
    found = {}
    for size in sizes:
        fits = engine.pool.total // wide
        table = torch.arange(1, 1 + min(fits, size) * wide, dtype=torch.int32, device="cuda").view(-1, wide)
        runner.rows.table[:size, :wide] = table[torch.arange(size, device="cuda") % table.shape[0]]
        inputs = torch.from_numpy(steps.padding(size)).cuda()
        inputs[0] = torch.randint(0, runner.vocab, (size,), device="cuda")
        inputs[1], inputs[3] = context - 1, torch.arange(size, device="cuda")
        inputs[2] = runner.rows.table[:size, wide - 1].long() * block + (context - 1) % block
        captured = steps._captured.get(size)
        if captured is None:
            continue
        captured.inputs.copy_(inputs)
        times = []
        for _ in range(30):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            captured.inputs[0].copy_(torch.randint(0, runner.vocab, (size,), device="cuda"))
            start.record()
            captured.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        found[size] = {"ms": sorted(times[5:])[12], "experts_hit": experts_hit(engine, inputs)}
    return found


def experts_hit(engine: Engine, inputs: torch.Tensor) -> float:
    """Different experts a layer's tokens choose, mean over layers, by an eager step."""
    hits: list[float] = []
    runner = engine.runner
    runner.forward.observe = lambda layer, hidden, logits, routing: hits.append(
        float(routing.ids.unique().numel()))
    try:
        runner._steps[runner.variant]._step(inputs)
    finally:
        runner.forward.observe = None
    return sum(hits) / max(1, len(hits))


def floor_seconds(engine: Engine, size: int, hit: float, context: int, read: float) -> float:
    """Least time of a decode step: every weight used and every key and value read once."""
    weights = engine.runner.weights
    parts = weights.bytes()
    experts = weights.config.n_routed_experts
    total = sum(v for k, v in parts.items() if k not in ("experts", "embed"))
    total += parts["experts"] * hit / experts + size * context * weights.kv_bytes_per_token
    return total / read


PLAN = ((1, 1024, 2), (8, 256, 2), (32, 128, 2), (128, 64, 2))  # concurrency, output tokens, pairs of rounds


def run(report: Any, args: Any) -> None:
    """Step times, after and before the change step by step, then whole rounds of 1K prompts at four concurrencies."""
    engine = build(report, args)
    try:
        steps = engine.call(lambda: step_times(engine, SIZES, 1536))
        for size, one in steps.items():
            floor = floor_seconds(engine, size, one["experts_hit"], 1536, report.read)
            one["floor_ms"] = floor * 1e3
            report.say(f"step of {size}: {one['ms']:.3f} ms, floor {floor * 1e3:.3f} ms, {one['experts_hit']:.1f} "
                       f"experts a layer, {size / one['ms'] * 1e3:.0f} tok/s at 1,536 tokens")
        report.detail["air_steps_1536"] = steps
        report.save()
        if os.environ.get("MOE_PARITY_STREAM") != "0":
            os.environ["MOE_PARITY_STREAM"] = "0"
            report.detail["air_steps_without_stream"] = engine.call(lambda: other_steps(engine, (1, 8)))
            os.environ["MOE_PARITY_STREAM"] = "1"
            report.say("without the stream kernel", report.detail["air_steps_without_stream"])
        report.detail["air_parts_against_reference"] = engine.call(lambda: layers_agree(engine))
        report.say(report.detail["air_parts_against_reference"])
        torch.cuda.reset_peak_memory_stats()
        pair = local.targets(engine, [AFTER, BEFORE])
        report.say("graphs of both variants")
        ratios = {size: engine.call(lambda n=size: paired_steps(engine, n)) for size in SIZES}
        for size, ratio in ratios.items():
            report.say(f"steps of {size}, after / before: {ratio.ratio:.5f} [{ratio.low:.5f}, {ratio.high:.5f}]")
        report.detail["air_step_ratios"] = {size: ratio.asdict() for size, ratio in ratios.items()}
        warm = make_load(engine.runner.vocab, 1024, 8, 8, 8, 99)
        for target in pair:
            measure(target, warm)
        for concurrency, output, rounds in PLAN:
            if report.left() < args.leave:
                report.say(f"no time for concurrency {concurrency}")
                continue
            found = compare(pair, 1024, output, concurrency, concurrency, rounds, warmup=0)
            note(report, engine, found, steps, ratios[concurrency])
        report.detail["air_memory"]["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        report.detail["air_memory"]["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        alike(report, engine)
    finally:
        engine.stop()


def other_steps(engine: Engine, sizes: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Step times of graphs captured anew, under whatever was switched."""
    runner = engine.runner
    kept, runner._steps[0] = runner._steps[0], DecodeSteps(runner.forward, runner.rows, list(sizes), graphs=True)
    try:
        return step_times(engine, sizes, 1536)
    finally:
        runner._steps[0] = kept


@torch.inference_mode()
def paired_steps(engine: Engine, size: int, blocks: int = 24) -> Ratio:
    """Rates of the same decode step after and before the change, replayed A B B A, a pair a block."""
    runner = engine.runner
    graphs = [steps._captured[size] for steps in runner._steps]
    graphs[1].inputs.copy_(graphs[0].inputs)  # as step_times left them
    rates: list[list[float]] = [[], []]
    for _ in range(blocks + 2):
        tokens = torch.randint(0, runner.vocab, (size,), device="cuda")
        took = [0.0, 0.0]
        for one in (0, 1, 1, 0):
            graphs[one].inputs[0].copy_(tokens)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[one].graph.replay()
            end.record()
            end.synchronize()
            took[one] += start.elapsed_time(end)
        for series, ms in zip(rates, took, strict=True):
            series.append(2e3 * size / ms)
    return paired_ratio(rates[0][2:], rates[1][2:])


def note(report: Any, engine: Engine, found: Comparison, steps: dict[int, Any], ratio: Ratio) -> None:
    """A row per concurrency; its ratio is that of paired steps, the rounds' own ratio is in the detail."""
    c = found.concurrency
    after, before = found.rounds[AFTER], found.rounds[BEFORE]
    hit = steps[c]["experts_hit"]
    floor = c / floor_seconds(engine, c, hit, found.prompt + found.output // 2, report.read)

    def middle(rounds: list[Round], name: str) -> float:
        return statistics.median(getattr(r, name) for r in rounds)

    report.rows.append({
        "model": "GLM-4.5-Air shape, random, block FP8 (attention FP8)", "variant": AFTER, "concurrency": c,
        "input": found.prompt, "output": found.output, "tok_s": middle(after, "decode_tok_s"),
        "floor_tok_s": floor, "baseline": BEFORE, "ratio": ratio.ratio, "ratio_low": ratio.low,
        "ratio_high": ratio.high, "measure": "decoding", "baseline_tok_s": middle(before, "decode_tok_s"),
        "tok_s_with_prefill": middle(after, "tok_s"), "goal_tok_s": GOALS.get(c), "vllm_0_26_tok_s": PEER.get(c),
        "experts_hit": hit,
    })
    report.detail.setdefault("air_rounds", []).append(found.asdict())
    own = found.decode_ratio
    spread = f"rounds' own ratio {own.ratio:.4f} [{own.low:.4f}, {own.high:.4f}]" if own else ""
    report.say(f"concurrency {c}, {found.prompt}/{found.output}: decoding {middle(after, 'decode_tok_s'):.1f} tok/s "
               f"(before {middle(before, 'decode_tok_s'):.1f}, goal {GOALS.get(c)}, vLLM {PEER.get(c)}, floor "
               f"{floor:.0f}), with prefill {middle(after, 'tok_s'):.1f}, itl {after[-1].itl_ms}, ttft "
               f"{after[-1].ttft_ms}, {spread}, preemptions {engine.stats().preemptions_total}")
    report.save()


def alike(report: Any, engine: Engine) -> None:
    """The same steps where all tokens choose the same experts, as with a dummy-loaded peer: router near zero."""
    def shrink() -> None:
        for layer in engine.runner.weights.layers:
            if layer.router is not None:
                layer.router.mul_(1e-3)

    engine.call(shrink)
    steps = engine.call(lambda: step_times(engine, SIZES, 1536))
    for size, one in steps.items():
        one["floor_ms"] = floor_seconds(engine, size, one["experts_hit"], 1536, report.read) * 1e3
        report.say(f"alike: step of {size}: {one['ms']:.3f} ms, {one['experts_hit']:.1f} experts, "
                   f"{size / one['ms'] * 1e3:.0f} tok/s, floor {one['floor_ms']:.3f} ms")
    report.detail["air_steps_1536_tokens_alike"] = steps


def profile(report: Any, args: Any) -> None:
    """Where a decode step's time goes: kernels of one replay by name."""
    engine = build(report, args)
    report.detail["air_profile"] = {}
    try:
        for size in SIZES:
            steps = engine.call(lambda n=size: step_times(engine, (n,), 1536))
            report.say(size, steps)
            table = engine.call(lambda n=size: kernels_of(engine, n))
            report.detail["air_profile"][size] = table
            for name, (count, us) in list(table.items())[:16]:
                report.say(f"  {us:9.1f} us {count:4d} x {name[:90]}")
    finally:
        engine.stop()


@torch.inference_mode()
def kernels_of(engine: Engine, size: int) -> dict[str, tuple[int, float]]:
    """Kernel name -> (launches, microseconds) of one replay, the longest first."""
    captured = engine.runner._steps[0]._captured[size]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        captured.graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.key_averages():
        found[event.key] = (event.count, event.device_time_total)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def look(report: Any, args: Any) -> None:
    """Step times with the shared experts beside the routed ones and behind them, and the time of a prefill."""
    engine = build(report, args)
    runner = engine.runner
    try:
        first = engine.call(lambda: step_times(engine, (1, 8), 1536))

        def without_side() -> dict[int, dict[str, float]]:
            side, runner.forward.side = runner.forward.side, None
            try:
                return other_steps(engine, (1, 8))
            finally:
                runner.forward.side = side

        second = engine.call(without_side)
        report.say("beside", first, "behind", second)
        report.detail["air_side_stream"] = {"beside": first, "behind": second}
        (target,) = local.targets(engine, [AFTER])
        for concurrency in (1, 8, 8):
            found = compare([target], 1024, 16, concurrency, concurrency, 2, warmup=0)
            for r in found.rounds[AFTER]:
                report.say(f"prefill of {concurrency} x 1,024: ttft {r.ttft_ms}")
    finally:
        engine.stop()


@torch.inference_mode()
def layers_agree(engine: Engine, layers: int = 3) -> dict[str, float]:
    """Relative difference of each part's output, kernels against `ops.reference` on the same GPU tensors, 8 rows.

    Only the first layers: behind them random weights and routing have amplified rounding.
    """
    from moe_kernels.ops import attention, elementwise, linear, reference
    from service.gpu.forward import DecodeRows

    runner = engine.runner
    inputs = runner._steps[0]._captured[8].inputs  # as step_times left them
    ids, positions, slots, row = torch.stack([inputs[0].clamp(min=0), *inputs[1:]])
    rows = DecodeRows(runner.rows.table.index_select(0, row), (positions + 1).int())
    seen: list[dict[str, torch.Tensor]] = []
    modules = (attention, elementwise, linear)
    kept = [module.kernels_run for module in modules]
    try:
        for use in (True, False):
            found: dict[str, torch.Tensor] = {}
            seen.append(found)

            def watch(name: str, output: torch.Tensor, found: dict[str, torch.Tensor] = found) -> None:
                key = name if name not in found else f"{name}.routed"
                found[key] = reference.summed(output, torch.bfloat16).float()

            for module, real in zip(modules, kept, strict=True):
                module.kernels_run = real if use else (lambda x: False)
            runner.forward(ids, positions, slots, rows, watch)
    finally:
        for module, real in zip(modules, kept, strict=True):
            module.kernels_run = real
    wanted = [n for n in seen[0] if "layers" not in n or int(n.split(".")[2]) < layers]
    return {n: float((seen[0][n] - seen[1][n]).norm() / seen[1][n].norm()) for n in wanted}
