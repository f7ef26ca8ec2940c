"""report.json as one self-contained HTML page: no network, texts escaped, readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from evals.report import common
from evals.report.plot import interval_plot
from evals.wording import p_value, percent, points


@cache
def _read(name: str) -> str:
    return resources.files("evals.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        points=points,
        percent=percent,
        p=p_value,
        score=common.score_cell,
        ratio=common.ratio_cell,
        short=common.short,
        oneline=common.one_line,
        backend=common.backend,
    )
    return environment.from_string(_read("report.html.j2"))


def render(report: common.Report) -> str:
    """The page. Its Content-Security-Policy allows the one script by hash and no network at all."""
    script = _read("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    floor = report["floor"]
    return _template().render(
        r=report,
        css=Markup(_read("report.css")),
        script=Markup(script),
        script_hash=digest,
        plot=Markup(interval_plot(report["comparisons"], report["margin"], floor["noise"] if floor else None)),
        cards={c["name"]: [_card(x) for x in c["notable"]] for c in report["comparisons"]},
        meaning=common.STATE_MEANING,
        marks=common.GATE_MARK,
        floor_words=common.floor_words(report),
        arms={a["name"]: a for a in report["arms"]},
        svg_data=_svg_data,
        difference_words=common.difference_words,
        regression_words=common.regression_words,
        flips_words=common.flips_words,
    )


def _svg_data(svg: str) -> str:
    """A layer's figure as an image: scripts inside an <img> never run."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _card(item: Mapping[str, Any]) -> dict[str, Any]:
    """A notable item with both texts cut into common part, first differing piece and rest."""
    where = item["difference"]
    sides = {}
    for side in ("baseline", "candidate"):
        text = item[side]["text"]
        if where is None:
            sides[side] = {"same": text, "piece": None, "rest": ""}
        else:
            piece = where[side]
            start = min(where["start"], len(text))
            sides[side] = {
                "same": text[:start],
                "piece": piece.replace("\n", "⏎\n") if piece else "∎",
                "rest": text[start + len(piece) :],
            }
    gaps = (
        []
        if where is None
        else [
            f"{side} {where['gap_' + side]:.3f} nats"
            for side in ("baseline", "candidate")
            if where["gap_" + side] is not None
        ]
    )
    return {**item, "sides": sides, "gaps": gaps}
