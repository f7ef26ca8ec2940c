"""The heat map of routing agreement: MoE layer by tenth of the text, as one SVG without scripts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from evals.forced.routing import BINS, LayerAgreement

CELL, ROW, LEFT, TOP = 62, 24, 76, 44
GROUP = 24  # with more layers, neighbours share a row


def heat_map(layers: Sequence[LayerAgreement]) -> str:
    """Rows are layers, columns tenths of the text; a cell holds the share of tokens with the same expert set."""
    rows = list(_grouped(layers))
    width, height = LEFT + CELL * BINS + 12, TOP + ROW * len(rows) + 30
    worst = min((v for _, values in rows for v in values), default=1.0)
    label = f"Share of tokens with the same experts, by MoE layer and position; lowest {100 * worst:.1f} %"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" font-size="12" fill="#222222">Same expert set, % of tokens (layer × position)</text>',
    ]
    for column in range(BINS):
        x = LEFT + CELL * column + CELL / 2
        name = f"{column * 100 // BINS}–{(column + 1) * 100 // BINS} %"
        out.append(f'<text x="{x:g}" y="{TOP - 8}" text-anchor="middle" fill="#555555">{name}</text>')
    for number, (name, values) in enumerate(rows):
        y = TOP + ROW * number
        out.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end" fill="#222222">{escape(name)}</text>')
        for column, value in enumerate(values):
            x = LEFT + CELL * column
            ink = "#ffffff" if value < 0.62 else "#222222"
            out.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="{_colour(value)}"/>'
                f'<text x="{x + CELL / 2 - 1:g}" y="{y + 15}" text-anchor="middle" fill="{ink}">{_number(value)}</text>'
            )
    out.append(
        f'<text x="{LEFT}" y="{height - 8}" fill="#555555">0 % = start of a text, 100 % = its end; '
        "white to dark: all to none</text></svg>"
    )
    return "".join(out)


def _grouped(layers: Sequence[LayerAgreement]) -> list[tuple[str, tuple[float, ...]]]:
    """At most GROUP rows; a row of several layers shows the lowest value of each column."""
    size = -(-len(layers) // GROUP) if layers else 1
    rows = []
    for start in range(0, len(layers), size):
        part = layers[start : start + size]
        name = f"layer {part[0].layer}" + (f"–{part[-1].layer}" if len(part) > 1 else "")
        rows.append((name, tuple(min(p.by_position[i] for p in part) for i in range(BINS))))
    return rows


def _colour(value: float) -> str:
    """White (1) over amber to dark red (0)."""
    stops = ((1.0, (255, 255, 255)), (0.9, (254, 232, 190)), (0.6, (227, 120, 74)), (0.0, (103, 0, 31)))
    value = min(max(value, 0.0), 1.0)
    for (high, a), (low, b) in itertools.pairwise(stops):
        if value >= low:
            share = (value - low) / (high - low)
            return "#" + "".join(f"{round(y + (x - y) * share):02x}" for x, y in zip(a, b, strict=True))
    return "#67001f"


def _number(value: float) -> str:
    return "100" if value == 1 else f"{100 * value:.1f}"
