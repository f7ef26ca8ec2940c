"""What a checkpoint's config declares: for each module how it is quantised, or that it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.patterns import Patterns
from moe_kernels.records import WeightFormat


@dataclass(frozen=True)
class QuantScheme:
    """Rules for modules, the most specific first: `exact` names, `rules` in order, then `default`.

    A module that `excluded` covers, or that no rule does, is not quantised. `kv_cache` is what the config says of the
    KV cache: noted and otherwise ignored, our caches keep the model's dtype.
    """

    label: str
    default: Encoding | None = None
    exact: Mapping[str, Encoding] = field(default_factory=dict)
    rules: tuple[tuple[Patterns, Encoding], ...] = ()
    exclusions: tuple[Patterns, ...] = ()
    kv_cache: str | None = None

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """Every declared encoding once; the default first."""
        every = [self.default, *self.exact.values(), *(encoding for _, encoding in self.rules)]
        return tuple(dict.fromkeys(e for e in every if e is not None))

    @property
    def format(self) -> WeightFormat:
        """The first declared weight format, "bf16" if there is none; the experts' own is the layout's."""
        return self.encodings[0].format if self.encodings else "bf16"

    @property
    def quantised(self) -> bool:
        """Whether anything is declared to be quantised."""
        return bool(self.encodings)

    @property
    def excluded(self) -> tuple[str, ...]:
        """All exclusion patterns as written."""
        return tuple(pattern for patterns in self.exclusions for pattern in patterns.patterns)

    def excludes(self, module: str) -> bool:
        """Whether the config leaves `module` (a full name without `.weight`) unquantised by name."""
        return any(patterns.match(module) for patterns in self.exclusions)

    def encoding(self, module: str) -> Encoding | None:
        """How `module` is declared to be stored; None: unquantised."""
        if self.excludes(module):
            return None
        found = self.exact.get(module)
        if found is None and self.exact:  # a name also stands for what is below it
            parts = module.split(".")
            found = next((e for n in range(len(parts), 0, -1) if (e := self.exact.get(".".join(parts[:n])))), None)
        if found is None:
            found = next((encoding for patterns, encoding in self.rules if patterns.match(module)), None)
        return found or self.default


UNQUANTISED = QuantScheme("BF16")
