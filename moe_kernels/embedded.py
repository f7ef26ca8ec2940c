"""Find the embedded model: `mini` names the checkpoint that ships as data of the package `evals`, hashes checked."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from moe_kernels.errors import CheckpointError

NAME = "mini"
MANIFEST = "MANIFEST.json"


def folder() -> Path:
    """Where the embedded model lies, whether or not it is there.

    The folder is found by file only: `evals` is located, not imported, because nothing here may depend on its code.
    """
    spec = importlib.util.find_spec("evals")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("model 'mini': the package 'evals', whose data it is, is not installed beside this one")
    return Path(next(iter(spec.submodule_search_locations))) / "mini" / "model"


def verify(path: Path) -> None:
    """Check every file of a model folder against its MANIFEST.json (size, SHA-256); CheckpointError names the file."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"model 'mini': {manifest} is missing; install the package again, or check it out again")
    for name, entry in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"model 'mini': {file} is missing; check the repository out again")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"model 'mini': {file} has {file.stat().st_size} bytes, not {entry['bytes']}; check it out again"
            )
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(
                f"model 'mini': {file} has sha256 {digest}, not {entry['sha256']}; check it out again"
            )


def resolve(model: str | Path) -> Path:
    """The folder a `--model` argument means: `mini` is the embedded model (verified), anything else a path as given."""
    if str(model) != NAME:
        return Path(model).expanduser()
    path = folder()
    verify(path)
    return path
