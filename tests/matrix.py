"""One cell of the family matrix: a model type in a stored layout under a variant, run and held against oracles.

A cell works if all of these hold:
* what the loader read of every expert lies within the format's rounding error (`READ`) of the BF16 original, decoded by
  table (tests/parity/slow_formats.py), not by our codec;
* `*/reference`: the engine's log-probabilities (prompt in chunks, then token by token, FP32) are those of one
  forward of stock transformers that was given the decoded weights, to `EXACT`;
* other variants: each MoE layer's output on the inputs it really saw is the slow emulation's, token by token, to
  `LAYER` (tokens whose intermediate lies within `TIE` of a rounding tie are left out), and the engine's
  log-probabilities are those of one forward of the same model, to `ENGINE` (a value that two orders of summation put
  on both sides of a rounding tie moves them: up to 1.5e-2 seen).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_kernels import hf, registry
from moe_kernels.convert import conversion
from moe_kernels.errors import MoeParityError
from moe_kernels.formats import Checkpoint, open_checkpoint
from moe_kernels.formats.targets import TARGETS
from moe_kernels.quantize import quantize
from moe_kernels.records import ExpertWeights
from moe_kernels.registry import VariantInfo
from tests import family
from tests.parity import slow_emulation, slow_formats
from tests.service.engine_tools import GREEDY, Running, generate, prompts_of

READ = {"bf16": 0.0, "fp8": 0.04, "fp8_channel": 0.04, "fp8_tensor": 0.04, "mxfp8": 0.05, "nvfp4": 0.13, "mxfp4": 0.17}
EXACT, LAYER, TIE, ENGINE = 3e-5, 1e-5, 5e-6, 5e-2
ACTIVATIONS = {"mxfp8": "mxfp8", "mxfp4": "mxfp8", "fp8_channel": "token", "fp8_tensor": "static", "nvfp4": "nvfp4"}
LENGTHS, NEW = [33, 5], 3
REFUSED_MODELS = ("glm5_next", "glm4v_moe", "deepseek_v32")  # published MoE types without support, refused by name
LAYOUTS = ("bf16", *TARGETS, "int4_ct")


@dataclass(frozen=True)
class Cell:
    """One row of benchmarks/results/family.json; `format` is a layout that `moe-kernels quantize` writes."""

    model: str
    format: str
    variant: str
    status: str  # works | refused | not_yet
    reason: str


@dataclass
class Bench:
    """Checkpoints of one run in `root`, made when first asked for."""

    root: Path
    device: str = "cpu"
    stock: dict[str, Any] = field(default_factory=dict)

    def plain(self, model: str) -> Path:
        """The BF16 original: sizes that every kernel takes (multiples of 128), ragged ones have tests of their own."""
        path = self.root / model / "bf16"
        if not path.exists():
            more: dict[str, Any] = {}
            if model == "glm_moe_dsa":
                more = dict(num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"])
            family.tiny(model, path, seed=3, hidden_size=128, moe_intermediate_size=128, intermediate_size=128, **more)
        return path

    def folder(self, model: str, layout: str) -> Path:
        """The original in a layout."""
        path = self.root / model / layout
        if layout == "bf16":
            return self.plain(model)
        if not path.exists():
            if layout == "int4_ct":
                return _int4(self.plain(model), path)
            quantize(self.plain(model), path, layout)
        return path

    def oracle(self, model: str) -> Any:
        """Stock transformers, to be given weights."""
        if model not in self.stock:
            self.stock[model] = family.stock(self.plain(model))
        return self.stock[model]


def _int4(plain: Path, path: Path) -> Path:
    """A checkpoint that declares compressed-tensors' W4A16 integers; refused before any tensor is looked at."""
    path.mkdir(parents=True)
    config = json.loads((plain / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    return path


def cells() -> Iterator[tuple[str, str, str]]:
    """Model, layout, variant of every cell."""
    for model in (*family.MODEL_TYPES, *REFUSED_MODELS):
        for layout in LAYOUTS:
            for name in registry.names():
                yield model, layout, name


def evaluate(bench: Bench, model: str, layout: str, variant: str) -> Cell:
    """Run one cell; an AssertionError means that it ran and is wrong."""
    cell = (model, layout, variant)
    if model in REFUSED_MODELS:
        return Cell(*cell, "refused", _refusal_of(bench, model))
    try:
        source = open_checkpoint(bench.folder(model, layout))
    except MoeParityError as error:
        return Cell(*cell, "refused", _short(error))
    info = registry.info(variant)
    reason = conversion(source.format, info.weight_format) if info.name != "bf16/reference" else None
    if reason is not None:
        return Cell(*cell, "refused", reason.split(";")[0])
    if needs_gpu(info) and bench.device == "cpu":
        return Cell(*cell, *_without_gpu(info, source))
    try:
        loaded = hf.load_model(source.path, variant, dtype=torch.float32, device=bench.device)
    except MoeParityError as error:
        return Cell(*cell, "refused", _short(error))
    said = check(bench, model, loaded, source)
    return Cell(*cell, "works", said)


def needs_gpu(info: VariantInfo) -> bool:
    """Whether a variant has no CPU path."""
    return info.min_sm is not None


def _without_gpu(info: VariantInfo, source: Checkpoint) -> tuple[str, str]:
    """Refused if the kernel does not do what the model asks for, else not run."""
    from moe_kernels.variants.triton_fp8 import check_common, common_support

    routing = source.routing
    if routing.scoring != "sigmoid":
        return "refused", f"the kernel routes with sigmoid scores, the model uses {routing.scoring}; use emulated"
    if "/triton" in info.name:
        check_common(info.name, routing, None)
        support = common_support(source.shape, "")
        if not support.ok:
            return "refused", support.reason
    elif not routing.norm_topk_prob:
        return "refused", "the kernel normalises the weights, the model does not"
    sm = f"SM{info.min_sm}" + (f" to SM{info.max_sm}" if info.max_sm else "+")
    return "not_yet", f"needs a GPU with {sm}; not run in this matrix"


def _refusal_of(bench: Bench, model: str) -> str:
    folder = bench.root / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model, "n_routed_experts": 8}))
    try:
        open_checkpoint(folder)
    except MoeParityError as error:
        return _short(error)
    raise AssertionError(f"{model} was not refused")


def _short(error: Exception) -> str:
    return " ".join(str(error).split()).split(" (and ")[0].split("; supported")[0].split("; docs/")[0]


# ---- oracles


def decoded(record: ExpertWeights, which: str, expert: int) -> np.ndarray:
    """FP64 [N, K] of an expert's matrix as stored, by table."""
    if record.format == "bf16":
        return getattr(record, which)[expert].double().numpy()
    if record.format != "fp8":
        return slow_formats.matrix(record, which, expert)
    codes = getattr(record, which)[expert].view(torch.uint8).numpy()
    values = np.where(codes & 128, -1.0, 1.0) * np.append(slow_emulation.E4M3, np.nan)[codes & 127]
    scale = getattr(record, f"{which}_scale")[expert].double().numpy()
    halves = 2 if which == "w13" else 1  # gate and up have block rows of their own
    out = [
        v * np.repeat(np.repeat(s, 128, 0), 128, 1)[: v.shape[0], : v.shape[1]]
        for v, s in zip(np.split(values, halves), np.split(scale, halves), strict=True)
    ]
    return np.concatenate(out)


@cache
def _original(path: Path, layer: int) -> ExpertWeights:
    return open_checkpoint(path).experts(layer)


def check(bench: Bench, model: str, loaded: hf.LoadedModel, source: Checkpoint) -> str:
    """All comparisons of the module's docstring; returns what was measured."""
    spec = loaded.variant
    weights, worst = {}, 0.0
    plain = open_checkpoint(bench.plain(model))
    for name in loaded.checkpoint.layout.linears:
        got, want = (c.tensor(name, torch.float32) for c in (loaded.checkpoint, plain))
        assert (got - want).norm() <= READ["fp8_tensor"] * want.norm(), f"'{name}' is not the original"
    for index in loaded.resolved:
        record, original = loaded.checkpoint.experts(index), _original(bench.plain(model), index)
        for e in range(record.num_experts):
            for which in ("w13", "w2"):
                weights[index, which, e] = read = decoded(record, which, e)
                was = getattr(original, which)[e].double().numpy()
                for ours, theirs in zip(np.split(read, 2), np.split(was, 2), strict=True):  # gate and up apart
                    worst = max(worst, float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)))
    # quantised twice: the errors add as independent ones do
    bound = READ[loaded.format] if loaded.format == source.format else math.hypot(
        READ[source.format], READ[loaded.format])
    assert worst <= bound, f"weights differ from the original by {worst:.3f}"
    prompts = prompts_of(LENGTHS, vocab=256, seed=7)
    if spec.backend == "reference":
        oracle = _given(bench, model, loaded, weights, rounded=spec.format == "bf16")
        said, bound = "stock transformers with the decoded weights", EXACT
    else:
        said, bound, oracle = f"layers {_layers(loaded, prompts[0]):.1e}, engine", ENGINE, loaded.model
    rows = [_logprobs(oracle, prompt, bench.device) for prompt in prompts]
    difference = _engine(loaded, prompts, rows, oracle, bench.device)
    assert difference <= bound, f"log-probabilities differ from {said}'s by {difference:.1e}"
    return f"{said}: {difference:.1e}, weights read to {worst:.3f}"


def _given(bench: Bench, model: str, loaded: hf.LoadedModel, weights: dict[Any, np.ndarray], rounded: bool) -> Any:
    """Stock transformers with the decoded experts and the checkpoint's other tensors."""
    stock = bench.oracle(model)
    parameters = dict(stock.named_parameters())
    with torch.no_grad():
        for name in loaded.checkpoint.layout.linears:
            parameters[name].copy_(loaded.checkpoint.tensor(name, torch.float32))
        for (index, which, e), value in weights.items():
            tensor = torch.from_numpy(value).float()
            experts = stock.model.layers[index].mlp.experts
            target = experts.gate_up_proj if which == "w13" else experts.down_proj
            target[e] = tensor.bfloat16().float() if rounded else tensor
    return stock


def _layers(loaded: hf.LoadedModel, prompt: list[int]) -> float:
    """Largest relative error of a token's MoE output against the slow emulation."""
    ids = torch.tensor([prompt[:5]], device=loaded.device)
    with hf.capture_moe_inputs(loaded.model) as inputs, torch.inference_mode():
        loaded.model(ids)
    worst, compared, left_out = 0.0, 0, 0
    for index, (hidden, logits) in inputs.items():
        record = loaded.checkpoint.experts(index)
        with torch.inference_mode():
            out, routing = loaded.model.model.layers[index].mlp.layer.forward(hidden, logits)
        chosen = (hidden.cpu(), routing.ids.cpu(), routing.weights.cpu())
        if record.format == "fp8":
            expected, margin = slow_emulation.layer(record, *chosen)
        else:
            expected, margin = slow_formats.layer(record, *chosen, ACTIVATIONS[record.format])
        error = (out.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        clear = margin > TIE
        compared, left_out = compared + int(clear.sum()), left_out + int((~clear).sum())
        worst = max([worst, *error[clear].tolist()])
    assert compared > left_out, f"{left_out} of {compared + left_out} tokens lie on rounding ties"
    assert worst <= LAYER, f"a layer's output differs from the slow emulation's by {worst:.1e}"
    return worst


def _logprobs(model: Any, ids: list[int], device: str) -> Tensor:
    where = next(model.parameters()).device
    with torch.inference_mode():
        return model(torch.tensor([ids], device=where)).logits[0].float().log_softmax(-1).cpu()


def _engine(loaded: hf.LoadedModel, prompts: list[list[int]], rows: list[Tensor], oracle: Any, device: str) -> float:
    """Largest |log-probability difference| of prompt tokens (against `rows`) and of a greedy answer."""
    with _attention_kept(loaded.model), Running(loaded, max_batch_tokens=16, kv_blocks=16) as engine:
        answers = generate(engine, prompts, max_tokens=NEW, prompt_logprobs=1, ignore_eos=True, **GREEDY)
    worst = 0.0
    for prompt, answer, row in zip(prompts, answers, rows, strict=True):
        for i, entry in enumerate(answer.prompt_logprobs[1:], start=1):
            assert entry is not None
            worst = max(worst, abs(entry.logprob - float(row[i - 1, prompt[i]])))
        after = _logprobs(oracle, prompt + answer.ids, device)
        for i, token in enumerate(answer.tokens):
            worst = max(worst, abs(token.logprob - float(after[len(prompt) - 1 + i, token.token_id])))
    return worst


@contextmanager
def _attention_kept(model: Any) -> Iterator[None]:
    """The engine leads attention to its cache; afterwards the model computes as before."""
    name = model.config._attn_implementation
    modules = [layer.self_attn for layer in model.model.layers]
    try:
        yield
    finally:
        model.set_attn_implementation(name)
        for module in modules:
            module.__dict__.pop("expand_kv", None)
            if getattr(module, "indexer", None) is not None:
                module.indexer.__dict__.pop("forward", None)
