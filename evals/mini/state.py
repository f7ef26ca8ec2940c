"""Training state in files of at most 16 MiB, 64 MiB together, from which a run continues exactly.

The FP32 state of the shipped model (weights, Muon momentum, Adam moments) is about 160 MB. It is therefore stored
compactly (Muon weights BF16, Muon momentum E4M3 with a scale a row, the rest FP32), and a run that saves goes on from
what it stored, so that the run that continues elsewhere and the run that never stopped are the same run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from evals.mini.network import MiniNetwork
from evals.mini.optimizer import MuonAdamW

PART_BYTES = 15 * 2**20
E4M3_MAX = 448.0


class StateError(RuntimeError):
    """A state folder that is damaged or belongs to another run."""


def _to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def pack(network: MiniNetwork, optimizer: MuonAdamW) -> dict[str, Tensor]:
    """The whole state as named CPU tensors."""
    tensors: dict[str, Tensor] = {"biases": network.biases}
    for name in optimizer.muon:
        tensors[f"weight.{name}"] = optimizer.parameters[name].detach().to(torch.bfloat16)
        tensors[f"momentum.{name}"], tensors[f"scale.{name}"] = _to_e4m3(optimizer.momentum[name])
    for name in optimizer.adam:
        tensors[f"weight.{name}"] = optimizer.parameters[name].detach()
        tensors[f"first.{name}"], tensors[f"second.{name}"] = optimizer.first[name], optimizer.second[name]
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def unpack(tensors: dict[str, Tensor], network: MiniNetwork, optimizer: MuonAdamW) -> None:
    """Set network and optimizer to a packed state."""
    network.biases.copy_(tensors["biases"])
    for name in optimizer.muon:
        optimizer.parameters[name].copy_(tensors[f"weight.{name}"].float())
        optimizer.momentum[name].copy_(tensors[f"momentum.{name}"].float() * tensors[f"scale.{name}"])
    for name in optimizer.adam:
        optimizer.parameters[name].copy_(tensors[f"weight.{name}"])
        optimizer.first[name].copy_(tensors[f"first.{name}"])
        optimizer.second[name].copy_(tensors[f"second.{name}"])


def write(folder: Path, network: MiniNetwork, optimizer: MuonAdamW, meta: dict[str, Any]) -> None:
    """Write the state and continue from what was written; `meta` (step, seed, plan) goes into state.json."""
    tensors = pack(network, optimizer)
    data = save(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
    for index, part in enumerate(parts):
        (folder / f"state-{index}.part").write_bytes(part)
    meta = meta | {"parts": len(parts), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "state.json").write_text(json.dumps(meta, indent=1) + "\n")
    unpack(tensors, network, optimizer)


def read(folder: Path, network: MiniNetwork, optimizer: MuonAdamW, expected: dict[str, Any]) -> dict[str, Any]:
    """Read a state written by `write`; raises StateError when damaged or when `expected` keys of the plan differ."""
    if not (folder / "state.json").is_file():
        raise StateError(f"{folder} holds no state.json")
    meta: dict[str, Any] = json.loads((folder / "state.json").read_text())
    different = [k for k, v in expected.items() if meta.get(k) != v]
    if different:
        raise StateError(f"{folder} was saved by a run with other settings: {', '.join(different)}")
    data = b"".join((folder / f"state-{i}.part").read_bytes() for i in range(meta["parts"]))
    if hashlib.sha256(data).hexdigest() != meta["sha256"]:
        raise StateError(f"{folder}: the parts do not hash to what state.json says; copy them again")
    unpack(load(data), network, optimizer)
    return meta
