"""`moe-kernels`: output, exit codes, one-line errors, quick help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_kernels.cli import build_parser, main
from moe_kernels.formats import open_checkpoint
from moe_kernels.formats.calibration import InputScales
from tests.kernels.damage import rewrite


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "cache"))


def one_line_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail: exit code 2, nothing on stdout, one line on stderr."""
    try:
        code = main(argv)
    except SystemExit as leaving:
        code = leaving.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n"), (code, out, err)
    return err


def test_quantize_and_inspect(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    assert main(["quantize", str(tiny_checkpoint), str(tmp_path / "a"), "--format", "fp8"]) == 0
    assert "block FP8 (format A), 1 file(s)" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    for text in ("glm4_moe, 3 layers, MoE in 2", "routed experts fp8", "8 experts, top-2", "below 1e-10"):
        assert text in out
    assert main(["quantize", str(tiny_checkpoint), str(tmp_path / "c"), "--format", "nvfp4", "--only", "linears"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "c"), "--json", "--hash"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["expert_format"] == "nvfp4" and report["weights_sha256"] == open_checkpoint(tmp_path / "c").sha256()


def test_quantize_options(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    amax = torch.full((8,), 6 * 448.0)
    InputScales({layer: (amax.clone(), amax * 2) for layer in (1, 2)}).save(tmp_path / "amax")
    argv = ["quantize", str(tiny_checkpoint), str(tmp_path / "c"), "--format", "nvfp4"]
    assert main([*argv, "--calibration", str(tmp_path / "amax"), "--max-shard-gb", "0.0005"]) == 0
    checkpoint = open_checkpoint(tmp_path / "c")
    assert len(checkpoint.files()) > 1
    record = checkpoint.experts(1)
    assert record.w13_input_scale is not None and (record.w13_input_scale == 1).all()
    assert record.w2_input_scale is not None and (record.w2_input_scale == 2).all()


def test_calibrate_on_texts(mini_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"question": "Tom has 3 apples."}\n\n{"text": "Ann buys 4 pears and 5 plums."}\n')
    argv = ["quantize", str(mini_checkpoint), str(tmp_path / "c"), "--format", "nvfp4"]
    assert main([*argv, "--calibrate", str(texts), "--save-calibration", str(tmp_path / "amax")]) == 0
    checkpoint = open_checkpoint(tmp_path / "c")
    saved = InputScales.load(tmp_path / "amax", checkpoint)
    record = checkpoint.experts(3)
    assert record.w13_input_scale is not None
    assert record.w13_input_scale.max().item() == pytest.approx(saved.amax[3][0].max().item() / (6 * 448))
    assert (tmp_path / "c" / "tokenizer.json").exists()


def test_list(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    assert main(["list", "--device", "cpu", "--json"]) == 0
    rows = {v["name"]: v for v in json.loads(capsys.readouterr().out)["variants"]}
    assert rows["fp8/emulated"]["runs_here"] and rows["fp8/emulated"]["options"]["bias"] == ["fp32", "bf16"]
    assert not rows["fp8/trtllm"]["runs_here"] and "needs a CUDA GPU" in rows["fp8/trtllm"]["reason"]
    assert main(["list", "--device", "cpu", "--model", str(tiny_checkpoint)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fp8/emulated" in out and "bias=fp32|bf16" in out and "no: 'fp8/trtllm' needs a CUDA GPU" in out


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["inspect", "/no/such/folder"], "does not exist"),
        (["inspect"], "required: CKPT"),
        (["quantise"], "invalid choice"),
        ([], "required: COMMAND"),
        (["quantize", "SRC", "DST", "--format", "int4"], "invalid choice: 'int4'"),
        (["quantize", "SRC", "DST"], "required: --format"),
        (["quantize", "SRC", "DST", "--format", "fp8", "--calibration", "x"], "fp8 has no input scales"),
        (["quantize", "SRC", "DST", "--format", "nvfp4", "--save-calibration", "x"], "needs --calibrate"),
        (["quantize", "SRC", "DST", "--format", "fp8", "--max-shard-gb", "0"], "must be positive"),
        (["quantize", "/no/such", "DST", "--format", "fp8"], "'/no/such' does not exist"),
        (["list", "--device", "abacus"], "unknown device 'abacus'"),
        (["list", "--model", "/no/such"], "does not exist"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], why: str) -> None:
    assert why in one_line_error(capsys, *argv)


def test_errors_of_a_checkpoint_are_one_line(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = rewrite(tiny_checkpoint, tmp_path / "nan", lambda t: t["lm_head.weight"].fill_(float("nan")))
    assert "'lm_head.weight' holds nan" in one_line_error(
        capsys, "quantize", str(nan), str(tmp_path / "x"), "--format", "fp8"
    )
    assert not (tmp_path / "x").exists()
    error = one_line_error(capsys, "quantize", str(tiny_checkpoint), "/proc/nothing/here", "--format", "fp8")
    assert "/proc/nothing" in error
    tokens = ["--format", "nvfp4", "--calibrate", str(tmp_path / "none.jsonl")]
    assert "has no tokenizer" in one_line_error(capsys, "quantize", str(tiny_checkpoint), str(tmp_path / "x"), *tokens)


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("inspect", "list", "quantize"))
    with pytest.raises(SystemExit) as leaving:
        main(["quantize", "--help"])
    assert leaving.value.code == 0 and "routed experts alone (default)" in " ".join(capsys.readouterr().out.split())
    assert build_parser().prog == "moe-kernels"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from moe_kernels.cli import build_parser; build_parser();"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_pipe_is_quiet(tiny_checkpoint: Path) -> None:
    command = f"{sys.executable} -m moe_kernels.cli inspect {tiny_checkpoint} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{" and done.stderr == ""
