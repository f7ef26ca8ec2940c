"""The weight layouts of the NVFP4 kernels, decoded bit by bit, and the choice of tile shapes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.quant import nvfp4
from moe_kernels.records import MoEShape
from moe_kernels.variants.triton import config, nvfp4_layout


def random_weights(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every E2M1 code and every E4M3 scale, subnormal and zero too: [2, 128, 256]."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (2, 128, 128), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 127, (2, 128, 16), generator=g, dtype=torch.uint8)
    scale[0, 3, 5] = 0
    scale[1, :8] = 1  # the smallest subnormal, 2^-9
    return packed, scale.view(torch.float8_e4m3fn)


def bfloat16(bits: Tensor) -> Tensor:
    """FP64 values of 16-bit patterns held in int64."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16).double()


def test_tiles_round_trip() -> None:
    """Nothing is lost, and byte c of a tile's row holds columns c and c + 64."""
    packed, scale = random_weights()
    tiled = nvfp4_layout.tile_weights(packed)
    assert torch.equal(nvfp4_layout.untile_weights(tiled), packed)
    codes = torch.stack([packed & 15, packed >> 4], -1).view(2, 128, 256)
    assert int(tiled[1, 1, 77, 9] & 15) == int(codes[1, 77, 128 + 9])
    assert int(tiled[1, 1, 77, 9] >> 4) == int(codes[1, 77, 128 + 64 + 9])
    scales = nvfp4_layout.tile_scales(scale)
    assert torch.equal(scales.view(torch.uint8)[1, 1, 77], scale.view(torch.uint8)[1, 77, 8:16])


def test_fragments_decode_to_the_weights() -> None:
    """The kernel's shifts, masks and one BF16 product, done here in integers, give e2m1 * scale exactly."""
    packed, scale = random_weights()
    true = nvfp4.dequantize(packed, scale, torch.ones(())).double()
    words = nvfp4_layout.fragment_weights(packed, scale).long() & 0xFFFFFFFF
    scales = nvfp4_layout.fragment_scales(scale).long() & 0xFFFFFFFF
    registers = [words & 0x81C081C0, (words << 3) & 0x81C081C0, (words << 6) & 0x81C081C0,
                 ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)]
    out = torch.empty(2, 2, 2, 2, 4, 2, 8, 4, 4, 2, 2, dtype=torch.float64)  # E, tile, block, q, w, h, r, c, s, j, i
    for number, value in enumerate(registers):
        h, j = number % 2, number // 2
        for i in range(2):
            left = bfloat16((value >> (16 * i)) & 0xFFFF).view(2, 2, 2, 2, 4, 8, 4, 4)
            for q in range(2):
                byte = (scales >> (8 * (2 * q + h))) & 255
                factor = bfloat16(byte * 16 + 0x7680).view(2, 2, 2, 4, 8, 4, 1)
                out[:, :, :, q, :, h, :, :, :, j, i] = left[:, :, :, q] * factor * 2.0**7
    rows = out.permute(0, 1, 4, 5, 6, 2, 3, 7, 8, 9, 10).reshape(2, 128, 256)
    assert torch.equal(rows, true)


def test_damaged_scales_are_refused() -> None:
    """NaN (0x7F) and negative scales have no code."""
    _, scale = random_weights()
    scale.view(torch.uint8)[0, 0, 0] = 0x7F
    with pytest.raises(VariantError, match="damaged"):
        nvfp4_layout.fragment_scales(scale)


def test_committed_tables_are_complete_and_fit_hopper() -> None:
    """Every table parses into configurations whose tiles exist."""
    tables = sorted(config.CONFIGS.glob("*.json"))
    assert tables
    for path in tables:
        kind = config.GemmConfig if path.name.startswith("fp8") else config.NvFp4Config
        entries = json.loads(path.read_text())["configs"]
        assert {"1", "8", "32", "128"} <= set(entries), path.name
        for fields in entries.values():
            assert kind(**fields).block_m in (8, 16, 32, 64, 128)


def test_lookup_takes_the_nearest_token_count_and_falls_back_to_the_rule() -> None:
    """Known shape on the tuned device, then an unknown one."""
    air = MoEShape(4096, 1408, 128, 8)
    one, many = (config.lookup(air, t, "NVIDIA H200", 90) for t in (1, 30000))
    assert one.swap1 and one.block_m == 16
    assert many.special1 and many.block_m == 128
    other = MoEShape(1024, 512, 64, 4)
    assert config.lookup(other, 1, "NVIDIA H200", 90) == config.default_config(other, 1)
    assert not config.lookup(other, 4096, "some Ada GPU", 89).special1  # no Hopper kernel elsewhere
