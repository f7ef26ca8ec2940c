"""How the embedded model answers to known changes of its MoE path: fills docs/sensitivity.md.

`python benchmarks/sensitivity.py [--items 300] [--forced 60] [--rows NAME ...]` runs the service's engine in this
process, one variant after the other, on the first items of the gsm8k-mini evaluation set (greedy). Every row is
compared with BF16 (the exact dequantisation of the shipped FP8 weights). Results are appended to
benchmarks/results/sensitivity.jsonl, and a row that is already there for the same model and counts is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "sensitivity.jsonl"
TABLE = ROOT / "docs" / "sensitivity.md"
BASELINE = "BF16"
OFFSET = 6.94
THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Row:
    """One line of the table: a variant, and what is changed besides."""

    name: str
    variant: str
    offset: float | None = None
    fault: str | None = None
    noise: float | None = None
    bf16_weights: bool = False


ROWS = (
    Row(BASELINE, "bf16/reference"),
    Row("FP8", "fp8/emulated"),
    Row("NVFP4", "nvfp4/emulated", bf16_weights=True),
    Row("BF16 bias, offset 0", "fp8/emulated:bias=bf16", offset=0.0),
    Row("BF16 bias, offset 7 (as shipped, 6.94)", "fp8/emulated:bias=bf16", offset=OFFSET),
    Row("BF16 bias, offset 11", "fp8/emulated:bias=bf16", offset=11.0),
    Row("BF16 bias, offset 34", "fp8/emulated:bias=bf16", offset=34.0),
    Row("top-k − 1", "fp8/emulated", fault="top_k_minus_one"),
    Row("shared expert dropped", "fp8/emulated", fault="shared_dropped"),
    Row("scaling factor missing", "fp8/emulated", fault="scaling_missing"),
    Row("1 % noise on expert outputs", "fp8/emulated", noise=0.01),
    Row("3 % noise", "fp8/emulated", noise=0.03),
    Row("10 % noise", "fp8/emulated", noise=0.10),
    Row("30 % noise", "fp8/emulated", noise=0.30),
)


def bf16_copy(model: Path, folder: Path) -> Path:
    """The dequantised checkpoint."""
    from evals.mini.export import write_bf16

    return write_bf16(model, folder)


def shifted_copy(model: Path, folder: Path, offset: float) -> Path:
    """The same checkpoint with the correction bias centred elsewhere: in exact arithmetic nothing changes."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = (tensor.double() - OFFSET + offset).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextlib.contextmanager
def noisy(loaded: Any, share: float) -> Iterator[None]:
    """Gaussian noise of `share` of each row's RMS on the routed experts' output, the same for the same input."""
    from moe_kernels.capture import moe_blocks

    with contextlib.ExitStack() as stack:
        for block in moe_blocks(loaded.model).values():
            layer: Any = block.layer  # type: ignore[attr-defined]
            original = layer.forward

            def forward(hidden: Tensor, logits: Tensor, original: Any = original) -> Any:
                out, routing = original(hidden, logits)
                noise = torch.stack([  # a row's noise depends on that row only, as the engine's batches vary
                    torch.randn(out.shape[1], generator=torch.Generator().manual_seed(seed))
                    for seed in (hidden.double().abs().sum(1) * 2**16).long().tolist()
                ])  # fmt: skip
                rms = out.float().square().mean(-1, keepdim=True).sqrt()
                return (out.float() + noise * rms * share).to(out.dtype), routing

            layer.forward = forward
            stack.callback(layer.__dict__.pop, "forward")
        yield


def generate(loaded: Any, tokenizer: Any, prompts: list[str], max_tokens: int = 384) -> list[tuple[str, list[int]]]:
    """Greedy answers through the service's engine: text and token ids, in order."""
    from service.config import EngineConfig
    from service.engine.engine import Engine
    from service.engine.types import GenerationRequest, SamplingParams, StepEvent

    engine = Engine(loaded, tokenizer, EngineConfig(max_model_len=1024, kv_blocks=2048))
    engine.start(THREADS)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=("\n\nQuestion:",))
    done = threading.Semaphore(0)
    texts: dict[str, str] = {}
    ids: dict[str, list[int]] = {}
    failed: list[str] = []

    def sink(event: StepEvent) -> None:
        texts[event.request_id] = texts.get(event.request_id, "") + event.text_delta
        ids.setdefault(event.request_id, []).extend(t.token_id for t in event.new_tokens)
        if event.finished:
            if event.error is not None:
                failed.append(f"{event.request_id}: {event.error}")
            done.release()

    for index, text in enumerate(prompts):
        prompt_ids = tuple(tokenizer.hf(text, add_special_tokens=False).input_ids)
        engine.submit(GenerationRequest(str(index), prompt_ids, params), sink, every_step=False)
    for _ in prompts:
        done.acquire()
    engine.stop()
    if failed:
        raise SystemExit("; ".join(failed[:3]))
    return [(texts[str(i)], ids[str(i)]) for i in range(len(prompts))]


@torch.inference_mode()
def forced(loaded: Any, sequences: list[list[int]], starts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities [answer tokens, V] and expert ids [tokens, layers, k] on given sequences."""
    from moe_kernels.capture import capture_routing

    loaded.model.set_attn_implementation("sdpa")
    logprobs, routes = [], []
    for ids, start in zip(sequences, starts, strict=True):
        with capture_routing(loaded.model) as trace:
            logits = loaded.model(torch.tensor([ids])).logits[0]
        logprobs.append(torch.log_softmax(logits[start - 1 : -1].float(), -1))
        routes.append(trace.ids().sort(-1).values)
    return logprobs, routes


def run_row(row: Row, model: Path, rows: list[dict[str, Any]], work: Path, base: dict[str, Any] | None, count: int):
    """Measure one row; the first call (base None) is the baseline and returns what others are compared with."""
    from evals.mini.evaluate import extract
    from evals.mini.tokenizer import prompt
    from moe_kernels.faults import inject
    from moe_kernels.hf import load_model
    from service import attention
    from service.tokenizer import Tokenizer

    attention.register()
    torch.set_num_threads(1)  # only the engine's thread gets an OpenMP team, see service/api/launch.py
    path = model
    if row.bf16_weights:
        path = bf16_copy(model, work / "bf16")
    elif row.offset is not None and row.offset != OFFSET:
        path = shifted_copy(model, work / f"offset-{row.offset}", row.offset)
    tokenizer = Tokenizer.load(path)
    loaded = load_model(path, row.variant, attn_implementation=attention.NAME)
    prompts = [prompt(r["question"]) for r in rows]
    with contextlib.ExitStack() as stack:
        if row.fault:
            stack.enter_context(inject(loaded, row.fault))
        if row.noise:
            stack.enter_context(noisy(loaded, row.noise))
        began = time.time()
        answers = generate(loaded, tokenizer, prompts)
        seconds = time.time() - began
        if base is None:
            starts = [len(tokenizer.hf(p, add_special_tokens=False).input_ids) for p in prompts[:count]]
            prompt_ids = [tokenizer.hf(p, add_special_tokens=False).input_ids for p in prompts[:count]]
            sequences = [p + a[1] for p, a in zip(prompt_ids, answers[:count], strict=True)]
        else:
            starts, sequences = base["starts"], base["sequences"]
        logprobs, routes = forced(loaded, sequences, starts)
    right = [extract(a[0]) == extract(r["answer"]) for a, r in zip(answers, rows, strict=True)]
    if base is None:
        base = {"starts": starts, "sequences": sequences, "logprobs": logprobs, "routes": routes, "right": right,
                "texts": [a[0] for a in answers]}  # fmt: skip
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(base["logprobs"], logprobs, strict=True)])
    k = base["routes"][0].shape[-1]
    same, shared = [], []
    for a, b in zip(base["routes"], routes, strict=True):
        if a.shape == b.shape:
            same.append((a == b).all(-1).float().flatten())
            shared.append((a[..., :, None] == b[..., None, :]).any(-1).float().mean(-1).flatten())
        else:  # top-k − 1: b's experts among a's
            same.append(torch.zeros(a.shape[:-1]).flatten())
            shared.append((a[..., :, None] == b[..., None, :]).any(-1).float().sum(-1).flatten() / k)
    record = {
        "items": len(rows), "forced": count, "row": row.name, "variant": str(row.variant),
        "correct": sum(right),
        "worse": sum(a and not b for a, b in zip(base["right"], right, strict=True)),
        "better": sum(b and not a for a, b in zip(base["right"], right, strict=True)),
        "texts_changed": sum(a[0] != t for a, t in zip(answers, base["texts"], strict=True)),
        "same_expert_set": torch.cat(same).mean().item(), "experts_shared": torch.cat(shared).mean().item(),
        "mean_kl": kl.mean().item(), "max_kl": kl.max().item(), "seconds": round(seconds, 1),
    }  # fmt: skip
    return record, base


def write_table(records: list[dict[str, Any]], sha: str) -> None:
    """Replace the table between the marks in docs/sensitivity.md."""
    lines = [
        "| change | right | flips (worse / better) | texts changed | same experts | experts shared | mean KL, nats |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        n = r["items"]
        lines.append(
            f"| {r['row']} | {r['correct']}/{n} = {100 * r['correct'] / n:.1f} % | {r['worse']} / {r['better']} "
            f"| {100 * r['texts_changed'] / n:.1f} % | {100 * r['same_expert_set']:.1f} % "
            f"| {100 * r['experts_shared']:.1f} % | {r['mean_kl']:.2g} |"
        )
    begin, end = "<!-- table: made by benchmarks/sensitivity.py -->", "<!-- end of table -->"
    text = TABLE.read_text()
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    first = records[0]
    note = (f"First {first['items']} items of the evaluation set, generated greedily; routing and KL on the first "
            f"{first['forced']} with BF16's answers forced. Weights sha256 `{sha[:16]}…`.")  # fmt: skip
    TABLE.write_text(f"{head}{begin}\n{note}\n\n" + "\n".join(lines) + f"\n{end}{tail}")


def main() -> None:
    """Run what is missing and write the table."""
    from evals.mini.dataset import load
    from moe_kernels.embedded import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--forced", type=int, default=60)
    parser.add_argument("--rows", nargs="*", help="only rows whose name contains one of these")
    parser.add_argument("--model", default="mini", help="another export of the recipe; prints only, no table")
    options = parser.parse_args()
    model = resolve(options.model)
    sha = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    rows = load()[: options.items]
    known: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            record = json.loads(line)
            if (record["weights"], record["items"], record["forced"]) == (sha, options.items, options.forced):
                known[record["row"]] = record
    chosen = [r for r in ROWS if not options.rows or any(text in r.name for text in options.rows)]
    base = None
    with tempfile.TemporaryDirectory() as work:
        for row in ROWS:
            if row.name != BASELINE and (row not in chosen or row.name in known):
                continue
            record, made = run_row(row, model, rows, Path(work), base, options.forced)
            base = base or made
            known[row.name] = record | {"weights": sha}
            print(json.dumps(record), flush=True)
            if options.model != "mini":
                continue
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as out:
                out.write(json.dumps(known[row.name]) + "\n")
    if options.model == "mini":
        write_table([known[r.name] for r in ROWS if r.name in known], sha)


if __name__ == "__main__":
    main()
