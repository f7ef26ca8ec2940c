"""Reads a variant file: environment filled in, model file merged, everything checked; gives an `EngineVariant`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from evals.client import base_url
from evals.engines.schema import Facts, ModelFile, Parallel, Protocol, VariantFile
from evals.errors import UsageError

_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class EngineVariant:
    """A variant file with its model: all that launching, attestation and the run's protocol need."""

    path: Path
    spec: VariantFile
    model: str
    parallel: Parallel
    protocol: Protocol
    facts: Facts
    served_name: str | None = None
    max_model_len: int | None = None
    gpus: tuple[int, ...] = field(default=())

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.spec.name

    @property
    def kernel(self) -> str | None:
        """The kernel that attestation expects."""
        return self.spec.attest.kernel or self.spec.kernel


def fill_in(text: str, environment: Mapping[str, str], path: Path) -> str:
    """`${NAME}`, `${NAME:-default}` and `${NAME:?why}`, as Compose reads them (an empty variable counts as unset)."""

    def value(match: re.Match[str]) -> str:
        name, how, rest = match.groups()
        found = environment.get(name, "")
        if found:
            return found
        if how == ":-":
            return str(rest)
        reason = rest if how == ":?" else "give it a value"
        raise UsageError(f"{path}: the environment variable {name} is not set: {reason}")

    lines = []
    for line in text.splitlines():  # a comment may speak of variables
        lines.append(line if line.lstrip().startswith("#") else _VARIABLE.sub(value, line))
    return "\n".join(lines)


def _read(path: Path, environment: Mapping[str, str], kind: type[_Model]) -> _Model:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; ready files lie in docker/variants") from None
    try:
        data: Any = yaml.safe_load(fill_in(text, environment, path))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no mapping; see docker/variants for ready files")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{path}: {where + ': ' if where else ''}{message}") from None


def _model_file(name: str, folder: Path) -> Path | None:
    """The model file a name means: a path, or a name beside the variant file."""
    direct = Path(name)
    if direct.suffix in (".yaml", ".yml"):
        return direct
    beside = folder / "models" / f"{name}.yaml"
    return beside if beside.is_file() else None


def _protocol(first: Protocol, second: Protocol) -> Protocol:
    """The first one's values, the second one's where it has none."""
    given = first.model_dump(exclude_none=True)
    if not first.chat_template_kwargs:
        given.pop("chat_template_kwargs", None)
    return Protocol(**(second.model_dump(exclude_none=True) | given))


def _facts(first: Facts, second: Facts) -> Facts:
    return Facts(
        bias=first.bias or second.bias, gsm8k=first.gsm8k or second.gsm8k,
        notes=first.notes + second.notes, sources=first.sources + second.sources,
    )


def load(path: Path, model: str | None = None, environment: Mapping[str, str] | None = None) -> EngineVariant:
    """The variant of a file, for `model` (a folder, a hub name or a model file) where given.

    Raises `UsageError` naming file, key and remedy: no such file, no YAML, an unknown key, an unset variable, a
    format this kernel does not take, or sizes that do not fit the GPUs.
    """
    env = os.environ if environment is None else environment
    spec = _read(path, env, VariantFile)
    if spec.url is not None:
        spec = spec.model_copy(update={"url": base_url(spec.url)})
    name = model or spec.model
    if name is None and spec.url is None:
        raise UsageError(f"{path} names no model; give --model (a folder, a hub name or a file of models/)")
    file = _model_file(name, path.parent) if name else None
    card = _read(file, env, ModelFile) if file else None
    if card and spec.formats and card.format not in spec.formats:
        raise UsageError(
            f"{path}: kernel {spec.kernel} takes {' or '.join(spec.formats)} weights, {file} has {card.format}; "
            "choose another variant file for this model"
        )
    parallel = spec.parallel or (card.parallel if card else Parallel())
    made = EngineVariant(
        path=path, spec=spec, model=card.path if card else name or "", parallel=parallel,
        protocol=_protocol(spec.protocol, card.protocol if card else Protocol()),
        facts=_facts(spec.facts, card.facts if card else Facts()),
        served_name=card.served_name if card else None,
        max_model_len=card.max_model_len if card else None,
        gpus=tuple(spec.gpus or ()),
    )
    _check_sizes(made)
    return made


def _check_sizes(variant: EngineVariant) -> None:
    p, spec = variant.parallel, variant.spec
    if spec.engine == "vllm" and p.expert not in (1, p.tensor * p.data):
        raise UsageError(
            f"{variant.path}: vLLM derives its expert parallel size: {p.tensor * p.data} (tensor x data) or 1, "
            f"not {p.expert}"
        )
    if spec.engine == "sglang" and p.tensor % p.expert:
        raise UsageError(f"{variant.path}: SGLang's expert size {p.expert} must divide its tensor size {p.tensor}")
    # SGLang's data parallel attention lies inside the tensor parallel group; vLLM's replicas are beside each other
    world = p.tensor * p.pipeline * (p.data if spec.engine == "vllm" else 1)
    nodes = spec.nodes.count if spec.nodes else 1
    if variant.gpus and world > len(variant.gpus) * nodes:
        raise UsageError(
            f"{variant.path}: {world} GPUs are needed (tensor {p.tensor} x pipeline {p.pipeline} x data {p.data}), "
            f"gpus names {len(variant.gpus)} on {nodes} node{'s' if nodes > 1 else ''}"
        )
    if world % nodes:
        raise UsageError(f"{variant.path}: {world} GPUs cannot be spread evenly over {nodes} nodes")
