"""Throughput of the service on a CPU with Hugging Face `generate` beside it in the same run.

    python benchmarks/cpu_serve.py --model ../shared/checkpoints/glm4moe-mini --data ../shared/data/mini-heldout.jsonl

Each system runs in its own process and stays loaded; rounds alternate between them, so slow minutes of a shared
machine hit all alike. The peer is stock `AutoModelForCausalLM.generate` in BF16, batch 50, left-padded, greedy, with
the blank line's token as a second EOS id (cheaper for it than stop strings). Ours is `python -m service` over HTTP with
32 concurrent requests, string prompts, greedy, `stop` a blank line. One unmeasured round warms each up. Writes
benchmarks/results/cpu-serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_TOKENS = 256
PEER_BATCH = 50
SELF = str(Path(__file__).resolve())


def prompts_of(data: Path, count: int) -> tuple[list[str], list[str]]:
    """Prompts and final answers of the first `count` problems."""
    items = [json.loads(line) for line in data.read_text().splitlines()[:count]]
    return [f"Question: {i['question']}\nAnswer:" for i in items], [_final(i["answer"]) for i in items]


def _final(text: str) -> str:
    return text.rpartition("####")[2].strip()


# ---- workers: one JSON line out per line in ------------------------------------------------------------------------


def peer_worker(model_path: str, data: str, count: int) -> None:
    """Stock transformers: load, then one measured pass over the items per line on stdin."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.padding_side = "left"
    loaded = time.perf_counter() - began
    prompts, answers = prompts_of(Path(data), count)
    blank = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    eos = model.config.eos_token_id
    stops = [*(eos if isinstance(eos, list) else [eos]), *(blank if len(blank) == 1 else [])]
    _say({"load_seconds": loaded})
    for line in sys.stdin:
        limit = int(line)
        tokens = correct = 0
        began = time.perf_counter()
        for first in range(0, min(limit, count), PEER_BATCH):
            batch = prompts[first : min(first + PEER_BATCH, limit)]
            inputs = tokenizer(batch, return_tensors="pt", padding=True)
            with torch.inference_mode():
                out = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=stops,
                                     pad_token_id=0)
            new = out[:, inputs["input_ids"].shape[1] :]
            for row, answer in zip(new.tolist(), answers[first:], strict=False):
                ends = [i for i, token in enumerate(row) if token in stops]
                tokens += ends[0] + 1 if ends else len(row)
                text = tokenizer.decode(row[: ends[0]] if ends else row)
                correct += _final(text) == answer
        _say({"tokens": tokens, "seconds": time.perf_counter() - began, "correct": correct})


def load_worker(model_path: str, variant: str) -> None:
    """Seconds from path to a started engine, imports not counted; a second load shows a warm file cache."""
    import torch

    from moe_kernels.hf import load_model
    from service import attention
    from service.engine.engine import Engine
    from service.tokenizer import Tokenizer

    attention.register()
    began = time.perf_counter()
    tokenizer = Tokenizer.load(model_path)
    loaded = load_model(model_path, variant, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    engine = Engine(loaded, tokenizer)
    engine.start()
    _say({"load_seconds": time.perf_counter() - began})
    engine.stop()


def _say(value: dict[str, Any]) -> None:
    print("@" + json.dumps(value), flush=True)


# ---- the driver -----------------------------------------------------------------------------------------------------


class Worker:
    """A child process that answers with lines beginning with '@'."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    def read(self, marker: str = "@") -> str:
        """The next line that starts with `marker`, without it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(marker):
                return line[len(marker) :].strip()
        raise SystemExit(f"a benchmark process ended early: {self.process.args}")

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line, read a JSON answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.read())

    def peak_mib(self) -> float:
        """Largest resident set so far (VmHWM), MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def end(self) -> None:
        """Stop it and wait."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.terminate()
        self.process.wait(30)


async def drive(url: str, prompts: list[str], answers: list[str], concurrency: int) -> dict[str, Any]:
    """All prompts through /v1/completions, `concurrency` at a time."""
    import aiohttp

    todo = iter(enumerate(prompts))
    tokens = correct = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        async def client() -> None:
            nonlocal tokens, correct
            for index, prompt in todo:
                body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stop": ["\n\n"]}
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    answer = await reply.json()
                tokens += answer["usage"]["completion_tokens"]
                correct += _final(answer["choices"][0]["text"]) == answers[index]

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        seconds = time.perf_counter() - began
    return {"tokens": tokens, "seconds": seconds, "correct": correct}


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--items", type=int, default=600, help="problems a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--variants", nargs="+", default=["bf16/reference", "fp8/emulated"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu-serve.json")
    args = parser.parse_args()
    model, data = str(Path(args.model).resolve()), str(args.data.resolve())
    prompts, answers = prompts_of(Path(data), args.items)
    checkpoint_mib = sum(f.stat().st_size for f in Path(model).glob("*.safetensors")) / 2**20

    loads = {v: [_load(model, v) for _ in range(3)][1:] for v in args.variants}  # the first may quantise
    peer = Worker(SELF, "peer-worker", model, data, str(args.items))
    peer_load = json.loads(peer.read())["load_seconds"]
    servers: dict[str, tuple[Worker, str]] = {}
    runs: dict[str, list[dict[str, Any]]] = {"peer": [], **{v: [] for v in args.variants}}
    peaks: dict[str, float] = {}
    try:
        for variant in args.variants:
            worker = Worker("-m", "service", "--model", model, "--variant", variant, "--port", "0")
            servers[variant] = (worker, worker.read("listening on "))
        for number in range(args.rounds + 1):
            for name in runs:
                if name == "peer":
                    result = peer.ask(str(args.items))
                else:
                    result = asyncio.run(drive(servers[name][1], prompts, answers, args.concurrency))
                rate = result["tokens"] / result["seconds"]
                print(f"round {number}{' (warm-up)' if not number else ''}: {name:28} {rate:8.0f} tok/s  "
                      f"{result['tokens']} tokens, {result['correct']}/{args.items} right", flush=True)
                if number:
                    runs[name].append(result)
        peaks = {v: worker.peak_mib() for v, (worker, _) in servers.items()}
    finally:
        peer.end()
        for worker, _ in servers.values():
            worker.end()

    def rate(name: str) -> list[float]:
        return [round(r["tokens"] / r["seconds"], 1) for r in runs[name]]

    context = {"command": " ".join(["python", "benchmarks/cpu_serve.py", *sys.argv[1:]]), "versions": versions(),
               "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                           "load_average": os.getloadavg()}}
    rows = []
    for variant in args.variants:
        ratios = [a / b for a, b in zip(rate(variant), rate("peer"), strict=True)]
        rows.append({
            "what": f"generated tokens per second, {variant} served over HTTP at {args.concurrency} concurrent, "
                    f"against HF generate batch {PEER_BATCH} in BF16; {args.items} problems a round, median of rounds",
            "ours": statistics.median(rate(variant)), "peer": statistics.median(rate("peer")),
            "ratio": round(statistics.median(ratios), 3), "unit": "tok/s",
            "rounds": {"ours": rate(variant), "peer": rate("peer"), "ratios": [round(r, 3) for r in ratios]},
            "right": {"ours": [r["correct"] for r in runs[variant]], "peer": [r["correct"] for r in runs["peer"]]},
            **context})
        seconds = statistics.median(loads[variant])
        rows.append({"what": f"seconds from path to a running engine, {variant}, imports excluded, quantised copy "
                             "cached; peer: from_pretrained + tokenizer", "ours": round(seconds, 3),
                     "peer": round(peer_load, 3), "ratio": round(seconds / peer_load, 3), "unit": "s", **context})
        limit = 3 * checkpoint_mib + 1500
        rows.append({"what": f"peak resident memory of the service process, {variant}; peer: the limit of 3 x "
                             f"checkpoint + 1.5 GB", "ours": round(peaks[variant]), "peer": round(limit),
                     "ratio": round(peaks[variant] / limit, 3), "unit": "MiB", **context})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(f"{row['ours']:>10} {row['unit']:6} against {row['peer']:>9}  ratio {row['ratio']:6}  {row['what']}")
    print(f"written: {args.out}")


def _load(model: str, variant: str) -> float:
    worker = Worker(SELF, "load-worker", model, variant)
    try:
        return float(json.loads(worker.read())["load_seconds"])
    finally:
        worker.end()


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    packages = ("torch", "transformers", "moe-parity", "fastapi", "uvicorn", "aiohttp")
    return {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "peer-worker":
        peer_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif len(sys.argv) > 1 and sys.argv[1] == "load-worker":
        load_worker(sys.argv[2], sys.argv[3])
    else:
        main()
