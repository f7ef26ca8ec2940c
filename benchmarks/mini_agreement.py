"""Does our service say what stock transformers says? All of gsm8k-mini, item by item, BF16: docs/benchmarks-mini.md.

`python benchmarks/mini_agreement.py [--limit N] [--stock FILE]` starts `service --model mini --variant bf16/reference`,
asks every problem greedily over HTTP, generates the same with stock `transformers` (or reads answers that
`python -m evals.mini.evaluate --out FILE` wrote), and explains every difference: at the first differing token it gives
the gap between the two tokens' logits in stock transformers and in an FP32 forward of the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "mini_agreement.json"
DOC = ROOT / "docs" / "benchmarks-mini.md"


def ask_service(prompts: list[str], max_tokens: int) -> tuple[list[str], float]:
    """Answers of a service started for this, and the seconds all of them took."""
    import httpx

    command = [sys.executable, "-m", "service", "--model", "mini", "--variant", "bf16/reference", "--port", "0"]
    command += ["--max-model-len", "1024"]
    quiet = subprocess.DEVNULL  # its access log
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=quiet, text=True)
    try:
        assert server.stdout is not None
        url = None
        for line in server.stdout:
            if found := re.search(r"listening on (http://\S+)", line):
                url = found[1]
                break
        if url is None:
            raise SystemExit(f"the service did not start (exit {server.wait()})")

        async def one(client: httpx.AsyncClient, slots: asyncio.Semaphore, text: str) -> str:
            body = {"model": "mini", "prompt": text, "max_tokens": max_tokens, "temperature": 0}
            async with slots:
                reply = await client.post(f"{url}/v1/completions", json=body)
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["text"])

        async def every() -> list[str]:
            slots = asyncio.Semaphore(64)
            async with httpx.AsyncClient(timeout=3600) as client:
                return list(await asyncio.gather(*(one(client, slots, p) for p in prompts)))

        began = time.time()
        return asyncio.run(every()), time.time() - began
    finally:
        server.terminate()
        server.wait(60)


def explain(prompt_text: str, ours: str, stock: str, models: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """First differing token, and how far apart the two candidates' logits are in each model."""
    import torch

    a = tokenizer(ours, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    b = tokenizer(stock, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    ids = tokenizer(prompt_text, add_special_tokens=False).input_ids + b[:first]
    out: dict[str, Any] = {"token": first, "ours": tokenizer.decode([a[first]]), "stock": tokenizer.decode([b[first]])}
    with torch.inference_mode():
        for name, model in models.items():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            out[f"gap_{name}"] = round(float(logits[b[first]] - logits[a[first]]), 4)
            out[f"probability_{name}"] = round(float(torch.softmax(logits, -1)[b[first]]), 4)
    return out


def main() -> None:
    """Run, compare, write the JSON and the section of the document."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evals.mini.dataset import load, sha256
    from evals.mini.evaluate import MAX_NEW_TOKENS, extract, greedy, score
    from evals.mini.tokenizer import prompt
    from moe_kernels.embedded import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--stock", type=Path, default=None, help="answers written by evals.mini.evaluate --out")
    parser.add_argument("--service", type=Path, default=None, help="answers of an earlier run (a JSON list of texts)")
    options = parser.parse_args()
    model = resolve("mini")
    rows = load()[: options.limit]
    prompts = [prompt(r["question"]) for r in rows]
    seconds: float | None = None
    if options.service:
        ours = json.loads(options.service.read_text())[: len(prompts)]
    else:
        ours, seconds = ask_service(prompts, MAX_NEW_TOKENS)
    began = time.time()
    if options.stock:
        known = {r["question"]: r["text"] for r in map(json.loads, options.stock.read_text().splitlines())}
        stock = [known[r["question"]] for r in rows]
    else:
        stock = greedy(model, [r["question"] for r in rows], "cpu", 100)
    stock_seconds = None if options.stock else round(time.time() - began, 1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    differing = [i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a != b]
    models = {
        "bf16": AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        "fp32": AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float(),
    } if differing else {}  # fmt: skip
    details = []
    for i in differing:
        right = {k: extract(t[i]) == extract(rows[i]["answer"]) for k, t in (("ours", ours), ("stock", stock))}
        details.append({"item": i, "right": right, **explain(prompts[i], ours[i], stock[i], models, tokenizer)})
    result = {
        "items": len(rows), "dataset_sha256": sha256(rows), "service_seconds": round(seconds, 1) if seconds else None,
        "stock_seconds": stock_seconds, "service": score(rows, ours), "stock": score(rows, stock),
        "texts_differ": len(differing), "flips": sum(d["right"]["ours"] != d["right"]["stock"] for d in details),
        "torch": torch.__version__, "differences": details,
    }  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_section(result)
    print(json.dumps({k: v for k, v in result.items() if k != "differences"}))


def write_section(result: dict[str, Any]) -> None:
    """Replace what stands between the marks in the document."""
    begin, end = "<!-- made by benchmarks/mini_agreement.py -->", "<!-- end -->"
    n = result["items"]
    lines = ["| | right | texts ended without an answer | seconds |", "|---|---|---|---|"]
    for name, key in (("service, `bf16/reference`", "service"), ("stock transformers, BF16", "stock")):
        s = result[key]
        took = result[f"{key}_seconds"]
        lines.append(f"| {name} | {s['correct']}/{n} = {100 * s['accuracy']:.2f} % | {s['invalid']} | {took or '–'} |")
    lines += ["", f"Texts that differ: {result['texts_differ']} of {n}; answers that flip: {result['flips']}."]
    if result["differences"]:
        lines += ["", "| item | token | service | stock | gap, BF16 | gap, FP32 | right (service / stock) |",
                  "|---|---|---|---|---|---|---|"]  # fmt: skip
        for d in result["differences"]:
            yes = {True: "yes", False: "no"}
            lines.append(
                f"| {d['item']} | {d['token']} | `{d['ours']}` | `{d['stock']}` | {d['gap_bf16']} | {d['gap_fp32']} "
                f"| {yes[d['right']['ours']]} / {yes[d['right']['stock']]} |"
            )
    lines += ["", "By number of steps (service):", "", "| steps | right |", "|---|---|"]
    lines += [f"| {k} | {a}/{b} |" for k, (a, b) in result["service"]["difficulty"].items()]
    lines += ["", "By family (service):", "", "| family | right |", "|---|---|"]
    lines += [f"| {k} | {a}/{b} |" for k, (a, b) in result["service"]["family"].items()]
    head, rest = DOC.read_text().split(begin)
    DOC.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}" + rest.split(end)[1])


if __name__ == "__main__":
    main()
