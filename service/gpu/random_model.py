"""A random model of a given config.json, built layer by layer on the device: quantised, seeded, no checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_kernels import registry
from moe_kernels.bench import BenchShape, random_record
from moe_kernels.errors import CheckpointError, FormatError, VariantError
from moe_kernels.formats.architectures import find_architecture
from moe_kernels.ops import Bf16Linear, Fp8Linear
from moe_kernels.quant.fp8 import E4M3
from moe_kernels.records import FP8_BLOCK
from moe_kernels.registry import VariantSpec
from service.gpu import MODEL_TYPES
from service.gpu.weights import LayerWeights, Linear, ModelWeights

BIAS_RANGE = (6.82, 7.06)  # of GLM-5.2's e_score_correction_bias
ROUTER_SPREAD = 1.0  # standard deviation of router logits of a normalised row: tokens then choose on their own


@dataclass(frozen=True)
class RandomModel:
    """What the engine and the fingerprint ask of a loaded model; there is no checkpoint behind it."""

    weights: ModelWeights
    model: Any
    path: Path
    variant: VariantSpec
    resolved: dict[int, str]
    format: str
    weights_sha256: str  # "random:SEED:...": the recipe, which the weights follow from on one kind of device

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.weights.config


def read_config(path: Path, num_layers: int | None = None) -> tuple[Any, dict[str, Any]]:
    """(transformers config, raw fields) of a config.json or a folder that holds one."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"--model {path}: cannot read {file}: {error}") from None
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise FormatError(f"{file}: random weights are built for {', '.join(MODEL_TYPES)} only, not '{kind}'")
    if num_layers is not None:
        raw["num_hidden_layers"] = num_layers
    left_out = ("quantization_config", "compression_config", "auto_map", "model_type")
    return AutoConfig.for_model(kind, **{k: v for k, v in raw.items() if k not in left_out}), raw


def build(
    path: str | Path, variant: str, *, seed: int = 0, device: torch.device | str = "cpu",
    attention_dtype: str = "bf16", num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> RandomModel:
    """Random weights with the spread of trained ones (standard deviation 1/sqrt(K) everywhere).

    Routed experts are in the variant's format. With an FP8 variant, dense MLP and shared experts are block FP8 too, and
    so are the attention projections with `attention_dtype="fp8"`; embedding, output head and router stay BF16, BF16
    and FP32. The router's bias is uniform in BIAS_RANGE. Nothing but one matrix is ever held unquantised, so the model
    takes the memory of its weights. Raises VariantError, FormatError, CheckpointError.
    """
    path, where = Path(path), torch.device(device)
    config, raw = read_config(path, num_layers)
    spec = registry.parse(variant)
    architecture = find_architecture(raw)
    shape, routing = architecture.shape(raw), architecture.routing(raw)
    support = registry.supports(spec, where, shape)
    if not support.ok:
        nearest = f"; the nearest that runs: {support.nearest}" if support.nearest else ""
        raise VariantError(f"variant '{spec}' cannot run here: {support.reason}{nearest}")
    fmt = registry.info(spec.base).weight_format
    if attention_dtype not in ("bf16", "fp8"):
        raise VariantError(f"--attention-dtype {attention_dtype} must be bf16 or fp8")
    make = registry.layer_class(spec)
    sizes = BenchShape("random", shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
                       routing.routed_scaling_factor)
    new = _Maker(where, dtype, seed)
    attention_fp8, dense_fp8 = attention_dtype == "fp8", fmt == "fp8"
    hidden, head_dim = config.hidden_size, getattr(config, "head_dim", None) or 128
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    moe_layers = set(architecture.moe_layers(raw))
    layers = []
    for index in range(config.num_hidden_layers):
        width = config.intermediate_size
        router, moe = None, None
        if index in moe_layers:
            width = config.moe_intermediate_size * config.n_shared_experts
            router = new.normal(shape.num_experts, hidden, scale=ROUTER_SPREAD * hidden**-0.5)
            bias = new.uniform(shape.num_experts, *BIAS_RANGE)
            record = random_record(sizes, fmt, where, seed=seed * 100_003 + index)
            moe = make(record, routing, bias, spec)
            del record
        norms = [new.norm(head_dim) if config.use_qk_norm else None for _ in range(2)]
        layers.append(LayerWeights(
            index, new.norm(hidden),
            new.linear((heads + 2 * kv_heads) * head_dim, hidden, fp8=attention_fp8, bias=config.attention_bias),
            new.linear(hidden, heads * head_dim, fp8=attention_fp8), norms[0], norms[1], new.norm(hidden),
            new.linear(2 * width, hidden, fp8=dense_fp8), new.linear(hidden, width, fp8=dense_fp8), router, moe,
        ))
    weights = ModelWeights(
        config, layers, new.normal(config.vocab_size, hidden, scale=1.0).to(dtype), new.norm(hidden),
        new.linear(config.vocab_size, hidden, fp8=False), _rotary(config, where), heads, kv_heads, head_dim,
        {"attention": attention_dtype, "dense": "fp8" if dense_fp8 else "bf16",
         "shared": "fp8" if dense_fp8 else "bf16", "head": "bf16"},
    )
    resolved = {layer.index: layer.moe.resolved() for layer in layers if layer.moe is not None}
    model = SimpleNamespace(config=config, generation_config=None)
    recipe = f"random:{seed}:{attention_dtype}:{config.num_hidden_layers}:{where.type}"
    return RandomModel(weights, model, path, spec, resolved, fmt, recipe)


def _rotary(config: Any, device: torch.device) -> Any:
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    return Glm4MoeRotaryEmbedding(config=config).to(device)


class _Maker:
    """Draws tensors on the device from one seeded generator."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, scale: float) -> Tensor:
        """FP32."""
        return torch.randn(*size, generator=self.generator, device=self.device).mul_(scale)

    def uniform(self, count: int, low: float, high: float) -> Tensor:
        """FP32."""
        return torch.rand(count, generator=self.generator, device=self.device).mul_(high - low).add_(low)

    def norm(self, size: int) -> Tensor:
        """A norm's weight near one."""
        return self.normal(size, scale=0.1).add_(1).to(self.dtype)

    def linear(self, rows: int, columns: int, *, fp8: bool, bias: bool = False) -> Linear:
        """Weight [rows, columns] in the model's dtype or block FP8."""
        offset = self.normal(rows, scale=0.1).to(self.dtype) if bias else None
        if not fp8:
            return Bf16Linear(self.normal(rows, columns, scale=columns**-0.5).to(self.dtype), offset)
        if columns % FP8_BLOCK:
            raise FormatError(f"block FP8 needs rows of a multiple of {FP8_BLOCK} columns, this layer has {columns}: "
                              "change intermediate_size (GLM-4.5-Air's 10944 becomes 11008) or use a BF16 variant")
        q = self.normal(rows, columns, scale=100.0).clamp_(-448, 448).to(E4M3)
        blocks = self.uniform(-(-rows // FP8_BLOCK) * (columns // FP8_BLOCK), 0.5, 1.5)
        scale = blocks.view(-(-rows // FP8_BLOCK), -1) / 100 * columns**-0.5
        return Fp8Linear(q, scale, offset)
