"""Which kernel does a server really run? Read back from its own routes and its log, never from the command line.

The lines are those that SGLang 0.5 (`server_args.py`, model overrides) and vLLM 0.2x-0.3x (`fused_moe/oracle/*.py`)
write. SGLang's `/server_info` echoes the settings after the server resolved them; vLLM logs the choice it made, and
`/server_info` exists only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evals.engines.load import EngineVariant
from evals.records import Finding

INFO_ROUTES = ("/server_info", "/get_server_info")  # SGLang's old name is the second
# name in a log or answer -> the name that the engine's flag takes
ALIASES = {
    "deepgemm": "deep_gemm", "batched_deepgemm": "deep_gemm", "vllm_cutlass": "cutlass",
    "batched_vllm_cutlass": "cutlass", "batched_triton": "triton",
}
UNRESOLVED = {"auto", "none", ""}


@dataclass(frozen=True)
class Engine:
    """What is known of an engine: where its choice shows, and how a fallback sounds."""

    http: tuple[tuple[str, str], ...] = ()  # (route, field)
    chosen: tuple[str, ...] = ()  # log patterns of a choice made while loading
    configured: tuple[str, ...] = ()  # log patterns that only echo the settings
    fallback: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[str, str]] | None = None  # parallel size -> (field of server_info, log pattern)


# not SGLang's "Fallback to triton version X and use MoE kernel config from …": another tuning file, the same kernel
_FALLBACK = (r"(?i)^(?!.*\bconfig)(?=.*(?:moe|experts))(?=.*\bfall(?:s|ing|en)?[- ]?back (?:to|on)\b).*$",)
ENGINES: dict[str, Engine] = {
    "sglang": Engine(
        http=tuple((route, "moe_runner_backend") for route in INFO_ROUTES),
        chosen=(r"[Uu]se (\w+) as MoE runner backend",),
        configured=(r"server_args=ServerArgs\(.*?\bmoe_runner_backend='(\w+)'",),
        fallback=_FALLBACK,
        sizes={
            "tensor": ("tp_size", r"server_args=ServerArgs\(.*?\btp_size=(\d+)"),
            "expert": ("ep_size", r"server_args=ServerArgs\(.*?\bep_size=(\d+)"),
            "pipeline": ("pp_size", r"server_args=ServerArgs\(.*?\bpp_size=(\d+)"),
        },
    ),
    "vllm": Engine(
        http=(("/server_info?config_format=json", "vllm_config.kernel_config.moe_backend"),),
        # not the Unquantized line: an MTP layer in BF16 has a backend of its own
        chosen=(r"Using '?([A-Z_]+)'? (?:Fp8|NvFp4|Mxfp8|Mxfp4) MoE backend out of potential backends",),
        # the DeepGEMM backend hands small layers to Triton while it runs
        fallback=(*_FALLBACK, r"DeepGemm disabled for N <= 512.*"),
        sizes={
            "tensor": ("", r"Initializing a V1 LLM engine.*?\btensor_parallel_size=(\d+)"),
            "pipeline": ("", r"Initializing a V1 LLM engine.*?\bpipeline_parallel_size=(\d+)"),
        },
    ),
    "service": Engine(),  # has /fingerprint, which is checked as always
    "other": Engine(fallback=_FALLBACK),
}


@dataclass(frozen=True)
class Attestation:
    """What was found. `status`: attested, mismatch, fallback, or unattested (nothing says which kernel ran)."""

    status: str
    expected: str | None
    found: tuple[str, ...]
    evidence: tuple[str, ...]
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)


def normalised(name: object) -> str:
    """One spelling per kernel: FLASHINFER_TRTLLM, 'FlashInfer TRTLLM' -> flashinfer_trtllm; DEEPGEMM -> deep_gemm."""
    text = re.sub(r"[\s-]+", "_", str(name).strip().strip("'\"").lower())
    return ALIASES.get(text, text)


def lookup(data: Any, dotted: str) -> Any:
    """A value by its dotted name; None where the path ends early."""
    for part in dotted.split("."):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def _kernels(variant: EngineVariant, answers: Mapping[str, Any], log: str) -> Iterator[tuple[str, str]]:
    """(kernel, where it was read) for everything that names one."""
    engine, own = ENGINES[variant.spec.engine], variant.spec.attest.sources
    for route, name in (*engine.http, *((s.url, s.field) for s in own if s.url and s.field)):
        value = lookup(answers.get(route), name)
        if value is not None:
            yield normalised(value), f"{route} {name}"
    patterns = [(p, "log, chosen") for p in (*engine.chosen, *(s.log for s in own if s.log))]
    patterns += [(p, "log, settings") for p in engine.configured]
    for pattern, where in patterns:
        for match in dict.fromkeys(m[1] for m in re.finditer(pattern, log)):
            yield normalised(match), where


def _sizes(variant: EngineVariant, answers: Mapping[str, Any], log: str) -> Iterator[str]:
    """Sentences about parallel sizes and further fields that are not as asked for."""
    info: Mapping[str, Any] = next((answers[r] for r in INFO_ROUTES if isinstance(answers.get(r), Mapping)), {})
    for name, (key, pattern) in (ENGINES[variant.spec.engine].sizes or {}).items():
        asked = getattr(variant.parallel, name)
        seen = {int(m) for m in re.findall(pattern, log)}
        if key and isinstance(info.get(key), int):
            seen.add(info[key])
        if seen - {asked}:
            yield f"{name} parallel size is {min(seen - {asked})}, {asked} was asked for"
    for key, value in variant.spec.attest.fields.items():
        found = lookup(info, key)
        if found != value:
            yield f"{key} is {found!r}, {value!r} was asked for"


def judge(variant: EngineVariant, answers: Mapping[str, Any], log: str) -> Attestation:
    """Compare what the server says of itself (JSON by route) and wrote to its log with what was asked for."""
    expected = normalised(variant.kernel) if variant.kernel else None
    seen = list(dict.fromkeys(_kernels(variant, answers, log)))
    found = tuple(dict.fromkeys(k for k, _ in seen if k not in UNRESOLVED))
    evidence = tuple(f"{k} ({where})" for k, where in seen)
    engine = ENGINES[variant.spec.engine]

    def made(status: str, detail: str) -> Attestation:
        return Attestation(status, expected, found, evidence, detail)

    for pattern in (*engine.fallback, *variant.spec.attest.fallback):
        match = re.search(pattern, log, re.MULTILINE)
        if match:
            return made("fallback", f"the server fell back to another kernel: '{' '.join(match[0].split())[-200:]}'")
    wrong = [f"{k} ({where})" for k, where in seen if k not in UNRESOLVED and k != expected]
    if expected is not None and wrong:
        return made("mismatch", f"{expected} was asked for, the server runs {', '.join(wrong)}")
    for sentence in _sizes(variant, answers, log):
        return made("mismatch", sentence)
    if expected is None:
        text = f"no kernel was asked for, the server runs {', '.join(found)}" if found else "no kernel was asked for"
        return made("attested" if found else "unattested", text)
    if not found:
        said = f"it only says {seen[0][0]}" if seen else "no route and no log line names one"
        return made("unattested", f"whether {expected} runs is not known: {said}; add a source to attest.sources, or "
                                  "attest.log for a server reached by URL")
    return made("attested", f"{expected} by {', '.join(where for _, where in seen)}")


def routes(variant: EngineVariant) -> list[str]:
    """Routes to ask, each once."""
    own = [s.url for s in variant.spec.attest.sources if s.url]
    known = [route for route, _ in ENGINES[variant.spec.engine].http]
    extra = INFO_ROUTES if variant.spec.attest.fields else ()
    return list(dict.fromkeys([*known, *own, *extra]))


def describe(variant: EngineVariant) -> list[str]:
    """How this variant is attested, for people."""
    if variant.spec.engine == "service":
        return [f"attested by /fingerprint: {variant.spec.kernel} on every MoE layer"]
    where = [*routes(variant), *(["its log"] if not variant.spec.url or variant.spec.attest.log else [])]
    return [f"attested: kernel {variant.kernel or '(any)'} from {', '.join(where) or 'nothing'}; another one, or a "
            "fallback, is INVALID (exit 4)"]


def findings(name: str, entry: Mapping[str, Any]) -> Iterator[Finding]:
    """What to say of an arm's stored attestations: at the start and after the last answer."""
    for when, stored in (("at the start", entry.get("attestation")), ("in the end", entry.get("attestation_after"))):
        if stored and stored["status"] != "attested" and (stored["expected"] or stored["status"] != "unattested"):
            yield Finding(f"kernel-{stored['status']}", "invalid", f"'{name}' {when}: {stored['detail']}", name)
            return
    stored = entry.get("attestation") or {}
    if stored.get("status") == "attested":
        yield Finding("kernel-attested", "note", f"'{name}': {stored['detail']}", name)
    elif stored:
        yield Finding("unattested", "note", f"'{name}': no kernel was asked for and the server names none", name)
