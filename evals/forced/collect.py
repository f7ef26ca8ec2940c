"""Collects one server's scores of all texts into a spool, and compares two spools text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evals.client import Endpoint, Retries
from evals.errors import ServerError
from evals.forced.client import score_texts
from evals.forced.divergence import Divergence
from evals.forced.routing import Agreement
from evals.forced.spool import Spool
from evals.forced.texts import Text

PER_ITEM_RETRIES = 2  # a prefill that failed twice fails again


@dataclass
class Comparison:
    """Running totals of two servers on the same texts: gold solutions and long texts apart, routing over both."""

    gold: Divergence = field(default_factory=Divergence)
    long: Divergence = field(default_factory=Divergence)
    routing: Agreement = field(default_factory=Agreement)
    routed: bool = False  # both servers return routing


def collect(
    endpoint: Endpoint,
    texts: Sequence[Text],
    spool: Spool,
    *,
    routing: bool,
    concurrency: int,
    dead: Callable[[], str | None] | None = None,
    retries: Retries | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> None:
    """Score the texts that `spool` lacks; one text at a time is in memory per request in flight."""
    missing = [t for t in texts if t.item not in spool]
    if not missing:
        return
    retries = retries or Retries(per_item=PER_ITEM_RETRIES, budget=max(20, len(missing) // 10))

    def sink(scores) -> None:  # type: ignore[no-untyped-def]
        spool.add(scores)
        on_text()

    score_texts(endpoint, missing, sink, routing=routing, concurrency=concurrency, retries=retries, dead=dead)


def compare(texts: Sequence[Text], a: Spool, b: Spool) -> Comparison:
    """Compare two spools in the texts' order, so that the result does not depend on arrival; memory is one text."""
    out = Comparison()
    for text in texts:
        if text.item not in a or text.item not in b:
            raise ServerError(f"item {text.item} was not scored by both servers")
        x, y = a.get(text.item), b.get(text.item)
        (out.long if text.kind == "long" else out.gold).add(x, y)
        if x.routing is not None and y.routing is not None:
            out.routing.add(x, y)
            out.routed = True
    return out
