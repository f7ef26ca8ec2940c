"""The texts both servers are asked about: prompt and gold solution of each item, and long concatenations of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from evals.client import Ask
from evals.data import Problems

Kind = Literal["gold", "long"]
JOIN = "\n\n"
RESERVE = 16  # tokens left free in a long text: the one generated token, and what joining changes


@dataclass(frozen=True)
class Text:
    """A text to score. Tokens before character `scored_chars` are context only."""

    item: str
    text: str
    scored_chars: int
    kind: Kind = "gold"


def gold_texts(problems: Problems, asks: Sequence[Ask], delimiter: str = " ") -> list[Text]:
    """Each item's prompt with its gold solution behind it; the solution is what is compared."""
    return [
        Text(item.id, f"{ask.prompt}{delimiter}{item.answer}", len(ask.prompt))
        for item, ask in zip(problems.items, asks, strict=True)
    ]


def long_texts(texts: Sequence[Text], tokens: Mapping[str, int], limit: int, count: int) -> list[Text]:
    """`count` concatenations of gold texts, each filled up to `limit` tokens; all of their tokens are compared.

    `tokens` says how many tokens each gold text has. Texts are taken in order, from the start again when they run out
    (then a long text repeats items, which changes nothing for a comparison of two servers on the same text).
    """
    room, made, at = limit - RESERVE, [], 0
    usable = [t for t in texts if t.item in tokens and tokens[t.item] + 2 <= room]
    if not usable:
        return []
    for number in range(count):
        parts: list[str] = []
        used = 0
        while used + tokens[usable[at % len(usable)].item] + 2 <= room:
            chosen = usable[at % len(usable)]
            parts.append(chosen.text)
            used += tokens[chosen.item] + 2  # what the joining newlines may cost
            at += 1
        made.append(Text(f"long-{number + 1}", JOIN.join(parts), 0, "long"))
    return made
