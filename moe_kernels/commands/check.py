"""`moe-kernels check VARIANT`: every MoE layer of a checkpoint against the oracle and the emulation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# Word problems in the embedded model's language; any text the model knows will do (--text).
TEXT = """\
Question: Mira buys 12 boxes at 4 dollars each and sells 30 pencils for 2 dollars each. How much does she earn?
Answer: The boxes cost 12*4=<<12*4=48>>48 dollars.
Selling gives 30*2=<<30*2=60>>60 dollars.
She earns 60-48=<<60-48=12>>12 dollars.
#### 12

Question: A train covers 180 miles in 3 hours. Tom rides half as fast for 5 hours. How far does Tom ride?
Answer: The train does 180/3=<<180/3=60>>60 miles an hour.
Tom does 60/2=<<60/2=30>>30 miles an hour.
Tom rides 30*5=<<30*5=150>>150 miles.
#### 150
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("check", help="kernel parity of a variant on a checkpoint, layer by layer")
    parser.add_argument("variant", help="e.g. fp8/triton or fp8/emulated:bias=bf16")
    parser.add_argument("--model", default="mini", help="checkpoint folder, or mini (the embedded model)")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--text", type=Path, help="file whose tokens give the activations (default: built in)")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens to run, default 1 2 3 5 7 ... 256")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when every probe passes, 1 when one fails."""
    import torch

    from moe_kernels.check import SWEEP, check_model, references
    from moe_kernels.embedded import resolve
    from moe_kernels.errors import CheckpointError
    from moe_kernels.hf import load_model

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(resolve(args.model), args.variant, device=device)
    text = args.text.read_text() if args.text else TEXT
    ids = token_ids(loaded.path, text, loaded.config.vocab_size)
    if len(ids) < 31:
        raise CheckpointError(f"the text gives {len(ids)} tokens; give one of at least 31")
    report = check_model(loaded, references(loaded, ids[:512]), args.tokens or SWEEP)
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.ok else 1


def token_ids(path: Path, text: str, vocab: int) -> list[int]:
    """Tokens of a text under the checkpoint's tokenizer.json; seeded random ids where it has none."""
    import torch

    if not (path / "tokenizer.json").exists():
        return torch.randint(0, vocab, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids


def _place(layer: int) -> str:
    return "model" if layer < 0 else str(layer)


def print_report(report) -> None:  # type: ignore[no-untyped-def]
    """One row a layer and probe: the worst value against its limit, then the details of what failed."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kernel parity of {report.variant}", title_justify="left")
    for column in ("layer", "probe", "against", "worst", "limit", ""):
        table.add_column(column, justify="right" if column in ("layer", "worst", "limit") else "left")
    groups: dict[tuple[int, str, str], list] = {}
    for finding in report.findings:
        against = ""
        if finding.probe == "parity":
            against = "oracle" if "against the oracle" in finding.detail else "emulation"
        groups.setdefault((finding.layer, finding.probe, against), []).append(finding)
    for (layer, probe, against), found in groups.items():
        worst = max(found, key=lambda f: f.value)
        bad = sorted({f.tokens for f in found if not f.ok})
        mark = f"FAILED at M = {', '.join(map(str, bad))}" if bad else "ok"
        table.add_row(_place(layer), probe, against, f"{worst.value:.2g}", f"{worst.limit:.2g}", mark)
    console = Console()
    console.print(table)
    for finding in report.failed()[:12]:
        where = f"layer {_place(finding.layer)}, {finding.probe}, M = {finding.tokens}"
        console.print(f"{where}: {finding.detail}", markup=False)
    if len(report.failed()) > 12:
        console.print(f"... and {len(report.failed()) - 12} more (--json FILE lists all)")
    console.print("PASS" if report.ok else "FAIL", style="bold green" if report.ok else "bold red")
