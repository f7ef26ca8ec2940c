"""The family matrix, model x format x variant, run: `python benchmarks/family.py`.

Writes benchmarks/results/family.json and the tables of docs/family.md.

Every cell is run on tiny random checkpoints and held against oracles (tests/matrix.py says which and how near), on a
CPU: variants that need a GPU are not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "family.json"
DOC = ROOT / "docs" / "family.md"
BEGIN, END = "<!-- matrix: written by benchmarks/family.py -->", "<!-- end of the matrix -->"

from tests.matrix import LAYOUTS, REFUSED_MODELS, Bench, Cell, cells, evaluate  # noqa: E402

PUBLISHED = {
    "glm4_moe": "GLM-4.5, 4.5-Air, 4.6, 4.7", "glm4_moe_lite": "GLM-4.7-Flash", "glm_moe_dsa": "GLM-5, 5.1, 5.2, 5.3",
    "deepseek_v3": "DeepSeek-V3, R1", "qwen3_moe": "Qwen3-30B-A3B, 235B-A22B", "glm5_next": "GLM-5.3-Flash",
    "glm4v_moe": "GLM-4.5V", "deepseek_v32": "DeepSeek-V3.2",
}  # fmt: skip
FORMATS = {
    "bf16": "BF16", "fp8": "A: block FP8", "fp8_ct": "B': compressed-tensors block FP8",
    "fp8_channel": "B: compressed-tensors channel FP8", "fp8_tensor": "H: ModelOpt per-tensor FP8",
    "fp8_channel_modelopt": "H: ModelOpt channel FP8", "fp8_pb_wo": "H: ModelOpt block FP8",
    "nvfp4": "C: ModelOpt NVFP4", "nvfp4_mixed": "C': ModelOpt mixed precision",
    "nvfp4_w4a16": "C'': ModelOpt W4A16 NVFP4",
    "nvfp4_ct": "D: compressed-tensors NVFP4", "mxfp4": "E: compressed-tensors MXFP4",
    "mxfp4_quark": "F: Quark MXFP4",
    "mxfp8": "G: ModelOpt MXFP8", "mxfp8_ct": "G: compressed-tensors MXFP8", "mxfp8_hf": "G: transformers MXFP8",
    "int4_ct": "I: INT4 W4A16",
}  # fmt: skip


def run(wanted: Iterable[tuple[str, str, str]]) -> list[Cell]:
    """All cells; one that ran and is wrong is reported with status "wrong" and fails the script."""
    from moe_kernels.errors import MoeParityError

    out = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOE_PARITY_CACHE"] = str(Path(folder) / "cache")
        bench = Bench(Path(folder))
        for model, layout, variant in wanted:
            try:
                cell = evaluate(bench, model, layout, variant)
            except (AssertionError, MoeParityError, RuntimeError) as error:
                cell = Cell(model, layout, variant, "wrong", f"{type(error).__name__}: {error}"[:300])
                print(cell, flush=True)
            out.append(cell)
    return out


def merged(old: Sequence[Cell], new: Sequence[Cell]) -> list[Cell]:
    """The old cells with those replaced that were run again, in the order of `cells()`."""
    by_name = {(c.model, c.format, c.variant): c for c in [*old, *new]}
    return [by_name[name] for name in cells() if name in by_name]


def tables(found: Sequence[Cell]) -> str:
    """Markdown: layouts x models for native variants, variants x models on BF16 checkpoints, and the reasons."""
    by_name = {(c.model, c.format, c.variant): c for c in found}
    models = list(dict.fromkeys(c.model for c in found if c.model not in REFUSED_MODELS))
    variants = list(dict.fromkeys(c.variant for c in found))
    counts = Counter(c.status for c in found)
    lines = [f"{len(found)} cells: " + ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in sorted(counts.items())) + ".",
             "", "Formats: variants that work / that take this format and run on a CPU. BF16 and block FP8 are "
             "converted for variants of other formats; others only where that is exact.", "",
             "| format | " + " | ".join(f"`{m}`" for m in models) + " |", "|---" * (len(models) + 1) + "|"]
    for layout in LAYOUTS:
        row = []
        for model in models:
            native = [by_name[model, layout, v] for v in variants]
            tried = [c for c in native if c.status in ("works", "wrong")]
            works = [c for c in tried if c.status == "works"]
            row.append(f"works {len(works)}/{len(tried)}" if tried else native[0].status)
        lines.append(f"| {FORMATS[layout]} (`{layout}`) | " + " | ".join(row) + " |")
    lines += ["", "Variants, on a BF16 checkpoint (converted where the variant needs it).", "",
              "| variant | " + " | ".join(f"`{m}`" for m in models) + " |", "|---" * (len(models) + 1) + "|"]
    for variant in variants:
        row = [by_name[m, "bf16", variant].status.replace("_", " ") for m in models]
        lines.append(f"| `{variant}` | " + " | ".join(row) + " |")
    lines += ["", "Why cells are refused or not yet run:", "",
              "| status | reason | cells | models |", "|---|---|---|---|"]
    reasons: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        if cell.status != "works":
            reason = re.sub(r"^quantising \w+ weights again to \w+ would", "quantising a quantised format again would",
                            cell.reason)
            reasons.setdefault((cell.status, reason), []).append(cell)
    for (status, reason), group in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        names = list(dict.fromkeys(c.model for c in group))
        lines.append(f"| {status.replace('_', ' ')} | {reason} | {len(group)} | "
                     f"{'all five' if names == models else ', '.join(f'`{n}`' for n in names)} |")
    return "\n".join(lines)


def main() -> int:
    """Run, write both files, print a summary; exit code 1 if a cell ran and was wrong."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--models", nargs="*", help="run only these model types; others keep their rows (default: all)")
    p.add_argument("--out", type=Path, default=RESULT, help="result file (default: %(default)s)")
    p.add_argument("--table-only", action="store_true", help="write docs/family.md from the result file")
    args = p.parse_args()
    old = [Cell(**c) for c in json.loads(args.out.read_text())] if args.out.exists() else []
    began = time.monotonic()
    chosen = [name for name in cells() if not args.models or name[0] in args.models]
    if args.table_only:
        found = merged(old, [])
    else:
        found = merged(old, run(chosen))
    args.out.write_text(json.dumps([asdict(c) for c in found], indent=0) + "\n")
    if args.out == RESULT:
        before, _, rest = DOC.read_text().partition(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{rest.partition(END)[2]}")
    print(Counter(c.status for c in found), f"{time.monotonic() - began:.0f} s")
    return int(any(c.status == "wrong" for c in found))


if __name__ == "__main__":
    sys.exit(main())
