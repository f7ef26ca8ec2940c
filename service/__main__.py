"""Command line of the service: `service --model PATH|mini --variant NAME`, `service bench` and `service plan`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

EXIT_USAGE = 2
KEY_VARIABLE = "MOE_PARITY_API_KEY"
SELFTEST_VARIABLE = "MOE_PARITY_SELFTEST"


class Parser(argparse.ArgumentParser):
    """One-line errors."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is; exit 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def at_least(low: int) -> type:
    """An argparse type: an integer not below `low`."""

    class Number(int):
        def __new__(cls, text: str) -> Number:
            value = int(text)
            if value < low:
                raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
            return super().__new__(cls, value)

    Number.__name__ = "integer"
    return Number


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers like 1,8,32, got {text!r}") from None


def _sizes_or_none(text: str) -> tuple[int, ...]:
    return () if text == "none" else _sizes(text)


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(
        prog="service", description="Serve a GLM MoE checkpoint with a named kernel variant over an OpenAI-style API."
    )
    count = at_least(1)
    p.add_argument("--model", required=True, help="folder of a checkpoint, or 'mini' for the embedded model")
    p.add_argument("--variant", required=True, help="kernel variant, e.g. fp8/emulated:bias=bf16 (moe-kernels list)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    p.add_argument("--port", type=int, default=8000, help="port, 0 picks a free one (default: %(default)s)")
    p.add_argument("--served-model-name", help="name in the API (default: the folder's name)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but experts and router")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    p.add_argument("--max-model-len", type=count, help="tokens one sequence may hold (default: the model's)")
    p.add_argument("--kv-blocks", type=count, help="KV cache blocks in all")
    p.add_argument("--kv-block", type=count, default=16, help="tokens a KV block (default: %(default)s)")
    p.add_argument("--max-batch-tokens", type=count, help="tokens a step (default: 512; on a GPU 8192)")
    p.add_argument("--max-seqs", type=count, help="sequences at once (default: 64; on a GPU 128)")
    p.add_argument("--max-waiting", type=count, default=4096, help="queued sequences before 429 (default: %(default)s)")
    p.add_argument(
        "--max-sequences-per-request",
        type=count,
        default=1024,
        help="prompts times n of one request (default: %(default)s)",
    )
    p.add_argument("--max-body-mb", type=count, default=32, help="largest request body in MiB (default: %(default)s)")
    p.add_argument("--max-logprobs", type=at_least(0), default=100, help="most logprobs a request may ask for")
    p.add_argument("--api-key", default=None, help=f"key clients must send (better: the {KEY_VARIABLE} variable)")
    p.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long running requests may finish after SIGTERM (default: %(default)s)",
    )
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    p.add_argument("--log-prompts", action="store_true", help="write prompt text to the log (never done otherwise)")
    p.add_argument("--load-format", choices=("auto", "random"), default="auto",
                   help="random: seeded random weights for --model's config.json, made on the device")
    p.add_argument("--seed", type=at_least(0), default=0, help="of --load-format random (default: %(default)s)")
    p.add_argument("--attention-dtype", choices=("bf16", "fp8"), default="bf16",
                   help="of the attention projections of --load-format random (default: %(default)s)")
    p.add_argument("--num-layers", type=count, help="layers of --load-format random (default: the config's)")
    p.add_argument("--graph-sizes", type=_sizes, help="batch sizes decoding is padded to on a GPU, e.g. 1,8,32,128")
    p.add_argument("--prefill-sizes", type=_sizes_or_none, help="token counts that short prefills are padded to, for "
                   "CUDA graphs, or 'none' (default: 256,512,1024,2048 where decoding uses graphs)")
    p.add_argument("--admit-interval-ms", type=at_least(0), help="admit waiting requests at most so often while others "
                   "run: one prefill then serves several (default: 0; on a GPU 20)")
    p.add_argument("--no-cuda-graph", action="store_true", help="decode without CUDA graphs (GPU only)")
    p.add_argument("--selftest", action="store_true", help=argparse.SUPPRESS)  # for `evals selftest`
    p.add_argument("--trust-remote-code", action="store_true", help="refused: code in checkpoints is never run")
    return p


def _admit_interval(args: argparse.Namespace) -> float:
    """Seconds: as asked for, else 20 ms on a GPU, where a prefill's many launches cost the host milliseconds."""
    if args.admit_interval_ms is not None:
        return float(args.admit_interval_ms) / 1e3
    return 0.0 if args.device == "cpu" else 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; exit code 2 and one line on stderr for anything a user can cause."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:
        from service.bench.cli import main as bench

        return bench(argv[1:])
    if argv[:1] == ["plan"]:
        return _plan(argv[1:])
    p = parser()
    args = p.parse_args(argv)
    if args.trust_remote_code:
        p.error("--trust-remote-code is refused: this service never runs code from a checkpoint")
    if args.selftest and os.environ.get(SELFTEST_VARIABLE) != "1":
        p.error(f"--selftest lets clients switch faults on; it needs {SELFTEST_VARIABLE}=1 in the environment")
    if not 0 <= args.port <= 65535:
        p.error(f"--port {args.port} is not between 0 and 65535")
    from moe_kernels.errors import MoeParityError
    from service.api import launch, logs
    from service.config import EngineConfig

    logs.setup(args.log_level)
    try:
        options = launch.Options(
            model=args.model,
            variant=args.variant,
            host=args.host,
            port=args.port,
            dtype=args.dtype,
            device=args.device,
            served_model_name=args.served_model_name,
            api_key=args.api_key or os.environ.get(KEY_VARIABLE) or None,
            max_body_bytes=args.max_body_mb * 2**20,
            max_sequences=args.max_sequences_per_request,
            log_prompts=args.log_prompts,
            drain_seconds=max(args.drain_seconds, 0.0),
            selftest=args.selftest,
            load_format=args.load_format,
            seed=args.seed,
            attention_dtype=args.attention_dtype,
            num_layers=args.num_layers,
            engine=EngineConfig(
                max_model_len=args.max_model_len,
                kv_block=args.kv_block,
                kv_blocks=args.kv_blocks,
                max_batch_tokens=args.max_batch_tokens or (512 if args.device == "cpu" else 8192),
                max_seqs=args.max_seqs or (64 if args.device == "cpu" else 128),
                max_waiting=args.max_waiting,
                max_logprobs=args.max_logprobs,
                cuda_graph=not args.no_cuda_graph,
                graph_sizes=args.graph_sizes,
                prefill_sizes=args.prefill_sizes,
                admit_interval=_admit_interval(args),
            ),
        )
        return launch.run(options)
    except MoeParityError as error:
        return _refused(error)


def _plan(argv: Sequence[str]) -> int:
    from moe_kernels.errors import MoeParityError
    from service import plan_command

    try:
        return plan_command.run(plan_command.parser(Parser, at_least(1)), argv)
    except MoeParityError as error:
        return _refused(error)


def _refused(error: Exception) -> int:
    print(f"service: error: {' '.join(str(error).split())}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
