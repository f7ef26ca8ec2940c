"""The torch references of the serving operations against transformers' own modules and torch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from moe_kernels import ops
from moe_kernels.errors import ContractError
from moe_kernels.quant import fp8
from tests.kernels.ops_inputs import paged

BF16 = torch.bfloat16


def config(**changes: object) -> Glm4MoeConfig:
    base = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64, partial_rotary_factor=0.5,
                use_qk_norm=True, attention_bias=True, moe_intermediate_size=128, n_routed_experts=16, n_group=1,
                topk_group=1, num_experts_per_tok=2, rope_theta=10000.0, max_position_embeddings=512,
                num_hidden_layers=1, vocab_size=64, intermediate_size=256)
    made = Glm4MoeConfig(**(base | changes))
    made._attn_implementation = "eager"
    return made


def rand(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_norm_is_transformers_to_the_bit() -> None:
    module = glm.Glm4MoeRMSNorm(256, 1e-5).to(BF16)
    module.weight.data = (rand(256) + 1).to(BF16)
    x = (rand(7, 256, seed=1) * 3).to(BF16)
    assert torch.equal(ops.rms_norm(x, module.weight.data, 1e-5), module(x))


def test_residual_chain_rounds_like_the_decoder_layer() -> None:
    """Routed + shared first, then the residual, each rounded; FP32 sums would differ."""
    module = glm.Glm4MoeRMSNorm(256, 1e-5).to(BF16)
    routed, shared, residual = (rand(5, 256, seed=s).to(BF16) for s in (1, 2, 3))
    y, new = ops.add_rms_norm(routed, residual, module.weight.data, 1e-5, shared)
    assert torch.equal(new, residual + (routed + shared)) and torch.equal(y, module(new))
    assert not torch.equal(new, (residual.float() + routed.float() + shared.float()).to(BF16))


@pytest.mark.parametrize("norm", [True, False])
def test_qkv_step_and_attention_are_the_attention_module(norm: bool) -> None:
    """A prompt written through slots, then attended by chunks and token by token, against Glm4MoeAttention."""
    made = config(use_qk_norm=norm)
    torch.manual_seed(0)
    module = glm.Glm4MoeAttention(made, 0).float().eval()
    for parameter in module.parameters():
        parameter.data = (torch.randn_like(parameter) * (1 if parameter.ndim == 1 else 0.1)).float()
    tokens = 21
    hidden = rand(1, tokens, 256)
    rotary = glm.Glm4MoeRotaryEmbedding(made)
    position = torch.arange(tokens)[None]
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        want, _ = module(hidden, rotary(hidden, position), mask)
        qkv = torch.cat([f(hidden[0]) for f in (module.q_proj, module.k_proj, module.v_proj)], -1)
        cos, sin = ops.rope_table(10000.0, 32, 512)
        pools = [torch.zeros(6, 16, 4, 64) for _ in range(2)]
        table = torch.tensor([[4, 2]], dtype=torch.int32)
        slots = table[0, torch.arange(tokens) // 16].long() * 16 + torch.arange(tokens) % 16
        weights = [module.q_norm.weight, module.k_norm.weight] if norm else [None, None]
        eps = made.rms_norm_eps
        q = ops.qk_norm_rope_store(qkv, position[0], cos, sin, slots, *pools, 8, *weights, eps)
        whole = ops.paged_prefill(q, *pools, table, torch.tensor([0, tokens]), torch.tensor([tokens]), 64**-0.5, tokens)
        torch.testing.assert_close(module.o_proj(whole.flatten(1)), want[0], rtol=1e-4, atol=1e-5)
        last = ops.paged_decode(q[-1:], *pools, table, torch.tensor([tokens]), 64**-0.5)
        torch.testing.assert_close(last, whole[-1:], rtol=1e-4, atol=1e-5)
        assert not pools[0][[0, 1, 3, 5]].any()


def test_rotation_rounds_like_transformers() -> None:
    """BF16: every product and the sum are rounded, bit for bit."""
    made = config()
    rotary = glm.Glm4MoeRotaryEmbedding(made)
    qkv = rand(9, 16 * 64).to(BF16)
    position = torch.arange(100, 109)
    cos, sin = rotary(qkv, position[None])
    q = qkv[:, : 8 * 64].view(1, 9, 8, 64).transpose(1, 2)
    k = qkv[:, 8 * 64 : 12 * 64].view(1, 9, 4, 64).transpose(1, 2)
    want_q, want_k = glm.apply_rotary_pos_emb(q, k, cos, sin)
    pools = [torch.zeros(1, 16, 4, 64, dtype=BF16) for _ in range(2)]
    table = ops.rope_table(10000.0, 32, 512)
    got = ops.qk_norm_rope_store(qkv, position, *table, torch.arange(9), *pools, 8)
    assert torch.equal(got, want_q[0].transpose(0, 1))
    assert torch.equal(pools[0][0, :9], want_k[0].transpose(0, 1))


def test_decode_is_torchs_attention_and_reads_no_stale_block() -> None:
    lengths = [0, 1, 16, 37]
    q, k, v, table, seq = paged(lengths, 4, 2, 32)
    got = ops.paged_decode(q.float(), k.float(), v.float(), table, seq, 32**-0.5)
    assert not got[0].any()
    for row, length in enumerate(lengths[1:], 1):
        flat = [p[table[row, : -(-length // 16)].long()].flatten(0, 1)[:length].float().transpose(0, 1) for p in (k, v)]
        want = F.scaled_dot_product_attention(q[row].float()[:, None], *(p.repeat_interleave(2, 0) for p in flat))
        torch.testing.assert_close(got[row], want[:, 0], rtol=1e-5, atol=1e-6)


def test_mlp_and_router_are_the_modules() -> None:
    made = config()
    mlp = glm.Glm4MoeMLP(made).to(BF16)
    x = rand(3, 256).to(BF16)
    gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)
    assert torch.equal(mlp.down_proj(ops.swiglu(gate_up)), mlp(x))
    router = glm.Glm4MoeTopkRouter(made)
    router.weight.data = rand(16, 256, seed=4)
    assert torch.equal(ops.router_logits(x, router.weight.data), router(x)[0])


def test_fp8_linear_is_near_the_exact_product_and_adds_the_bias_before_rounding() -> None:
    weight, x, bias = rand(200, 384) / 20, rand(5, 384, seed=1).to(BF16), rand(200, seed=2).to(BF16)
    q, scale = fp8.quantize_weight_blocks(weight)
    got = ops.Fp8Linear(q, scale, bias)(x)
    exact = x.double() @ weight.double().t() + bias.double()
    assert got.dtype == BF16
    assert ((got.double() - exact).norm() / exact.norm()).item() < 0.05
    values = ops.quantise(x)
    wide = fp8.dequantize_activations(values.q, values.scale.t()) @ fp8.dequantize_weight_blocks(q, scale).t()
    assert torch.equal(got, (wide + bias.float()).to(BF16))
    assert torch.equal(ops.Fp8Linear(q, scale, bias)(values), got)


@pytest.mark.parametrize(("rows", "columns", "scale_size", "said"), [
    (128, 200, (1, 1), "keep this layer in BF16"), (256, 256, (1, 2), "weight_scale_inv must be")])
def test_fp8_linear_refuses_what_it_cannot_read(rows: int, columns: int, scale_size: tuple[int, int],
                                                said: str) -> None:
    with pytest.raises(ContractError, match=said):
        ops.Fp8Linear(torch.zeros(rows, columns).to(fp8.E4M3), torch.ones(scale_size))


def test_split_sums_are_added_in_order() -> None:
    parts = torch.tensor([[[1e8]], [[1.0]], [[-1e8]]])
    residual, weight = torch.zeros(1, 1, dtype=BF16), torch.ones(1, dtype=BF16)
    assert ops.add_rms_norm(parts, residual, weight, 1e-5)[1].item() == 0.0  # (1e8 + 1) - 1e8 in FP32
    assert ops.add_rms_norm(parts[[0, 2, 1]], residual, weight, 1e-5)[1].item() == 1.0
