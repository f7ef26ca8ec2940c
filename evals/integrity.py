"""Is the comparison what it claims to be? Who answered, before and after, and whether prompts stayed whole.

How items ended (errors, cut and empty answers) is judged with the statistics in `evals.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evals.records import ArmResult, Finding, Integrity, Protocol

VOLATILE = frozenset({"path", "timing", "id"})
FORMAT_GAP = 0.05  # strict below flexible by more than this share: template or endpoint do not fit (evals T12)


def stable(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint without what may differ between two starts of the same server."""
    return {k: v for k, v in fingerprint.items() if k not in VOLATILE}


def identity(arm: str, fingerprint: Mapping[str, Any] | None, observed: Mapping[str, Any]) -> dict[str, Any]:
    """Who answers, for the journal key: variant, weights and versions, or a foreign server's address.

    `arm` is the variant or URL asked for; `observed` what a server without fingerprint shows of itself.
    """
    if fingerprint is None:
        return {"asked": arm, "observed": dict(observed)}
    keys = ("variant", "weights_sha256", "tokenizer_sha256", "format", "versions", "device", "dtype", "engine")
    return {"asked": arm} | {k: fingerprint.get(k) for k in keys}


def split_variant(name: str) -> tuple[str, dict[str, str]]:
    """`fp8/emulated:bias=bf16` as (base, options)."""
    base, _, tail = name.partition(":")
    return base, dict(part.partition("=")[::2] for part in filter(None, tail.split(",")))


def same_variant(asked: str, reported: str) -> bool:
    """Equal up to the order of options and to defaults spelled out in what was asked."""
    base, options = split_variant(asked)
    other, reported_options = split_variant(reported)
    return base == other and all(options.get(k) == v for k, v in reported_options.items())


def changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of fields that differ between two fingerprints."""
    names: list[str] = []
    for key in sorted({*before, *after}):
        if not prefix and key in VOLATILE:
            continue
        a, b = before.get(key), after.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names += changed(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(prefix + key)
    return names


def check_server(
    arm: str,
    asked: str | None,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    *,
    require_attestation: bool = False,
) -> list[Finding]:
    """One arm's fingerprints: the variant asked for is the one that ran, on every layer, from start to end.

    `asked` is None for a URL given without a variant.
    """
    if before is None and after is None:
        said = f"the server of '{arm}' has no /fingerprint: "
        if require_attestation:
            remedy = "start one that has, or drop --require-attestation"
            return [Finding("unattested", "invalid", said + remedy, arm)]
        return [Finding("unattested", "note", said + "which kernel ran is not attested", arm)]
    if before is None or after is None:
        return [Finding("fingerprint-lost", "invalid",
                        f"'{arm}' gave a fingerprint only {'after' if before is None else 'before'} the run", arm)]
    found: list[Finding] = []
    if "faults" in before:
        found.append(Finding("selftest-server", "invalid",
                             f"the server of '{arm}' is in self-test mode (faults: {before['faults']}); "
                             "start it without --selftest", arm))
    names = changed(before, after)
    if names:
        found.append(Finding(
            "fingerprint-changed", "invalid",
            f"the server of '{arm}' changed during the run ({', '.join(names[:4])}); run again", arm,
        ))
    variant = before.get("variant") or {}
    requested = str(variant.get("requested", ""))
    if asked is not None and not same_variant(asked, requested):
        found.append(Finding(
            "variant-mismatch", "invalid",
            f"'{arm}' was to run {asked}, its server says {requested or 'nothing'}", arm,
        ))
    resolved = variant.get("resolved") or {}
    strangers = {k: v for k, v in resolved.items() if split_variant(str(v)) != split_variant(requested)}
    if strangers:
        layer, kernel = next(iter(strangers.items()))
        found.append(Finding(
            "kernel-not-resolved", "invalid",
            f"'{arm}': layer {layer} ran {kernel} instead of {requested} ({len(strangers)} of {len(resolved)} layers)",
            arm,
        ))
    elif not resolved:
        found.append(Finding("kernel-not-attested", "invalid",
                             f"the server of '{arm}' names no resolved kernel for any MoE layer", arm))
    if variant.get("fallbacks"):
        found.append(Finding("fallbacks", "invalid",
                             f"'{arm}' fell back to another kernel {variant['fallbacks']} times", arm))
    return found


def check_pair(baseline: ArmResult, candidate: ArmResult, factors: Iterable[str] = ()) -> list[Finding]:
    """Two arms may differ in their variant (and so in weight format), and in declared factors, nothing else."""
    a, b = baseline.fingerprint_before, candidate.fingerprint_before
    if a is None or b is None:
        return []
    allowed = set(factors)
    found: list[Finding] = []

    def flag(factor: str, what: str) -> None:
        if factor not in allowed:
            found.append(Finding(
                f"differs-{factor}", "invalid",
                f"'{baseline.name}' and '{candidate.name}' differ in {what}; declare it with --factor {factor} "
                "or make them equal", candidate.name,
            ))

    for key, factor in (
        ("model", "model"), ("tokenizer_sha256", "tokenizer"), ("versions", "versions"), ("device", "device"),
        ("device_name", "device"), ("dtype", "dtype"), ("max_model_len", "max_model_len"), ("engine", "engine"),
    ):
        if a.get(key) == b.get(key):
            continue
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            names = changed(x, y, f"{key}.")
            if key == "engine" and all("spec" in n for n in names):
                factor = "spec"  # speculative decoding has a word of its own
            flag(factor, ", ".join(names[:4]))
        else:
            flag(factor, f"{key} ({str(x)[:40]} against {str(y)[:40]})")
    if a.get("format") == b.get("format") and a.get("weights_sha256") != b.get("weights_sha256"):
        flag("weights", "their weights, in the same format")
    return found


def check_prompt_tokens(
    baseline: ArmResult, candidate: ArmResult, factors: Iterable[str] = ()
) -> list[Finding]:
    """Both servers must have read the same number of tokens: a missing or double BOS shows here."""
    if "tokenizer" in set(factors):
        return []
    pairs = [
        (item, baseline.items[item].prompt_tokens, result.prompt_tokens)
        for item, result in candidate.items.items()
        if item in baseline.items
    ]
    odd = [(i, x, y) for i, x, y in pairs if x is not None and y is not None and x != y]
    if not odd:
        return []
    item, x, y = odd[0]
    return [Finding(
        "prompt-tokens", "invalid",
        f"the same prompt is {x} tokens for '{baseline.name}' and {y} for '{candidate.name}' "
        f"({len(odd)} of {len(pairs)} items, first {item}): BOS or tokenizer differ; --factor tokenizer allows it",
        candidate.name,
    )]


def check_budget(arm: ArmResult, protocol: Protocol, max_model_len: int | None) -> list[Finding]:
    """No prompt may have been cut: each must fit the server's limit together with its budget."""
    if max_model_len is None:
        return []
    over = [r for r in arm.items.values()
            if r.prompt_tokens is not None and r.prompt_tokens + protocol.max_tokens > max_model_len
            and r.status != "error"]
    if not over:
        return []
    worst = max(r.prompt_tokens or 0 for r in over)
    return [Finding(
        "over-budget", "invalid",
        f"'{arm.name}': {len(over)} prompts (up to {worst} tokens) plus {protocol.max_tokens} pass the server's "
        f"limit of {max_model_len}; lower --max-tokens or raise the server's limit", arm.name,
    )]


def check_format(arm: ArmResult) -> list[Finding]:
    """lm-eval's strict filter far below its flexible one: the prompt does not get the answer format it asks for."""
    scored = [r for r in arm.items.values() if r.strict is not None and r.flexible is not None]
    if not scored:
        return []
    strict, flexible = sum(bool(r.strict) for r in scored), sum(bool(r.flexible) for r in scored)
    if flexible - strict <= FORMAT_GAP * len(scored):
        return []
    return [Finding(
        "format", "warning",
        f"'{arm.name}': lm-eval's strict filter finds {strict} and its flexible one {flexible} of {len(scored)} "
        "answers right; the model does not write '#### N': check --endpoint, --shots and the chat template", arm.name,
    )]


def gather(findings: Iterable[Finding], arms: Sequence[ArmResult]) -> Integrity:
    """All findings, without repetition, most severe first, with each arm's attestation."""
    rank = {"invalid": 0, "inconclusive": 1, "warning": 2, "note": 3}
    unique = list(dict.fromkeys(findings))
    by_engine = {f.arm for f in unique if f.code == "kernel-attested"}  # by the engine's own routes and log
    attestation = {a.name: "attested" if a.fingerprint_before is not None or a.name in by_engine else "unattested"
                   for a in arms}
    return Integrity(tuple(sorted(unique, key=lambda f: rank[f.severity])), attestation)
