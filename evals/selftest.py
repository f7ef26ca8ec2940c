"""`evals selftest`: switch real faults on in a running service and see whether the gate catches them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.errors import UsageError

# Twelve faults of different kinds and three benign changes, for a check of minutes.
QUICK = (
    "bias_bf16", "weights_cancel", "softmax_routing", "scaling_missing", "w13_swapped", "dead_expert_scale",
    "scales_tma_read", "act_ue8m0_after", "tactic_nan_128", "shared_scaled", "kv_block_truncated", "wrong_eos",
    "logits_bf16", "gate_up_fp8", "noise_2",
)  # fmt: skip
FORMATS = ("fp8", "nvfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evals selftest`."""
    parser.add_argument("--quick", action="store_true", help="12 faults and 3 benign changes on FP8")
    parser.add_argument("--model", default="mini", metavar="PATH|mini", help="checkpoint (default: mini)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="problems in GSM8K's format (default: gsm8k-mini)")
    parser.add_argument("--fault", action="append", metavar="NAME", help="only these")
    parser.add_argument("--format", action="append", choices=FORMATS, dest="formats", help="only these weight formats")
    parser.add_argument("--texts", type=int, metavar="N", help="gold texts scored per fault")
    parser.add_argument("--answers", type=int, metavar="N", help="free-running answers per fault")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where logs go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the matrix")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the matrix as a document")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def main(options: argparse.Namespace) -> int:
    """0 when every harmful fault is caught by some layer and every benign change passes, else 1."""
    from evals import selftest_report as report
    from evals.selftest_bench import Sizes

    quick = options.quick
    sizes = Sizes(
        texts=options.texts or (8 if quick else 16), long=1, answers=options.answers or (24 if quick else 100),
        repeats=2 if quick else 10, answer_caught=not quick,
    )
    formats = options.formats or (["fp8"] if quick else list(FORMATS))
    names = options.fault or (QUICK if quick else None)

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="selftest-") as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows, repeats = run(options.model, folder, formats, names, sizes, options.data, say)
    seconds = time.monotonic() - began
    if not rows:
        raise UsageError(f"no fault to test: {', '.join(names or ())} on {', '.join(formats)}")
    matrix = report.Matrix(rows, repeats, options.model, sizes, seconds)
    report.show(matrix)
    if options.json:
        report.write_json(matrix, options.json)
    if options.markdown:
        report.write_markdown(matrix, options.markdown)
    return 0 if matrix.right else 1


def run(
    model: str, folder: Path, formats: Sequence[str], names: Sequence[str] | None, sizes: Any, data: Path | None,
    say: Any,
) -> tuple[list[Any], list[Any]]:
    """(rows, A/A repeats) over the formats; a fault that exists on several is measured on the first it exists on."""
    from evals.selftest_bench import Bench
    from evals.selftest_judge import Row, judge_row

    rows: list[Row] = []
    repeats: list[Row] = []
    done: set[str] = set()
    for fmt in formats:
        say(f"{fmt}: starting the server")
        with Bench(fmt, model, folder, sizes, data) as bench:
            unknown = set(names or ()) - {f["name"] for f in bench.faults}
            if unknown:
                raise UsageError(f"unknown fault '{min(unknown)}'; known: {', '.join(f['name'] for f in bench.faults)}")
            chosen = [f for f in bench.faults if fmt in f["formats"] and f["name"] not in done
                      and (names is None or f["name"] in names)]
            if not chosen:
                continue
            sound = bench.check()
            floor = bench.forced(width=1)
            repeats += _repeats(bench, sound, floor, sizes.repeats)

            def caught(measured: Any, fault: Any, floor: Any = floor, sound: Any = sound, fmt: str = fmt) -> bool:
                return bool(judge_row(fault, fmt, measured, floor, None, sound).caught) or not fault["harmful"]

            for number, fault in enumerate(chosen, 1):
                measured = bench.measure(fault["name"], caught=lambda m, f=fault: caught(m, f))
                row = judge_row(fault, fmt, measured, floor, bench.answers, sound)
                rows.append(row)
                done.add(row.name)
                verdict = f"caught by {row.first}" if row.caught else "passed"
                say(f"{fmt} {number}/{len(chosen)} {row.name}: {verdict}{'' if row.right else '  <-- wrong'}")
            bench.switch(None)
    return rows, repeats


def _repeats(bench: Any, sound: Any, floor: Any, count: int) -> list[Any]:
    """The sound server against itself at several concurrencies, judged as a fault would be."""
    from evals.selftest_bench import Measured
    from evals.selftest_judge import judge_row

    nothing = {"name": "A/A", "source": "", "summary": "the same server again", "harmful": False}
    out = []
    for number in range(count):
        width = (2, 4, 8, 3, 16, 5)[number % 6]
        out.append(judge_row(nothing, bench.fmt, Measured(check=sound, forced=bench.forced(width)), floor, None, sound))
    return out
