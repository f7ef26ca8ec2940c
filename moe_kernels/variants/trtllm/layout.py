"""Weight layouts the TRT-LLM MoE kernels read, made once from the canonical record, in plain torch on any device.

Sources: FlashInfer's own helpers (`shuffle_matrix_a`, `reorder_rows_for_gated_act_gemm`,
`convert_to_block_layout`), against which the tests prove each function, and cuBLAS's documented 128x4
block-scale layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.records import FP8_BLOCK, NVFP4_GROUP, ExpertWeights

HIDDEN_PAD_FP4 = 512  # what pad_trtllm_moe_weights pads to
INTERMEDIATE_PAD_FP4 = 128
ONE_E4M3 = 0x38  # neutral block scale 1.0 for padded groups


def swap_halves(x: Tensor) -> Tensor:
    """[gate; up] -> [up; gate] along dim 1 (rows or scale rows); its own inverse."""
    gate, up = x.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)


def interleave_halves(rows: int) -> Tensor:
    """Index int64 [rows]: 0, rows/2, 1, rows/2 + 1, ... (one row of each half in turn)."""
    return torch.arange(rows).view(2, rows // 2).t().reshape(-1)


def shuffle_index(rows: int, epilogue_tile_m: int) -> Tensor:
    """Row permutation for the transposed MMA's output, int64 [rows]: `shuffled = x[index]`.

    In blocks of 32 rows for tiles of 128: old row 8 * (n % 4) + n // 4 ends at n (0, 4, .. in memory order);
    in blocks of 16 for tile 64, even rows first. `rows` must be a multiple of the block.
    """
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    if rows % block:
        raise VariantError(f"{rows} rows cannot be shuffled in blocks of {block}; pad the weights")
    lanes = 4 if block == 32 else 2
    within = torch.arange(block).view(block // lanes, lanes).t().reshape(-1)
    return (torch.arange(0, rows, block)[:, None] + within).reshape(-1)


def inverse(index: Tensor) -> Tensor:
    """The permutation that undoes `index`."""
    out = torch.empty_like(index)
    out[index] = torch.arange(index.numel())
    return out


def block_major_k(x: Tensor, block_bytes: int = 128) -> Tensor:
    """[E, M, K] -> [E, K / b, M, b], b = elements in `block_bytes` bytes."""
    e, m, k = x.shape
    b = block_bytes // x.element_size()
    return x.view(e, m, k // b, b).transpose(1, 2).contiguous()


def from_block_major_k(x: Tensor) -> Tensor:
    """Inverse of `block_major_k`."""
    e, blocks, m, b = x.shape
    return x.transpose(1, 2).reshape(e, m, blocks * b)


def interleave_scales_128x4(scale: Tensor) -> Tensor:
    """Swizzle 1-byte scales [E, M, G] into 128x4 tiles, M and G zero-padded to multiples: [E, ceil128(M) * ceil4(G)].

    Inside a tile of 512 bytes, row r and column c sit at (r % 32) * 16 + (r // 32) * 4 + c.
    """
    e, m, g = scale.shape
    raw = F.pad(scale.view(torch.uint8), (0, -g % 4, 0, -m % 128))
    m, g = raw.shape[1:]
    return raw.view(e, m // 128, 4, 32, g // 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(e, m * g)


def deinterleave_scales_128x4(flat: Tensor, rows: int, groups: int) -> Tensor:
    """Inverse of `interleave_scales_128x4`, cropped to [E, rows, groups] (uint8)."""
    m, g = rows + -rows % 128, groups + -groups % 4
    tiles = flat.view(-1, m // 128, g // 4, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return tiles.reshape(-1, m, g)[:, :rows, :groups]


@dataclass(frozen=True)
class Fp8Weights:
    """Block-FP8 weights as `trtllm_fp8_block_scale_moe` reads them: [up; gate], scales FP32 dense.

    `w13` e4m3 [E, 2I, H] or BlockMajorK [E, H/128, 2I, 128]; `w2` [E, H, I] or [E, I/128, H, 128].
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    shuffled: bool
    layout: str  # the name of a WeightLayout member: "MajorK" or "BlockMajorK"


def prepare_fp8(record: ExpertWeights, blocked: bool = False) -> Fp8Weights:
    """[gate; up] -> [up; gate] with its scales; `blocked` adds the tile-64 shuffle and BlockMajorK-128.

    Scales stay unshuffled in both layouts: one covers 128 rows, and the shuffle never leaves a block of 16.
    """
    for name, size in (("hidden_size", record.hidden_size), ("moe_intermediate_size", record.intermediate_size)):
        if size % FP8_BLOCK:
            raise VariantError(f"{name}={size} is no multiple of {FP8_BLOCK}; use fp8/emulated or pad the checkpoint")
    if record.w13_scale is None or record.w2_scale is None:
        raise VariantError("fp8/trtllm needs a block-FP8 record with w13_scale and w2_scale")
    w13, w2 = swap_halves(record.w13.view(torch.uint8)), record.w2.view(torch.uint8)
    if blocked:
        w13 = block_major_k(w13[:, shuffle_index(w13.shape[1], 64).to(w13.device)])
        w2 = block_major_k(w2[:, shuffle_index(w2.shape[1], 64).to(w2.device)])
    f8 = torch.float8_e4m3fn
    return Fp8Weights(
        w13.contiguous().view(f8),
        w2.contiguous().view(f8),
        swap_halves(record.w13_scale).contiguous(),
        record.w2_scale.contiguous(),
        blocked,
        "BlockMajorK" if blocked else "MajorK",
    )


@dataclass(frozen=True)
class Fp4Weights:
    """NVFP4 weights as `trtllm_fp4_block_scale_moe` reads them, with the three output scalars (FP32 [E]).

    `input_scale` and `act_scale` are the dequantisation scales of the hidden states and of the intermediate.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    output1_scale: Tensor
    output1_scale_gate: Tensor
    output2_scale: Tensor
    input_scale: float
    act_scale: float
    hidden_size: int  # before padding
    padded_hidden: int
    padded_intermediate: int


def pad_nvfp4(record: ExpertWeights, hidden: int, inter: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(w13, w13_scale, w2, w2_scale) as uint8, zero weights and scale 1.0 added; each half of w13 is padded alone."""
    if record.w13_scale is None or record.w2_scale is None:
        raise VariantError("nvfp4/trtllm needs an NVFP4 record with w13_scale and w2_scale")
    dh, di = hidden - record.hidden_size, inter - record.intermediate_size
    e = record.num_experts

    def halves(x: Tensor, columns: int, fill: int) -> Tensor:
        split = x.view(torch.uint8).view(e, 2, x.shape[1] // 2, x.shape[2])
        return F.pad(split, (0, columns, 0, di), value=fill).flatten(1, 2)

    w13 = halves(record.w13, dh // 2, 0)
    s13 = halves(record.w13_scale, dh // NVFP4_GROUP, ONE_E4M3)
    w2 = F.pad(record.w2.view(torch.uint8), (0, di // 2, 0, dh))
    s2 = F.pad(record.w2_scale.view(torch.uint8), (0, di // NVFP4_GROUP, 0, dh), value=ONE_E4M3)
    return w13, s13, w2, s2


def prepare_nvfp4(record: ExpertWeights) -> Fp4Weights:
    """Pad, [gate; up] -> [up; gate], interleave the halves' rows, shuffle for tile 128, swizzle scales 128x4.

    Scalars: the gate's own scale_2 goes to `output1_scale_gate`, the up half's to `output1_scale`. Taking
    one for both is the fault of vLLM #54974. One activation scale a layer: the max over experts and halves.
    """
    hidden = record.hidden_size + -record.hidden_size % HIDDEN_PAD_FP4
    inter = record.intermediate_size + -record.intermediate_size % INTERMEDIATE_PAD_FP4
    if record.w13_input_scale is None or record.w2_input_scale is None:
        raise VariantError(
            "nvfp4/trtllm quantises activations with the checkpoint's input_scale and this one has none; "
            "make one with `moe-kernels quantize --calibrate`, or use nvfp4/emulated"
        )
    if record.w13_scale_2 is None or record.w2_scale_2 is None:
        raise VariantError("nvfp4/trtllm needs w13_scale_2 [E, 2] and w2_scale_2 [E]")
    w13, s13, w2, s2 = pad_nvfp4(record, hidden, inter)
    first = interleave_halves(2 * inter)[shuffle_index(2 * inter, 128)].to(w13.device)
    second = shuffle_index(hidden, 128).to(w13.device)
    w13, s13 = swap_halves(w13)[:, first], swap_halves(s13)[:, first]
    w2, s2 = w2[:, second], s2[:, second]
    f8, e = torch.float8_e4m3fn, record.num_experts
    act_in, act_mid = float(record.w13_input_scale.max()), float(record.w2_input_scale.max())
    gate, up = record.w13_scale_2.float().unbind(1)
    return Fp4Weights(
        w13.contiguous(),
        w2.contiguous(),
        interleave_scales_128x4(s13).view(f8).view(e, 2 * inter, hidden // NVFP4_GROUP),
        interleave_scales_128x4(s2).view(f8).view(e, hidden, inter // NVFP4_GROUP),
        (up * act_in / act_mid).contiguous(),
        (gate * act_in).contiguous(),
        (record.w2_scale_2.float() * act_mid).contiguous(),
        act_in,
        act_mid,
        record.hidden_size,
        hidden,
        inter,
    )
