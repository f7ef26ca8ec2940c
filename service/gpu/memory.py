"""How many KV blocks fit beside the weights on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from service.config import EngineConfig

KEEP_FRACTION = 0.03  # of the card: other users of it, fragmentation
GRAPH_BYTES = 1 << 30  # memory of captured graphs and libraries' workspaces


def activation_bytes(config: Any, tokens: int, sequences: int) -> int:
    """Bytes one forward of `tokens` rows holds at most, estimated from the largest tensors alive at once.

    The experts' outputs before they are summed (BF16 [tokens * top_k, H]) with their quantised inputs, the router's and
    projections' rows, and FP32 logits of all sequences (three copies while sampling).
    """
    hidden = config.hidden_size
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * (getattr(config, "head_dim", None) or 128)
    experts = tokens * config.num_experts_per_tok * (2 * hidden + 3 * config.moe_intermediate_size)
    rows = tokens * (2 * heads * 2 + 8 * hidden + 6 * config.intermediate_size)
    return experts + rows + 3 * 4 * sequences * config.vocab_size


def blocks_that_fit(loaded: Any, config: EngineConfig, positions: int) -> int | None:
    """KV blocks for what is free of the GPU now, at most what `max_seqs` whole sequences need; None off a GPU."""
    weights = getattr(loaded, "weights", None)
    device = weights.device if weights is not None else next(loaded.model.parameters()).device
    if device.type != "cuda":
        return None
    model = weights.config if weights is not None else loaded.model.config
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = free - KEEP_FRACTION * total - GRAPH_BYTES
    room -= activation_bytes(model, config.max_batch_tokens, config.max_seqs)
    heads = model.num_key_value_heads * (getattr(model, "head_dim", None) or
                                         model.hidden_size // model.num_attention_heads)
    element = 2 if weights is None or weights.dtype == torch.bfloat16 else 4
    block = 2 * model.num_hidden_layers * heads * element * config.kv_block
    most = config.max_seqs * -(-(config.max_model_len or positions) // config.kv_block)
    return max(1, min(int(room // block), most))
