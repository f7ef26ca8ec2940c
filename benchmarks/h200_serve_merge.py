"""Puts what a run of h200_serve.py measured into benchmarks/results, and prints docs/serving.md's table of it.

    python benchmarks/h200_serve_merge.py OUT

OUT is the folder that run wrote. Rows of the same model, variant and concurrency are replaced; the details are added as
a further call, so that earlier ones stay comparable.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    """What makes two rows measurements of one thing; the large model is named once, however it was measured."""
    return row["model"], row["variant"], row["concurrency"]


def number(value: float | None, digits: int = 1) -> str:
    """For the table."""
    return "" if value is None else f"{value:,.{digits}f}"


def main() -> None:
    """Merge and print."""
    out = Path(sys.argv[1])
    rows = json.loads((out / "h200-serve.json").read_text())
    detail = json.loads((out / "h200-serve.detail.json").read_text())
    kept_rows = json.loads((RESULTS / "h200-serve.json").read_text())
    kept = json.loads((RESULTS / "h200-serve.detail.json").read_text())
    call = 1 + max(one["call"] for one in kept["calls"])
    kept["calls"].append({"call": call, "date": time.strftime("%Y-%m-%d %H:%M"), **detail})
    fresh = {key(row): {**row, "call": call} for row in rows}
    merged = [fresh.pop(key(row), row) for row in kept_rows] + list(fresh.values())
    (RESULTS / "h200-serve.json").write_text(json.dumps(merged, indent=1) + "\n")
    (RESULTS / "h200-serve.detail.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"call {call}: {len(rows)} rows")
    print("| concurrency | in/out | decode tok/s | before | after / before, steps | floor | goal | with prefill |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "baseline_tok_s" in row:
            ratio = f"{row['ratio']:.4f} [{row['ratio_low']:.4f}, {row['ratio_high']:.4f}]"
            print(f"| {row['concurrency']} | {row['input']}/{row['output']} | {number(row['tok_s'])} | "
                  f"{number(row['baseline_tok_s'])} | {ratio} | {number(row['floor_tok_s'])} | "
                  f"{number(row['goal_tok_s'], 0)} | {number(row['tok_s_with_prefill'])} |")
    for name in ("air_steps_1536", "air_steps_without_stream", "air_steps_1536_tokens_alike", "mini_throughput",
                 "evals_run"):
        if name in detail:
            print(name, json.dumps(detail[name])[:900])


if __name__ == "__main__":
    main()
