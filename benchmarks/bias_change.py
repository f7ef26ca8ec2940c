"""A BF16 correction bias must end CHANGED with routing named, accuracy non-inferior.

`python benchmarks/bias_change.py`: by default on ../shared/checkpoints/glm4moe-mini and its 1,319 held-out problems.
For these design.md has other experts for 57/21/18/21/32 % of the tokens in layers 1 to 5, and no flips. `--model mini`
is the embedded model. Exit code 0 when the verdict is that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from evals.cli import main as evals

SHARED = Path(__file__).resolve().parents[2] / "shared"
DESIGN = (57, 21, 18, 21, 32)


def main() -> int:
    """Run all layers and compare with what is expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(SHARED / "checkpoints" / "glm4moe-mini"))
    parser.add_argument("--data", default=str(SHARED / "data" / "mini-heldout.jsonl"))
    parser.add_argument("--limit", type=int, help="fewer items (at least 178 for a margin of 1.5 points)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="bias-")) / "run"
    argv = ["run", "all", "--model", options.model, "--baseline", "fp8/emulated",
            "--candidate", "fp8/emulated:bias=bf16", "--out", str(out)]
    if options.model != "mini":
        argv += ["--items", "gsm8k", "--shots", "0", "--data", options.data, "--max-tokens", "384"]
    if options.limit:
        argv += ["--limit", str(options.limit)]
    code = evals(argv)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    (comparison,) = report["comparisons"]
    moved = [r["code"] for r in comparison["reasons"]]
    metrics = next(x["metrics"] for x in comparison["layers"] if x["layer"] == "routing")
    flips = [round(100 * v, 1) for k, v in metrics.items() if k.startswith("flips_layer_")]
    print(f"state {report['state']} (exit {code}), reasons {moved}, other experts for {flips} % of the tokens; "
          f"design.md: {list(DESIGN)} on glm4moe-mini; table {comparison['numbers']['table']}")
    return 0 if report["state"] == "CHANGED" and moved[0] == "layer:routing" and code == 5 else 1


if __name__ == "__main__":
    sys.exit(main())
