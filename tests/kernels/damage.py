"""Rewrites a small checkpoint with something changed: the raw material of loader tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def rewrite(
    src: Path,
    dst: Path,
    tensors: Callable[[Tensors], Any] | None = None,
    config: Callable[[dict[str, Any]], Any] | None = None,
) -> Path:
    """Copy `src` to `dst`, passing its tensors and its config through functions that change them in place."""
    shutil.copytree(src, dst)
    if tensors is not None:
        content = load_file(src / "model.safetensors")
        tensors(content)
        save_file(content, dst / "model.safetensors", {"format": "pt"})
    if config is not None:
        fields = json.loads((src / "config.json").read_text())
        config(fields)
        (dst / "config.json").write_text(json.dumps(fields))
    return dst


def shards(src: Path, dst: Path, count: int = 3) -> Path:
    """Copy `src` to `dst` with its single file split into `count` shards and an index."""
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("model.safetensors"))
    content = load_file(src / "model.safetensors")
    names = sorted(content)
    weight_map = {}
    for number in range(count):
        part = names[number::count]
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: content[name] for name in part}, dst / file)
        weight_map.update(dict.fromkeys(part, file))
    (dst / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return dst
