"""Measures the largest activations each expert sees on given texts, for NVFP4 input scales."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.errors import CheckpointError
from moe_kernels.formats import dequantize, open_checkpoint
from moe_kernels.formats.calibration import InputScales
from moe_kernels.records import ExpertWeights

log = logging.getLogger(__name__)

TEXT_FIELDS = ("text", "prompt", "question")


def calibrate(
    path: str | Path, texts: Iterable[str], *, max_texts: int = 64, max_tokens: int = 512, device: str = "cpu"
) -> InputScales:
    """Run `bf16/reference` over the first `max_texts` texts (each cut to `max_tokens` tokens).

    amax of gate/up: largest |hidden| among the tokens routed to an expert; of down: largest |silu(gate) * up|,
    with weights dequantised to FP32. One text at a time. Needs a tokenizer in the checkpoint folder.
    """
    from transformers import AutoTokenizer

    from moe_kernels.hf import capture_moe_inputs, load_model

    checkpoint = open_checkpoint(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' has no tokenizer, which --calibrate needs ({error})") from None
    loaded = load_model(path, "bf16/reference", device=device)
    e = checkpoint.shape.num_experts
    amax = {layer: (torch.zeros(e), torch.zeros(e)) for layer in checkpoint.moe_layers}
    seen = 0
    for text in texts:
        if seen == max_texts:
            break
        ids = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt").input_ids
        if ids.numel() == 0:
            continue
        with torch.no_grad(), capture_moe_inputs(loaded.model) as inputs:
            loaded.model(ids.to(device))
        for layer, (hidden, logits) in inputs.items():
            chosen = loaded.model.model.layers[layer].mlp.layer.route(logits).ids
            _update(amax[layer], hidden.float(), chosen, checkpoint.experts(layer))
        seen += 1
    if not seen:
        raise CheckpointError("no text to calibrate on: give a .jsonl with a 'text', 'prompt' or 'question' field")
    log.info("calibrated on %d texts", seen)
    return InputScales(amax)


def read_texts(path: str | Path) -> Iterator[str]:
    """Texts of a .jsonl file (field `text`, `prompt` or `question`) or the lines of any other file."""
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"calibration texts '{path}' cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            yield line
            continue
        try:
            entry = json.loads(line)
            yield str(next(entry[field] for field in TEXT_FIELDS if field in entry))
        except (ValueError, TypeError, StopIteration):
            fields = ", ".join(TEXT_FIELDS)
            raise CheckpointError(f"'{path}' line {number}: expected a JSON object with one of: {fields}") from None


def _update(amax: tuple[Tensor, Tensor], hidden: Tensor, chosen: Tensor, stored: ExpertWeights) -> None:
    """Raise one layer's maxima by one text's tokens; one expert's weights are dequantised at a time."""
    for expert in torch.unique(chosen).tolist():
        x = hidden[(chosen == expert).any(-1)].cpu()
        one = dequantize(slice_expert(stored, expert), torch.float32)
        gate, up = (x @ one.w13[0].T).chunk(2, dim=-1)
        amax[0][expert] = torch.maximum(amax[0][expert], x.abs().max())
        amax[1][expert] = torch.maximum(amax[1][expert], (F.silu(gate) * up).abs().max())


def slice_expert(record: ExpertWeights, expert: int) -> ExpertWeights:
    """A record of one expert, sharing memory."""
    tensors: dict[str, Any] = {k: v[expert : expert + 1] for k, v in vars(record).items() if isinstance(v, Tensor)}
    return replace(record, **tensors)
