"""Attestation on real log lines and answers: what counts as proof, as another kernel, as a fallback, as nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.engines.attest import findings, judge, normalised
from evals.engines.load import EngineVariant, load

# as written by SGLang 0.5 and vLLM 0.2x (shortened)
SGLANG = ("[2026-05-15 08:39:19] server_args=ServerArgs(model_path='/m', tp_size=8, pp_size=1, ep_size=1, "
          "moe_a2a_backend='none', moe_runner_backend='{}', disable_radix_cache=True)\n")
SGLANG_AUTO = "[2026-05-15 08:39:19] INFO Use {} as MoE runner backend on sm100 for Glm4MoeForCausalLM\n"
VLLM_FP8 = ("(Worker_TP0 pid=42) INFO 06-14 04:57:13 [fp8.py:419] Using {} Fp8 MoE backend out of potential backends: "
            "['AITER', 'FLASHINFER_TRTLLM', 'DEEPGEMM', 'TRITON'].\n")
VLLM_FP4 = ("(EngineCore pid=187) INFO 05-01 18:55:06 [nvfp4.py:209] Using '{}' NvFp4 MoE backend out of potential "
            "backends: ['FLASHINFER_TRTLLM', 'MARLIN', 'EMULATION'].\n")
VLLM_MTP = "INFO [unquantized.py:1] Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].\n"
VLLM_CONFIG = "INFO [core.py:93] Initializing a V1 LLM engine (v0.26.0) with config: tensor_parallel_size={}, x=1\n"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(engine: str, kernel: str | None = None, **more: Any) -> EngineVariant:
        path = tmp_path / "x.yaml"
        data = {"name": "x", "engine": engine, "model": "m", "kernel": kernel, "parallel": {"tensor": 8}}
        path.write_text(yaml.safe_dump(data | more))
        return load(path)

    return make


@pytest.mark.parametrize(("engine", "kernel", "answers", "log", "status"), [
    ("sglang", "flashinfer_trtllm", {}, SGLANG.format("flashinfer_trtllm"), "attested"),
    ("sglang", "flashinfer_trtllm", {"/server_info": {"moe_runner_backend": "flashinfer_trtllm"}}, "", "attested"),
    ("sglang", "flashinfer_trtllm", {"/get_server_info": {"moe_runner_backend": "flashinfer_trtllm"}}, "", "attested"),
    ("sglang", "flashinfer_trtllm", {"/server_info": {"moe_runner_backend": "triton"}}, "", "mismatch"),
    ("sglang", "flashinfer_trtllm", {}, SGLANG.format("auto") + SGLANG_AUTO.format("flashinfer_trtllm"), "attested"),
    ("sglang", "flashinfer_trtllm", {}, SGLANG.format("auto") + SGLANG_AUTO.format("marlin"), "mismatch"),
    ("sglang", "flashinfer_trtllm", {"/server_info": {"moe_runner_backend": "auto"}}, SGLANG.format("auto"),
     "unattested"),
    ("sglang", "flashinfer_trtllm", {"/server_info": None}, "", "unattested"),
    ("sglang", "triton", {"/server_info": {"moe_runner_backend": "triton", "tp_size": 4}}, "", "mismatch"),
    ("sglang", "flashinfer_trtllm", {"/server_info": {"moe_runner_backend": "flashinfer_trtllm"}},
     "W flashinfer_trtllm MoE unsupported here, falling back to triton\n", "fallback"),
    ("sglang", "triton", {"/server_info": {"moe_runner_backend": "triton"}},
     "W attention falls back to torch_native\n", "attested"),  # not of the MoE
    ("sglang", "triton", {"/server_info": {"moe_runner_backend": "triton"}},
     "Config file not found at A.json. Fallback to triton version 3.4.0 and use MoE kernel config from B.json\n",
     "attested"),  # another tuning file, the same kernel
    ("vllm", "flashinfer_trtllm", {}, VLLM_FP8.format("FLASHINFER_TRTLLM"), "attested"),
    ("vllm", "flashinfer_trtllm", {}, VLLM_FP4.format("FLASHINFER_TRTLLM") + VLLM_MTP, "attested"),
    ("vllm", "flashinfer_trtllm", {}, VLLM_FP8.format("MARLIN"), "mismatch"),
    ("vllm", "emulation", {}, VLLM_FP4.format("EMULATION"), "attested"),
    ("vllm", "cutlass", {}, VLLM_FP4.format("VLLM_CUTLASS"), "attested"),
    ("vllm", "deep_gemm", {}, VLLM_FP8.format("DEEPGEMM"), "attested"),
    ("vllm", "deep_gemm", {}, VLLM_FP8.format("DEEPGEMM") + "DEBUG DeepGemm disabled for N <= 512. M=1\n", "fallback"),
    ("vllm", "triton", {}, VLLM_FP8.format("TRITON") + VLLM_FP8.format("MARLIN"), "mismatch"),  # ranks disagree
    ("vllm", "triton", {}, VLLM_CONFIG.format(4) + VLLM_FP8.format("TRITON"), "mismatch"),
    ("vllm", "triton", {}, VLLM_CONFIG.format(8) + VLLM_FP8.format("TRITON"), "attested"),
    ("vllm", "triton", {}, VLLM_MTP, "unattested"),
    ("vllm", "flashinfer_trtllm",
     {"/server_info?config_format=json": {"vllm_config": {"kernel_config": {"moe_backend": "flashinfer_trtllm"}}}},
     "", "attested"),
])
def test_what_the_server_says(
    made: Any, engine: str, kernel: str, answers: dict[str, Any], log: str, status: str
) -> None:
    found = judge(made(engine, kernel), answers, log)
    assert found.status == status, found.detail
    if status == "mismatch":
        assert "was asked for" in found.detail


def test_own_sources_and_fields(made: Any) -> None:
    variant = made("other", "fast", command=["x"], attest={
        "sources": [{"url": "/info", "field": "moe.0.name"}, {"log": r"kernel=(\w+)"}], "fields": {"spec": False},
        "fallback": ["SLOW PATH"],
    })
    info = {"/info": {"moe": [{"name": "fast"}]}, "/server_info": {"spec": False}}
    assert judge(variant, info, "kernel=fast").status == "attested"
    assert "spec is True, False was asked for" in judge(variant, info | {"/server_info": {"spec": True}}, "").detail
    assert judge(variant, info, "kernel=slow").status == "mismatch"
    assert judge(variant, info, "… SLOW PATH taken").status == "fallback"


def test_a_url_without_a_kernel_only_notes_what_runs(made: Any) -> None:
    variant = made("sglang", url="http://h:1")
    found = judge(variant, {"/server_info": {"moe_runner_backend": "triton", "tp_size": 8}}, "")
    assert (found.status, found.found) == ("attested", ("triton",))
    assert judge(variant, {}, "").status == "unattested"
    notes = list(findings("candidate", {"attestation": judge(variant, {}, "").as_dict()}))
    assert [f.severity for f in notes] == ["note"]


def test_spellings() -> None:
    names = ["FLASHINFER_TRTLLM", "'FlashInfer TRTLLM'", "flashinfer-trtllm"]
    assert {normalised(n) for n in names} == {"flashinfer_trtllm"}
    assert normalised("BATCHED_DEEPGEMM") == "deep_gemm"


def test_a_fallback_in_the_end_is_invalid(made: Any) -> None:
    variant = made("sglang", "triton")
    good = judge(variant, {"/server_info": {"moe_runner_backend": "triton"}}, "")
    late = judge(variant, {}, "the MoE kernel falls back to torch\n")
    said = list(findings("candidate", {"attestation": good.as_dict(), "attestation_after": late.as_dict()}))
    assert [(f.code, f.severity) for f in said] == [("kernel-fallback", "invalid")]
    assert "in the end" in said[0].message
