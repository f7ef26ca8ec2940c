"""`input_scale` of NVFP4 and per-tensor FP8: from the largest activations seen in a calibration run, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats.checkpoint import Checkpoint
from moe_kernels.quant import fp8, nvfp4
from moe_kernels.records import ExpertWeights, WeightFormat

# Without calibration: hidden states up to 6 * 448 / 4 = 672 and intermediates up to 2,688 do not saturate, while
# groups whose amax is above 0.023 and 0.094 still get block scales of full precision (E4M3 normal numbers). Room
# above matters more than resolution below: on the mini checkpoint (intermediates up to 546, 24 problems, FP32) the
# KL to BF16 is 1.5e-4 with these, 1.6e-4 calibrated on 32 problems, 2.0e-4 when 2^-4 cuts intermediates at 168.
DEFAULT_INPUT_SCALE = 2.0**-2
DEFAULT_INTERMEDIATE_SCALE = 1.0
# Per-tensor FP8 without calibration: room up to 896 and 3,584; E4M3 keeps 3 bits down to 2^-6 of the scale.
DEFAULT_FP8_INPUT_SCALE = 2.0
DEFAULT_FP8_INTERMEDIATE_SCALE = 8.0


@dataclass(frozen=True)
class InputScales:
    """Largest absolute inputs per MoE layer: `amax[layer] = (of gate and up [E], of down [E])`, FP32.

    Stored in a safetensors file as `model.layers.{layer}.mlp.experts.w13_input_amax` and `.w2_input_amax`.
    An expert that no token reached (amax 0) takes the largest of its layer.
    """

    amax: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None, source: Checkpoint) -> InputScales:
        """Read and check a calibration file for `source`; no path means the default scale everywhere."""
        if path is None:
            return cls()
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"calibration file '{path}' cannot be read ({error}); run --calibrate") from None
        amax = {}
        for layer in source.moe_layers:
            pair = []
            for part in ("w13", "w2"):
                name = _name(layer, part)
                value = stored.pop(name, None)
                if value is None or tuple(value.shape) != (source.shape.num_experts,):
                    found = "no tensor" if value is None else f"shape {list(value.shape)}"
                    raise CheckpointError(
                        f"calibration file '{path}': '{name}' must have shape [{source.shape.num_experts}], found "
                        f"{found}; it belongs to another model"
                    )
                value = value.float()
                if not bool(torch.isfinite(value).all()) or float(value.min()) < 0:
                    raise CheckpointError(f"calibration file '{path}': '{name}' must be finite and not negative")
                pair.append(value)
            amax[layer] = (pair[0], pair[1])
        if stored:
            raise CheckpointError(f"calibration file '{path}': '{min(stored)}' is not expected in this model")
        return cls(amax)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        tensors = {}
        for layer, (wide, down) in self.amax.items():
            tensors[_name(layer, "w13")], tensors[_name(layer, "w2")] = wide, down
        save_file(tensors, path)

    def apply(self, record: ExpertWeights, layer: int) -> None:
        """Set the record's input scales (NVFP4 and per-tensor FP8; other formats have none).

        Without calibration a record keeps those it has, i.e. those of a checkpoint in the same format.
        """
        if record.format not in ("nvfp4", "fp8_tensor"):
            return
        if layer not in self.amax and record.w13_input_scale is not None:
            return
        e = record.num_experts
        wide, down = (default_scale(record.format, is_down) for is_down in (False, True))
        if layer not in self.amax:
            record.w13_input_scale = torch.full((e, 2), wide)
            record.w2_input_scale = torch.full((e,), down)
            return
        scales = _scales(record.format, self.amax[layer][0], wide)
        record.w13_input_scale = scales.unsqueeze(-1).expand(e, 2).contiguous()
        record.w2_input_scale = _scales(record.format, self.amax[layer][1], down)


def default_scale(format: WeightFormat, down: bool) -> float:
    """The input scale of an uncalibrated module; `down` for down projections, whose inputs are wider."""
    if format == "fp8_tensor":
        return DEFAULT_FP8_INTERMEDIATE_SCALE if down else DEFAULT_FP8_INPUT_SCALE
    return DEFAULT_INTERMEDIATE_SCALE if down else DEFAULT_INPUT_SCALE


def _scales(format: WeightFormat, amax: Tensor, default: float) -> Tensor:
    largest = amax.max()
    if float(largest) == 0:
        return torch.full_like(amax, default)
    filled = torch.where(amax > 0, amax, largest)
    return nvfp4.scale_from_amax(filled) if format == "nvfp4" else filled / fp8.E4M3_MAX


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{part}_input_amax"
