"""Frozen records the run side (client, journal) hands to the judging side (pairing, verdict, report)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["completed", "truncated", "empty", "truncated_in_reasoning", "error"]
Severity = Literal["invalid", "inconclusive", "warning", "note"]

STATUSES: tuple[Status, ...] = ("completed", "truncated", "empty", "truncated_in_reasoning", "error")


def canonical(value: Any) -> str:
    """The one JSON spelling we hash: sorted keys, no spaces, UTF-8 kept, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_hex(text: str | bytes) -> str:
    """Lower-case hexadecimal sha256 of text (as UTF-8) or bytes."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def item_id(question: str) -> str:
    """An item's name everywhere: the first 16 hex digits of its question's sha256, never its row number."""
    return sha256_hex(question)[:16]


@dataclass(frozen=True)
class Protocol:
    """Everything that must be equal for two runs to be comparable; `hash()` is its identity.

    `items` are item ids in the order asked. `concurrency` is part of it because batch composition changes
    the rounding of kernels that are not batch-invariant.
    """

    task: str
    dataset_sha256: str
    items: tuple[str, ...]
    shots: int
    shots_sha256: str
    template_sha256: str
    endpoint: Literal["completions", "chat"]
    max_tokens: int
    stops: tuple[str, ...]
    temperature: float
    seed: int
    extractor: str
    concurrency: int
    lm_eval_version: str
    task_version: str = "1"
    top_p: float | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, lists for tuples."""
        return json.loads(canonical(asdict(self)))

    def hash(self) -> str:
        """sha256 over the canonical JSON of every field."""
        return sha256_hex(canonical(self.as_dict()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Inverse of `as_dict`."""
        fields = dict(data)
        fields["items"] = tuple(fields["items"])
        fields["stops"] = tuple(fields["stops"])
        return cls(**fields)


@dataclass(frozen=True)
class ItemResult:
    """One answered item of one arm and repeat, scored.

    `strict` and `flexible` are lm-eval's filters, `ours` the project's extractor; all three are None when
    `status` is "error" (an infrastructure error is never right or wrong). `seconds` is wall-clock time and
    must stay out of anything that has to be byte-identical after a resume.
    `logprobs`, `tokens` and `gaps` (top-1 minus top-2 logprob, None where the server gave one entry) are
    aligned lists over the completion's tokens, present only when the run asked for logprobs.
    """

    item: str
    doc_id: int
    question: str
    gold: str
    prompt_sha256: str
    status: Status
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    strict: bool | None
    flexible: bool | None
    ours: bool | None
    difficulty: str | None = None
    logprobs: list[float] | None = None
    matched_stop: str | None = None
    error: str | None = None
    tokens: list[str] | None = None
    gaps: list[float | None] | None = None
    extracted: str | None = None  # what `ours` read, None where nothing was found


@dataclass(frozen=True)
class ArmResult:
    """All items of one arm in one repeat, in protocol order.

    `name` is "baseline", "baseline_repeat" (the A/A run), "candidate", "candidate:2", ...; `repeat` counts
    from 0 when `--repeats K` asks the same arm K times. A fingerprint is None when the server has none.
    """

    name: str
    variant: str
    fingerprint_before: Mapping[str, Any] | None
    fingerprint_after: Mapping[str, Any] | None
    items: Mapping[str, ItemResult]
    repeat: int = 0


@dataclass(frozen=True)
class Finding:
    """One thing the integrity checks have to say; `message` is one sentence with the remedy."""

    code: str
    severity: Severity
    message: str
    arm: str | None = None


@dataclass(frozen=True)
class Integrity:
    """Result of the integrity checks over one comparison.

    Any "invalid" finding makes the verdict INVALID, any "inconclusive" one at best INCONCLUSIVE; warnings
    are shown in red beside the verdict. `attestation` says per arm "attested" or "unattested".
    """

    findings: tuple[Finding, ...] = ()
    attestation: Mapping[str, str] = field(default_factory=dict)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Findings of one severity, in order."""
        return tuple(f for f in self.findings if f.severity == severity)


@dataclass(frozen=True)
class RunMeta:
    """What a run folder's `run.json` says besides the protocol; nothing here is wall-clock except `timing`.

    `arms` maps arm name to the variant (or server URL) asked for. `factors` are protocol or fingerprint
    fields declared to differ on purpose. `margin` and `alpha` as given (points of accuracy, one-sided level).
    """

    schema: int
    tool_version: str
    task: str
    model: str | None
    arms: Mapping[str, str]
    margin: float
    alpha: float = 0.05
    repeats: int = 1
    factors: tuple[str, ...] = ()
    allow_truncated: bool = False
    require_attestation: bool = False
    command: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)
