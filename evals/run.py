"""`evals run` on a task: prepare or resume the folder, run every arm, judge, write the reports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals import data, protocol, tasks
from evals.data import Problems
from evals.errors import ProtocolError
from evals.journal import Journal
from evals.protocol import Sampling
from evals.records import Protocol, RunMeta
from evals.run_arm import Run, ask, finish, finished, own_server, run_all, server_for, show, smoke
from evals.run_folder import SCHEMA, RunFolder
from evals.run_options import BASELINE, RunOptions, same_run
from evals.run_progress import Progress


def tool_version() -> str:
    """This package's version."""
    try:
        return importlib.metadata.version("moe-parity")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def environment() -> dict[str, Any]:
    """Where the client side ran; servers describe themselves in their fingerprints."""
    return {
        "python": platform.python_version(), "system": platform.system(), "machine": platform.machine(),
        "lm_eval": protocol.lm_eval_version(), "aiohttp": importlib.metadata.version("aiohttp"),
    }


def sampling_dict(sampling: Sampling) -> dict[str, Any]:
    """For run.json; `Sampling(**…)` restores it."""
    return dict(asdict(sampling))


def open_folder(options: RunOptions, problems: Problems, made: Protocol) -> RunFolder:
    """The run's folder: new, or the one to go on with when it is the same run."""
    if options.resume and (options.out / "run.json").exists():
        folder = RunFolder.open(options.out)
        stored = folder.protocol()
        differing = [protocol.describe(n, a, b) for n, (a, b) in protocol.differences(stored, made).items()]
        differing += same_run(folder.data["meta"], options)
        if differing:
            raise ProtocolError(
                f"--resume: {options.out} was started differently ({'; '.join(differing[:3])}); "
                "repeat the original command, or choose another --out"
            )
        return folder
    raw = asdict(options.sampling)
    meta = RunMeta(
        schema=SCHEMA, tool_version=tool_version(), task=options.task, model=options.model,
        arms={a.name: a.label for a in options.arms}, margin=options.margin, alpha=options.alpha,
        repeats=options.repeats, factors=options.factors, allow_truncated=options.allow_truncated,
        require_attestation=options.require_attestation, command=options.command,
        data={"label": problems.label, "sha256": problems.sha256, "items": len(problems.items),
              "total": problems.total, "about": tasks.get(options.task).about},
        environment=environment(),
    )
    folder = RunFolder.create(options.out, meta, made, raw)
    data.save(problems, folder.problems)
    return folder


def prepare(options: RunOptions) -> tuple[Problems, Protocol]:
    """Items and protocol of a run."""
    spec = tasks.get(options.task)
    raw = spec.load(options.data, options.train)
    shots = spec.shots if options.shots is None else options.shots
    problems = data.select(raw, shots=shots, limit=options.limit, seed=options.sampling.seed)
    return problems, protocol.build(spec, problems, options.sampling)


def execute(options: RunOptions) -> Path:
    """Ask everything that is missing; returns the run folder, ready to be judged."""
    options.check()
    problems, made = prepare(options)
    folder = open_folder(options, problems, made)
    from evals import lm  # seconds to import: after everything that can be refused

    with Progress(options.progress) as progress, Journal(folder.journal) as journal:
        asks = lm.render(tasks.get(options.task), problems, options.sampling)
        run = Run(options, folder, journal, made, problems, asks, progress)
        progress.say(
            f"{options.task}: {len(asks)} of {problems.total} items, {len(problems.shots)} shots, "
            f"max_tokens {made.max_tokens}, {made.endpoint}, protocol {made.hash()[:12]}; first prompt ends with:\n"
            + "\n".join("  | " + line for line in asks[0].prompt[-300:].splitlines())
        )
        try:
            if options.parallel_servers:
                _side_by_side(run)
            else:
                _one_by_one(run)
        finally:
            folder.save()
    return folder.path


def _floor(run: Run, identity: Mapping[str, Any]) -> None:
    """Take over a stored A/A floor once the baseline's server is known."""
    if run.options.floor is not None and "floor" not in run.folder.data:
        from evals.run_judge import floor_from

        run.folder.data["floor"] = floor_from(run.options.floor, run.protocol, identity)
        run.folder.save()


def _one_by_one(run: Run) -> None:
    for arm in run.options.arms:
        if run.options.only not in (None, arm.name):
            continue
        if finished(run, arm):
            run.progress.say(f"{arm.name}: complete in the journal")
            continue
        with server_for(run, arm) as live:
            if arm.name == BASELINE:
                _floor(run, live.identity)
            run_all(run, live)
            finish(run, live)


def _side_by_side(run: Run) -> None:
    """All servers up at once, all arms asked at the same time; no early stops."""
    with contextlib.ExitStack() as stack:
        arms = [arm for arm in run.options.arms if not finished(run, arm)]
        servers = [own_server(run, arm) for arm in arms]
        for server in servers:  # they load at the same time, unless we choose their ports: two could get the same one
            if server is not None and "{port}" not in (server.launch.template or ""):
                stack.callback(server.stop)
                server.begin()
        lives = [stack.enter_context(server_for(run, arm, server)) for arm, server in zip(arms, servers, strict=True)]
        for live in lives:
            if live.arm.name == BASELINE:
                _floor(run, live.identity)
            smoke(run, live)
            show(run, live.jobs(run), live.arm.label)
        rounds = max((len(live.jobs(run)) for live in lives), default=0)
        for number in range(rounds):
            ask(run, [live.jobs(run)[number] for live in lives if number < len(live.jobs(run))], run.asks)
        for live in lives:
            finish(run, live)


def main(options: RunOptions, formats: tuple[str, ...] = ("terminal",)) -> int:
    """Run, judge, write the reports, print; the exit code is the verdict's."""
    path = execute(options)
    if options.only is not None:
        print(f"{options.only}: done, nothing judged. Go on with: {options.command} --resume")
        return 0
    from evals.run_judge import judge_run
    from evals.run_report import publish

    return publish(judge_run(path), path, formats, sys.stdout)
