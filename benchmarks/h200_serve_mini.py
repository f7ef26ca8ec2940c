"""Phases of h200_serve.py on the embedded model: correctness of the GPU path, throughput, and the peer beside it."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.mini.dataset import load as problems
from evals.mini.evaluate import MAX_NEW_TOKENS, extract
from moe_kernels import embedded
from moe_kernels.hf import load_model
from service import attention
from service.api.launch import settle
from service.bench.rounds import paired_ratio
from service.config import EngineConfig
from service.engine.engine import Engine
from service.engine.types import GenerationRequest, SamplingParams, StepEvent
from service.gpu.forward import ChunkRows
from service.gpu.prefill import PrefillSteps
from service.tokenizer import Tokenizer

STOP = ("\n\nQuestion:",)


def engine_of(model: Any, tokenizer: Tokenizer | None, **settings: Any) -> Engine:
    """A started engine."""
    engine = Engine(model, tokenizer, EngineConfig(**settings))
    engine.start()
    return engine


def answer(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> tuple[list[StepEvent], float]:
    """Final events of all prompts, submitted at once, and the seconds it took."""
    found: list[StepEvent | None] = [None] * len(prompts)
    done, left = threading.Event(), [len(prompts)]

    def sink_of(i: int) -> Any:
        def sink(event: StepEvent) -> None:
            found[i] = event
            left[0] -= 1
            if not left[0]:
                done.set()
        return sink

    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(f"a{began}-{i}", tuple(prompt), SamplingParams(**params)), sink_of(i),
                      every_step=False)
    if not done.wait(300):
        raise TimeoutError("not answered in 300 s")
    events = [event for event in found if event is not None]
    if any(event.error for event in events):
        raise RuntimeError(str(next(event.error for event in events if event.error)))
    return events, time.perf_counter() - began


def mini(variant: str, device: str) -> Any:
    """The embedded model."""
    attention.register()
    return load_model(embedded.resolve("mini"), variant, device=device, attn_implementation=attention.NAME)


def texts(tokenizer: Tokenizer, count: int) -> tuple[list[list[int]], list[str]]:
    """Prompts and final answers of the first problems."""
    rows = problems(count)
    return ([tokenizer.encode(f"Question: {row['question']}\nAnswer:") for row in rows],
            [extract(row["answer"]) for row in rows])


def correctness(report: Any, args: Any) -> None:
    """GPU path against transformers' forward on the same GPU and on the CPU; graphs; padding; answers."""
    tokenizer = Tokenizer.load(embedded.resolve("mini"))
    prompts, right = texts(tokenizer, 300)
    ask: dict[str, Any] = dict(max_tokens=MAX_NEW_TOKENS, temperature=0.0, stop=STOP)
    detail: dict[str, Any] = {}
    report.detail["mini_correctness"] = detail
    engine = engine_of(mini("fp8/triton", "cuda"), tokenizer, max_seqs=64, max_batch_tokens=4096,
                       graph_sizes=(1, 8, 32, 64), max_model_len=1024)
    report.say("mini engine up:", engine.runner.forward_name, "graphs", engine.runner.cuda_graph)
    detail["cuda_graph"] = engine.runner.cuda_graph
    detail.update(engine.call(lambda: steps_agree(engine)))
    report.say(detail)
    own, seconds = answer(engine, prompts, **ask)
    again, _ = answer(engine, prompts, **ask)
    own_texts = [e.text_delta for e in own]
    detail["accuracy_own"] = sum(extract(t) == r for t, r in zip(own_texts, right, strict=True)) / len(right)
    detail["same_text_again"] = sum(a == b.text_delta for a, b in zip(own_texts, again, strict=True)) / len(right)
    tokens = sum(e.completion_tokens for e in own)
    report.say(f"own: {detail['accuracy_own']:.4f} right, {tokens / seconds:.0f} tok/s, again same "
               f"{detail['same_text_again']:.4f}")
    # Teacher-forced log-probabilities of the own answers: one forward each, no drift of generated text.
    forced = [p + [t.token_id for t in e.new_tokens] for p, e in zip(prompts[:64], own[:64], strict=True)]
    scored: dict[str, list[list[float]]] = {}

    def score(name: str, one: Engine) -> None:
        events, _ = answer(one, forced, max_tokens=0, prompt_logprobs=0)
        scored[name] = [[t.logprob for t in (e.prompt_logprobs or [])[1:] if t] for e in events]
        one.stop()

    score("own", engine)
    theirs = engine_of(mini("fp8/triton", "cuda"), tokenizer, max_seqs=64, forward="transformers")
    their_texts = [e.text_delta for e in answer(theirs, prompts[:100], **ask)[0]]
    detail["same_text_as_transformers_forward"] = sum(
        a == b for a, b in zip(own_texts, their_texts, strict=False)) / len(their_texts)
    score("transformers_cuda", theirs)
    torch.set_num_threads(16)
    cpu = engine_of(mini("fp8/emulated", "cpu"), tokenizer, max_seqs=64)
    score("transformers_cpu_emulated", cpu)
    for name in ("transformers_cuda", "transformers_cpu_emulated"):
        gaps = np.abs(np.concatenate(scored["own"]) - np.concatenate(scored[name]))
        detail[f"logprob_gap_to_{name}"] = {
            "mean": float(gaps.mean()), "p99": float(np.percentile(gaps, 99)), "max": float(gaps.max()),
            "tokens": len(gaps)}
    gaps = np.abs(np.concatenate(scored["transformers_cuda"]) - np.concatenate(scored["transformers_cpu_emulated"]))
    detail["logprob_gap_of_those_two"] = {"mean": float(gaps.mean()), "p99": float(np.percentile(gaps, 99)),
                                          "max": float(gaps.max())}
    report.say(detail)


@torch.inference_mode()
def steps_agree(engine: Engine) -> dict[str, Any]:
    """Captured against eager, padded against full, one row against eight: bits of logits. The engine must be idle."""
    runner = engine.runner
    steps, kv, block = runner._steps[0], runner.kv, runner.kv.block
    generator = torch.Generator("cuda").manual_seed(0)
    kv.k[:, 1:200].normal_(generator=generator)
    kv.v[:, 1:200].normal_(generator=generator)
    count, length = 8, 150
    wide = -(-length // block)
    runner.rows.table[:count, :wide] = torch.arange(1, 1 + count * wide, dtype=torch.int32,
                                                    device="cuda").view(count, wide)
    at = length - 1
    inputs = np.stack([np.arange(count) * 7 + 3, np.full(count, at),
                       [(1 + i * wide + at // block) * block + at % block for i in range(count)],
                       np.arange(count)]).astype(np.int64)
    full = [t.clone() for t in steps(inputs)]
    eager = [t.clone() for t in steps._step(torch.from_numpy(inputs).cuda())]
    part = [t.clone() for t in steps(inputs[:, :5])]
    alone = torch.cat([steps(inputs[:, i : i + 1])[1].clone() for i in range(count)])
    zero = bool(kv.k[:, 0].any()) or bool(kv.v[:, 0].any())
    ids, positions, slots, row = torch.from_numpy(inputs).cuda()
    start = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((count,), length, dtype=torch.int32, device="cuda")
    chunked = runner.forward.logits(runner.forward(ids, positions, slots, ChunkRows(
        runner.rows.table.index_select(0, row), start, lengths, 1)))
    kv.zero(list(range(1, 201)))
    return {
        "graph_equals_eager": all(torch.equal(a, b) for a, b in zip(full, eager, strict=True)),
        "padding_changes_nobody": torch.equal(full[1][:5], part[1]) and torch.equal(full[0][:, :5], part[0]),
        "alone_equals_batched": torch.equal(alone, full[1]),
        "alone_max_logit_difference": float((alone - full[1]).abs().max()),
        "prefill_kernel_max_logit_difference": float((chunked - full[1]).abs().max()),
        "block_zero_untouched": not zero,
    }


SETTINGS: dict[str, Any] = dict(max_seqs=256, max_batch_tokens=8192, graph_sizes=(1, 8, 32, 64, 128, 192, 256),
                                max_model_len=1024, admit_interval=0.02)


def warm(report: Any, args: Any) -> None:
    """Start the engine that `throughput` and `http` measure and answer once: Triton's cache then holds its kernels."""
    tokenizer = Tokenizer.load(embedded.resolve("mini"))
    prompts, _ = texts(tokenizer, 300)
    ask: dict[str, Any] = dict(max_tokens=8, temperature=0.0, stop=STOP)
    began = time.time()
    engine = engine_of(mini("fp8/triton", "cuda"), tokenizer, **SETTINGS)
    engine.call(lambda: engine.runner.add_variant("fp8/triton:bias=bf16,scales=copied"))
    answer(engine, prompts, **ask)
    answer(engine, prompts, **ask, logprobs=2)
    engine.stop()
    report.detail["mini_warm_seconds"] = time.time() - began


def throughput(report: Any, args: Any) -> None:
    """Tokens a second of the embedded model through the engine, and 1,319 items three times."""
    tokenizer = Tokenizer.load(embedded.resolve("mini"))
    prompts, right = texts(tokenizer, 1319)
    ask: dict[str, Any] = dict(max_tokens=MAX_NEW_TOKENS, temperature=0.0, stop=STOP)
    began = time.time()
    engine = engine_of(mini("fp8/triton", "cuda"), tokenizer, **SETTINGS)
    report.detail["mini_start_seconds"] = time.time() - began
    report.detail["mini_steps"] = engine.call(lambda: steps_agree(engine))
    report.say(f"engine up in {report.detail['mini_start_seconds']:.1f} s", report.detail["mini_steps"])
    number = engine.call(lambda: engine.runner.add_variant("fp8/triton:bias=bf16,scales=copied"))
    answer(engine, prompts[:600], **ask)
    settle()  # as the service does after loading
    runs = []
    said: dict[str, list[str]] = {}
    for name, variant in (("A", 0), ("A again", 0), ("B", number)):
        engine.call(lambda v=variant: engine.runner.use(v))
        steps = engine.counters.steps
        events, seconds = answer(engine, prompts, **ask)
        tokens = sum(e.completion_tokens for e in events)
        correct = sum(extract(e.text_delta) == r for e, r in zip(events, right, strict=True))
        runs.append({"run": name, "seconds": seconds, "tokens": tokens, "tok_s": tokens / seconds, "correct": correct,
                     "steps": engine.counters.steps - steps})
        said[name] = [e.text_delta for e in events]
        report.say(runs[-1])
    engine.call(lambda: engine.runner.use(0))
    engine.call(lambda: engine.runner._prefills.__setitem__(0, no_prefills(engine)))
    events, seconds = answer(engine, prompts, **ask)
    tokens = sum(e.completion_tokens for e in events)
    packed = {"run": "A, prefill not captured", "seconds": seconds, "tokens": tokens, "tok_s": tokens / seconds,
              "texts_as_captured": sum(a == e.text_delta for a, e in zip(said["A again"], events, strict=True))}
    events, seconds = answer(engine, prompts, **ask, logprobs=2)
    tokens = sum(e.completion_tokens for e in events)
    asked = {"run": "A, prefill not captured, logprobs 2", "seconds": seconds, "tok_s": tokens / seconds}
    report.say(packed, asked)
    engine.stop()
    same = sum(a == b for a, b in zip(said["A"], said["A again"], strict=True))
    report.detail["mini_throughput"] = {"runs": runs, "through": "the engine, without HTTP", "same_texts_again": same,
                                        "others": [packed, asked],
                                        "three_runs_seconds": sum(r["seconds"] for r in runs)}
    report.rows.append(_row("glm4moe-mini embedded", "fp8/triton", 256, runs[1]["tok_s"],
                            "goal 30,000 tok/s", runs[1]["tok_s"] / 30_000))


def no_prefills(engine: Engine) -> PrefillSteps:
    """Takes no prefill: all are packed and launched kernel by kernel, as before there were captured ones."""
    return PrefillSteps(engine.runner.forward, engine.runner.rows, [], graphs=False)


def _row(model: str, variant: str, concurrency: int, tok_s: float, baseline: str, ratio: float | None,
         low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"model": model, "variant": variant, "concurrency": concurrency, "input": "gsm8k-mini prompts",
            "output": f"answers, at most {MAX_NEW_TOKENS}", "tok_s": tok_s, "floor_tok_s": None, "baseline": baseline,
            "ratio": ratio, "ratio_low": low, "ratio_high": high}


def peer(report: Any, args: Any) -> None:
    """transformers' continuous batching (`generate_batch`, stock BF16 model) and ours, in turns."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from evals.mini.export import write_bf16

    tokenizer = Tokenizer.load(embedded.resolve("mini"))
    prompts, _ = texts(tokenizer, 128)
    ask: dict[str, Any] = dict(max_tokens=128, temperature=0.0, ignore_eos=True)
    path = write_bf16(embedded.resolve("mini"), Path(tempfile.mkdtemp()) / "mini-bf16")
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    ours = engine_of(mini("fp8/triton", "cuda"), tokenizer, max_seqs=128, max_batch_tokens=8192,
                     graph_sizes=(64, 128), max_model_len=1024)

    def theirs() -> float:
        began = time.perf_counter()
        out = stock.generate_batch(prompts, generation_config=config)
        tokens = sum(len(o.generated_tokens) for o in out.values())
        return tokens / (time.perf_counter() - began)

    def mine() -> float:
        events, seconds = answer(ours, prompts, **ask)
        return sum(e.completion_tokens for e in events) / seconds

    mine()
    began = time.time()
    first = theirs()
    report.say(f"generate_batch warm-up: {first:.0f} tok/s in {time.time() - began:.1f} s")
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(3):
        if report.left() < 2.5 * (time.time() - began) / (i + 1) and i >= 2:
            break
        for name, call in (("ours", mine), ("theirs", theirs))[:: 1 if i % 2 else -1]:
            rates[name].append(call())
        report.say(rates)
    ours.stop()
    ratio = paired_ratio(rates["ours"], rates["theirs"])
    report.detail["mini_peer"] = {"rates": rates, "ratio": ratio.asdict(), "peer": "transformers generate_batch, BF16"}
    report.rows.append(_row("glm4moe-mini embedded, 128 tokens each", "fp8/triton", 128,
                            statistics.median(rates["ours"]), "transformers generate_batch BF16", ratio.ratio,
                            ratio.low, ratio.high))


def over_http(report: Any, args: Any) -> None:
    """`evals run gsm8k-mini` over HTTP, A, A again and B, on this GPU; needs the packages of both."""
    import json
    import os
    import subprocess
    import sys

    out = Path(tempfile.mkdtemp()) / "evals-run"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
           "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "evals.cli", "run", "gsm8k-mini", "--model", "mini", "--baseline", "fp8/triton",
               "--candidate", "fp8/triton:bias=bf16,scales=copied", "--out", str(out), "--concurrency", "256",
               "--parallel-servers"]
    for option in ("--device=cuda", "--max-seqs=256", "--max-model-len=1024", "--graph-sizes=1,8,32,64,128,192,256"):
        command.append(f"--server-arg={option}")
    began = time.time()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = [(round(time.time() - began, 2), line.rstrip()[:200]) for line in process.stdout or ()]
    seconds = time.time() - began
    report.say("\n".join(f"{at:6.1f} {line}" for at, line in lines)[-2500:], f"{seconds:.1f} s")
    detail: dict[str, Any] = {"exit": process.returncode, "seconds": seconds, "command": command[1:],
                              "lines": lines[:80] + lines[-40:]}
    report.detail["evals_run"] = detail
    if (out / "run.json").is_file():
        detail["timing"] = json.loads((out / "run.json").read_text())["meta"].get("timing")
        report.say(detail["timing"])
    for log in sorted((out / "logs").glob("*.log")):
        detail[f"log_{log.stem}"] = log.read_text()[:2500]
    for name in ("report.json", "report.md"):
        if (out / name).is_file():
            (report.out / f"evals-{name}").write_text((out / name).read_text())
