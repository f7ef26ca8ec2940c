"""Keeps converted checkpoints: made once under a file lock, checked on every reuse, made again when damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from moe_kernels import __version__
from moe_kernels.convert import conversion
from moe_kernels.errors import CheckpointError
from moe_kernels.formats import Checkpoint, open_checkpoint
from moe_kernels.formats.checkpoint import file_sha256
from moe_kernels.paths import cache_dir
from moe_kernels.quantize import QUANTIZER_VERSION, quantize
from moe_kernels.records import WeightFormat

__all__ = ["MANIFEST", "conversion", "ensure_format"]

log = logging.getLogger(__name__)

MANIFEST = "moe-parity.json"


def ensure_format(path: str | Path, format: WeightFormat) -> Path:
    """The same checkpoint with its routed experts in `format`; `path` itself if they are already.

    Otherwise `quantize(path, ..., format)` writes it once into MOE_PARITY_CACHE (default ~/.cache/moe-parity).
    Processes wait for each other at a file lock, and a folder appears under its name only when complete. On reuse
    the manifest (source sha256, format, tool version) and every file's size and sha256 are checked (hashes are
    remembered by size and modification time); what does not match is made again, with a log line.
    """
    source = open_checkpoint(path)
    if source.format == format:
        return source.path
    wanted = _identity(source, format)
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir() / "checkpoints" / f"{source.path.resolve().name}-{format}-{key}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            problem = _problem(folder, wanted)
            if problem is None:
                return folder
            if folder.exists():
                log.warning("cached checkpoint %s is made again: %s", folder, problem)
            _make(source.path, folder, format, wanted)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the converted checkpoint to {folder.parent} ({error}); set MOE_PARITY_CACHE to a folder "
            "with enough space"
        ) from error
    return folder


def _identity(source: Checkpoint, format: WeightFormat) -> dict[str, Any]:
    """All that decides the bytes of the converted checkpoint."""
    weights = {f.name for f in source.files()}
    others = {
        f.name: file_sha256(f)
        for f in sorted(source.path.iterdir())
        if f.is_file() and f.name not in weights and f.stat().st_size < 64 << 20
    }
    return {
        "source_sha256": source.sha256(),
        "source_files": hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest(),
        "format": format,
        "quantizer": QUANTIZER_VERSION,
        "tool_version": __version__,
    }


def _problem(folder: Path, wanted: dict[str, Any]) -> str | None:
    """Why a cached folder cannot be used, or None."""
    if not folder.exists():
        return "not there"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["made_from"] != wanted:
            return "it was made from something else"
        for name, known in manifest["files"].items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != known["size"]:
                return f"{name} is missing or has another size"
            if file_sha256(file) != known["sha256"]:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest is missing or damaged ({error})"
    return None


def _make(source: Path, folder: Path, format: WeightFormat, wanted: dict[str, Any]) -> None:
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    started = time.monotonic()
    try:
        quantize(source, temporary, format)
        files = {
            f.name: {"size": f.stat().st_size, "sha256": _sha256(f)} for f in sorted(temporary.iterdir()) if f.is_file()
        }
        manifest = {"made_from": wanted, "source": str(source.resolve()), "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("converted %s to %s in %.1f s: %s", source, format, time.monotonic() - started, folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
