"""Tokens on their way from the device: a step is launched, and read when the host needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from service.engine.sequence import Sequence
from service.engine.types import TokenOutput


class Pending(Protocol):
    """Sampled tokens that may still be computed."""

    def read(self) -> list[TokenOutput | None]:
        """The tokens, None where a row's logits were not finite; waits for the device."""


@dataclass(frozen=True)
class Ready:
    """Tokens that are here already."""

    tokens: list[TokenOutput | None]

    def read(self) -> list[TokenOutput | None]:
        """The tokens."""
        return self.tokens


@dataclass(eq=False)
class Flight:
    """One step: the sequences due for a token, in the order of the tokens that `read` gives."""

    due: list[Sequence] = field(default_factory=list)
    parts: list[Pending] = field(default_factory=list)

    def add(self, due: list[Sequence], pending: Pending) -> None:
        """Part of the step."""
        self.due += due
        self.parts.append(pending)

    def read(self) -> list[TokenOutput | None]:
        """All tokens; waits for the device."""
        return [token for part in self.parts for token in part.read()]
