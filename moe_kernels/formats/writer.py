"""Writes safetensors shards of bounded size and their index, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.files import INDEX, SINGLE


class ShardWriter:
    """Collects tensors up to `max_bytes`, writes them as a shard and forgets them.

    Names follow Hugging Face: `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index. The count
    is known only at the end, so shards get their final names when the writer is closed without an error.
    """

    def __init__(self, folder: Path, max_bytes: int, metadata: dict[str, str]) -> None:
        if max_bytes < 1:
            raise CheckpointError(f"the largest shard size must be positive, got {max_bytes}")
        self._folder, self._max_bytes, self._metadata = folder, max_bytes, metadata
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a view of something larger is copied, so that the larger can go."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if self._held and self._held_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
            self._finish()
        self._held.clear()

    def _flush(self) -> None:
        if not self._held:
            return
        path = self._folder / f"model-{len(self._shards) + 1:05d}.part.safetensors"
        save_file(self._held, path, self._metadata)
        path.chmod(0o644)  # safetensors makes it private
        self._shards.append((path, list(self._held)))
        self._held.clear()
        self._held_bytes = 0

    def _finish(self) -> None:
        if len(self._shards) == 1:
            self._shards[0][0].replace(self._folder / SINGLE)
            return
        weight_map = {}
        for number, (path, names) in enumerate(self._shards, 1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.replace(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
