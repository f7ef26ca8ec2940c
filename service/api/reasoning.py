"""Splits GLM's `<think>…</think>` from the answer while text streams in; nothing but the two tags is removed."""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Feed text deltas, get (reasoning, content) deltas. `inside` when the prompt itself ends with the opening tag.

    Only a `<think>` that begins the answer (white space before it is dropped) opens reasoning, so an answer that
    mentions the tag stays as it is. Possible beginnings of a tag are held back until they are decided.
    """

    def __init__(self, inside: bool = False) -> None:
        self._state: Literal["start", "inside", "outside"] = "inside" if inside else "start"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Deltas that are certain after this text."""
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held = "inside", begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                return "", ""
            else:
                self._state = "outside"
        if self._state == "inside":
            reasoning, tag, rest = self._held.partition(CLOSE)
            if tag:
                self._state, self._held = "outside", ""
                return reasoning, rest
            keep = _overlap(self._held, CLOSE)
            reasoning, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return reasoning, ""
        content, self._held = self._held, ""
        return "", content

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "inside" else ("", held)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
