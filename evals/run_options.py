"""What one `evals run` was asked to do, in one frozen object, and what of it must match on --resume."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.client import base_url
from evals.errors import UsageError
from evals.policy import Policy
from evals.protocol import Sampling

if TYPE_CHECKING:
    from evals.engines.load import EngineVariant

BASELINE, REPEAT, CANDIDATE = "baseline", "baseline_repeat", "candidate"
_SECRET = re.compile(r"^--api-key(=.*)?$")


@dataclass(frozen=True)
class ArmSpec:
    """One side of the comparison: a variant we start a server for, a variant file, or a server already there."""

    name: str
    variant: str | None = None
    url: str | None = None
    engine: EngineVariant | None = None

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.variant or (self.engine.name if self.engine else None) or self.url or "?"


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
    only: str | None = None
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
            raise UsageError("give a baseline and at least one candidate: a variant, a URL or a variant file")
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
        if self.only is not None and self.only not in [a.name for a in self.arms]:
            raise UsageError(f"--only {self.only}: the arms are {', '.join(a.name for a in self.arms)}")
        if self.only is not None and self.parallel_servers:
            raise UsageError("--only and --parallel-servers exclude each other")
        if self.parallel_servers:
            self._check_side_by_side()

    def _check_side_by_side(self) -> None:
        taken: dict[int, str] = {}
        for arm in self.arms:
            engine = arm.engine
            if engine is None or engine.spec.url is not None:
                continue
            if engine.spec.sequential:
                raise UsageError(f"{engine.path} says sequential: true; drop --parallel-servers")
            for gpu in engine.gpus:
                if gpu in taken:
                    raise UsageError(
                        f"{arm.name} and {taken[gpu]} both use GPU {gpu}; drop --parallel-servers (one server after "
                        "the other), or give each half of the GPUs"
                    )
                taken[gpu] = arm.name


def arm_specs(
    baseline: str | None, baseline_url: str | None, candidates: Sequence[str], candidate_urls: Sequence[str],
    baseline_file: EngineVariant | None = None, candidate_files: Sequence[EngineVariant] = (),
) -> tuple[ArmSpec, ...]:
    """Arms from the command line: the baseline, then candidates in the order variants, URLs, variant files."""
    if sum(b is not None for b in (baseline, baseline_url, baseline_file)) != 1:
        raise UsageError("give exactly one of --baseline VARIANT and --baseline-url URL (or --baseline-file FILE)")
    if not candidates and not candidate_urls and not candidate_files:
        raise UsageError("give at least one --candidate VARIANT, --candidate-url URL or --candidate-file FILE")
    arms = [ArmSpec(BASELINE, baseline, base_url(baseline_url) if baseline_url else None, baseline_file)]
    others: list[tuple[str | None, str | None, EngineVariant | None]] = [(v, None, None) for v in candidates]
    others += [(None, base_url(u), None) for u in candidate_urls] + [(None, None, f) for f in candidate_files]
    for number, (variant, url, engine) in enumerate(others, 1):
        arms.append(ArmSpec(CANDIDATE if number == 1 else f"{CANDIDATE}:{number}", variant, url, engine))
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
    words = [w for at, w in enumerate(words) if w != "--only" and not w.startswith("--only=")
             and (at == 0 or words[at - 1] != "--only")]
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
