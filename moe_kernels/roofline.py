"""Draws measured layers under the roofline of the ceilings measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_kernels.bench import BenchShape, Ceilings, Row


def plot(rows: Sequence[Row], shape: BenchShape, ceilings: Ceilings, path: Path, device: str) -> None:
    """Work rate over arithmetic intensity, both log; one marker per variant and token count.

    The intensity of a point is its FLOP over `bench.bytes_read`, what no implementation can avoid.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=110)
    layers = [row for row in rows if row.stage == "layer"]
    points: dict[str, list[tuple[float, float, int]]] = {}
    for row in layers:
        flops = 6.0 * row.tokens * shape.top_k * shape.hidden * shape.intermediate
        size = row.detail.get("bytes")
        if not isinstance(size, float):
            continue
        points.setdefault(row.variant, []).append((flops / size, flops / row.us * 1e-6, row.tokens))
    span = [x for found in points.values() for x, _, _ in found] or [1.0]
    low, high = min(span) / 2, max(max(span) * 2, 2 * ceilings.flops / ceilings.read)
    xs = [low * (high / low) ** (n / 200) for n in range(201)]
    axes.plot(xs, [min(x * ceilings.read, ceilings.flops) * 1e-12 for x in xs], color="0.3", label="measured ceilings")
    for variant, found in points.items():
        axes.plot([x for x, _, _ in found], [y for _, y, _ in found], "o-", markersize=4, linewidth=0.8, label=variant)
    if points:
        for x, y, tokens in next(iter(points.values())):
            axes.annotate(str(tokens), (x, y), textcoords="offset points", xytext=(3, -9), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must be read", ylabel="TFLOP/s",
             title=f"{shape.name} MoE layer on {device}")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
