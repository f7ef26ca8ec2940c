"""Safetensors files of one checkpoint: headers read and checked at once, data memory-mapped when asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_kernels.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip
_AGAIN = "copy or download the checkpoint again"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is; `dtype` is the safetensors name, e.g. `BF16`, `F8_E4M3`, `U8`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a checkpoint folder needs it; {_AGAIN}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); {_AGAIN}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(content).__name__}; {_AGAIN}")
    return content


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file; the file's length is checked against them."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes); {_AGAIN}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = [(n, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
    except FileNotFoundError:
        raise CheckpointError(f"shard {path} is missing; {_AGAIN}") from None
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable safetensors header ({error}); {_AGAIN}") from None
    tensors, end = {}, 0
    for name, dtype, shape, first, last in entries:
        info = TensorInfo(name, dtype, shape, path, last - first)
        bits = _BITS.get(info.dtype)
        if bits is not None and math.prod(info.shape) * bits != info.nbytes * 8:
            raise CheckpointError(f"{path}: {name} has {info.nbytes} bytes, not {info.dtype} {list(info.shape)}")
        tensors[name] = info
        end = max(end, last)
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} is truncated or damaged: {size} bytes, its header needs {8 + length + end}; {_AGAIN}"
        )
    return tensors


def read_tensor_table(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint folder, from its index and shards or its single file."""
    index = folder / INDEX
    if not index.exists():
        return read_header(_single_file(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map'; {_AGAIN}")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} names the shard {file!r}, which is no file of this folder; {_AGAIN}")
    shards = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    tensors = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(f"{index} names '{name}' in {file}, which does not hold it; {_AGAIN}")
        tensors[name] = shards[file][name]
    for file, content in shards.items():
        for name in content:
            if weight_map.get(name) != file:
                raise CheckpointError(f"{folder / file} holds '{name}', which {INDEX} does not place there; {_AGAIN}")
    return tensors


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).exists():
        return folder / SINGLE
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1 and "-of-" not in found[0]:
        return folder / found[0]
    if found:
        raise CheckpointError(f"{folder} has {len(found)} shards ({found[0]}, ...) but no {INDEX}; {_AGAIN}")
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.gguf") for p in folder.glob(pattern))
    hint = f"; {others[0]} is no safetensors file, convert it first" if others else ""
    raise CheckpointError(f"{folder} holds no safetensors weights{hint}; give the folder of a Hugging Face model")


class ShardReader:
    """Reads tensors through memory maps; keeps one shard open, so that mapped pages of others can go."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def read(self, info: TensorInfo) -> Tensor:
        """The tensor, backed by the mapped file: copy it before changing or keeping it."""
        return next(iter(self.read_many([info])))[1]

    def read_many(self, infos: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Tensors in file order, each backed by its mapped file."""
        for info in sorted(infos, key=lambda i: i.file):
            try:
                if info.file != self._path:
                    self.close()
                    self._file, self._path = safe_open(info.file, framework="pt"), info.file
                yield info, self._file.get_tensor(info.name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{info.file}: cannot read '{info.name}' ({error}); {_AGAIN}") from error

    def close(self) -> None:
        """Let go of the open shard."""
        self._file = self._path = None
