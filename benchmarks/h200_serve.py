"""Serving on one H200: correctness of the GPU path, GLM-4.5-Air's shape in block FP8, the embedded model's throughput.

    python3 benchmarks/h200_serve.py --out DIR --phases mini,air --budget 400

Phases run in order, each in its own try; what was measured is written after every phase, so a cut run loses the rest
only. `--out` gets h200-serve.json (rows as issue 7 names them), h200-serve.detail.json (everything else) and a log.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, nothing installed

import torch
import triton

READ = 4.47e12  # bytes/s, measured by benchmarks/h200_moe.py on this kind of card; measured again here


@dataclass
class Report:
    """Rows for the results file and everything else that was found."""

    out: Path
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)
    read: float = READ

    def say(self, *words: object) -> None:
        """Print at once, with the time left."""
        print(f"[{self.deadline - time.time():5.0f} s left]", *words, flush=True)

    def save(self) -> None:
        """Write what there is."""
        (self.out / "h200-serve.json").write_text(json.dumps(self.rows, indent=1) + "\n")
        (self.out / "h200-serve.detail.json").write_text(json.dumps(self.detail, indent=1, default=str) + "\n")

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.time()


def read_bandwidth() -> float:
    """Bytes/s of an FP32 sum over 4 GB."""
    x = torch.randn(1 << 30, device="cuda")
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return x.numel() * 4 / sorted(times)[len(times) // 2]


def compile_experts() -> None:
    """The large model's MoE kernels, compiled in parallel processes into Triton's cache ("warm" is for the other)."""
    from benchmarks import h200_tune
    from moe_kernels.bench import SHAPES

    tasks = h200_tune.forward_tasks(SHAPES["glm-4.5-air"], "fp8", [1, 8, 16, 32, 64, 128, 1024, 4096, 8192])
    h200_tune.precompile(list(dict.fromkeys(tasks)))


def main() -> None:
    """Run the phases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", default="mini,air,throughput,peer")
    parser.add_argument("--budget", type=float, default=400, help="seconds for everything")
    parser.add_argument("--layers", type=int, help="layers of the large model, for a quick look")
    parser.add_argument("--leave", type=float, default=20, help="seconds the large model leaves for later phases")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out, time.time() + args.budget)
    report.detail["environment"] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv),
    }
    report.read = report.detail["read_bytes_per_s"] = read_bandwidth()
    torch.cuda.empty_cache()
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {report.read / 1e12:.2f} TB/s")
    from benchmarks import h200_serve_air as air
    from benchmarks import h200_serve_long as long
    from benchmarks import h200_serve_mini as mini

    phases = {"compile": lambda r, a: compile_experts(), "mini": mini.correctness, "throughput": mini.throughput,
              "peer": mini.peer, "http": mini.over_http, "air": air.run, "profile": air.profile, "look": air.look,
              "long": long.long, "replayed": long.replayed, "bf16": long.bf16_attention, "warm": mini.warm}
    for name in args.phases.split(","):
        began = time.time()
        try:
            phases[name](report, args)
        except Exception:
            report.say(f"phase {name} failed:\n{traceback.format_exc()}")
            report.detail[f"{name}_error"] = traceback.format_exc()[-1500:]
        report.say(f"phase {name}: {time.time() - began:.1f} s")
        report.save()
        gc.unfreeze()  # a phase may have frozen what it loaded
        gc.collect()
        torch.cuda.empty_cache()
    report.save()


if __name__ == "__main__":
    main()
