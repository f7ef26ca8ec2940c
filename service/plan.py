"""`service plan`: weights, KV cache per token and what fits on a GPU, from a config alone.

Counts what this service holds: routed experts in their format, everything else in `dtype`, router and correction bias
in FP32, no MTP layers. Memory set aside is what the engine sets aside on a GPU (`service.gpu.memory`), so the tokens
that fit are the KV blocks the engine would make. More than one GPU means tensor parallelism as engines that have it
lay it out (this service itself uses one GPU): weights in equal parts but for what every GPU needs whole, KV heads in
parts down to one head a GPU, latents whole on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, get_args

from moe_kernels.formats.architectures import Architecture, find_architecture
from moe_kernels.formats.rows import Config, Row
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP, WeightFormat
from service.config import ConfigError
from service.gpu import memory
from service.latent import EXPANDED_ELEMENTS

GIB = 2**30
CONTEXT_BYTES = GIB  # CUDA context and loaded kernels: 0.7 and 1.0 GB in two starts of GLM-4.5-Air's shape on an H200
FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


@dataclass(frozen=True)
class Request:
    """What is asked: weights in `format` (`quantised`: "experts", or "linears" with attention, shared and dense)."""

    format: WeightFormat
    quantised: str = "experts"
    gpus: int = 1
    gpu_memory_gib: float = 141.0
    max_model_len: int | None = None
    max_seqs: int = 64
    max_batch_tokens: int = 512
    kv_block: int = 16
    element: int = 2  # bytes of the model's dtype


@dataclass(frozen=True)
class Plan:
    """All bytes; `weights` by part over all GPUs, `*_per_gpu` on the fullest one. `tokens` and `sequences` fit at once.

    `sequences` are of `max_model_len` tokens and at most `max_seqs`; `short_bytes` is what is missing for one block.
    """

    model_type: str
    format: str
    quantised: str
    gpus: int
    parameters: int
    active_parameters: int
    weights: Mapping[str, int]
    weights_bytes: int
    weights_bytes_per_gpu: int
    kv_bytes_per_token: int
    kv_bytes_per_token_per_gpu: int
    gpu_bytes: int
    reserved_bytes: int
    kv_room_bytes: int
    fits: bool
    short_bytes: int
    kv_blocks: int
    tokens: int
    max_model_len: int
    sequences: int
    sequences_of_8192: int

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def matrix_bytes(format: WeightFormat, rows: int, columns: int, element: int = 2) -> int:
    """Bytes of a weight [rows, columns] with its scales as `moe_kernels.records.ExpertWeights` stores them."""
    count = rows * columns
    blocks = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return {
        "bf16": element * count,
        "fp8": count + 4 * blocks,
        "fp8_channel": count + 4 * rows,
        "fp8_tensor": count + 4 + 4,  # its scale and its input's
        "nvfp4": count // 2 + count // NVFP4_GROUP + 4 + 4,
        "mxfp8": count + count // MX_GROUP,
        "mxfp4": count // 2 + count // MX_GROUP,
    }[format]


def make(config: Config, asked: Request) -> Plan:
    """The plan for a config.json; CheckpointError for what is not supported, ConfigError for impossible requests."""
    architecture = find_architecture(config)
    heads, kv_heads = int(config["num_attention_heads"]), _kv_heads(architecture, config)
    if heads % asked.gpus:
        raise ConfigError(f"--gpus {asked.gpus} does not divide the model's {heads} attention heads")
    parts, whole, parameters, idle = _weights(architecture, config, asked)
    total = sum(parts.values())
    per_gpu = whole + -(-(total - whole) // asked.gpus)
    kv_token = architecture.kv_elements(config) * asked.element
    share = max(-(-kv_heads // asked.gpus), 1) / kv_heads if architecture.attention == "gqa" else 1.0
    kv_gpu = round(kv_token * share)

    limit = int(config.get("max_position_embeddings") or 0) or 8192
    length = min(asked.max_model_len or limit, limit)
    gpu = int(asked.gpu_memory_gib * GIB)
    kept = int(memory.KEEP_FRACTION * gpu) + memory.GRAPH_BYTES + CONTEXT_BYTES
    reserved = kept + _activations(architecture, config, asked, length)
    room = gpu - reserved - per_gpu
    block = kv_gpu * asked.kv_block
    blocks = max(0, room // block)
    tokens = blocks * asked.kv_block
    return Plan(
        architecture.model_type, asked.format, asked.quantised, asked.gpus, parameters, parameters - idle, parts, total,
        per_gpu, kv_token, kv_gpu, gpu, reserved, max(0, room), blocks > 0, max(0, block - room), blocks, tokens,
        length, _sequences(blocks, length, asked), _sequences(blocks, min(length, 8192), asked),
    )


def gpus_needed(config: Config, asked: Request) -> int | None:
    """The fewest GPUs, a power of two up to 64, that hold the weights and one block; None if none do."""
    for count in (1, 2, 4, 8, 16, 32, 64):
        if int(config["num_attention_heads"]) % count == 0:
            trial = Request(**(asdict(asked) | {"gpus": count}))
            if make(config, trial).fits:
                return count
    return None


def _sequences(blocks: int, length: int, asked: Request) -> int:
    return min(asked.max_seqs, blocks // -(-length // asked.kv_block))


def _kv_heads(architecture: Architecture, config: Config) -> int:
    if architecture.attention != "gqa":
        return 1
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _weights(architecture: Architecture, config: Config, asked: Request) -> tuple[dict[str, int], int, int, int]:
    """Bytes by part, bytes that every GPU holds whole, parameters, and parameters a token does not use."""
    parts = dict.fromkeys(
        ("experts", "shared_experts", "dense_mlp", "attention", "indexer", "router", "norms", "embeddings", "head"), 0)
    whole = parameters = 0
    for name, shape, row in architecture.expected(config):
        if row.optional:
            continue  # a tied head
        part = _part(name)
        count = 1
        for size in shape:
            count *= size
        size = _row_bytes(part, row, shape, count, asked)
        parameters += count
        parts[part] += size
        if part in ("router", "norms", "indexer") or "_a_proj" in name or "_a_layernorm" in name:
            whole += size
    routing, layers = architecture.routing(config), len(architecture.moe_layers(config))
    for rows, columns in architecture.expert_shapes(config).values():
        parts["experts"] += layers * routing.num_experts * matrix_bytes(asked.format, rows, columns, asked.element)
        parameters += layers * routing.num_experts * rows * columns
    sizes = architecture.sizes(config)
    one = 3 * sizes["hidden"] * sizes["moe_intermediate"]
    idle = layers * (routing.num_experts - routing.top_k) * one
    return parts, whole, parameters, idle


def _row_bytes(part: str, row: Row, shape: tuple[int, ...], count: int, asked: Request) -> int:
    if part == "router":
        return 4 * count
    if asked.quantised == "linears" and row.kind == "linear" and part != "head":
        return matrix_bytes(asked.format, shape[0], shape[1], asked.element)
    return asked.element * count


def _part(name: str) -> str:
    for mark, part in ((".mlp.gate.", "router"), (".shared_experts.", "shared_experts"), (".mlp.", "dense_mlp"),
                       (".indexer.", "indexer"), (".self_attn.", "attention"), ("embed_tokens", "embeddings"),
                       ("lm_head", "head")):
        if mark in name:
            return part
    return "norms"


def _activations(architecture: Architecture, config: Config, asked: Request, length: int) -> int:
    """As `service.gpu.memory` reckons; with latents, the keys and values expanded for one part of a group besides."""
    sizes = architecture.sizes(config)
    heads = int(config["num_attention_heads"])
    dim = sizes["q"] // heads
    latents = architecture.attention != "gqa"
    stand_in = SimpleNamespace(
        hidden_size=sizes["hidden"], num_attention_heads=heads, head_dim=dim,
        num_key_value_heads=heads if latents else _kv_heads(architecture, config),
        num_experts_per_tok=architecture.routing(config).top_k, moe_intermediate_size=sizes["moe_intermediate"],
        intermediate_size=sizes["dense_intermediate"], vocab_size=sizes["vocab"],
    )  # fmt: skip
    expanded = 0
    if latents:
        one = length * (sizes["q"] + sizes["o"])
        expanded = 2 * asked.element * max(EXPANDED_ELEMENTS, one) // asked.gpus
    return memory.activation_bytes(stand_in, asked.max_batch_tokens, asked.max_seqs) + expanded
