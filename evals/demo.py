"""The main job in one command: the kernel path before SGLang #28555 against the path after it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

BEFORE = "fp8/emulated:bias=bf16,scales=copied"
AFTER = "fp8/emulated"
ITEMS = {"mini": 180}  # 178 is the least for a margin of 1.5 points; other models take 200
ROUTING_ITEMS = 24
CONCURRENCY = 64  # all that the service decodes at once by default: fewer steps, and answers do not depend on it
WHY = f"""\
Compared: {BEFORE}   (the path before SGLang #28555)
against:  {AFTER}                             (the path after it)

The change removed a cast of the router's correction bias to BF16 and a copy of the activation scales.
GLM-5.2's bias lies near 7, where BF16 steps by 1/32, so the cast chose other experts for most tokens;
accuracy alone could not see it. First the experts both paths choose on the same texts, then accuracy, item by item.
"""


def arguments(model: str, data: str | None, limit: int | None) -> list[str]:
    """The `evals run` command line for a model: the generated task for `mini`, else JSONL items in GSM8K's format."""
    task, extra = "gsm8k-mini", []
    if model != "mini":
        task = "gsm8k"
        source = Path(data) if data else Path(model).resolve().parents[1] / "data" / "mini-heldout.jsonl"
        if not source.exists():
            print(f"{source} does not exist; name the items: make demo MODEL={model} DATA=items.jsonl", file=sys.stderr)
            raise SystemExit(2)
        extra = ["--data", str(source)]
        # One file of items holds no training split to take shots from; a folder with train.jsonl does.
        extra += ["--shots", "5" if source.is_dir() else "0"]
    limit = limit or ITEMS.get(model, 200)
    return ["run", task, "--model", model, "--baseline", BEFORE, "--candidate", AFTER, *extra,
            "--concurrency", str(CONCURRENCY), "--limit", str(limit)]


def routing_arguments(command: list[str]) -> list[str]:
    """The `evals run routing` command line for the same pair and items: a few gold solutions, no generation."""
    task, rest = command[1], command[2:-1]
    return ["run", "routing", "--items", task, *rest, str(ROUTING_ITEMS)]


def main() -> int:
    """Print what is compared and why, then run it; the exit code is the verdict's."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", default="mini", help="mini (the embedded model) or a checkpoint folder")
    parser.add_argument("--data", help="JSONL items, or a folder with train.jsonl and test.jsonl")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    command = arguments(options.model, options.data, options.limit)
    print(WHY)
    from evals.cli import main as evals_main

    for step in (routing_arguments(command), command):
        print("$ evals " + " ".join(step) + "\n", flush=True)
        code = evals_main(step)
        print(flush=True)
        if code not in (0, 1, 3, 5):  # could not be compared: the message is on the screen
            return code
    return code


if __name__ == "__main__":
    sys.exit(main())
