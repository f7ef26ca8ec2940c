"""Text of one request as it grows: detokenisation, stop strings, and what must be held back."""

from __future__ import annotations

from collections.abc import Sequence

from service.tokenizer import Detokenizer, Tokenizer


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string could begin with (and is not complete)."""
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:  # the first fit is this stop's longest
            if stop.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(stop[0], at + 1)
    return longest


class TextStream:
    """Feeds tokens to the detokeniser and decides which characters are final.

    Stop strings are searched in the decoded text, so they match across token boundaries. Held-back text always contains
    every possible beginning of a stop string, hence searching it alone is enough.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_tail: Sequence[int], stops: tuple[str, ...],
                 include_stop: bool, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_tail, skip_special_tokens) if tokenizer else None
        self._stops = stops
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def add(self, token_id: int, look_for_stops: bool = True) -> str:
        """Characters that became final with this token; `matched` is set when a stop string ended the text."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.add(token_id)
        if not self._stops or not look_for_stops:
            return self._release(0)
        if self._found():
            return self._release(0)
        return self._release(held_back(self._held, self._stops))

    def finish(self, look_for_stops: bool = True) -> str:
        """The rest of the text; an unfinished character becomes U+FFFD."""
        if self._detokenizer is None or self.matched is not None:
            return ""
        self._held += self._detokenizer.flush()
        if look_for_stops:
            self._found()
        return self._release(0)

    def _found(self) -> bool:
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not hits:
            return False
        at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        self._held = self._held[: at + len(self.matched) if self._include else at]
        return True

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out
