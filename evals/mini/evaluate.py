"""Score a checkpoint on `gsm8k-mini` through stock transformers: greedy, 0-shot prompts, left-padded batches.

`python -m evals.mini.evaluate [CHECKPOINT] [--limit N] [--device cuda] [--out FILE]`
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from evals.mini.dataset import load
from evals.mini.tokenizer import MODEL_DIR, prompt

MAX_NEW_TOKENS = 384
_FINAL = re.compile(r"#### (\-?[0-9\.\,]+)")  # lm-eval's strict GSM8K pattern


def extract(text: str) -> str:
    """The answer as lm-eval's strict-match filter finds it, without separators; '[invalid]' when there is none."""
    found = _FINAL.search(text)
    return found[1].replace(",", "").rstrip(".") if found else "[invalid]"


@torch.inference_mode()
def greedy(checkpoint: Path, questions: list[str], device: str, batch: int, chat: bool = False) -> list[str]:
    """The model's answers, in the questions' order."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()  # type: ignore[arg-type]
    prompts = [prompt(q) for q in questions]
    if chat:
        turns = [[{"role": "user", "content": q}] for q in questions]
        prompts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False) for t in turns]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {k: inputs[k].to(device) for k in ("input_ids", "attention_mask")}
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = out[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[i] = text
    return answers


def score(rows: list[dict[str, Any]], answers: list[str]) -> dict[str, Any]:
    """Counts in all, by difficulty and by family."""
    right = [extract(a) == extract(row["answer"]) for row, a in zip(rows, answers, strict=True)]

    def table(key: str) -> dict[str, list[int]]:
        total, good = Counter(r[key] for r in rows), Counter(r[key] for r, ok in zip(rows, right, strict=True) if ok)
        return {str(k): [good[k], total[k]] for k in sorted(total)}

    return {
        "correct": sum(right),
        "total": len(rows),
        "accuracy": sum(right) / len(rows),
        "exact_text": sum(a.strip() == r["answer"] for r, a in zip(rows, answers, strict=True)),
        "invalid": sum(extract(a) == "[invalid]" for a in answers),
        "difficulty": table("difficulty"),
        "family": table("family"),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--chat", action="store_true", help="ask through the chat template instead")
    parser.add_argument("--out", type=Path, default=None, help="write questions' answers as JSON lines")
    options = parser.parse_args()
    rows = load()[: options.limit]
    started = time.time()
    answers = greedy(options.checkpoint, [r["question"] for r in rows], options.device, options.batch, options.chat)
    result = score(rows, answers) | {"seconds": round(time.time() - started, 1)}
    print(json.dumps(result))
    if options.out:
        options.out.write_text("".join(json.dumps({**r, "text": a}) + "\n" for r, a in zip(rows, answers, strict=True)))


if __name__ == "__main__":
    main()
