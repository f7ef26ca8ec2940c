"""`evals run TASK`: options of a run, and which runner a task's name selects."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from evals.errors import Interrupted, UsageError

# Tasks that are not lm-eval tasks: name -> module with `add_arguments(parser)` and `main(options) -> int`.
RUNNERS: dict[str, str] = {
    "routing": "evals.commands.forced", "logprobs": "evals.commands.forced", "all": "evals.commands.all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evals run`."""
    from evals import tasks

    known = ", ".join((*tasks.names(), *RUNNERS))
    parser.add_argument("task", metavar="TASK", help=f"what to run: {known}")
    arms = parser.add_argument_group("what is compared")
    arms.add_argument("--model", metavar="PATH|mini", help="checkpoint to serve")
    arms.add_argument("--baseline", metavar="VARIANT", help="e.g. fp8/emulated:bias=bf16")
    arms.add_argument("--candidate", metavar="VARIANT", action="append", default=[], help="may be repeated")
    arms.add_argument("--baseline-url", metavar="URL", help="a running OpenAI-style server instead")
    arms.add_argument("--candidate-url", metavar="URL", action="append", default=[], help="may be repeated")
    arms.add_argument("--baseline-file", type=Path, metavar="FILE", help="another engine: see docker/variants")
    arms.add_argument("--candidate-file", type=Path, metavar="FILE", action="append", default=[],
                      help="may be repeated")
    arms.add_argument("--dry-run", action="store_true", help="print the commands, addresses and attestation only")
    arms.add_argument("--only", metavar="ARM", help="run this arm and stop unjudged; --resume runs the others")
    arms.add_argument("--factor", metavar="F", action="append", default=[],
                      help="protocol or server field that differs on purpose (shots, versions, …)")
    items = parser.add_argument_group("items and prompts")
    items.add_argument("--data", type=Path, metavar="DIR|FILE", help="local JSONL; without it the hub is asked")
    items.add_argument("--train", type=Path, metavar="FILE", help="where shots come from, if not from --data")
    items.add_argument("--limit", type=int, metavar="N", help="only the first N of a seeded order")
    items.add_argument("--shots", type=int, metavar="N", help="few-shot examples (default: the task's)")
    items.add_argument("--max-tokens", type=int, metavar="N", help="completion budget (default: the task's)")
    items.add_argument("--endpoint", choices=("completions", "chat"),
                       help="default: as in the variant files, or completions")
    items.add_argument("--system", metavar="TEXT", help="system message (chat)")
    items.add_argument("--prompt-prefix", default="", metavar="TEXT", help="text before every prompt (completions)")
    items.add_argument("--temperature", type=float, default=0.0)
    items.add_argument("--top-p", type=float)
    items.add_argument("--seed", type=int, default=1234, help="order of items, and the servers' sampling seed")
    items.add_argument("--concurrency", type=int, metavar="N", help="requests in flight per server (default: 32)")
    items.add_argument("--chat-template-kwargs", metavar="JSON", help='e.g. {"enable_thinking": false}')
    items.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    items.add_argument("--logprobs", action=argparse.BooleanOptionalAction, default=None,
                       help="keep logprobs of the completions (default: when all servers are ours)")
    layers = parser.add_argument_group("layers (routing, logprobs, all)")
    layers.add_argument("--items", metavar="TASK",
                        help="whose items (default: gsm8k-mini for --model mini, else gsm8k)")
    layers.add_argument("--long", type=int, default=2, metavar="N", help="long texts beside the gold solutions")
    layers.add_argument("--long-tokens", type=int, default=16384, metavar="N",
                        help="their length, at most the server's limit")
    rule = parser.add_argument_group("verdict")
    rule.add_argument("--margin", type=float, default=1.5, metavar="PT", help="largest acceptable drop, in points")
    rule.add_argument("--alpha", type=float, default=0.05, help="one-sided level")
    rule.add_argument("--repeats", type=int, default=1, metavar="K", help="ask every item K times")
    rule.add_argument("--looks", type=int, nargs="?", const=4, default=1, metavar="K",
                      help="O'Brien–Fleming interim looks with early stop (4 if no number is given)")
    rule.add_argument("--aa", action=argparse.BooleanOptionalAction, default=True,
                      help="run the baseline twice to measure its own noise")
    rule.add_argument("--floor", type=Path, metavar="RUN", help="reuse the A/A floor of an earlier run")
    rule.add_argument("--allow-truncated", action="store_true", help="judge even if many answers were cut")
    rule.add_argument("--require-attestation", action="store_true", help="INVALID if a server has no /fingerprint")
    place = parser.add_argument_group("run folder and output")
    place.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/TASK-TIME)")
    place.add_argument("--resume", action="store_true", help="go on with the run in --out")
    place.add_argument("--format", action="append", metavar="F", help="terminal, md, json, junit, html, github")
    place.add_argument("--quiet", action="store_true", help="no progress on standard error")
    servers = parser.add_argument_group("servers")
    servers.add_argument("--server-arg", action="append", default=[], metavar="ARG",
                         help="passed on to the service, e.g. --server-arg=--dtype=float32")
    servers.add_argument("--server-cmd", metavar="TEMPLATE",
                         help="start this instead of our service; {model} {variant} {port} are filled in")
    order = servers.add_mutually_exclusive_group()
    order.add_argument("--parallel-servers", action="store_true", help="all servers up at once")
    order.add_argument("--sequential", action="store_true",
                       help="one server after the other, each stopped before the next starts (the default)")
    servers.add_argument("--startup-timeout", type=float, default=600.0, metavar="S")
    servers.add_argument("--model-name", help="name to ask a server for (default: the first it lists)")
    servers.add_argument("--api-key", help="bearer token (default: EVALS_API_KEY)")
    servers.add_argument("--ca", metavar="FILE", help="certificate authority to trust")
    servers.add_argument("--insecure", action="store_true", help="do not check TLS certificates")
    servers.add_argument("--timeout", type=float, default=300.0, metavar="S", help="per request")
    servers.add_argument("--retries", type=int, default=5, metavar="N", help="per item, infrastructure errors only")
    servers.add_argument("--smoke", type=int, default=20, metavar="N", help="items of the smoke stage, 0 = none")


def _json(text: str | None, option: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{option} must be a JSON object, like {{\"enable_thinking\": false}}")
    return found


def engine_files(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The variant files of the command line, loaded; their protocol fills in what was not given."""
    files = [*([options.baseline_file] if options.baseline_file else []), *options.candidate_file]
    if not files:
        if options.dry_run:
            raise UsageError("--dry-run prints what variant files start; give --baseline-file and --candidate-file")
        return None, []
    from evals.engines.load import load
    from evals.engines.protocol import apply

    loaded = [load(path, options.model) for path in files]
    for text in apply(options, loaded):
        if not options.quiet:
            print(text, file=sys.stderr)
    return (loaded[0], loaded[1:]) if options.baseline_file else (None, loaded)


def to_run_options(options: argparse.Namespace) -> Any:
    """The parsed command line as `RunOptions`."""
    from evals import tasks
    from evals.protocol import Sampling, check_factors
    from evals.run_options import RunOptions, arm_specs, command_line

    spec = tasks.get(options.task)
    baseline_file, candidate_files = engine_files(options)
    arms = arm_specs(options.baseline, options.baseline_url, options.candidate, options.candidate_url,
                     baseline_file, candidate_files)
    given = options.out is not None
    if options.resume and not given:
        raise UsageError("--resume needs --out DIR, the folder of the run to go on with")
    out = options.out or Path("runs") / f"{options.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    logprobs = options.logprobs
    if logprobs is None:
        logprobs = options.server_cmd is None and all(a.variant is not None for a in arms)
    sampling = Sampling(
        endpoint=options.endpoint or "completions",
        max_tokens=spec.max_tokens if options.max_tokens is None else options.max_tokens,
        temperature=options.temperature, top_p=options.top_p, seed=options.seed,
        concurrency=32 if options.concurrency is None else options.concurrency,
        chat_template_kwargs=_json(options.chat_template_kwargs, "--chat-template-kwargs"),
        extra_body=_json(options.extra_body, "--extra-body"), logprobs=logprobs, system=options.system,
        prefix=options.prompt_prefix,
    )
    if sampling.endpoint != "chat" and (sampling.system or sampling.chat_template_kwargs):
        raise UsageError("--system and --chat-template-kwargs need --endpoint chat")
    if sampling.endpoint == "chat" and sampling.prefix:
        raise UsageError("--prompt-prefix needs --endpoint completions; a chat server applies its own template")
    model = options.model or next((a.engine.model for a in arms if a.engine is not None), None)
    return RunOptions(
        task=options.task, arms=arms, model=model, data=options.data, train=options.train,
        limit=options.limit, shots=options.shots, sampling=sampling, margin=options.margin, alpha=options.alpha,
        repeats=options.repeats, looks=options.looks, aa=options.aa, floor=options.floor, out=out,
        resume=options.resume, factors=check_factors(options.factor), allow_truncated=options.allow_truncated,
        require_attestation=options.require_attestation, parallel_servers=options.parallel_servers,
        only=options.only,
        server_cmd=options.server_cmd, server_args=tuple(options.server_arg),
        startup_timeout=options.startup_timeout, model_name=options.model_name,
        api_key=options.api_key or os.environ.get("EVALS_API_KEY"),
        tls=False if options.insecure else (options.ca or True), timeout=options.timeout, retries=options.retries,
        smoke=options.smoke, progress=not options.quiet, command=command_line(options.argv, out, given),
    )


def main(options: argparse.Namespace) -> int:
    """Run it; an interruption says how to go on."""
    if options.task in RUNNERS:
        return int(importlib.import_module(RUNNERS[options.task]).main(options))
    made = to_run_options(options)
    if options.dry_run:
        from evals.engines.dryrun import render

        made.check()
        arms = [(a.name, a.engine) for a in made.arms if a.engine is not None]
        command = made.command.replace(" --dry-run", "")
        print(render(arms, made.parallel_servers, command), end="")
        return 0
    from evals import run
    from evals.run_report import check_formats

    formats = check_formats(options.format)
    try:
        return run.main(made, formats)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what is finished is kept. Go on with: {made.command} --resume") from None
