"""TRT-LLM weight layouts: against FlashInfer's own CPU helpers where installed, and round trips."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.errors import VariantError
from moe_kernels.quant import nvfp4
from moe_kernels.variants.trtllm import layout
from tests.kernels import trtllm_case as case


@pytest.mark.parametrize(("rows", "tile"), [(64, 64), (256, 64), (128, 128), (2816, 128)])
def test_shuffle_matches_flashinfer(rows: int, tile: int) -> None:
    utils = pytest.importorskip("flashinfer.utils", reason="flashinfer-python is not installed")
    assert torch.equal(
        layout.shuffle_index(rows, tile), utils.get_shuffle_matrix_a_row_indices(torch.zeros(rows, 8), tile)
    )


def test_gated_interleave_and_block_layout_match_flashinfer() -> None:
    fi = pytest.importorskip("flashinfer.fused_moe", reason="flashinfer-python is not installed")
    x = torch.arange(64 * 3.0).view(64, 3)
    assert torch.equal(x[layout.interleave_halves(64)], fi.reorder_rows_for_gated_act_gemm(x))
    y = torch.randint(0, 255, (2, 64, 512), dtype=torch.uint8)
    ours = layout.block_major_k(y)
    assert all(torch.equal(ours[e], fi.convert_to_block_layout(y[e], 128)) for e in range(2))
    assert torch.equal(layout.from_block_major_k(ours), y)


def test_w13_permutation_of_nvfp4_matches_flashinfer() -> None:
    core = pytest.importorskip("flashinfer.fused_moe.core", reason="flashinfer-python is not installed")
    w = torch.zeros(256, 64, dtype=torch.uint8)
    theirs = core._maybe_get_cached_w3_w1_permute_indices({}, w, 128)
    assert torch.equal(layout.interleave_halves(256)[layout.shuffle_index(256, 128)], theirs)


@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (256, 12), (130, 5), (5, 1)])
def test_scale_swizzle_places_every_byte(rows: int, groups: int) -> None:
    scale = torch.randint(1, 255, (2, rows, groups), dtype=torch.uint8)
    flat = layout.interleave_scales_128x4(scale)
    columns = (groups + 3) // 4
    for e, r, c in [
        (0, 0, 0),
        (1, rows - 1, groups - 1),
        (0, min(97, rows - 1), min(3, groups - 1)),
        (1, rows // 2, groups // 2),
    ]:
        tile = (r // 128) * columns + c // 4
        assert flat[e, tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == scale[e, r, c]
    assert torch.equal(layout.deinterleave_scales_128x4(flat, rows, groups), scale)


def test_fp8_layouts_hold_the_same_weights_in_up_gate_order() -> None:
    record = case.fp8_record(0)
    plain, blocked = layout.prepare_fp8(record), layout.prepare_fp8(record, blocked=True)
    i = record.intermediate_size
    assert torch.equal(plain.w13[:, :i].float(), record.w13[:, i:].float())  # up first
    assert torch.equal(plain.w13[:, i:].float(), record.w13[:, :i].float())
    assert torch.equal(plain.w13_scale[:, : i // 128], record.w13_scale[:, i // 128 :])
    undo = layout.inverse(layout.shuffle_index(2 * i, 64))
    assert torch.equal(layout.from_block_major_k(blocked.w13.view(torch.uint8))[:, undo], plain.w13.view(torch.uint8))
    assert torch.equal(blocked.w13_scale, plain.w13_scale)


def test_fp8_refuses_a_ragged_intermediate_size() -> None:
    with pytest.raises(VariantError, match="moe_intermediate_size=192"):
        layout.prepare_fp8(case.fp8_record(0, i=192))


def test_nvfp4_round_trip_and_both_halves_scalars() -> None:
    record = case.nvfp4_record(1, h=512, i=192)  # padded to 256
    w = layout.prepare_nvfp4(record)
    assert w.padded_intermediate == 256
    order = layout.interleave_halves(512)[layout.shuffle_index(512, 128)]
    undo = layout.inverse(order)
    rows = w.w13[:, undo].view(8, 2, 256, -1)
    scales = layout.deinterleave_scales_128x4(w.w13_scale.view(torch.uint8).view(8, -1), 512, 32)[:, undo].view(
        8, 2, 256, -1
    )
    act_in = float(record.w13_input_scale.max())
    for half, alpha in ((0, w.output1_scale * w.act_scale), (1, w.output1_scale_gate)):
        packed, scale = rows[:, half, :192], scales[:, half, :192].view(torch.float8_e4m3fn)
        ours = nvfp4.dequantize(packed, scale, (alpha / act_in)[:, None, None])
        source = slice(192, 384) if half == 0 else slice(0, 192)  # half 0 is up
        column = 1 if half == 0 else 0
        want = nvfp4.dequantize(
            record.w13[:, source], record.w13_scale[:, source], record.w13_scale_2[:, column, None, None]
        )
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=0)
        assert (rows[:, half, 192:] == 0).all()
    down = layout.inverse(layout.shuffle_index(512, 128))
    s2 = layout.deinterleave_scales_128x4(w.w2_scale.view(torch.uint8).view(8, -1), 512, 16)[:, down]
    want = nvfp4.dequantize(record.w2, record.w2_scale, record.w2_scale_2[:, None, None])
    alpha2 = (w.output2_scale / w.act_scale)[:, None, None]
    got = nvfp4.dequantize(w.w2[:, down][..., :96], s2[..., :12].view(torch.float8_e4m3fn), alpha2)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert not torch.allclose(w.output1_scale * w.act_scale, w.output1_scale_gate)  # one scalar for both would be wrong


def test_nvfp4_without_input_scale_is_refused_with_the_remedy() -> None:
    record = case.nvfp4_record(1)
    record.w13_input_scale = None
    with pytest.raises(VariantError, match="calibrate"):
        layout.prepare_nvfp4(record)
