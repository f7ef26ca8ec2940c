"""Counts a checkpoint's linear modules by kind and by how they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_kernels.formats import Checkpoint
from moe_kernels.formats.layout import expert_modules


@dataclass(frozen=True)
class KindReport:
    """Linear modules of one kind that are stored alike; `label` is a float dtype if they are not quantised."""

    kind: str
    label: str
    modules: int
    activations: str


def kinds(checkpoint: Checkpoint) -> Iterator[KindReport]:
    """Routed experts first, then in the order of the files."""
    counts: dict[tuple[str, str, str], int] = {}
    layout = checkpoint.layout
    others = (layout.modules[name] for name in layout.modules if name in layout.linears)
    for module in (*expert_modules(layout), *others):
        encoding = module.encoding
        label = encoding.label if encoding else module.parts["weight"].dtype
        key = (_kind(module.name), label, encoding.activations if encoding else "")
        counts[key] = counts.get(key, 0) + 1
    for (kind, label, activations), count in counts.items():
        yield KindReport(kind, label, count, activations)


def _kind(name: str) -> str:
    for part, kind in (
        (".experts.", "routed experts"), (".shared_expert", "shared experts"), (".indexer.", "sparse indexer"),
        (".self_attn.", "attention"), (".mlp.", "dense MLP"),
    ):  # fmt: skip
        if part in name:
            return kind
    return name.removesuffix(".weight").rpartition(".")[2]
