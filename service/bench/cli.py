"""Command line of `service bench`: a concurrency sweep of one target, or two side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.__main__ import EXIT_USAGE, KEY_VARIABLE, Parser, at_least


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(
        prog="service bench",
        description="Measure tokens a second, time to first token and inter-token latency with random prompts. "
        "Two targets are measured in alternating rounds, and their ratio is given with a 95 %% interval.",
    )
    count = at_least(1)
    where = p.add_argument_group("what to measure: one or two servers, or one or two variants in this process")
    where.add_argument("--url", help="root of an OpenAI-style server")
    where.add_argument("--url-b", help="a second server to compare it with")
    where.add_argument("--model-name", help="its model (default: the first it lists)")
    where.add_argument("--vocab", type=count, default=1000, help="prompt ids at a --url are below this (default: 1000)")
    where.add_argument("--model", help="folder, 'mini', or with --load-format random a config.json")
    where.add_argument("--variant", action="append", default=[], help="kernel variant; give two to compare them")
    where.add_argument("--device", default="cpu")
    where.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    where.add_argument("--load-format", choices=("auto", "random"), default="auto")
    where.add_argument("--seed", type=at_least(0), default=0)
    where.add_argument("--attention-dtype", choices=("bf16", "fp8"), default="bf16")
    where.add_argument("--num-layers", type=count)
    where.add_argument("--max-model-len", type=count)
    where.add_argument("--kv-blocks", type=count)
    work = p.add_argument_group("load")
    work.add_argument("--input", type=count, default=1024, help="prompt tokens (default: %(default)s)")
    work.add_argument("--output", type=at_least(2), default=1024, help="tokens to generate (default: %(default)s)")
    work.add_argument("--concurrency", default="1,8,32,128", help="list (default: %(default)s)")
    work.add_argument("--requests", type=count, help="requests a round (default: the concurrency)")
    work.add_argument("--rounds", type=count, default=5, help="counted rounds of each target (default: %(default)s)")
    work.add_argument("--warmup", type=at_least(0), default=1, help="rounds not counted (default: %(default)s)")
    work.add_argument("--json", type=Path, help="write everything measured to this file")
    work.add_argument("--api-key", help=f"of the --url servers (better: the {KEY_VARIABLE} variable)")
    return p


def main(argv: Sequence[str]) -> int:
    """Run it; exit 2 and one line on stderr for anything a user can cause."""
    p = parser()
    args = p.parse_args(argv)
    try:
        args.concurrency = [int(c) for c in args.concurrency.split(",")]
    except ValueError:
        args.concurrency = []
    if not args.concurrency or min(args.concurrency) < 1:
        p.error("--concurrency must be a list of positive numbers, e.g. 1,8,32")
    if bool(args.url) == bool(args.model):
        p.error("give either --url or --model")
    if args.model and not 1 <= len(args.variant) <= 2:
        p.error("--model needs one --variant, or two to compare")
    if args.model and len(set(args.variant)) < len(args.variant):
        p.error("the two variants are the same")
    from moe_kernels.errors import MoeParityError

    try:
        return _run(args)
    except MoeParityError as error:
        print(f"service bench: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def _run(args: argparse.Namespace) -> int:
    from service.bench.report import show
    from service.bench.rounds import compare

    targets, stop, about = _remote(args) if args.url else _local(args)
    try:
        found = []
        for concurrency in args.concurrency:
            found.append(compare(
                targets, args.input, args.output, concurrency, args.requests or concurrency, args.rounds,
                warmup=args.warmup,
                say=lambda name, r, c=concurrency: print(  # type: ignore[misc]
                    f"{name}, concurrency {c}: {r.tok_s:.1f} tok/s, decoding {r.decode_tok_s:.1f}"
                    + (f", {r.errors} FAILED" if r.errors else ""), file=sys.stderr, flush=True)))
            if args.json:
                _write(args, about, found)
        show(found)
        return 1 if any(r.errors for c in found for rounds in c.rounds.values() for r in rounds) else 0
    finally:
        stop()


def _write(args: argparse.Namespace, about: dict[str, Any], found: list[Any]) -> None:
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "api_key"}
    args.json.write_text(json.dumps(
        {"schema": 1, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "settings": settings, **about,
         "results": [c.asdict() for c in found]}, indent=1) + "\n", encoding="utf-8")


def _remote(args: argparse.Namespace) -> tuple[list[Any], Any, dict[str, Any]]:
    from service.bench.remote import UrlTarget

    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    urls = [url for url in (args.url, args.url_b) if url]
    targets = [UrlTarget(url, url, args.model_name, key, args.vocab) for url in urls]
    return targets, lambda: None, {"targets": [{"url": t.url, "model": t.model} for t in targets]}


def _local(args: argparse.Namespace) -> tuple[list[Any], Any, dict[str, Any]]:
    from moe_kernels import registry
    from service.api import launch
    from service.bench.local import EngineTarget, targets
    from service.config import EngineConfig
    from service.engine.engine import Engine

    most = max(args.concurrency)
    cpu = args.device == "cpu"
    length = args.max_model_len or args.input + args.output
    blocks = args.kv_blocks or (most * -(-length // 16) if cpu else None)
    engines: list[Engine] = []

    def start(variant: str) -> Engine:
        options = launch.Options(
            model=args.model, variant=variant, device=args.device, dtype=args.dtype, load_format=args.load_format,
            seed=args.seed, attention_dtype=args.attention_dtype, num_layers=args.num_layers,
            engine=EngineConfig(max_model_len=length, kv_blocks=blocks,
                                max_batch_tokens=512 if cpu else 8192, max_seqs=most,
                                graph_sizes=tuple(sorted(set(args.concurrency)))),
        )
        model, tokenizer, settings = launch.load_weights(options, launch.checkpoint_path(args.model, args.load_format))
        engine = Engine(model, tokenizer, settings)
        engine.start()
        engines.append(engine)
        return engine

    specs = [registry.parse(name) for name in args.variant]
    first = start(args.variant[0])
    shared = len(specs) == 2 and hasattr(first.runner, "add_variant") and first.runner.shares(specs[1])
    if len(specs) < 2 or shared:
        found = targets(first, args.variant)
    else:  # two engines, each with its own weights
        found = [EngineTarget(name, first if i == 0 else start(name)) for i, name in enumerate(args.variant)]
    about = {"targets": [{"variant": str(spec)} for spec in specs], "weights": "shared" if shared else "one set each",
             "engine": {"forward": first.runner.forward_name, "cuda_graph": first.runner.cuda_graph,
                        "kernels": first.runner.kernels, "kv_blocks": first.pool.total}}

    def stop() -> None:
        for engine in engines:
            engine.stop()

    return list(found), stop, about

