"""`moe-kernels inspect CKPT`: what a checkpoint is and where its numbers are delicate."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_kernels.inspect import Inspection


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="architecture, format, tensors, scales and router biases of a checkpoint",
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
        pairs, different = sum(n.experts for n in x.nvfp4), sum(n.mismatched for n in x.nvfp4)
        worst = max(n.max_ratio for n in x.nvfp4)
        out.print(
            f"gate and up have different scale_2 in {different} of {pairs} experts ({different / pairs:.1%}), by up to "
            f"{worst:.3f}x{': a kernel must take both' if different else ''}.\n"
        )
    if x.fp8:
        scales = table("scales of layer#", "lowest#", "highest#", "below 1e-10#", "in experts")
        for s in x.fp8:
            scales.add_row(s.layer, f"{s.low:.3g}", f"{s.high:.3g}", s.tiny, ", ".join(map(str, s.tiny_experts)))
        out.print(scales)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"
