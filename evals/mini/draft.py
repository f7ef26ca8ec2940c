"""The shape every problem family fills in: facts, a question, and solution steps in GSM8K's notation."""

from __future__ import annotations

import re
from collections.abc import Callable

from evals.mini.rng import Rng

_LONG = re.compile(r"\d{4,}")


class NoProblem(Exception):
    """A family could not meet the number ranges with these draws; the generator draws again."""


def prose(raw: str) -> str:
    """The same number or expression as running text writes it: thousands separators from 1,000 up."""
    if len(raw) < 4:
        return raw
    return _LONG.sub(lambda match: f"{int(match[0]):,}", raw)


def money(cents: int) -> str:
    """An amount in cents as dollars with two decimals ('12.50')."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


class Draft:
    """A problem under construction. `step` writes one solution line with exactly one `<<expression=value>>`."""

    __slots__ = ("exprs", "facts", "lines", "question", "value")

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.question = ""
        self.lines: list[str] = []
        self.exprs: list[str] = []
        self.value = ""

    def step(self, lead: str, expr: str, value: int | str, tail: str = ".") -> None:
        """Add `lead expr=<<expr=value>>value tail`; numbers inside << >> carry no separators."""
        text = str(value)
        self.exprs.append(f"{expr}={text}")
        self.lines.append(f"{lead} {prose(expr)}=<<{expr}={text}>>{prose(text)}{tail}")
        self.value = text


Family = Callable[[Rng, int], Draft]


def insert_anywhere(rng: Rng, facts: list[str], extra: str, first: int = 1) -> None:
    """Put a distracting sentence somewhere after the first `first` facts."""
    facts.insert(rng.between(first, len(facts)), extra)
