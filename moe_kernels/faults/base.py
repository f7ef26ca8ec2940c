"""What a fault is, the list of them, and switching one on in a loaded model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from moe_kernels import registry
from moe_kernels.capture import moe_blocks
from moe_kernels.errors import VariantError
from moe_kernels.records import ExpertWeights

_MODULES = ("routing", "weights", "activations", "kernel", "model")
_FAULTS: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """One fault; exactly one of the hooks does the work.

    `layer` is a class mixed in front of the emulated layer's, `record` changes the weights a layer is built from,
    `shared` wraps the addition of the
    shared experts (original, routed, hidden), `model` is a context manager over the whole model, `engine` names a
    fault that the service's engine implements itself. `row` is the line of the fault catalogue
    (docs/faults.md), `source` its public report. `formats`: variants on which it exists.
    """

    name: str
    source: str
    summary: str
    row: int | None = None
    harmful: bool = True
    formats: tuple[str, ...] = ("fp8", "nvfp4")
    layer: type | None = None
    record: Callable[[ExpertWeights], ExpertWeights] | None = None
    shared: Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor] | None = None
    model: Callable[[Any], Any] | None = None
    engine: str | None = None
    expected: tuple[str, ...] = field(default=())  # layers of evidence that ought to see it


def register(new: Fault) -> Fault:
    """Add a fault to the list."""
    if new.name in _FAULTS:
        raise VariantError(f"fault '{new.name}' is registered twice")
    _FAULTS[new.name] = new
    return new


def all_faults() -> tuple[Fault, ...]:
    """Every fault, in the catalogue's order."""
    for name in _MODULES:
        importlib.import_module(f"moe_kernels.faults.{name}")
    return tuple(_FAULTS.values())


def fault(name: str) -> Fault:
    """A fault by name."""
    known = {f.name: f for f in all_faults()}
    if name not in known:
        raise VariantError(f"unknown fault '{name}'; known: {', '.join(known)}")
    return known[name]


@contextmanager
def inject(loaded: Any, name: str) -> Iterator[Fault]:
    """Switch a fault on in a `LoadedModel` running an emulated variant; leaving the context removes it.

    Faults with an `engine` hook change nothing here: the engine of the service acts on their name.
    """
    chosen = fault(name)
    if loaded.variant.backend != "emulated" or loaded.variant.format not in chosen.formats:
        wanted = " or ".join(f"{f}/emulated" for f in chosen.formats)
        raise VariantError(f"fault '{name}' exists on {wanted}, not on '{loaded.variant}'")
    with ExitStack() as stack:
        blocks: dict[int, Any] = dict(moe_blocks(loaded.model))
        if chosen.model is not None:
            stack.enter_context(chosen.model(loaded.model))
        for index, block in blocks.items():
            if chosen.record is not None:
                stack.callback(setattr, block, "layer", block.layer)
                record = chosen.record(loaded.checkpoint.experts(index).to(loaded.device))
                make = registry.layer_class(loaded.variant)
                block.layer = make(
                    record, loaded.checkpoint.routing, block.gate.e_score_correction_bias, loaded.variant
                )
            if chosen.layer is not None:
                stack.callback(setattr, block, "layer", block.layer)
                block.layer = _copy_with(block.layer, chosen.layer)
            if chosen.shared is not None:  # an instance attribute shadows the module's method
                stack.callback(block.__dict__.pop, "add_shared")
                block.__dict__["add_shared"] = partial(chosen.shared, block.add_shared)
        yield chosen


def _copy_with(layer: Any, mixin: type) -> Any:
    """A layer that shares all tensors and has `mixin` in front of its class."""
    cls = type(f"{mixin.__name__}{type(layer).__name__}", (mixin, type(layer)), {})
    copy: Any = object.__new__(cls)
    copy.__dict__.update(layer.__dict__)
    return copy
