"""`moe-kernels list`: the registered variants and whether they run on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("list", help="registered kernel variants, and which of them run here")
    parser.add_argument(
        "--model", metavar="CKPT", help="judge shapes by this checkpoint (default: GLM-4.5-Air's shape)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the variants."""
    import torch

    from moe_kernels.errors import VariantError
    from moe_kernels.formats import open_checkpoint
    from moe_kernels.records import MoEShape

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise VariantError(f"unknown device '{args.device}'; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise VariantError("no CUDA GPU is usable here; use --device cpu")
    shape = open_checkpoint(args.model).shape if args.model else MoEShape(4096, 1408, 128, 8)
    rows = [_describe(name, device, shape) for name in _names()]
    if args.json:
        print(json.dumps({"device": str(device), "shape": vars(shape), "variants": rows}, indent=2))
        return 0
    _print_table(rows, str(device))
    return 0


def _names() -> list[str]:
    from moe_kernels import registry

    return registry.names()


def _describe(name: str, device: Any, shape: Any) -> dict[str, Any]:
    from moe_kernels import registry
    from moe_kernels.errors import VariantError

    declared = registry.info(name)
    try:
        support = registry.supports(registry.parse(name), device, shape)
        ok, reason, nearest = support.ok, support.reason, support.nearest
    except VariantError as error:
        ok, reason, nearest = False, str(error), None
    return {
        "name": name,
        "weights": declared.weight_format,
        "activations": declared.activation_format,
        "options": {key: list(values) for key, values in declared.options.items()},
        "summary": declared.summary,
        "runs_here": ok,
        "reason": reason,
        "nearest": nearest,
    }


def _print_table(rows: list[dict[str, Any]], device: str) -> None:
    from moe_kernels.commands._console import console, table

    out = table("variant", "weights", "activations", "options (default first)", f"runs on {device}", "what it is")
    for row in rows:
        options = "\n".join(f"{key}={'|'.join(values)}" for key, values in row["options"].items())
        runs = "yes" if row["runs_here"] else f"no: {row['reason']}"
        out.add_row(row["name"], row["weights"], row["activations"], options, runs, row["summary"])
    console().print(out)
