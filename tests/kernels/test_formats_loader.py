"""The checkpoint reader: right values in the record, and one test per kind of damage, each named in the error."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_kernels.errors import CheckpointError, FormatError
from moe_kernels.formats import dequantize, open_checkpoint
from moe_kernels.formats.files import read_header
from moe_kernels.quantize import quantize
from tests.kernels.damage import rewrite, shards

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
DOWN = "model.layers.2.mlp.experts.7.down_proj.weight"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def fp8(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_checkpoint, tmp_path_factory.mktemp("a") / "fp8", "fp8")


@pytest.fixture(scope="module")
def nvfp4(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_checkpoint, tmp_path_factory.mktemp("c") / "nvfp4", "nvfp4")


def load_all(path: Path) -> None:
    """What loading a model reads: everything."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensor_names():
        checkpoint.tensor(name)
    for layer in checkpoint.moe_layers:
        checkpoint.experts(layer)
        checkpoint.router(layer)


# ---- right values


def test_bf16_record(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    stored = load_file(tiny_checkpoint / "model.safetensors")
    assert checkpoint.format == "bf16" and checkpoint.model_type == "glm4_moe"
    assert checkpoint.moe_layers == (1, 2) and checkpoint.num_layers == 3
    assert checkpoint.shape.hidden_size == 128 and checkpoint.shape.intermediate_size == 128
    assert checkpoint.routing.num_experts == 8 and checkpoint.routing.top_k == 2
    assert checkpoint.routing.routed_scaling_factor == 2.5 and checkpoint.routing.norm_topk_prob
    assert checkpoint.config == json.loads((tiny_checkpoint / "config.json").read_text())
    record = checkpoint.experts(1)
    assert record.w13.shape == (8, 256, 128) and record.w2.shape == (8, 128, 128) and record.w13_scale is None
    for e in range(8):
        expert = f"model.layers.1.mlp.experts.{e}."
        assert torch.equal(record.w13[e, :128], stored[expert + "gate_proj.weight"])
        assert torch.equal(record.w13[e, 128:], stored[expert + "up_proj.weight"])
        assert torch.equal(record.w2[e], stored[expert + "down_proj.weight"])
    weight, bias = checkpoint.router(2)
    assert bias is not None and weight.dtype == bias.dtype == torch.float32
    assert torch.equal(bias, stored["model.layers.2.mlp.gate.e_score_correction_bias"])
    names = {n for n in stored if ".experts." not in n}
    assert set(checkpoint.tensor_names()) == names
    for name in names:
        assert torch.equal(checkpoint.tensor(name), stored[name])
        assert checkpoint.tensor(name).dtype == stored[name].dtype


def test_tensors_are_copies(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    before = checkpoint.tensor("model.norm.weight")
    checkpoint.tensor("model.norm.weight").zero_()
    assert torch.equal(checkpoint.tensor("model.norm.weight"), before) and before.any()


def test_fp8_record(fp8: Path) -> None:
    checkpoint, stored = open_checkpoint(fp8), load_file(fp8 / "model.safetensors")
    assert checkpoint.format == "fp8" and checkpoint.scheme.label == "block FP8 (format A)"
    record = checkpoint.experts(2)
    assert record.w13_scale is not None and record.w2_scale is not None
    assert record.w13_scale.shape == (8, 2, 1) and record.w2_scale.shape == (8, 1, 1)
    for e in range(8):
        expert = f"model.layers.2.mlp.experts.{e}."
        assert torch.equal(record.w13[e, 128:].view(torch.uint8), stored[expert + "up_proj.weight"].view(torch.uint8))
        assert torch.equal(record.w13_scale[e, :1], stored[expert + "gate_proj.weight_scale_inv"])
        assert torch.equal(record.w13_scale[e, 1:], stored[expert + "up_proj.weight_scale_inv"])
        up = dequantize(record, torch.float32).w13[e, 128:]
        want = stored[expert + "up_proj.weight"].float() * stored[expert + "up_proj.weight_scale_inv"]
        assert torch.equal(up, want)
        assert torch.equal(dequantize(record).w13[e, 128:], want.bfloat16())


def test_nvfp4_record_keeps_both_halves(nvfp4: Path, tmp_path: Path) -> None:
    gate_2, up_2 = GATE.replace("weight", "weight_scale_2"), GATE.replace("gate_proj.weight", "up_proj.weight_scale_2")

    def ten_apart(t: dict[str, torch.Tensor]) -> None:
        t[up_2] = t[gate_2] * 10

    changed = rewrite(nvfp4, tmp_path / "m", ten_apart)
    checkpoint, stored = open_checkpoint(changed), load_file(changed / "model.safetensors")
    record = checkpoint.experts(1)
    assert record.w13_scale_2 is not None and record.w2_scale_2 is not None and record.w13_input_scale is not None
    assert record.w13_scale_2.shape == (8, 2) and record.w2_scale_2.shape == (8,)
    assert record.w13_scale_2[3, 1] == record.w13_scale_2[3, 0] * 10
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exact = dequantize(record, torch.float32)
    for e in range(8):
        for projection, got in (
            ("gate_proj", exact.w13[e, :128]),
            ("up_proj", exact.w13[e, 128:]),
            ("down_proj", exact.w2[e]),
        ):
            module = f"model.layers.1.mlp.experts.{e}.{projection}."
            packed = stored[module + "weight"]
            values = torch.stack([grid[(packed & 15).long()], grid[(packed >> 4).long()]], -1).flatten(-2)
            scale = stored[module + "weight_scale"].float().repeat_interleave(16, 1)
            assert torch.equal(got, values * scale * stored[module + "weight_scale_2"])


def test_scalars_of_shape_one_are_accepted(nvfp4: Path, tmp_path: Path) -> None:
    def widen(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            if t[name].ndim == 0:
                t[name] = t[name].reshape(1)

    a, b = open_checkpoint(rewrite(nvfp4, tmp_path / "m", widen)).experts(1), open_checkpoint(nvfp4).experts(1)
    assert torch.equal(a.w13_scale_2, b.w13_scale_2) and torch.equal(a.w2_input_scale, b.w2_input_scale)  # type: ignore[arg-type]


def test_input_scale_may_be_absent(nvfp4: Path, tmp_path: Path) -> None:
    def drop(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("input_scale")]:
            del t[name]

    record = open_checkpoint(rewrite(nvfp4, tmp_path / "m", drop)).experts(1)
    assert record.w13_input_scale is None and record.w2_input_scale is None
    one = rewrite(nvfp4, tmp_path / "n", lambda t: t.pop("model.layers.2.mlp.experts.0.up_proj.input_scale"))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp\.experts\.0\.up_proj\.input_scale' is missing"):
        open_checkpoint(one)


def test_quantised_linears_are_dequantised(tiny_checkpoint: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(tiny_checkpoint)
    name = "model.layers.0.self_attn.o_proj.weight"
    for fmt, bound in (("fp8", 2**-4), ("nvfp4", 2**-2)):
        checkpoint = open_checkpoint(quantize(tiny_checkpoint, tmp_path / fmt, fmt, only="linears"))  # type: ignore[arg-type]
        assert checkpoint.layout.modules[name].format == fmt
        got = checkpoint.tensor(name, torch.float32)
        assert set(checkpoint.tensor_names()) == set(plain.tensor_names())
        want = plain.tensor(name).float()
        assert ((got - want).norm() / want.norm()).item() < bound and not torch.equal(got, want)
        assert checkpoint.tensor(name).dtype == torch.bfloat16
        assert torch.equal(checkpoint.tensor("lm_head.weight"), plain.tensor("lm_head.weight"))


def test_shards(tiny_checkpoint: Path, fp8: Path, tmp_path: Path) -> None:
    for number, src in enumerate((tiny_checkpoint, fp8)):
        whole, parts = open_checkpoint(src), open_checkpoint(shards(src, tmp_path / str(number)))
        assert len(parts.files()) == 3
        assert torch.equal(parts.experts(2).w13.view(torch.uint8), whole.experts(2).w13.view(torch.uint8))
        for name in whole.tensor_names():
            assert torch.equal(parts.tensor(name), whole.tensor(name))


def test_tied_embeddings_need_no_head(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(
        tiny_checkpoint, tmp_path / "m", lambda t: t.pop("lm_head.weight"), lambda c: c.update(tie_word_embeddings=True)
    )
    assert "lm_head.weight" not in open_checkpoint(path).tensor_names()


def test_num_local_experts_is_another_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(
        tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(num_local_experts=c.pop("n_routed_experts"))
    )
    assert open_checkpoint(path).routing.num_experts == 8


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_mtp_layers_are_skipped_by_index(tiny_checkpoint: Path, tmp_path: Path, key: str) -> None:
    def add(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.3.eh_proj.weight"] = torch.ones(128, 256, dtype=torch.bfloat16)
        t["model.layers.3.mlp.experts.0.gate_proj.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    def one(c: dict) -> None:
        del c["num_nextn_predict_layers"]
        c[key] = 1

    checkpoint = open_checkpoint(rewrite(tiny_checkpoint, tmp_path / "one", add, one))
    assert len(checkpoint.layout.mtp) == 2 and checkpoint.moe_layers == (1, 2)
    assert not any(name.startswith("model.layers.3.") for name in checkpoint.tensor_names())
    without_key = rewrite(tiny_checkpoint, tmp_path / "default", add, lambda c: c.pop("num_nextn_predict_layers"))
    assert len(open_checkpoint(without_key).layout.mtp) == 2  # Glm4MoeConfig's default is one
    with pytest.raises(CheckpointError, match=r"'model\.layers\.3\..*0 MTP layers"):
        open_checkpoint(rewrite(tiny_checkpoint, tmp_path / "none", add))


def test_kv_scales_are_ignored_with_a_log_line(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rewrite(
        tiny_checkpoint, tmp_path / "m",
        lambda t: t.update({"model.layers.1.self_attn.k_proj.k_scale": torch.tensor(1.0)}),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(path)
    assert [i.name for i in checkpoint.layout.ignored] == ["model.layers.1.self_attn.k_proj.k_scale"]
    assert "k_scale" in caplog.text


def test_mini_checkpoint_loads_in_under_a_second(mini_checkpoint: Path) -> None:
    spent = []
    for _ in range(3):  # the least of three: a full garbage collection may fall into one of them
        started = time.process_time()
        load_all(mini_checkpoint)
        spent.append(time.process_time() - started)
    assert min(spent) < 1.0


# ---- the hash


def test_sha256_of_one_file_and_of_shards(tiny_checkpoint: Path, tmp_path: Path) -> None:
    one = hashlib.sha256((tiny_checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert open_checkpoint(tiny_checkpoint).sha256() == one
    folder = shards(tiny_checkpoint, tmp_path / "s")
    lines = "".join(
        f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(folder.glob("*.safetensors"))
    )
    assert open_checkpoint(folder).sha256() == hashlib.sha256(lines.encode()).hexdigest()


def test_sha256_is_remembered_until_the_file_changes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    first = open_checkpoint(path).sha256()
    (note,) = (tmp_path / "cache" / "sha256").iterdir()
    note.write_text(note.read_text().replace(first, "0" * 64))
    assert open_checkpoint(path).sha256() == "0" * 64  # the note was used
    note.write_text("{ damaged")
    assert open_checkpoint(path).sha256() == first
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_checkpoint(path).sha256() == hashlib.sha256(data).hexdigest() != first


# ---- damage, one kind a test


def refuse(path: Path, match: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=match):
        load_all(path)


def test_no_such_path(tmp_path: Path, tiny_checkpoint: Path) -> None:
    refuse(tmp_path / "nowhere", "nowhere' does not exist; give the folder")
    refuse(tiny_checkpoint / "config.json", "is a file; give the folder")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", r"config\.json is missing")


def test_no_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    shutil.copy(tiny_checkpoint / "config.json", tmp_path / "m")
    refuse(tmp_path / "m", "holds no safetensors weights; give")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"x")
    refuse(tmp_path / "m", r"pytorch_model\.bin is no safetensors file")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_bad_config_json(tiny_checkpoint: Path, tmp_path: Path, text: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    refuse(path, r"config\.json (is not readable JSON|must hold a JSON object)")


@pytest.mark.parametrize("keep", [4, 1000, -1])
def test_truncated_file(tiny_checkpoint: Path, tmp_path: Path, keep: int) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:keep])
    refuse(path, r"model\.safetensors is truncated.*copy or download the checkpoint again")


def test_file_of_something_else(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"<html>" + b" " * 100)
    refuse(path, "truncated or no safetensors file")
    (path / "model.safetensors").write_bytes((6).to_bytes(8, "little") + b"<html>")
    refuse(path, "no readable safetensors header")


def test_trailing_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refuse(path, "truncated or damaged")


def test_header_that_lies_about_its_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    assert data.count(b'"shape":[8]') == 2
    (path / "model.safetensors").write_bytes(data.replace(b'"shape":[8]', b'"shape":[9]'))
    refuse(path, r"e_score_correction_bias has 32 bytes, not F32 \[9\]")


def test_missing_shard(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = shards(tiny_checkpoint, tmp_path / "m")
    (path / "model-00002-of-00003.safetensors").unlink()
    refuse(path, r"shard .*model-00002-of-00003\.safetensors is missing")


def test_shards_without_index(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = shards(tiny_checkpoint, tmp_path / "m")
    (path / "model.safetensors.index.json").unlink()
    refuse(path, r"3 shards .* but no model\.safetensors\.index\.json")


def test_index_names_an_absent_tensor(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = shards(tiny_checkpoint, tmp_path / "m")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    refuse(path, r"names 'model\.ghost\.weight' in model-00001-of-00003\.safetensors, which does not hold it")
    del content["weight_map"]["model.ghost.weight"], content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    refuse(path, r"holds 'model\.norm\.weight', which .* does not place there")
    index.write_text("{}")
    refuse(path, "has no 'weight_map'")


@pytest.mark.parametrize("name", [GATE, "model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"])
def test_missing_tensor(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    refuse(rewrite(tiny_checkpoint, tmp_path / "m", lambda t: t.pop(name)), f"tensor '{name}' is missing")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.1.mlp.experts.8.gate_proj.weight", "8 routed experts"),
        ("model.layers.7.mlp.gate.weight", "3 layers"),
        ("model.layers.1.mlp.experts.gate_up_proj", "fused in one tensor"),
        ("model.layers.1.self_attn.q_proj.weight_scale", "a scale without a quantised weight"),
        ("model.surprise.weight", "in 'glm4_moe' with this config.json"),
    ],
)
def test_extra_tensor(tiny_checkpoint: Path, tmp_path: Path, name: str, why: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", lambda t: t.update({name: torch.ones(4)}))
    refuse(path, f"tensor '{name}' is not expected.*{why}")


@pytest.mark.parametrize("name", [GATE, DOWN, "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"])
def test_wrong_shape(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", lambda t: t.update({name: t[name][:-1].clone()}))
    refuse(path, rf"tensor '{name}' has shape .* config\.json implies")


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        (GATE, torch.int32, "is I32, expected"),
        (GATE, torch.float16, "is F16: routed experts must be BF16"),
        (GATE, torch.float32, "is F32: routed experts must be BF16"),
        ("model.norm.weight", torch.float64, "is F64, expected"),
    ],
)
def test_wrong_dtype(tiny_checkpoint: Path, tmp_path: Path, name: str, dtype: torch.dtype, why: str) -> None:
    refuse(rewrite(tiny_checkpoint, tmp_path / "m", lambda t: t.update({name: t[name].to(dtype)})), f"'{name}' {why}")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [GATE, DOWN, "model.embed_tokens.weight", "model.layers.2.mlp.gate.weight"])
def test_value_that_is_not_finite(tiny_checkpoint: Path, tmp_path: Path, name: str, bad: float) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", lambda t: t[name].view(-1)[-1:].fill_(bad))
    refuse(path, f"tensor '{name}' holds {bad}")


def test_nan_code_in_fp8_weight(fp8: Path, tmp_path: Path) -> None:
    path = rewrite(fp8, tmp_path / "m", lambda t: t[DOWN].view(torch.uint8)[5, 6].fill_(0xFF))
    refuse(path, f"tensor '{DOWN}' holds nan")


@pytest.mark.parametrize(("value", "why"), [(math.nan, "holds nan"), (-1.0, "holds -1.0, scales are never negative")])
def test_bad_fp8_scale(fp8: Path, tmp_path: Path, value: float, why: str) -> None:
    name = GATE + "_scale_inv"
    refuse(rewrite(fp8, tmp_path / "m", lambda t: t[name].fill_(value)), f"'{name}' {why}")


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2", "input_scale"])
def test_bad_nvfp4_scale(nvfp4: Path, tmp_path: Path, part: str) -> None:
    name = DOWN.replace("weight", part)

    def spoil(t: dict[str, torch.Tensor]) -> None:
        if part == "weight_scale":
            t[name].view(torch.uint8)[0, 0] = 0x7F
        else:
            t[name].fill_(math.inf)

    refuse(rewrite(nvfp4, tmp_path / "m", spoil), f"'{name}' holds")


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_missing_nvfp4_part(nvfp4: Path, tmp_path: Path, part: str) -> None:
    name = GATE.replace("weight", part)
    refuse(rewrite(nvfp4, tmp_path / "m", lambda t: t.pop(name)), f"tensor '{name}' is missing")


def test_scale_of_wrong_shape_or_dtype(fp8: Path, nvfp4: Path, tmp_path: Path) -> None:
    name = GATE + "_scale_inv"
    refuse(rewrite(fp8, tmp_path / "1", lambda t: t.update({name: torch.ones(2, 1)})), rf"'{name}' has shape \[2, 1\]")
    half = rewrite(fp8, tmp_path / "2", lambda t: t.update({name: t[name].int()}))
    refuse(half, f"'{name}' is I32, expected F32 or BF16")
    name = GATE + "_scale_2"
    refuse(rewrite(nvfp4, tmp_path / "3", lambda t: t.update({name: torch.ones(2)})), rf"'{name}' has shape \[2\]")


def test_a_slot_never_filled_is_found(nvfp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a reader ever skipped a scalar, its NaN would show (SGLang #14102 served such a model)."""
    checkpoint = open_checkpoint(nvfp4)
    read = checkpoint._reader.read_many
    skipped = GATE.replace("weight", "weight_scale_2").replace("gate", "up")
    monkeypatch.setattr(
        checkpoint._reader, "read_many", lambda infos: ((i, t) for i, t in read(infos) if i.name != skipped)
    )
    with pytest.raises(CheckpointError, match=f"'{skipped}' holds nan"):
        checkpoint.experts(1)


def test_weights_and_config_that_do_not_belong_together(tiny_checkpoint: Path, fp8: Path, tmp_path: Path) -> None:
    no_config = rewrite(fp8, tmp_path / "1", None, lambda c: c.pop("quantization_config"))
    refuse(no_config, "is F8_E4M3 but the config declares BF16")
    quant = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    plain = rewrite(tiny_checkpoint, tmp_path / "2", None, lambda c: c.update(quantization_config=quant))
    refuse(plain, r"is BF16 but the config declares block FP8")
    excluded = rewrite(
        fp8, tmp_path / "3", None,
        lambda c: c["quantization_config"]["modules_to_not_convert"].append("model.layers.2.mlp.experts.5"),
    )  # fmt: skip
    refuse(excluded, r"experts\.5\.gate_proj\.weight' is quantised \(F8_E4M3\) but the config excludes")


def test_experts_in_two_formats(tiny_checkpoint: Path, fp8: Path, tmp_path: Path) -> None:
    plain = load_file(tiny_checkpoint / "model.safetensors")[DOWN]

    def mix(t: dict[str, torch.Tensor]) -> None:
        t[DOWN] = plain
        del t[DOWN + "_scale_inv"]

    refuse(rewrite(fp8, tmp_path / "m", mix), "all routed experts need one weight format", FormatError)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer >= 1, got 0"),
        ({"num_experts_per_tok": 9}, "8 experts do not fit num_experts_per_tok 9"),
        ({"moe_intermediate_size": "128"}, "moe_intermediate_size must be an integer"),
        ({"first_k_dense_replace": 3}, "model without MoE"),
        ({"n_routed_experts": 0}, "model without MoE"),
        ({"model_type": "llama", "n_routed_experts": None}, "model without MoE: model_type 'llama'"),
        ({"model_type": "ernie4_5_moe"}, "model_type 'ernie4_5_moe' is not supported yet; supported: glm4_moe"),
        ({"model_type": None}, "no 'model_type'"),
    ],
)
def test_config_that_is_no_supported_moe(tiny_checkpoint: Path, tmp_path: Path, change: dict, why: str) -> None:
    def apply(c: dict) -> None:
        c.update(change)
        for key in [k for k, v in change.items() if v is None]:
            del c[key]

    refuse(rewrite(tiny_checkpoint, tmp_path / "m", None, apply), why)


def test_wrong_names_asked_for(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    with pytest.raises(CheckpointError, match="layer 0 has no routed experts; MoE layers are 1 to 2"):
        checkpoint.experts(0)
    with pytest.raises(CheckpointError, match="no tensor outside the routed experts"):
        checkpoint.tensor(GATE)


def test_header_reader_agrees_with_safetensors(tmp_path: Path) -> None:
    made = {"a": torch.ones(3, 5), "b": torch.zeros(0, 4).bfloat16(), "c": torch.tensor(1, dtype=torch.uint8)}
    save_file(made, tmp_path / "x.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {n: (i.dtype, i.shape, i.nbytes) for n, i in header.items()} == {
        "a": ("F32", (3, 5), 60), "b": ("BF16", (0, 4), 0), "c": ("U8", (), 1),
    }  # fmt: skip


@pytest.mark.parametrize("header", ["[]", '{"a": 1}', '{"a": {"dtype": "F32"}}', '{"a": {"dtype": "F32", "shape": 3}}'])
def test_malformed_header(tiny_checkpoint: Path, tmp_path: Path, header: str) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m")
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    refuse(path, "no readable safetensors header")


def test_index_that_leaves_the_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = shards(tiny_checkpoint, tmp_path / "m")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    refuse(path, r"names the shard '\.\./other\.safetensors', which is no file of this folder")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a positive number, got None"),
        ({"quantization_config": [1]}, "quantization_config must be an object"),
    ],
)
def test_config_values_of_the_wrong_kind(tiny_checkpoint: Path, tmp_path: Path, change: dict, why: str) -> None:
    refuse(rewrite(tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(change)), why)


def test_null_means_the_default(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(head_dim=None, n_group=None))
    assert open_checkpoint(path).routing.n_group == 1


def test_swiglu_limit_goes_into_the_record(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(tiny_checkpoint, tmp_path / "m", None, lambda c: c.update(swiglu_limit=10))
    assert open_checkpoint(path).experts(1).swiglu_limit == 10.0
    assert open_checkpoint(quantize(path, tmp_path / "q", "mxfp4")).experts(2).swiglu_limit == 10.0
    assert open_checkpoint(tiny_checkpoint).experts(1).swiglu_limit is None
    for number, wrong in enumerate((0, -1.0, "10", True)):
        bad = rewrite(tiny_checkpoint, tmp_path / str(number), None, lambda c, w=wrong: c.update(swiglu_limit=w))
        with pytest.raises(CheckpointError, match="swiglu_limit must be a positive number"):
            open_checkpoint(bad).experts(1)
