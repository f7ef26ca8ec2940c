"""Tile shapes per model shape and token count: tuned ones from JSON, a rule for every other shape."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from moe_kernels.records import MoEShape

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class GemmConfig:
    """Launch parameters of the two grouped GEMMs.

    `block_m` rows (token-expert pairs) a tile, shared by both; `swap` puts the weights on the tensor core's M
    side. `warps*` and `stages*` per GEMM, `block_n` output columns a tile of the second.
    """

    block_m: int
    swap: bool
    warps1: int
    stages1: int
    block_n: int
    warps2: int
    stages2: int
    kernel: str = "plain"

    def to_json(self) -> dict[str, object]:
        """The fields as a dict."""
        return asdict(self)


def default_config(shape: MoEShape, tokens: int, sm: int = 90) -> GemmConfig:
    """The rule for untuned shapes: by the mean number of rows an expert gets."""
    rows = tokens * shape.top_k / shape.num_experts
    if sm < 90:  # 99 KB of shared memory on SM89, no TMA
        if rows <= 64:
            return GemmConfig(16, False, 4, 2, 128, 4, 3)
        return GemmConfig(64, False, 8, 2, 128, 8, 3)
    if rows <= 8:
        return GemmConfig(16, True, 4, 3, 128, 4, 4)
    if rows <= 24:
        return GemmConfig(32, True, 8, 4, 128, 4, 4)
    if rows <= 96:
        return GemmConfig(64, True, 8, 4, 128, 4, 4)
    return GemmConfig(128, False, 8, 3, 128, 8, 4)


def table_name(shape: MoEShape, weight_format: str, device: str) -> str:
    """File name of a tuned table, e.g. `fp8_E128_H4096_I1408_K8_NVIDIA_H200.json`."""
    sizes = f"E{shape.num_experts}_H{shape.hidden_size}_I{shape.intermediate_size}_K{shape.top_k}"
    return f"{weight_format}_{sizes}_{device.replace(' ', '_')}.json"


@lru_cache(maxsize=64)
def _table(name: str) -> tuple[tuple[int, GemmConfig], ...]:
    path = CONFIGS / name
    if not path.is_file():
        return ()
    entries = json.loads(path.read_text())["configs"]
    return tuple(sorted((int(tokens), GemmConfig(**fields)) for tokens, fields in entries.items()))


def lookup(shape: MoEShape, tokens: int, weight_format: str, device: str, sm: int) -> GemmConfig:
    """The tuned entry whose token count is nearest on a log scale, or the rule's."""
    table = _table(table_name(shape, weight_format, device))
    if not table:
        return default_config(shape, tokens, sm)
    return min(table, key=lambda entry: max(entry[0], tokens) / max(1, min(entry[0], tokens)))[1]
