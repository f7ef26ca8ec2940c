"""The frozen protocol of a run: built from task and options, hashed, and compared field by field."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from evals.data import Problems
from evals.errors import UsageError
from evals.extraction import EXTRACTOR
from evals.records import Protocol, canonical, sha256_hex
from evals.tasks import TaskSpec

# What one word on the command line (`--factor shots`) declares: the fields that follow from it.
FACTORS: dict[str, tuple[str, ...]] = {
    "shots": ("shots", "shots_sha256"),
    "template": ("template_sha256", "task_version"),
    "data": ("dataset_sha256", "items"),
    "items": ("items",),
    "endpoint": ("endpoint", "template_sha256"),
    "sampling": ("temperature", "top_p", "seed"),
    "seed": ("seed",),
    "max_tokens": ("max_tokens",),
    "stops": ("stops",),
    "concurrency": ("concurrency",),
    "extractor": ("extractor",),
    "lm_eval": ("lm_eval_version",),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "extra_body": ("extra_body",),
    "logprobs": ("logprobs",),
}
# Factors on the server's side; the integrity checks read these.
SERVER_FACTORS = (
    "model", "weights", "tokenizer", "versions", "device", "dtype", "engine", "max_model_len", "spec",
)


@dataclass(frozen=True)
class Sampling:
    """How an item is asked; part of the protocol."""

    endpoint: str = "completions"
    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 1234
    concurrency: int = 32
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    system: str | None = None
    prefix: str = ""


def lm_eval_version() -> str:
    """The installed lm-eval's version (its filters and metric are part of the protocol)."""
    return importlib.metadata.version("lm-eval")


def template_sha256(spec: TaskSpec, sampling: Sampling) -> str:
    """Hash of everything that turns a row into a prompt and an answer into a score."""
    config = spec.config()
    for key in ("num_fewshot", "metadata", "generation_kwargs"):
        config.pop(key, None)
    chat = {"system": sampling.system, "multiturn": True} if sampling.endpoint == "chat" else None
    return sha256_hex(canonical({"config": config, "chat": chat, "prefix": sampling.prefix}))


def build(spec: TaskSpec, problems: Problems, sampling: Sampling) -> Protocol:
    """The protocol of a run; an impossible setting is refused."""
    if sampling.endpoint not in ("completions", "chat"):
        raise UsageError(f"--endpoint must be completions or chat, got '{sampling.endpoint}'")
    for name, value, low in (
        ("--max-tokens", sampling.max_tokens, 1),
        ("--concurrency", sampling.concurrency, 1),
        ("--temperature", sampling.temperature, 0),
    ):
        if value < low:
            raise UsageError(f"{name} must be at least {low}, got {value}")
    return Protocol(
        task=spec.name,
        task_version=str((spec.config().get("metadata") or {}).get("version", "1")),
        dataset_sha256=problems.sha256,
        items=tuple(item.id for item in problems.items),
        shots=len(problems.shots),
        shots_sha256=problems.shots_sha256,
        template_sha256=template_sha256(spec, sampling),
        endpoint="chat" if sampling.endpoint == "chat" else "completions",
        max_tokens=sampling.max_tokens,
        stops=spec.stops,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        extractor=EXTRACTOR,
        concurrency=sampling.concurrency,
        lm_eval_version=lm_eval_version(),
        chat_template_kwargs=dict(sampling.chat_template_kwargs),
        extra_body=dict(sampling.extra_body),
        logprobs=sampling.logprobs,
    )


def differences(a: Protocol, b: Protocol) -> dict[str, tuple[Any, Any]]:
    """Fields in which two protocols differ, with both values, in declaration order."""
    return {
        f.name: (getattr(a, f.name), getattr(b, f.name))
        for f in fields(Protocol)
        if getattr(a, f.name) != getattr(b, f.name)
    }


def check_factors(factors: Iterable[str]) -> tuple[str, ...]:
    """Validate `--factor` words."""
    chosen = tuple(dict.fromkeys(factors))
    for name in chosen:
        if name not in FACTORS and name not in SERVER_FACTORS:
            raise UsageError(f"unknown --factor '{name}'; known: {', '.join((*FACTORS, *SERVER_FACTORS))}")
    return chosen


def undeclared(a: Protocol, b: Protocol, factors: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Differences that no declared factor covers: with any of these the runs must not be compared."""
    allowed = {name for factor in factors for name in FACTORS.get(factor, ())}
    return {name: pair for name, pair in differences(a, b).items() if name not in allowed}


def factor_for(name: str) -> str:
    """The shortest `--factor` word that would declare a field."""
    words = [(len(covered), word) for word, covered in FACTORS.items() if name in covered]
    return min(words)[1] if words else name


def describe(name: str, a: Any, b: Any) -> str:
    """One difference in words; long values as counts or short hashes."""

    def short(value: Any) -> str:
        if isinstance(value, tuple) and name == "items":
            return f"{len(value)} items"
        if isinstance(value, str) and len(value) == 64:
            return value[:8] + "…"
        return str(value)

    return f"{name} {short(a)} against {short(b)}"
