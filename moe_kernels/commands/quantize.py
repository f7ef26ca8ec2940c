"""`moe-kernels quantize SRC DST --format fp8|nvfp4|mxfp4|...`."""

from __future__ import annotations

import argparse

# Names of --format: those of moe_kernels.formats.targets, repeated so that --help needs no torch.
LABELS = {
    "bf16": "dequantised",
    "fp8": "block FP8 (format A)",
    "fp8_ct": "compressed-tensors block FP8 (format B')",
    "fp8_channel": "compressed-tensors channel FP8 (format B)",
    "fp8_tensor": "ModelOpt per-tensor FP8 (format H)",
    "fp8_channel_modelopt": "ModelOpt per-channel FP8 (format H)",
    "fp8_pb_wo": "ModelOpt weight-only block FP8 (format H)",
    "nvfp4": "ModelOpt NVFP4 (format C)",
    "nvfp4_mixed": "ModelOpt mixed precision (format C'): experts NVFP4, dense MLPs per-tensor FP8",
    "nvfp4_w4a16": "ModelOpt weight-only NVFP4, W4A16 (format C'')",
    "nvfp4_ct": "compressed-tensors NVFP4 (format D)",
    "mxfp4": "compressed-tensors MXFP4 (format E)",
    "mxfp4_quark": "AMD Quark MXFP4 (format F)",
    "mxfp8": "ModelOpt MXFP8 (format G)",
    "mxfp8_ct": "compressed-tensors MXFP8 (format G)",
    "mxfp8_hf": "MXFP8 (format G)",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a checkpoint in another weight format",
        description="Write a Hugging Face checkpoint in a quantised format, as its publishers lay it out, or in BF16.",
        epilog="; ".join(f"{name}: {label}" for name, label in LABELS.items()),
    )
    parser.add_argument("src", metavar="SRC", help="folder of a safetensors checkpoint, usually BF16")
    parser.add_argument("dst", metavar="DST", help="new folder")
    parser.add_argument("--format", required=True, choices=tuple(LABELS), metavar="FORMAT", help="a name listed below")
    parser.add_argument(
        "--only", default="experts", choices=("experts", "linears"),
        help="experts: routed experts alone (default); linears: also attention, dense MLP, shared experts",
    )  # fmt: skip
    parser.add_argument("--max-shard-gb", type=float, default=4.0, metavar="GB", help="largest file (default 4)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--calibrate", metavar="TEXTS",
        help="static formats: measure input scales on these texts (.jsonl with text, prompt or question; else lines)",
    )  # fmt: skip
    group.add_argument("--calibration", metavar="FILE", help="input maxima from an earlier --save-calibration")
    parser.add_argument("--calibrate-texts", type=int, default=64, metavar="N", help="texts to use (default 64)")
    parser.add_argument("--save-calibration", metavar="FILE", help="keep what --calibrate measured")
    parser.set_defaults(run=run)


def _has_input_scales(name: str) -> bool:
    from moe_kernels.formats.targets import TARGETS

    return name in TARGETS and TARGETS[name].encoding.activations == "static"


def run(args: argparse.Namespace) -> int:
    """Quantise and say what was written."""
    from moe_kernels.errors import QuantizationError
    from moe_kernels.formats import open_checkpoint
    from moe_kernels.formats.calibration import InputScales
    from moe_kernels.quantize import quantize

    if not _has_input_scales(args.format) and (args.calibrate or args.calibration):
        raise QuantizationError(f"--format {args.format} has no input scales: leave out --calibrate/--calibration")
    if args.save_calibration and not args.calibrate:
        raise QuantizationError("--save-calibration needs --calibrate TEXTS")
    if args.max_shard_gb <= 0 or args.calibrate_texts < 1:
        raise QuantizationError("--max-shard-gb and --calibrate-texts must be positive")
    calibration: str | InputScales | None = args.calibration
    if args.calibrate:
        from moe_kernels.calibrate import calibrate, read_texts

        calibration = calibrate(args.src, read_texts(args.calibrate), max_texts=args.calibrate_texts)
        if args.save_calibration:
            calibration.save(args.save_calibration)
    target = quantize(
        args.src, args.dst, args.format, only=args.only, calibration=calibration,
        max_shard_bytes=int(args.max_shard_gb * 2**30),
    )  # fmt: skip
    written = open_checkpoint(target)
    total = sum(info.nbytes for info in written.tensor_table())
    print(f"{target}: {written.scheme.label}, {len(written.files())} file(s), {total / 2**20:.1f} MiB")
    return 0
