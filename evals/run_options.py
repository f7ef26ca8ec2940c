"""What one `evals run` was asked to do, in one frozen object, and what of it must match on --resume."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.client import base_url
from evals.errors import UsageError
from evals.policy import Policy
from evals.protocol import Sampling

BASELINE, REPEAT, CANDIDATE = "baseline", "baseline_repeat", "candidate"
_SECRET = re.compile(r"^--api-key(=.*)?$")


@dataclass(frozen=True)
class ArmSpec:
    """One side of the comparison: a variant we start a server for, or a server that is already there."""

    name: str
    variant: str | None = None
    url: str | None = None

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.variant or self.url or "?"


@dataclass(frozen=True)
class RunOptions:
    """All options of `evals run` on a generated-text task."""

    task: str
    arms: tuple[ArmSpec, ...]
    model: str | None = None
    data: Path | None = None
    train: Path | None = None
    limit: int | None = None
    shots: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    margin: float = 1.5
    alpha: float = 0.05
    repeats: int = 1
    looks: int = 1
    aa: bool = True
    floor: Path | None = None
    out: Path = Path("runs")
    resume: bool = False
    factors: tuple[str, ...] = ()
    allow_truncated: bool = False
    require_attestation: bool = False
    parallel_servers: bool = False
    server_cmd: str | None = None
    server_args: tuple[str, ...] = ()
    startup_timeout: float = 600.0
    model_name: str | None = None
    api_key: str | None = None
    tls: bool | str = True
    timeout: float = 300.0
    retries: int = 5
    smoke: int = 20
    progress: bool = True
    command: str = ""

    def check(self) -> None:
        """Refuse combinations that cannot mean anything."""
        if self.arms[0].name != BASELINE or len(self.arms) < 2:
            raise UsageError("give one --baseline or --baseline-url, and at least one --candidate or --candidate-url")
        if any(a.variant for a in self.arms) and not self.model:
            raise UsageError("--model PATH is needed to start a server for a variant; or give a URL for every arm")
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, got {self.repeats}")
        if self.looks < 1 or (self.looks > 1 and self.repeats > 1):
            raise UsageError("--looks must be at least 1, and cannot be combined with --repeats")
        Policy(margin=self.margin, alpha=self.alpha)
        if self.retries < 0 or self.timeout <= 0:
            raise UsageError("--retries must be 0 or more and --timeout above 0")
        if self.floor is not None and not (self.floor / "run.json").is_file():
            raise UsageError(f"--floor {self.floor} is not a run folder (no run.json in it)")


def arm_specs(
    baseline: str | None, baseline_url: str | None, candidates: Sequence[str], candidate_urls: Sequence[str]
) -> tuple[ArmSpec, ...]:
    """Arms from the command line: the baseline, then candidates in the order variants, URLs."""
    if (baseline is None) == (baseline_url is None):
        raise UsageError("give exactly one of --baseline VARIANT and --baseline-url URL")
    if not candidates and not candidate_urls:
        raise UsageError("give at least one --candidate VARIANT or --candidate-url URL")
    arms = [ArmSpec(BASELINE, baseline, base_url(baseline_url) if baseline_url else None)]
    others = [(v, None) for v in candidates] + [(None, base_url(u)) for u in candidate_urls]
    for number, (variant, url) in enumerate(others, 1):
        arms.append(ArmSpec(CANDIDATE if number == 1 else f"{CANDIDATE}:{number}", variant, url))
    return tuple(arms)


def redacted(argv: Sequence[str]) -> list[str]:
    """The command line without secrets."""
    out: list[str] = []
    hide = False
    for word in argv:
        match = _SECRET.match(word)
        if hide:
            out.append("…")
        elif match and match[1]:
            out.append("--api-key=…")
        else:
            out.append(word)
        hide = bool(match and not match[1])
    return out


def command_line(argv: Sequence[str], out: Path, given: bool) -> str:
    """The command to write into the report: as typed, without --resume, with --out when we chose it."""
    words = [w for w in redacted(argv) if w != "--resume"]
    return shlex.join(["evals", *words, *([] if given else ["--out", str(out)])])


def same_run(stored: Mapping[str, Any], options: RunOptions) -> list[str]:
    """Options in which a continuation differs from the run it continues (stored `run.json`'s meta)."""
    now: dict[str, Any] = {
        "arms": {a.name: a.label for a in options.arms},
        "model": options.model,
        "margin": options.margin,
        "alpha": options.alpha,
        "repeats": options.repeats,
        "factors": list(options.factors),
        "allow_truncated": options.allow_truncated,
        "require_attestation": options.require_attestation,
    }
    return [name for name, value in now.items() if stored.get(name) != value]
