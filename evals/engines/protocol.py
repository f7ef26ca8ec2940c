"""The protocol that variant files expect, where the command line says nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from evals.engines.load import EngineVariant
from evals.errors import UsageError

FIELDS = ("endpoint", "shots", "max_tokens", "concurrency", "chat_template_kwargs")


def _wanted(variants: Sequence[EngineVariant], name: str) -> Any:
    """The value all files agree on, or None."""
    found = [(v.path, getattr(v.protocol, name)) for v in variants if getattr(v.protocol, name) not in (None, {})]
    for path, value in found[1:]:
        if value != found[0][1]:
            raise UsageError(
                f"{found[0][0]} expects {name} {found[0][1]}, {path} expects {value}; give it on the command line"
            )
    return found[0][1] if found else None


def apply(options: argparse.Namespace, variants: Sequence[EngineVariant]) -> Iterator[str]:
    """Fill in `options` from the files; yields a sentence for everything that differs from what they expect."""
    for name in FIELDS:
        given = getattr(options, name)
        if given is not None:
            try:
                wanted = _wanted(variants, name)
            except UsageError:
                continue  # the command line decides
            said = json.loads(given) if name == "chat_template_kwargs" else given
            # a larger budget than expected cannot cut answers
            if wanted is not None and said != wanted and not (name == "max_tokens" and said > wanted):
                yield f"note: {name} is {said}; {variants[0].path} expects {wanted}, published figures do not apply"
            continue
        wanted = _wanted(variants, name)
        if wanted is None or (name == "chat_template_kwargs" and options.endpoint != "chat"):
            continue
        setattr(options, name, json.dumps(wanted) if name == "chat_template_kwargs" else wanted)
