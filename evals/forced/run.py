"""Runs the forced layers: each server scores the same texts, its scores go to disk, candidates are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evals import data, integrity, lm, tasks
from evals import run_preflight as preflight
from evals.client import Endpoint
from evals.errors import ServerError, UsageError
from evals.forced.collect import Comparison, collect, compare
from evals.forced.figures import heat_map
from evals.forced.limits import Limits, gross, logprob_evidence, routing_evidence
from evals.forced.spool import Spool
from evals.forced.texts import Text, gold_texts, long_texts
from evals.records import Finding
from evals.rules import LayerEvidence
from evals.run_options import BASELINE, ArmSpec, RunOptions
from evals.servers import Launch, Server

FLOOR_TEXTS = 32  # gold texts the baseline scores a second time, one request at a time
ENOUGH_TOKENS = 1000  # fewer cannot show the limits' shares


@dataclass(frozen=True)
class Extent:
    """How much is scored: `long` concatenated texts of at most `long_tokens` tokens beside the gold texts."""

    long: int = 2
    long_tokens: int = 16384
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, eq=False)
class Forced:
    """One candidate's forced evidence, or what kept it from being measured (`failure`)."""

    name: str
    label: str
    comparison: Comparison | None
    floor: Comparison | None
    same_weights: bool
    findings: tuple[Finding, ...] = ()
    failure: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def tokens(self) -> int:
        """Tokens compared."""
        if self.comparison is None:
            return 0
        return self.comparison.gold.summary().tokens + self.comparison.long.summary().tokens

    def routing(self) -> LayerEvidence | None:
        """Routing evidence with its heat map; None where a server gives no routing."""
        if self.comparison is None or not self.comparison.routed:
            return None
        layers = self.comparison.routing.by_layer()
        floor = self.floor.routing.by_layer() if self.floor is not None and self.floor.routed else None
        found = routing_evidence(layers, floor, self.limits, self.comparison.routing.gaps_known)
        return replace(found, svg=heat_map(layers))

    def logprobs(self) -> LayerEvidence | None:
        """Logprob evidence; a server that could not score a text has moved."""
        if self.failure is not None:
            return LayerEvidence("logprobs", True, self.failure)
        if self.comparison is None:
            return None
        floor = None if self.floor is None else parts_of(self.floor)
        return logprob_evidence(parts_of(self.comparison), floor, self.same_weights, self.limits)

    def gross(self) -> str | None:
        """Why nothing further need be run, or None."""
        if self.failure is not None:
            return self.failure
        return None if self.comparison is None else gross(parts_of(self.comparison), self.limits)


def parts_of(comparison: Comparison) -> dict[str, Any]:
    """Summaries of gold and long texts."""
    return {"gold": comparison.gold.summary(), "long": comparison.long.summary()}


@dataclass(frozen=True)
class _Live:
    arm: ArmSpec
    endpoint: Endpoint
    info: preflight.ServerInfo
    dead: Callable[[], str | None] | None


@contextlib.contextmanager
def _server(options: RunOptions, arm: ArmSpec, folder: Path, say: Callable[[str], None]) -> Iterator[_Live]:
    """Start or reach an arm's server."""
    with contextlib.ExitStack() as stack:
        dead: Callable[[], str | None] | None = None
        base = arm.url or ""
        if arm.url is None:
            log = folder / "logs" / f"{arm.name.replace(':', '-')}-forced.log"
            launch = Launch(arm.variant or "", options.model or "", log, options.server_cmd, options.server_args,
                            options.startup_timeout)
            say(f"starting the server for {arm.name} ({arm.label}); log: {log}")
            server = stack.enter_context(Server(launch))
            base, dead = server.url, server.dead
        start = Endpoint(base, model=options.model_name, api_key=options.api_key, tls=options.tls,
                         timeout=options.timeout)
        info = preflight.inspect(start)
        yield _Live(arm, preflight.with_model(start, info), info, dead)


def texts_of(options: RunOptions) -> list[Text]:
    """The gold texts of a run's items."""
    spec = tasks.get(options.task)
    raw = spec.load(options.data, options.train)
    shots = spec.shots if options.shots is None else options.shots
    problems = data.select(raw, shots=shots, limit=options.limit, seed=options.sampling.seed)
    if options.sampling.endpoint != "completions":
        raise UsageError("routing and logprobs need --endpoint completions: chat servers do not echo prompts")
    return gold_texts(problems, lm.render(spec, problems, options.sampling))


def measure(options: RunOptions, extent: Extent, folder: Path, say: Callable[[str], None]) -> list[Forced]:
    """All candidates of a run against its baseline. A baseline that cannot be scored is an error; a candidate that
    cannot is a result."""
    options.check()
    texts = texts_of(options)
    width = options.sampling.concurrency
    with contextlib.ExitStack() as stack:
        spool = stack.enter_context(Spool(folder / "baseline.spool"))
        again = stack.enter_context(Spool(folder / "again.spool"))
        with _server(options, options.arms[0], folder, say) as live:
            base, routed = live.info, live.info.fingerprint is not None
            say(f"baseline: scoring {len(texts)} texts")
            collect(live.endpoint, texts, spool, routing=routed, concurrency=width, dead=live.dead)
            limit = min(base.max_model_len or extent.long_tokens, extent.long_tokens)
            texts += long_texts(texts, spool.lengths, limit, extent.long)
            collect(live.endpoint, texts, spool, routing=routed, concurrency=width, dead=live.dead)
            subset = texts[:FLOOR_TEXTS] + [t for t in texts[FLOOR_TEXTS:] if t.kind == "long"][:1]
            collect(live.endpoint, subset, again, routing=routed, concurrency=1, dead=live.dead)
            found = _attest(live)
        floor = compare(subset, spool, again)
        out = []
        for arm in options.arms[1:]:
            out.append(_candidate(options, extent, folder, say, arm, texts, spool, floor, base, found))
        return out


def _candidate(
    options: RunOptions, extent: Extent, folder: Path, say: Callable[[str], None], arm: ArmSpec,
    texts: Sequence[Text], spool: Spool, floor: Comparison, base: preflight.ServerInfo, found: list[Finding],
) -> Forced:
    with Spool(folder / "candidate.spool") as other, _server(options, arm, folder, say) as live:
        info, failure, comparison = live.info, None, None
        same = base.fingerprint is not None and info.fingerprint is not None and (
            base.fingerprint.get("weights_sha256") == info.fingerprint.get("weights_sha256"))
        say(f"{arm.name}: scoring {len(texts)} texts")
        try:
            collect(live.endpoint, texts, other, routing=info.fingerprint is not None,
                    concurrency=options.sampling.concurrency, dead=live.dead)
        except ServerError as error:
            failure = str(error)
        else:
            comparison = compare(texts, spool, other)
        findings = (*found, *_attest(live))
        return Forced(arm.name, arm.label, comparison, floor, same, findings, failure, extent.limits)


def _attest(live: _Live) -> list[Finding]:
    """Is the server what was asked for, and still the same at the end?"""
    try:
        after = preflight.inspect(live.endpoint).fingerprint
    except ServerError:
        return []  # it died: the missing scores say so
    asked = live.arm.variant
    found = integrity.check_server(live.arm.name, asked, live.info.fingerprint, after)
    return [f for f in found if live.arm.name != BASELINE or f.severity == "invalid"]
