"""The interval plot of the HTML report: differences and bounds against the margin, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evals.wording import points

WIDTH, ROW, TOP, BOTTOM, LEFT, RIGHT = 720, 76, 38, 48, 30, 30


def axis(values: Sequence[float], least: float = 0.5) -> tuple[float, float, float]:
    """Low end, high end and tick step (points) that hold all values with room, ticks at 1-2-5 steps."""
    low, high = min(*values, -least), max(*values, least)
    pad = 0.08 * (high - low)
    step = next(s * 10**e for e in range(-2, 3) for s in (1, 2, 5) if (high - low) / (s * 10**e) <= 9)
    return math.floor((low - pad) / step) * step, math.ceil((high + pad) / step) * step, step


def interval_plot(comparisons: Sequence[Mapping[str, Any]], margin: float, floor_noise: float | None) -> str:
    """One row per candidate: point, two-sided 95 % interval (thin), one-sided bound (thick end), margin, A/A band.

    `margin` in points, `floor_noise` a fraction. Empty string when no candidate has numbers.
    """
    rows = [(c["variant"], c["numbers"]) for c in comparisons if c["numbers"] is not None]
    if not rows:
        return ""
    everything = [-margin, 0.0]
    for _, n in rows:
        everything += [100 * x for x in (n["lower"], n["upper"], *n["tango"])]
    noise = None if floor_noise is None else 100 * floor_noise
    if noise is not None and noise < 4 * margin:
        everything += [-noise, noise]
    low, high, step = axis(everything)
    bottom = TOP + ROW * len(rows)
    height = bottom + BOTTOM

    def x(value: float) -> float:
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    summary = "; ".join(
        f"{name}: {points(n['difference'])} points, one-sided lower bound {points(n['lower'])}" for name, n in rows
    )
    out = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(summary)}; margin '
        f'−{margin:g} points">'
    ]
    out.append(
        f'<rect class="beyond" x="{x(low)}" y="{TOP - 10}" width="{round(x(-margin) - x(low), 1)}" '
        f'height="{bottom - TOP + 10}"/>'
    )
    if noise is not None:
        left, right = x(max(-noise, low)), x(min(noise, high))
        out.append(
            f'<rect class="noise" x="{left}" y="{TOP - 10}" width="{round(right - left, 1)}" '
            f'height="{bottom - TOP + 10}"><title>A/A noise ±{noise:.2f} points</title></rect>'
        )
    ticks = round((high - low) / step)
    for i in range(ticks + 1):
        value = low + i * step
        label = points(value / 100, 2 if step < 0.1 else 1 if step < 1 else 0)
        out.append(f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="{TOP - 10}" y2="{bottom}"/>')
        kind = "tick minor" if i % 2 else "tick"
        out.append(f'<text class="{kind}" x="{x(value)}" y="{bottom + 20}">{label}</text>')
    out.append(f'<text class="axis" x="{WIDTH - 8}" y="{bottom + 40}">candidate − baseline, points</text>')
    out.append(f'<line class="zero" x1="{x(0)}" x2="{x(0)}" y1="{TOP - 10}" y2="{bottom}"/>')
    out.append(f'<line class="margin" x1="{x(-margin)}" x2="{x(-margin)}" y1="{TOP - 16}" y2="{bottom}"/>')
    out.append(f'<text class="marginlabel" x="{x(-margin)}" y="{TOP - 21}">margin −{margin:g}</text>')
    for i, (name, n) in enumerate(rows):
        y = TOP + ROW * i + 42
        t_low, t_high = (x(100 * v) for v in n["tango"])
        bound, mid = x(100 * n["lower"]), x(100 * n["difference"])
        state = "ok" if n["noninferior"] else "bad"
        out.append(f'<g class="{state}"><text class="row" x="{LEFT + 4}" y="{y - 22}">{escape(name)}</text>')
        out.append(f'<line class="thin" x1="{t_low}" x2="{t_high}" y1="{y}" y2="{y}"/>')
        out.append(f'<line class="thick" x1="{bound}" x2="{mid}" y1="{y}" y2="{y}"/>')
        out.append(f'<line class="cap" x1="{bound}" x2="{bound}" y1="{y - 9}" y2="{y + 9}"/>')
        out.append(f'<circle class="dot" cx="{mid}" cy="{y}" r="6"/>')
        out.append(f'<text class="value" x="{mid}" y="{y - 12}">{points(n["difference"])}</text>')
        out.append(f'<text class="value low" x="{bound}" y="{y + 23}">{points(n["lower"])}</text></g>')
    out.append("</svg>")
    return "".join(out)
