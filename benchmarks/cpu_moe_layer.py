"""Time of one MoE block of a real checkpoint on the CPU, per variant and number of tokens, on captured inputs.

`python benchmarks/cpu_moe_layer.py [--model DIR --data JSONL --tokens 1 8 32 256 --out FILE]`; run it on an idle
machine: with other processes on the cores the OpenMP barriers make every number many times larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

SHARED = Path(os.environ.get("MOE_PARITY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
VARIANTS = ("bf16/reference", "fp8/reference", "fp8/emulated", "nvfp4/emulated")


def measure(model_dir: Path, data: Path, variants: list[str], sizes: list[int], repeats: int) -> list[dict]:
    """Microseconds per block (router, experts, shared experts), averaged over the model's MoE layers."""
    from transformers import AutoTokenizer

    from moe_kernels import hf
    from moe_kernels.capture import moe_blocks

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    items = [json.loads(line) for line in data.read_text().splitlines()[:40]]
    texts = [f"Question: {d['question']}\nAnswer: {d['answer']}" for d in items]
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    rows = []
    for variant in variants:
        model = hf.load_model(model_dir, variant).model
        with torch.inference_mode():
            with hf.capture_moe_inputs(model) as inputs:
                for ids in prompts:
                    model(ids)
            blocks = moe_blocks(model)
            for size in sizes:
                captured = next(iter(inputs.values()))[0].shape[0]
                pick = torch.randperm(captured, generator=torch.Generator().manual_seed(size))
                pairs = [(block, inputs[layer][0][pick[:size]]) for layer, block in blocks.items()]
                times = []
                for _ in range(repeats + 5):
                    started = time.perf_counter()
                    for block, hidden in pairs:
                        block(hidden)  # type: ignore[operator]
                    times.append((time.perf_counter() - started) / len(pairs) * 1e6)
                rows.append({
                    "variant": variant, "tokens": size, "median_us": round(statistics.median(times[5:]), 1),
                    "min_us": round(min(times[5:]), 1),
                })
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHARED / "checkpoints/glm4moe-mini")
    parser.add_argument("--data", type=Path, default=SHARED / "data/mini-heldout.jsonl")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measure(args.model, args.data, args.variants, args.tokens, args.repeats)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
