"""A small random source whose draws depend only on `random.random()`, so that a seed means the same on every Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Rng:
    """Uniform draws from a Mersenne Twister seeded by the SHA-256 of a label.

    Python promises that `random.Random(seed).random()` never changes; it makes no such promise for `randrange`,
    `choice` or `shuffle`. Everything here is therefore built on `random()` alone.
    """

    __slots__ = ("_random",)

    def __init__(self, *label: object) -> None:
        digest = hashlib.sha256("/".join(map(str, label)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:16], "big")).random

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high], both ends included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One item."""
        return items[int(self._random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def shuffle(self, items: list[T]) -> list[T]:
        """The same list, permuted in place (Fisher–Yates)."""
        for i in range(len(items) - 1, 0, -1):
            j = int(self._random() * (i + 1))
            items[i], items[j] = items[j], items[i]
        return items

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different positions of `items`, in random order (rejection: count is small beside len(items))."""
        chosen: list[int] = []
        while len(chosen) < count:
            index = int(self._random() * len(items))
            if index not in chosen:
                chosen.append(index)
        return [items[i] for i in chosen]
