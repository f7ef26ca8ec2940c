"""Variant files: every key checked, variables filled in, model files merged, sizes that do not fit refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from evals.engines.load import fill_in, load
from evals.engines.schema import json_schema
from evals.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ROOT / "docker" / "variants"
ENV = {"BEFORE_IMAGE": "before:1", "AFTER_IMAGE": "after:1", "HEAD": "node0"}


def write(path: Path, **data: object) -> Path:
    path.write_text(yaml.safe_dump({"name": "x", "engine": "sglang", "model": "m"} | data))
    return path


@pytest.mark.parametrize(("data", "message"), [
    ({"kernl": "triton"}, r"x\.yaml: kernl: Extra inputs are not permitted"),
    ({"engine": "tgi"}, r"engine: Input should be 'sglang', 'vllm', 'service' or 'other'"),
    ({"gpus": "0-"}, r"gpus: '0-' is no list of indices such as 0-3 or 0,2"),
    ({"gpus": "3-1"}, "no list of indices"),
    ({"engine": "other"}, "engine: other needs a command or a url"),
    ({"engine": "service"}, "needs kernel: a variant such as fp8/emulated"),
    ({"url": "http://h:1", "image": "i"}, "a running server is not launched; drop image and command"),
    ({"attest": {"sources": [{"log": "Using (\\w+"}]}}, "is no regular expression"),
    ({"attest": {"sources": [{"log": "Using"}]}}, "must have one group: the kernel's name"),
    ({"attest": {"sources": [{"url": "server_info", "field": "a"}]}}, "attest.sources.0"),
    ({"parallel": {"tensor": 8}, "gpus": "0-3"},
     r"8 GPUs are needed \(tensor 8 x pipeline 1 x data 1\), gpus names 4 on 1 node"),
    ({"parallel": {"tensor": 8, "expert": 3}}, "expert size 3 must divide its tensor size 8"),
    ({"engine": "vllm", "parallel": {"tensor": 4, "expert": 2}}, "vLLM derives its expert parallel size: 4"),
    ({"nodes": {"count": 2, "launcher": "srun", "address": "h:1"}}, "1 GPUs cannot be spread evenly over 2 nodes"),
    ({"nodes": {"count": 2, "launcher": "lws", "address": "h:1"}}, "Kubernetes starts the pods; give the leader's url"),
    ({"protocol": {"endpoint": "chatty"}}, "protocol.endpoint"),
    ({"ready": {"timeout": 0}}, "ready.timeout: Input should be greater than 0"),
    ({"name": "a b"}, "name: String should match"),
])
def test_what_is_wrong_is_named(tmp_path: Path, data: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(write(tmp_path / "x.yaml", **data))


def test_files_that_are_no_variant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ready files lie in docker/variants"):
        load(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(UsageError, match="is not YAML"):
        load(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text("- a")
    with pytest.raises(UsageError, match="holds no mapping"):
        load(tmp_path / "x.yaml")


def test_variables_as_compose_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# ${NOT_READ:?in a comment}\nname: x\nengine: sglang\n"
                    "model: ${M:-zai-org/A}\nimage: ${IMG:?the image}\n")
    assert load(path, environment={"IMG": "i:1", "M": ""}).model == "zai-org/A"
    assert load(path, environment={"IMG": "i:1", "M": "b"}).model == "b"
    with pytest.raises(UsageError, match="IMG is not set: the image"):
        load(path, environment={})


def test_a_model_file_gives_path_sizes_protocol_and_facts(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.yaml").write_text(yaml.safe_dump({
        "path": "org/M", "format": "fp8", "parallel": {"tensor": 4},
        "protocol": {"endpoint": "chat", "shots": 5}, "facts": {"bias": "near 7"},
    }))
    made = load(write(tmp_path / "x.yaml", kernel="triton", formats=["fp8"], protocol={"shots": 8}))
    assert (made.model, made.parallel.tensor, made.protocol.endpoint, made.protocol.shots) == ("org/M", 4, "chat", 8)
    assert made.facts.bias == "near 7"
    with pytest.raises(UsageError, match=r"kernel emulation takes nvfp4 weights, .*m\.yaml has fp8"):
        load(write(tmp_path / "y.yaml", kernel="emulation", formats=["nvfp4"]))
    assert load(tmp_path / "x.yaml", "/other/folder").model == "/other/folder"


def ready_files() -> list[Path]:
    return sorted(VARIANTS.glob("*.yaml"))


@pytest.mark.parametrize("path", ready_files(), ids=lambda p: p.stem)
def test_every_ready_file_loads_for_every_model_it_takes(path: Path) -> None:
    import jsonschema

    schema = json.loads((VARIANTS / "schema.json").read_text())
    jsonschema.validate(yaml.safe_load(fill_in(path.read_text(), ENV, path)), schema)
    own = load(path, environment=ENV)
    assert own.spec.about
    taken = 0
    for model in sorted((VARIANTS / "models").glob("*.yaml")):
        form = yaml.safe_load(model.read_text())["format"]
        if own.spec.formats and form not in own.spec.formats:
            with pytest.raises(UsageError, match=f"has {form}"):
                load(path, str(model), ENV)
            continue
        made = load(path, str(model), ENV)
        taken += 1
        if own.spec.engine in ("sglang", "vllm"):  # what the published figures were measured with
            assert made.protocol.endpoint == "chat" and (made.protocol.max_tokens or 0) >= 4096
            assert made.protocol.shots == 5 and made.protocol.chat_template_kwargs == {"enable_thinking": False}
            assert made.facts.bias and made.facts.sources
    assert taken >= 1


def test_the_files_the_issue_asks_for_are_there() -> None:
    names = {p.stem for p in ready_files()}
    assert {"sglang-before-28555", "sglang-after-28555", "sglang-trtllm", "sglang-triton", "sglang-deep-gemm",
            "vllm-trtllm", "vllm-cutlass", "vllm-emulation"} <= names
    models = {p.stem for p in (VARIANTS / "models").glob("*.yaml")}
    assert {"glm-4.5-air-fp8", "glm-4.7-nvfp4", "glm-5.2-fp8", "glm-5.2-nvfp4"} <= models


def test_the_schema_file_is_the_models() -> None:
    assert (VARIANTS / "schema.json").read_text() == json_schema()


def test_the_page_about_files_is_true() -> None:
    """Its example loads, the files and model files it names exist, and every file that exists is named."""
    import re

    from evals.engines.schema import VariantFile

    page = (ROOT / "docs" / "engines.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    made = VariantFile.model_validate(yaml.safe_load(example))
    assert made.kernel == "flashinfer_trtllm" and made.gpus == list(range(8))
    named = set(re.findall(r"`((?:sglang|vllm|moe-parity|glm|url)[\w.-]*)`", page))
    there = {p.stem for p in ready_files()} | {p.stem for p in (VARIANTS / "models").glob("*.yaml")}
    assert named - there <= {"glm", "sglang"}, named - there
    assert there <= named, there - named


def test_facts_in_the_page_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    card = load(VARIANTS / "sglang-trtllm.yaml", str(VARIANTS / "models" / "glm-5.2-fp8.yaml"), ENV)
    assert "[6.817, 7.063]" in (card.facts.bias or "") and "[6.817, 7.063]" in page
    # the statement itself: BF16 has nine values there, 1/32 apart; the model's 238 hit eight of them
    import torch

    line = torch.linspace(6.817, 7.063, 100_000, dtype=torch.float32).to(torch.bfloat16)
    values = line.unique().float()
    assert len(values) == 9
    assert (values[1:] - values[:-1]).unique().tolist() == [1 / 32]
