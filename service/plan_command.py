"""The command line of `service plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_kernels.errors import CheckpointError
from moe_kernels.formats import open_checkpoint
from service import plan
from service.plan import FORMATS, GIB, Plan, Request


def parser(make: Callable[..., argparse.ArgumentParser], count: type) -> argparse.ArgumentParser:
    """All options; `make` gives a parser with the service's way of reporting errors."""
    p = make(prog="service plan", description="What a model needs on GPUs and what fits, from its config alone.")
    p.add_argument("--model", required=True, help="a config.json (see benchmarks/configs), or a checkpoint's folder")
    p.add_argument("--format", choices=FORMATS, help="of the routed experts (default: the folder's own weights')")
    p.add_argument("--quantised", choices=("experts", "linears"), default="experts",
                   help="what has that format: experts only, as this service holds a model, or all but embeddings and "
                        "head (default: %(default)s)")
    p.add_argument("--gpus", type=count, default=1, help="tensor-parallel size (default: %(default)s)")
    p.add_argument("--gpu-memory", type=float, default=141.0, metavar="GiB", help="of one GPU (default: %(default)s)")
    p.add_argument("--max-model-len", type=count, help="tokens one sequence may hold (default: the model's)")
    p.add_argument("--max-seqs", type=count, default=64, help="sequences at once (default: %(default)s)")
    p.add_argument("--max-batch-tokens", type=count, default=512, help="tokens a step (default: %(default)s)")
    p.add_argument("--kv-block", type=count, default=16, help="tokens a KV block (default: %(default)s)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but experts and router")
    p.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")
    return p


def run(p: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Print the plan; exit code 0 whether or not it fits. Raises MoeParityError for what a user can cause."""
    args = p.parse_args(argv)
    if not args.gpu_memory > 0:
        p.error(f"--gpu-memory {args.gpu_memory} must be positive")
    config, stored = _config(args.model)
    if (format := args.format or stored) is None:
        p.error("--format is needed where --model has no weights")
    asked = Request(format, args.quantised, args.gpus, args.gpu_memory, args.max_model_len, args.max_seqs,
                    args.max_batch_tokens, args.kv_block, 2 if args.dtype == "bfloat16" else 4)
    made = plan.make(config, asked)
    if args.json:
        json.dump(made.asdict(), sys.stdout, indent=2)
        print()
    else:
        print(text(made, None if made.fits else plan.gpus_needed(config, asked)))
    return 0


def _config(model: str) -> tuple[dict[str, Any], Any]:
    """A config and the format of the weights beside it, None without weights."""
    path = Path(model).expanduser()
    if path.is_dir() and list(path.glob("*.safetensors")):
        checkpoint = open_checkpoint(path)
        return checkpoint.config, checkpoint.format
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"--model {model}: no such file; give a config.json or a folder with one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model {model}: not readable JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"--model {model}: must hold a JSON object")
    return config, None


def text(made: Plan, needed: int | None) -> str:
    """The plan in lines; `needed` GPUs are named where it does not fit."""
    def size(value: float) -> str:
        return f"{value / GIB:.2f} GiB" if value >= GIB / 100 else f"{value / 2**20:.2f} MiB"

    parts = ", ".join(f"{name.replace('_', ' ')} {size(value)}" for name, value in made.weights.items() if value)
    lines = [
        f"model      {made.model_type}, {made.parameters / 1e9:.1f} B parameters, {made.active_parameters / 1e9:.1f} B "
        f"active, {made.format} {made.quantised}",
        f"weights    {size(made.weights_bytes)} ({parts})",
        f"KV cache   {made.kv_bytes_per_token:,} bytes a token",
        f"GPU        {made.gpus} x {size(made.gpu_bytes)}; on each: weights {size(made.weights_bytes_per_gpu)}, "
        f"reserved {size(made.reserved_bytes)}, KV {size(made.kv_room_bytes)} at "
        f"{made.kv_bytes_per_token_per_gpu:,} bytes a token",
    ]
    if made.fits:
        lines.append(f"fits       {made.tokens:,} tokens ({made.kv_blocks:,} blocks); sequences at once: "
                     f"{made.sequences} of {made.max_model_len:,} tokens, {made.sequences_of_8192} of "
                     f"{min(made.max_model_len, 8192):,}")
    else:
        where = f"{needed} such GPUs hold it" if needed else "64 such GPUs do not hold it"
        lines.append(f"fits       no: {size(made.short_bytes)} short on each GPU; {where}")
    if made.gpus > 1:
        lines.append("note       this service runs on one GPU; more are reckoned for engines with tensor parallelism")
    return "\n".join(lines)
