"""Tile shapes per model shape and token count: tuned ones from JSON, a rule for every other shape."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_kernels.records import MoEShape

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class GemmConfig:
    """Launch parameters of the two grouped GEMMs.

    `block_m` rows (token-expert pairs) a tile, shared by both; `swap*` puts the weights on the tensor core's M
    side. `warps*` and `stages*` per GEMM, `block_n` output columns a tile of the second. `special*` takes the
    warp-specialised kernel instead (Hopper, `block_m` 128; of the parameters before it only the stages count);
    `group*`, `registers*`, `tma2` and `corrected1` are its choices (`specialised.py`). `overlap` quantises on a
    second stream beside routing and sort where the quantiser is a launch of its own. None of these changes a bit.
    """

    block_m: int
    swap1: bool
    warps1: int
    stages1: int
    swap2: bool
    block_n: int
    warps2: int
    stages2: int
    special1: bool = False
    special2: bool = False
    group1: int = 1
    group2: int = 1
    registers1: bool = False
    registers2: bool = False
    tma2: bool = False
    corrected1: bool = False
    overlap: bool = False

    def to_json(self) -> dict[str, object]:
        """The fields as a dict."""
        return asdict(self)


@dataclass(frozen=True)
class NvFp4Config:
    """Launch parameters of the NVFP4 grouped GEMMs: weights are always on the tensor core's M side.

    `decode` takes the kernels of `nvfp4_decode.py` (`block_m` 8 to 64, 2 or 4 warps, stages as blocks loaded
    ahead), which read another weight layout; a layer holds each layout that its configurations use.
    """

    block_m: int
    block_n1: int = 64
    warps1: int = 4
    stages1: int = 3
    block_n2: int = 64
    warps2: int = 4
    stages2: int = 3
    decode: bool = False

    def to_json(self) -> dict[str, object]:
        """The fields as a dict."""
        return asdict(self)


def default_nvfp4_config(shape: MoEShape, tokens: int) -> NvFp4Config:
    """The rule for untuned shapes."""
    rows = tokens * shape.top_k / shape.num_experts
    return NvFp4Config(8, stages1=4, stages2=4, decode=True) if rows <= 6 else NvFp4Config(16, decode=True)


def default_config(shape: MoEShape, tokens: int, sm: int = 90) -> GemmConfig:
    """The rule for untuned shapes: by the mean number of rows an expert gets."""
    rows = tokens * shape.top_k / shape.num_experts
    if sm < 90:  # 99 KB of shared memory on SM89, no TMA
        if rows <= 64:
            return GemmConfig(16, False, 4, 2, False, 128, 4, 3)
        return GemmConfig(64, False, 8, 2, False, 128, 8, 3)
    if rows <= 12:
        return GemmConfig(16, True, 4, 4, True, 128, 4, 3)
    if rows <= 48:
        return GemmConfig(32, True, 8, 4, True, 128, 4, 4)
    special = sm < 100 and shape.hidden_size % 256 == 0  # Hopper's wgmma is gone from Blackwell
    return GemmConfig(128, False, 8, 3, False, 128, 8, 4, special, special)


def table_name(shape: MoEShape, weight_format: str, device: str) -> str:
    """File name of a tuned table, e.g. `fp8_E128_H4096_I1408_K8_NVIDIA_H200.json`."""
    sizes = f"E{shape.num_experts}_H{shape.hidden_size}_I{shape.intermediate_size}_K{shape.top_k}"
    return f"{weight_format}_{sizes}_{device.replace(' ', '_')}.json"


@lru_cache(maxsize=64)
def _table(name: str, kind: type) -> tuple[tuple[int, Any], ...]:
    path = CONFIGS / name
    if not path.is_file():
        return ()
    entries = json.loads(path.read_text())["configs"]
    return tuple(sorted(((int(tokens), kind(**fields)) for tokens, fields in entries.items()), key=lambda e: e[0]))


def _nearest(table: tuple[tuple[int, Any], ...], tokens: int) -> Any:
    """The entry whose token count is nearest on a log scale."""
    return min(table, key=lambda entry: max(entry[0], tokens) / max(1, min(entry[0], tokens)))[1]


def lookup(shape: MoEShape, tokens: int, device: str, sm: int) -> GemmConfig:
    """The tuned FP8 entry for the nearest token count, or the rule's."""
    table = _table(table_name(shape, "fp8", device), GemmConfig)
    return _nearest(table, tokens) if table else default_config(shape, tokens, sm)


def lookup_nvfp4(shape: MoEShape, tokens: int, device: str, sm: int) -> NvFp4Config:
    """The tuned NVFP4 entry for the nearest token count, or the rule's."""
    table = _table(table_name(shape, "nvfp4", device), NvFp4Config)
    return _nearest(table, tokens) if table else default_nvfp4_config(shape, tokens)
