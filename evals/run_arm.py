"""Runs one arm: server up, checks, smoke stage, all items, fingerprint again; the state goes to run.json."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from evals import run_preflight as preflight
from evals.client import Ask, Endpoint, Retries
from evals.data import Problems
from evals.engines import server as engines
from evals.errors import JournalError, PreflightError, ServerError
from evals.integrity import changed, identity
from evals.journal import Journal
from evals.records import ArmResult, Protocol
from evals.run_collect import ALONE, Job, collect
from evals.run_folder import RunFolder
from evals.run_options import BASELINE, REPEAT, ArmSpec, RunOptions
from evals.run_progress import Progress
from evals.run_score import item_results, rows_of
from evals.servers import Launch, Server

ALONE_ITEMS = 4  # asked one at a time, to see whether batching changes their text
GROSS_AT = (50, 100, 200)  # items after which a candidate may be stopped as grossly worse
GROSS_E = 1000.0  # evidence needed: anytime-valid, so a false stop has probability below 1/1000


@dataclass(frozen=True)
class Run:
    """What every arm of a run shares."""

    options: RunOptions
    folder: RunFolder
    journal: Journal
    protocol: Protocol
    problems: Problems
    asks: Sequence[Ask]
    progress: Progress

    def retries(self) -> Retries:
        """Fresh retry counters for one arm: a tenth of the items may be asked again."""
        return Retries(per_item=self.options.retries, budget=max(50, len(self.asks) // 10))

    def endpoint(self, base: str) -> Endpoint:
        """How to reach a server of this run."""
        o = self.options
        return Endpoint(base, model=o.model_name, api_key=o.api_key, tls=o.tls, timeout=o.timeout)


@dataclass(frozen=True)
class Live:
    """A server that answers for an arm."""

    arm: ArmSpec
    endpoint: Endpoint
    identity: Mapping[str, Any]
    dead: Callable[[], str | None] | None
    engine: engines.LiveEngine | None = None

    def job(self, run: Run, name: str | None = None, repeat: int = 0) -> Job:
        """A job of this arm (or of its second run under another name)."""
        seed = run.protocol.seed + repeat
        return Job(name or self.arm.name, repeat, self.endpoint, self.identity, seed, self.dead)

    def jobs(self, run: Run) -> list[Job]:
        """All jobs of this arm: its repeats, and the A/A run for the baseline."""
        found = [self.job(run, repeat=r) for r in range(run.options.repeats)]
        if self.arm.name == BASELINE and run.options.aa and run.options.floor is None:
            found.append(self.job(run, REPEAT))
        return found


def finished(run: Run, arm: ArmSpec) -> bool:
    """Is nothing left to ask of this arm (so that its server need not be started again)?"""
    entry = run.folder.data["arms"].get(arm.name, {})
    if not entry.get("done"):
        return False
    endpoint = Endpoint(entry.get("url") or "", model=entry.get("model_name"))
    live = Live(arm, endpoint, entry["identity"], None)
    asks = run.asks[: entry["stopped"]["items"]] if entry.get("stopped") else run.asks
    return not any(job.missing(run.protocol, asks, run.journal) for job in live.jobs(run))


def own_server(run: Run, arm: ArmSpec) -> Server | None:
    """The server this run starts itself for an arm, not started yet; None where it is reached by URL or an engine."""
    if arm.engine is not None or arm.url is not None:
        return None
    o = run.options
    return Server(Launch(arm.variant or "", o.model or "", run.folder.log(arm.name), o.server_cmd, o.server_args,
                         o.startup_timeout))


@contextlib.contextmanager
def server_for(run: Run, arm: ArmSpec, server: Server | None = None) -> Iterator[Live]:
    """Start (or reach) the arm's server, check it against what is stored, and note it in run.json.

    `server` is one of `own_server` that has begun to start.
    """
    with contextlib.ExitStack() as stack:
        dead: Callable[[], str | None] | None = None
        engine: engines.LiveEngine | None = None
        if arm.engine is not None:
            log = run.folder.log(arm.name)
            engine = stack.enter_context(engines.running(arm.engine, arm.name, log, run.progress.say))
            base, dead = engine.url, engine.dead
        elif arm.url is None:
            server = server or own_server(run, arm)
            assert server is not None  # for the type checker
            run.progress.say(f"starting the server for {arm.name} ({arm.label}); log: {server.launch.log}")
            stack.enter_context(server)
            base, dead = server.url, server.dead
        else:
            base = arm.url
        start = run.endpoint(base)
        attested = None if engine is None else engine.attestation(start)
        if attested is not None:
            run.folder.arm(arm.name)["attestation"] = attested.as_dict()
            run.folder.save()
            engines.refuse(arm.name, attested)
            run.progress.say(f"{arm.name}: {attested.status}: {attested.detail}")
        info = preflight.inspect(start)
        endpoint = preflight.with_model(start, info)
        found = preflight.check(endpoint, run.protocol, run.asks, info)
        who = identity(arm.label, info.fingerprint, info.observed)
        if arm.engine is not None and attested is not None:
            who |= engines.identity(arm.engine, attested)
        live = Live(arm, endpoint, who, dead, engine)
        entry = run.folder.arm(arm.name)
        asked_before = any(row["arm"] == arm.name for row in run.journal)
        other = changed(entry.get("identity") or {}, who) if asked_before and "identity" in entry else []
        if other:
            raise JournalError(
                f"{run.journal.path} holds answers of another server for '{arm.name}' ({', '.join(other[:4])} differ); "
                "start that one again, or choose another --out"
            )
        for job in live.jobs(run):
            job.missing(run.protocol, run.asks, run.journal)  # raises if a key does not fit
        if not (asked_before and "fingerprint_before" in entry):
            entry["fingerprint_before"] = None if info.fingerprint is None else dict(info.fingerprint)
        entry.pop("died", None)
        entry |= {
            "label": arm.label, "variant": _asked(arm), "url": arm.url, "model_name": endpoint.model,
            "identity": who, "observed": dict(info.observed), "done": False, **found,
        }
        run.folder.save()
        yield live


def _asked(arm: ArmSpec) -> str | None:
    """The variant that the fingerprint must name; None where none was asked for."""
    if arm.engine is not None and arm.engine.spec.engine == "service":
        return arm.engine.kernel
    return arm.variant


def finish(run: Run, live: Live) -> None:
    """Read the fingerprint again and note how the arm ended."""
    entry = run.folder.arm(live.arm.name)
    reason = live.dead() if live.dead else None
    after: Mapping[str, Any] | None = None
    observed: Mapping[str, Any] = {}
    if reason is None:
        try:
            info = preflight.inspect(run.endpoint(live.endpoint.base))
            after, observed = info.fingerprint, info.observed
            again = None if live.engine is None else live.engine.attestation(live.endpoint)
            if again is not None:  # a fallback may show only while answering
                entry["attestation_after"] = again.as_dict()
        except ServerError as error:
            reason = str(error)
    if reason is not None:
        entry["died"] = reason
        run.progress.say(f"the server of {live.arm.name} is gone: {reason}")
    else:
        entry["fingerprint_after"] = None if after is None else dict(after)
        entry["observed_after"] = dict(observed)
        entry["done"] = True
    if any(job.arm == REPEAT for job in live.jobs(run)):
        run.folder.data["arms"][REPEAT] = dict(entry)
    run.folder.save()


def ask(run: Run, jobs: Sequence[Job], asks: Sequence[Ask], concurrency: int | None = None) -> None:
    """Ask what is missing and note the time it took."""
    start = time.monotonic()
    collect(jobs, run.protocol, asks, run.journal, make_retries=run.retries, concurrency=concurrency,
            on_row=run.progress.on_row)
    timing = run.folder.data["meta"].setdefault("timing", {})
    for job in jobs:
        name = f"{job.arm}:{job.repeat}"
        timing[name] = round(timing.get(name, 0.0) + time.monotonic() - start, 2)


def show(run: Run, jobs: Sequence[Job], label: str) -> None:
    """Open a progress line per job."""
    for job in jobs:
        missing = job.missing(run.protocol, run.asks, run.journal)
        run.progress.start(job, len(run.asks) - len(missing), len(run.asks), label)


def smoke(run: Run, live: Live) -> None:
    """The first items one at a time and at full concurrency; ends the run when nothing usable comes back."""
    count = min(run.options.smoke, len(run.asks))
    if count == 0:
        return
    job = live.job(run)
    ask(run, [replace(job, arm=job.arm + ALONE)], run.asks[: min(ALONE_ITEMS, count)], concurrency=1)
    ask(run, [job], run.asks[:count])
    rows = [run.journal.last(job.arm, 0, a.item) or {} for a in run.asks[:count]]
    if all(r.get("status") == "error" for r in rows):
        gone = live.dead() if live.dead else None
        raise ServerError(
            f"the first {count} items of '{live.arm.name}' all failed: {gone or rows[0].get('error')}; "
            "see the server's log, then go on with --resume"
        )
    if live.arm.name == BASELINE and count >= 10 and all(r.get("status") in ("empty", "error") for r in rows):
        raise PreflightError(
            f"the first {count} answers of the baseline are all empty; check --endpoint, --prompt-prefix and the "
            "server's chat template, then start a new run"
        )


def run_all(run: Run, live: Live) -> None:
    """Everything an arm is to answer, one job after the other, with early stops for candidates."""
    jobs = live.jobs(run)
    show(run, jobs, live.arm.label)
    smoke(run, live)
    for job in jobs:
        if live.arm.name == BASELINE or job.repeat:
            ask(run, [job], run.asks)
        else:
            _candidate(run, live, job)


def _candidate(run: Run, live: Live, job: Job) -> None:
    """A candidate's first pass: in prefixes, with a look after each."""
    from evals.statistics import plan_looks
    from evals.verdict import final_look

    n = len(run.asks)
    entry = run.folder.arm(live.arm.name)
    entry.pop("stopped", None)
    entry.pop("final_look", None)
    looks = plan_looks(n, run.options.looks, run.options.alpha) if run.options.looks > 1 else None
    at = {x for x in GROSS_AT if x < n and run.options.smoke} | set(looks.items if looks else ())
    for stop in sorted(at | {n}):
        ask(run, [job], run.asks[:stop])
        if stop == n:
            if looks is not None:  # earlier looks are paid for: the last one has a higher critical value
                entry["final_look"] = asdict(final_look(looks))
            return
        reason = _early(run, live.arm.name, stop, looks)
        if reason is not None:
            entry["stopped"] = reason
            log = "" if live.arm.url else f" (server log: {run.folder.log(live.arm.name)})"
            run.progress.say(f"{live.arm.name}: stopped after {stop} of {n} items: {reason['message']}{log}")
            return


def _early(run: Run, name: str, stop: int, looks: Any) -> dict[str, Any] | None:
    """Why a candidate need not be asked any further, or None."""
    from evals.pairing import pair
    from evals.policy import Policy
    from evals.statistics import regression_log_e
    from evals.verdict import interim

    prefix = replace(run.problems, items=run.problems.items[:stop])
    rows = rows_of(run.journal)
    baseline, candidate = (
        ArmResult(arm, arm, None, None, item_results(prefix, rows.get((arm, 0), {}))) for arm in (BASELINE, name)
    )
    if not len(baseline.items) == len(candidate.items) == stop:
        return None
    outcomes = pair(baseline, candidate)
    table = outcomes.counts
    if stop in GROSS_AT and float(regression_log_e(table.b, table.c)) >= math.log(GROSS_E):
        return {
            "kind": "gross", "items": stop,
            "message": f"grossly worse: {table.b} items lost and {table.c} won (e-value above {GROSS_E:g})",
        }
    if looks is not None and stop in looks.items:
        policy = Policy(margin=run.options.margin, alpha=run.options.alpha, factors=run.options.factors,
                        allow_truncated=run.options.allow_truncated)
        found = interim(outcomes, looks, policy)
        if found is not None:
            return {"kind": found.kind, "items": stop, "message": found.message, "look": asdict(found.look)}
    return None
