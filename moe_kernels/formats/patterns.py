"""Module patterns of quantisation configs: each producer's own rule for what a name in its lists covers."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Style = Literal["transformers", "modelopt", "compressed", "quark"]

_PLAIN = re.compile(r"[\w.\-]*")


@dataclass(frozen=True)
class Patterns:
    """A list of patterns over module names (full names without `.weight`).

    | style | a plain name covers | others |
    |---|---|---|
    | transformers (format A) | itself and what is below it, wherever between dots (`mlp.gate` is not `mlp.gate_proj`) | regular expressions from the start |
    | modelopt | itself and what is below it | shell wildcards over the whole name |
    | compressed | itself | `re:` regular expressions from the start |
    | quark | itself | `re:` as above, shell wildcards over the whole name |
    """  # noqa: E501

    style: Style
    patterns: tuple[str, ...] = ()

    def match(self, module: str) -> bool:
        """Whether any pattern covers `module`."""
        if self._expression is not None and self._expression.match(module):
            return True
        if self.style in ("compressed", "quark"):
            return module in self._names
        parts = module.split(".")
        starts = range(1 if self.style == "modelopt" else len(parts))
        return any(
            ".".join(parts[start:stop]) in self._names for start in starts for stop in range(start + 1, len(parts) + 1)
        )

    # Lists have thousands of entries and checkpoints tens of thousands of modules: look names up, match the rest once.
    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(p for p in self.patterns if _PLAIN.fullmatch(p))

    @cached_property
    def _expression(self) -> re.Pattern[str] | None:
        found = []
        for pattern in self.patterns:
            expression = self._regular(pattern)
            if expression is None:
                continue
            try:
                re.compile(expression)
            except re.error:
                continue  # names nothing
            found.append(f"(?:{expression})")
        return re.compile("|".join(found)) if found else None

    def _regular(self, pattern: str) -> str | None:
        if self.style in ("compressed", "quark") and pattern.startswith("re:"):
            return pattern.removeprefix("re:")
        if _PLAIN.fullmatch(pattern) or self.style == "compressed":
            return None
        return rf"(?:{pattern})(?:\.|$)" if self.style == "transformers" else fnmatch.translate(pattern)
