"""`moe-kernels inspect CKPT`: what a checkpoint is and where its numbers are delicate."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_kernels.inspect import Inspection


_ACTIVATIONS = {
    "dynamic": "quantised, scales from the data",
    "static": "quantised, scales from the checkpoint",
    "none": "left alone (weight-only)",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="architecture, formats, tensors, scales, router biases and known hazards of a checkpoint",
        description="Read a checkpoint's headers, scales and routers (not its expert weights) and describe them.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="folder of a safetensors checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--hash", action="store_true", help="also the sha256 of the weights (reads all of them)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the inspection."""
    from moe_kernels.inspect import inspect_checkpoint

    result = inspect_checkpoint(args.checkpoint, with_hash=args.hash)
    if args.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        show(result)
    return 0


def show(x: Inspection) -> None:
    """Print an inspection as tables."""
    from moe_kernels.commands._console import console, table

    out = console()
    facts = table("checkpoint", x.path)
    moe = f"{x.moe_layers[0]}..{x.moe_layers[-1]}"
    facts.add_row("architecture", f"{x.model_type}, {x.num_layers} layers, MoE in {len(x.moe_layers)} of them ({moe})")
    facts.add_row("format", f"{x.format}; routed experts {x.expert_format}")
    facts.add_row("MoE", f"{x.num_experts} experts, top-{x.top_k}, hidden {x.hidden_size}, I {x.moe_intermediate_size}")
    facts.add_row(
        "routing",
        f"n_group {x.n_group}, topk_group {x.topk_group}, norm_topk_prob {x.norm_topk_prob}, "
        f"routed_scaling_factor {x.routed_scaling_factor:g}",
    )
    facts.add_row("size", f"{x.parameters / 1e6:,.1f} M parameters, {_mib(x.nbytes)} in {x.files} file(s)")
    if x.mtp_tensors:
        layers = ", ".join(map(str, x.mtp_layers))
        facts.add_row("MTP", f"{x.mtp_tensors} tensors of layer {layers} skipped")
    if x.weights_sha256:
        facts.add_row("sha256", x.weights_sha256)
    out.print(facts)

    kinds = table("modules", "count#", "stored as", "activations")
    for k in x.kinds:
        kinds.add_row(k.kind, k.modules, k.label, _ACTIVATIONS.get(k.activations, ""))
    out.print(kinds)

    tensors = table("tensors", "count#", "dtype", "shape", "size#", "")
    for f in x.families:
        tensors.add_row(f.pattern, f.count, f.dtype, list(f.shape), _mib(f.nbytes), f.note)
    out.print(tensors)

    if x.bias:
        bias = table(
            "bias of layer#", "lowest#", "highest#", "BF16 step there#", "distinct#", "after BF16#", "sets changed#"
        )
        for b in x.bias:
            bias.add_row(
                b.layer, f"{b.low:.5f}", f"{b.high:.5f}", f"{b.bf16_step:g}", b.distinct, b.distinct_bf16,
                f"{b.sets_changed:.1%}",
            )  # fmt: skip
        out.print(bias)
        out.print(
            "sets changed: share of synthetic tokens (random hidden states through the real norm and router) that get\n"
            "another set of experts when the bias is rounded to BF16; an order of magnitude, real text may move more.\n"
        )
    if x.nvfp4:
        halves = table(
            "scale_2 of layer#", "gate != up#", "share#", "largest ratio#", "lowest#", "highest#", "input_scale"
        )
        for n in x.nvfp4:
            inputs = "none" if n.input_scale_low is None else f"{n.input_scale_low:.3g} to {n.input_scale_high:.3g}"
            halves.add_row(
                n.layer, n.mismatched, f"{n.mismatched / n.experts:.1%}", f"{n.max_ratio:.3f}",
                f"{n.scale_2_low:.3g}", f"{n.scale_2_high:.3g}", inputs,
            )  # fmt: skip
        out.print(halves)
    if x.fp8:
        columns = ("scales of layer#", "stored as", "lowest#", "highest#", "below 1e-10#", "in experts", "input_scale")
        scales = table(*columns)
        for r in x.fp8:
            inputs = "none" if r.input_scale_low is None else f"{r.input_scale_low:.3g} to {r.input_scale_high:.3g}"
            dead = ", ".join(map(str, r.tiny_experts))
            scales.add_row(r.layer, r.dtype, f"{r.low:.3g}", f"{r.high:.3g}", r.tiny, dead, inputs)
        out.print(scales)
    for warning in x.warnings:
        out.print(f"warning ({warning.code}): {warning.message}", markup=False)
    if not x.warnings:
        out.print("no known hazards found")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"
