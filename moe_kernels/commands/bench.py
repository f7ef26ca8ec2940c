"""`moe-kernels bench VARIANT...`: times MoE layers of several variants in one run, against a measured floor."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_kernels.errors import VariantError

if TYPE_CHECKING:
    from moe_kernels.bench import BenchShape, Ceilings, Row

EPILOG = """\
On a GPU every number is the median of CUDA-graph replays in which inputs rotate and variants take turns; on a CPU
it is wall clock. The floor is the larger of bytes / measured read rate and FLOP / measured peak. The first variant
is the one the others are compared with, e.g. the path before and after SGLang #28555:

  moe-kernels bench fp8/triton fp8/triton:bias=bf16,scales=copied --tokens 1,8,32,128,4096
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench", help="time variants at several token counts", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="VARIANT", help="e.g. fp8/emulated or fp8/triton:bias=bf16")
    parser.add_argument("--shape", help="glm-4.5-air, glm-4.7, glm-4.7-flash, glm-5, mini, or H,I,E,K "
                        "(default: glm-4.5-air on a GPU, mini on a CPU)")
    parser.add_argument("--tokens", default="1,8,32,128", help="token counts, comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="graph replays a number (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline plot (PNG or SVG)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    import torch

    from moe_kernels import bench

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise VariantError("--device cuda: torch sees no CUDA GPU here; leave --device out to use the CPU")
    shape = parse_shape(args.shape or ("glm-4.5-air" if device.type == "cuda" else "mini"))
    tokens = parse_tokens(args.tokens)
    if args.rounds < 1:
        raise VariantError(f"--rounds must be 1 or more, got {args.rounds}")
    ceilings = bench.measure_ceilings(device)
    rows = bench.time_layers(args.variants, shape, tokens, device, ceilings, args.rounds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print_table(rows, shape, ceilings, name)
    if args.csv:
        write_csv(args.csv, rows)
    if args.json:
        args.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    if args.plot:
        from moe_kernels.roofline import plot

        plot(rows, shape, ceilings, args.plot, name)
    return 0


def parse_shape(text: str) -> BenchShape:
    """A named shape or `H,I,E,K`."""
    from moe_kernels.bench import SHAPES, BenchShape

    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) != 4 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise VariantError(f"--shape '{text}' is neither one of {', '.join(SHAPES)} nor H,I,E,K in whole numbers")
    hidden, intermediate, experts, top_k = map(int, parts)
    if top_k > experts:
        raise VariantError(f"--shape '{text}': top_k {top_k} exceeds the {experts} experts")
    return BenchShape(text, hidden, intermediate, experts, top_k, 1.0)


def parse_tokens(text: str) -> list[int]:
    """Positive whole numbers, comma-separated."""
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 1:
        raise VariantError(f"--tokens '{text}' must be whole numbers of 1 or more, e.g. 1,8,32")
    return tokens


def print_table(rows: Sequence[Row], shape: BenchShape, ceilings: Ceilings, device: str) -> None:
    """One line per token count and variant; the saving is against the first variant at the same token count."""
    from rich.console import Console
    from rich.table import Table

    first = rows[0].variant
    table = Table(title=f"{shape.name}: H {shape.hidden}, I {shape.intermediate}, E {shape.experts}, "
                  f"top-{shape.top_k} on {device}")
    for title in ("tokens", "variant", "µs", "p10–p90", "floor µs", "of floor", f"more than {first}"):
        table.add_column(title, justify="left" if title == "variant" else "right")
    base: dict[int, float] = {}
    for row in rows:
        if row.variant == first:
            base.setdefault(row.tokens, row.us)
        more = row.us - base[row.tokens]
        floor = row.floor_us or 0.0
        table.add_row(
            str(row.tokens), row.variant, f"{row.us:.1f}", f"{row.detail['p10_us']:.1f}–{row.detail['p90_us']:.1f}",
            f"{floor:.1f}", f"{row.us / floor:.2f}x" if floor else "",
            "" if row.variant == first else f"{more:+.1f} µs ({more / base[row.tokens]:+.1%})",
        )
    console = Console(width=max(Console().width, 120))
    console.print(table)
    console.print(f"read {ceilings.read / 1e12:.3f} TB/s, peak {ceilings.flops / 1e12:.1f} TFLOP/s ({ceilings.source})",
                  highlight=False)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All fields of all rows."""
    flat = [row.to_json() for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
