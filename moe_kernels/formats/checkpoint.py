"""A checkpoint folder opened for reading: checked by names and shapes at once, its data read layer by layer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.architectures import Architecture, find_architecture
from moe_kernels.formats.encodings import Encoding
from moe_kernels.formats.experts import canonical, check_finite, check_scale, read_experts
from moe_kernels.formats.files import ShardReader, TensorInfo, read_json, read_tensor_table
from moe_kernels.formats.layout import Layout, StoredModule, expert_modules, match
from moe_kernels.formats.markers import QuantScheme, declared_scheme
from moe_kernels.paths import cache_dir
from moe_kernels.quant import codec
from moe_kernels.records import ExpertWeights, MoEShape, RoutingConfig, WeightFormat

log = logging.getLogger(__name__)


class Checkpoint:
    """An opened checkpoint; made by `open_checkpoint`. Tensors it returns are copies that it keeps no hold of.

    `config` is config.json untouched. `format` is the routed experts' weight format; other linears may be
    quantised the same way, and `tensor` dequantises them.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], architecture: Architecture, scheme: QuantScheme, layout: Layout
    ) -> None:
        self.path = path
        self.config = config
        self.architecture = architecture
        self.scheme = scheme
        self.layout = layout
        self.model_type: str = config["model_type"]
        self.format: WeightFormat = layout.format
        self.shape: MoEShape = architecture.shape(config)
        self.routing: RoutingConfig = architecture.routing(config)
        self.moe_layers: tuple[int, ...] = architecture.moe_layers(config)
        self.num_layers: int = architecture.sizes(config)["layers"]
        self._reader = ShardReader()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.model_type}, {self.scheme.label}, experts {self.format})"

    @property
    def expert_encoding(self) -> Encoding | None:
        """How the routed experts are stored; None: BF16."""
        return self.layout.experts[self.moe_layers[0]][0]["gate_proj"].encoding

    def tensor_names(self) -> Iterable[str]:
        """Names of all tensors but the routed experts' and the MTP layers' (scales belong to their weight)."""
        return self.layout.modules.keys()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of `tensor_names()`; dequantised (FP32 product, rounded once, BF16 by default) if quantised.

        An unquantised tensor keeps its stored dtype unless `dtype` is given. NaN or infinity: CheckpointError.
        """
        stored = self.layout.modules.get(name)
        if stored is None:
            raise CheckpointError(f"'{name}' is no tensor outside the routed experts; see tensor_names()")
        return self._read_module(stored, dtype)

    def parts(self, name: str) -> dict[str, Tensor]:
        """The stored tensors of a quantised weight in the record's terms: weight, scale, scale_2, input_scale."""
        return self._read_parts(self.layout.modules[name])

    def experts(self, layer: int) -> ExpertWeights:
        """The routed experts of one MoE layer, as stored; peak extra memory is one expert's tensor."""
        return read_experts(self._reader, self._experts(layer), swiglu_limit(self.config))

    def router(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Router weight FP32 [E, H] and selection bias FP32 [E] (None for routers without one)."""
        self._experts(layer)
        weight = self.tensor(self.architecture.router_weight.format(layer=layer), torch.float32)
        if self.architecture.router_bias is None:
            return weight, None
        return weight, self.tensor(self.architecture.router_bias.format(layer=layer), torch.float32)

    def expert_tensors(self, layer: int) -> list[dict[str, StoredModule]]:
        """Stored tensors of one layer's experts, [expert][projection], for tools that look at files."""
        return self._experts(layer)

    def read(self, info: TensorInfo) -> Tensor:
        """A copy of one stored tensor as it is, unchecked: for copying files."""
        return self._reader.read(info).clone()

    def tensor_table(self) -> list[TensorInfo]:
        """Every stored tensor: name, dtype, shape, file and bytes; MTP and ignored ones included."""
        modules = [*self.layout.modules.values(), *expert_modules(self.layout)]
        return [i for m in modules for i in m.parts.values()] + self.layout.mtp + self.layout.ignored

    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted({info.file for info in self.tensor_table()})

    def sha256(self) -> str:
        """Hash of the weights: of the file if there is one, else of the lines `sha256  name` of all shards.

        So `sha256sum model.safetensors` or `sha256sum *.safetensors | sha256sum` gives the same. Kept per file,
        size and modification time in the cache folder.
        """
        files = self.files()
        if len(files) == 1:
            return file_sha256(files[0])
        lines = "".join(f"{file_sha256(f)}  {f.name}\n" for f in files)
        return hashlib.sha256(lines.encode()).hexdigest()

    def close(self) -> None:
        """Unmap the open shard (it is opened again when needed)."""
        self._reader.close()

    def _experts(self, layer: int) -> list[dict[str, StoredModule]]:
        try:
            return self.layout.experts[layer]
        except KeyError:
            known = f"{self.moe_layers[0]} to {self.moe_layers[-1]}"
            raise CheckpointError(f"layer {layer} has no routed experts; MoE layers are {known}") from None

    def _read_module(self, stored: StoredModule, dtype: torch.dtype | None) -> Tensor:
        read = self._read_parts(stored)
        if stored.encoding is None:
            return read["weight"].to(dtype or read["weight"].dtype, copy=True)
        return codec.decode(stored.format, read["weight"], read["scale"], read.get("scale_2"), dtype or torch.bfloat16)

    def _read_parts(self, stored: StoredModule) -> dict[str, Tensor]:
        """Views of the mapped file (or copies): checked, scales in the record's shape, scalars 0-d."""
        parts = {info.name: part for part, info in stored.parts.items()}
        read = {}
        for info, tensor in self._reader.read_many(stored.parts.values()):
            part = parts[info.name]
            (check_finite if part == "weight" else check_scale)(info.name, tensor)
            tensor = canonical(stored, part, tensor)
            if part == "scale" and stored.encoding is not None:
                tensor = tensor.view(stored.encoding.scale_shapes(*stored.shape)[0])
            read[part] = tensor.reshape(()) if part in ("scale_2", "input_scale") else tensor
        return read


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face checkpoint folder; reads config.json, hf_quant_config.json, index and headers, no data.

    Raises CheckpointError for anything missing, extra, mis-shaped, mis-typed or truncated, and FormatError for a
    quantisation format that is not supported, with the remedy.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise CheckpointError(f"checkpoint '{path}' does not exist; give the folder of a downloaded model")
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint '{path}' is a file; give the folder that holds config.json")
    config = read_json(folder / "config.json")
    architecture = find_architecture(config)
    modelopt = folder / "hf_quant_config.json"
    scheme = declared_scheme(config, read_json(modelopt) if modelopt.exists() else None)
    layout = match(read_tensor_table(folder), config, architecture, scheme)
    if layout.mtp:
        log.info("%s: skipped %d tensors of MTP layers", folder, len(layout.mtp))
    if layout.ignored:
        log.info("%s: ignored %d tensors such as %s", folder, len(layout.ignored), layout.ignored[0].name)
    return Checkpoint(folder, config, architecture, scheme, layout)


def swiglu_limit(config: Mapping[str, Any]) -> float | None:
    """The config's clamp of SwiGLU (GLM-5.3-Flash: 10.0), None where it has none."""
    limit = config.get("swiglu_limit")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise CheckpointError(f"config.json: swiglu_limit must be a positive number, got {limit!r}")
    return float(limit)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered in the cache folder as long as size and modification time stay the same."""
    stat = path.stat()
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    note = cache_dir() / "sha256" / f"{key}.json"
    state = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        known = json.loads(note.read_text())
        if {k: known.get(k) for k in state} == state:
            return known["sha256"]
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # not seen before, or the note is damaged: compute
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**state, "sha256": digest}))
        temporary.replace(note)
    except OSError as error:
        log.debug("cannot keep the hash of %s: %s", path, error)
    return digest
