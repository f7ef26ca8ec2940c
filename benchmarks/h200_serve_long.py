"""Phases of h200_serve.py on GLM-4.5-Air's shape: long rounds at 32 and 128, and BF16 attention at full size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.h200_serve_air import AFTER, BEFORE, build, floor_seconds, note, paired_steps, step_times
from benchmarks.h200_serve_mini import answer
from service.bench import local
from service.bench.rounds import Comparison, compare, make_load, measure, paired_ratio

LONG = ((32, 1024, 55.0), (128, 1024, 135.0), (32, 1024, 55.0))  # a pair of rounds each, and about its seconds


def long(report: Any, args: Any) -> None:
    """Whole rounds of 1K in and 1K out at 32 and 128, after and before the change in turns.

    128 sequences of 2,048 tokens do not fit beside the weights: the youngest are preempted and computed again, here by
    prefill (`replayed` has the other way).
    """
    engine = build(report, args, sizes=(32, 128), replay=False)
    try:
        steps = engine.call(lambda: step_times(engine, (32, 128), 1536))
        pair = local.targets(engine, [AFTER, BEFORE])
        ratios = {size: engine.call(lambda n=size: paired_steps(engine, n)) for size in (32, 128)}
        report.detail["air_long_step_ratios"] = {size: ratio.asdict() for size, ratio in ratios.items()}
        report.say(steps, report.detail["air_long_step_ratios"])
        report.save()
        warm = make_load(engine.runner.vocab, 1024, 4, 8, 8, 99)
        for target in pair:
            measure(target, warm)
        seen: dict[int, Comparison] = {}
        for turn, (concurrency, output, seconds) in enumerate(LONG):
            if report.left() - args.leave < seconds:
                report.say(f"no time for {concurrency} x {output}: {seconds:.0f} s a pair")
                continue
            before = engine.stats().preemptions_total
            earlier = seen.get(concurrency)
            found = compare(pair if earlier is None else pair[::-1], 1024, output, concurrency, concurrency, 1,
                            warmup=0, seed=turn, say=lambda name, one: report.say(name, one))
            if earlier is not None:
                for name, rounds in earlier.rounds.items():
                    found.rounds[name] = rounds + found.rounds[name]
                found.ratio, found.decode_ratio = (
                    paired_ratio(*([getattr(r, rate) for r in found.rounds[name]] for name in (AFTER, BEFORE)))
                    for rate in ("tok_s", "decode_tok_s"))
                report.rows[:] = [row for row in report.rows if row["concurrency"] != concurrency]
            seen[concurrency] = found
            note(report, engine, found, steps, ratios[concurrency])
            report.rows[-1]["preemptions"] = engine.stats().preemptions_total - before
            report.save()
    finally:
        engine.stop()


def replayed(report: Any, args: Any) -> None:
    """One round of 1K in and 1K out at 128, preempted sequences' own tokens decoded again one by one (the default)."""
    engine = build(report, args, sizes=(32, 128))
    try:
        (target,) = local.targets(engine, [AFTER])
        measure(target, make_load(engine.runner.vocab, 1024, 4, 8, 8, 99))
        one = measure(target, make_load(engine.runner.vocab, 1024, 1024, 128, 128, 1))
        report.detail["air_replayed_128"] = {**asdict(one), "preemptions": engine.stats().preemptions_total}
        report.say(report.detail["air_replayed_128"])
    finally:
        engine.stop()


def bf16_attention(report: Any, args: Any) -> None:
    """The model at full size with BF16 attention: what it holds, steps of 1 and 8 rows, a few tokens twice."""
    engine = build(report, args, "bf16", (1, 8), "air_bf16_memory")
    try:
        steps = engine.call(lambda: step_times(engine, (1, 8), 1536))
        for size, one in steps.items():
            one["floor_ms"] = floor_seconds(engine, size, one["experts_hit"], 1536, report.read) * 1e3
        report.detail["air_bf16_steps_1536"] = steps
        (target,) = local.targets(engine, [AFTER])
        load = make_load(engine.runner.vocab, 300, 32, 4, 4, 7)
        texts: list[list[tuple[int, float]]] = []
        for _ in range(2):
            said: list[tuple[int, float]] = []
            texts.append(said)
            for prompt in load.prompts:
                events, _ = answer(engine, [prompt], max_tokens=32, temperature=0.0, ignore_eos=True)
                said += [(t.token_id, t.logprob) for t in events[0].new_tokens]
        one = measure(target, load)
        report.detail["air_bf16_serves"] = {
            "tokens": len(texts[0]), "repeated_to_the_bit": texts[0] == texts[1], "first_ids": texts[0][:8],
            "finite": all(-100 < value <= 0 for _, value in texts[0]), "round_of_4": one.decode_tok_s}
        report.say(steps, report.detail["air_bf16_serves"])
        for size, found in steps.items():
            rate = size / found["ms"] * 1e3
            report.rows.append({
                "model": "GLM-4.5-Air shape, random, block FP8 (attention BF16)", "variant": AFTER,
                "concurrency": size, "input": 1536, "output": 1, "tok_s": rate, "floor_tok_s": size / found["floor_ms"]
                * 1e3, "baseline": None, "ratio": None, "ratio_low": None, "ratio_high": None,
                "measure": "decode steps by graph replay", "experts_hit": found["experts_hit"]})
    finally:
        engine.stop()
