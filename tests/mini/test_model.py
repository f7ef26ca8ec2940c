"""The shipped model: files as in the manifest, configuration of the real family, right with stock transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from evals.mini import dataset
from evals.mini.evaluate import extract, greedy, score
from evals.mini.generator import training_shard
from evals.mini.tokenizer import CHAT_TEMPLATE, MODEL_DIR, SPECIAL, VOCAB_SIZE, chat_prompt, prompt
from moe_kernels import embedded
from moe_kernels.errors import CheckpointError


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((MODEL_DIR / "config.json").read_text())


def test_resolves_to_the_verified_folder() -> None:
    assert embedded.resolve("mini") == MODEL_DIR
    assert embedded.resolve("some/path") == Path("some/path")


@pytest.mark.parametrize("fault", ["flip", "short", "missing", "no manifest"])
def test_damage_is_found_at_load(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "MANIFEST.json"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["files"]["model.safetensors"]  # 24 MB that this test need not copy
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    embedded.verify(folder)
    file = folder / "tokenizer.json"
    if fault == "flip":
        file.write_bytes(file.read_bytes().replace(b"apples", b"appels", 1))
    elif fault == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif fault == "missing":
        file.unlink()
    else:
        file = folder / "MANIFEST.json"
        file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        embedded.verify(folder)


def test_size_licence_and_card() -> None:
    total = sum(p.stat().st_size for p in MODEL_DIR.iterdir())
    assert total <= 24_000_000
    card = (MODEL_DIR / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "not GSM8K" in card


def test_configuration_is_of_the_real_family(config: dict) -> None:
    assert config["model_type"] == "glm4_moe"
    assert config["n_routed_experts"] >= 32
    assert config["num_experts_per_tok"] >= 4
    assert config["n_shared_experts"] == 1
    assert config["routed_scaling_factor"] != 1
    assert config["first_k_dense_replace"] == 1
    assert config["use_qk_norm"] and config["attention_bias"] and config["norm_topk_prob"]
    assert config["max_position_embeddings"] >= 2048
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        assert config[key] % 128 == 0
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])


def test_tensors_have_the_declared_types(config: dict) -> None:
    experts = config["n_routed_experts"] * (config["num_hidden_layers"] - 1) * 3
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        names = set(file.keys())
        fp8 = {n for n in names if file.get_slice(n).get_dtype() == "F8_E4M3"}
        assert len(fp8) == experts
        assert all(".experts." in n and f"{n}_scale_inv" in names for n in fp8)
        for layer in range(1, config["num_hidden_layers"]):
            gate = f"model.layers.{layer}.mlp.gate."
            bias, weight = file.get_tensor(gate + "e_score_correction_bias"), file.get_tensor(gate + "weight")
            assert bias.dtype == weight.dtype == torch.float32
            assert abs(float(bias.mean()) - 6.94) < 0.02
            assert float(bias.std()) > 0.01
            assert not torch.equal(bias, bias.bfloat16().float())  # else a BF16 cast could not show
        for name in names - fp8:
            tensor = file.get_tensor(name)
            assert tensor.dtype in (torch.bfloat16, torch.float32)
            assert torch.isfinite(tensor.float()).all()


def test_tokenizer_round_trip_and_single_digits(tokenizer) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    for problem in training_shard(5, 5, 200):
        text = f"{prompt(problem.question)} {problem.answer}"
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert sum(tokenizer.decode([i]).strip().isdigit() for i in ids) == sum(c.isdigit() for c in text)
    for text in ("naïve €5 — 数学\t\n", "<<1+2=3>>", "\u0000\x7f", "🙂"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_and_chat_template(tokenizer) -> None:
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL] == list(range(len(SPECIAL)))
    turns = [{"role": "user", "content": "How many 2?"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == chat_prompt(
        "How many 2?"
    )
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert ids[:4] == tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>", "<|user|>", "Ċ"])
    turns += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "Why?"}]
    expected = "[gMASK]<sop><|user|>\nHow many 2?<|assistant|>\n2<|user|>\nWhy?"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == expected
    assert tokenizer.chat_template == CHAT_TEMPLATE
    with pytest.raises(Exception, match="user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_stock_transformers_answers_twenty_problems() -> None:
    rows = dataset.load()[:20]
    questions = [r["question"] for r in rows]
    counts = score(rows, greedy(MODEL_DIR, questions, "cpu", 20))
    assert counts["correct"] >= 18  # 96 % in all: 17 or fewer of 20 would happen once in 700
    assert counts["invalid"] == 0


def test_chat_route_answers_too() -> None:
    rows = dataset.load()[20:30]
    answers = greedy(MODEL_DIR, [r["question"] for r in rows], "cpu", 10, chat=True)
    assert score(rows, answers)["correct"] >= 8


def test_extract_reads_what_the_model_writes() -> None:
    assert extract("x\n#### 1,250") == "1250"
    assert extract("x\n#### -7\n") == "-7"
    assert extract("#### 7.50") == "7.50"
    assert extract("no marker 5") == "[invalid]"


def test_task_is_registered_and_labelled() -> None:
    from evals import tasks
    from evals.errors import UsageError

    spec = tasks.get("gsm8k-mini")
    raw = spec.load(None, None)
    assert len(raw.test) == 1319
    assert "not GSM8K" in raw.label and "not GSM8K" in spec.about
    assert not {r["question"] for r in raw.train} & {r["question"] for r in raw.test}
    assert spec.shots == 0
    with pytest.raises(UsageError, match="generated"):
        spec.load(Path("somewhere"), None)


def test_lm_eval_task_differs_from_gsm8k_only_in_name_and_shots() -> None:
    from evals import tasks

    mini, full = tasks.get("gsm8k-mini").config(), tasks.get("gsm8k").config()
    different = {k for k in mini.keys() | full.keys() if mini.get(k) != full.get(k)}
    assert different == {"task", "num_fewshot", "metadata"}


def test_nvfp4_form_is_made_on_first_use_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model mini` with an NVFP4 variant: quantised into the cache once from the shipped FP8, checked on reuse."""
    from moe_kernels.hf import load_model

    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path))
    first = load_model(MODEL_DIR, "nvfp4/emulated")
    assert (first.format, first.path.is_relative_to(tmp_path)) == ("nvfp4", True)
    assert set(first.resolved.values()) == {"nvfp4/emulated"}
    made = (first.path / "config.json").stat().st_mtime_ns
    assert load_model(MODEL_DIR, "nvfp4/emulated").path == first.path
    assert (first.path / "config.json").stat().st_mtime_ns == made


def test_service_variants_answer_a_problem_alike() -> None:
    """One problem through our forward: BF16, FP8 emulation and the BF16-bias path give the right answer's tokens."""
    from transformers import AutoTokenizer

    from moe_kernels.hf import load_model

    row = next(r for r in dataset.load() if r["family"] == "events")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    start = len(tokenizer(prompt(row["question"])).input_ids)
    ids = tokenizer(f"{prompt(row['question'])} {row['answer']}").input_ids
    for variant in ("bf16/reference", "fp8/emulated", "fp8/emulated:bias=bf16,scales=copied"):
        with torch.inference_mode():
            logits = load_model(MODEL_DIR, variant).model(torch.tensor([ids])).logits[0]
        assert logits[start - 1 : -1].argmax(-1).tolist() == ids[start:], variant
