"""The fingerprint: what exactly answers here, as JSON, with an id that two equal services share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from service.engine.engine import Engine
from service.engine.probe import run_probe
from service.tokenizer import Tokenizer

SCHEMA = 1
UNSTABLE = ("path", "id")  # where the weights lie says nothing about what they are


def build(loaded: Any, tokenizer: Tokenizer, engine: Engine, name: str, *, probe: bool = True) -> dict[str, Any]:
    """The fingerprint of a running engine over a `moe_kernels.hf.LoadedModel`.

    `probe` runs the determinism probe (about a second); without it `determinism.batch_invariant` is null.
    """
    asked = str(loaded.variant)
    resolved = {str(layer): kernel for layer, kernel in loaded.resolved.items()}
    runner, config = engine.runner, engine.config
    determinism: dict[str, Any] = {"batch_invariant": None, "probe": "not run"}
    if probe:
        determinism = run_probe(engine).asdict()
    device = runner.device
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "model": name,
        "path": str(Path(loaded.path).resolve()),
        "weights_sha256": loaded.weights_sha256,
        "tokenizer_sha256": tokenizer.sha256(),
        "format": loaded.format,
        "variant": {
            "requested": asked, "resolved": resolved,
            "fallbacks": sum(kernel != asked for kernel in resolved.values()),
        },
        "versions": versions(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "max_model_len": engine.max_model_len,
        "engine": {
            "kv_block": config.kv_block, "kv_blocks": engine.pool.total, "max_batch_tokens": config.max_batch_tokens,
            "max_seqs": config.max_seqs, "prefix_cache": config.prefix_cache, "cuda_graph": runner.cuda_graph,
            "forward": runner.forward_name, "attention": runner.attention_name, "kernels": runner.kernels,
            "threads": engine.threads if device.type == "cpu" else None,
        },
        "determinism": determinism,
    }
    out["id"] = identify(out)
    return out


def identify(fingerprint: dict[str, Any]) -> str:
    """sha256 over the canonical JSON of everything but the path and the id itself."""
    stable = {key: value for key, value in fingerprint.items() if key not in UNSTABLE}
    return hashlib.sha256(json.dumps(stable, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of what computes; None where not installed."""
    names = {"moe_parity": "moe-parity", "torch": "torch", "transformers": "transformers", "triton": "triton",
             "flashinfer": "flashinfer-python"}
    found: dict[str, str | None] = {"python": platform.python_version()}
    for key, package in names.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = None
    return found


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The CPU's model name and its widest matrix instructions as torch sees them."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the short name will do
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
