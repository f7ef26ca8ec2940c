"""Makes docs/faults.md and benchmarks/results/faults.json; options are those of `evals selftest`.

All faults on FP8 and NVFP4 on the embedded model; about twenty minutes on two idle cores. The exit code is that of
`evals selftest`: 0 when every harmful fault is caught and every benign change passes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from evals.cli import main

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(main([
        "selftest", "--json", str(ROOT / "benchmarks" / "results" / "faults.json"),
        "--markdown", str(ROOT / "docs" / "faults.md"), *sys.argv[1:],
    ]))
