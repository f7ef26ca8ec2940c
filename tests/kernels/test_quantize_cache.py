"""ensure_format(): made once, checked on reuse, made again when damaged, safe between processes."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_kernels import cache
from moe_kernels.cache import ensure_format
from moe_kernels.errors import CheckpointError
from moe_kernels.formats import open_checkpoint
from tests.kernels.damage import rewrite


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Formats that quantize() was really called with."""
    calls: list[str] = []
    real = cache.quantize

    def counting(src, dst, format, **options):
        calls.append(format)
        return real(src, dst, format, **options)

    monkeypatch.setattr(cache, "quantize", counting)
    return calls


def folders(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.is_dir())


def test_same_format_is_the_path_itself(tiny_checkpoint: Path, made: list[str], home: Path) -> None:
    assert ensure_format(tiny_checkpoint, "bf16") == tiny_checkpoint
    assert made == [] and not home.exists()


def test_made_once_for_each_format(tiny_checkpoint: Path, made: list[str], home: Path) -> None:
    fp8 = ensure_format(tiny_checkpoint, "fp8")
    assert fp8.parent == home and open_checkpoint(fp8).format == "fp8"
    assert ensure_format(str(tiny_checkpoint), "fp8") == fp8
    nvfp4 = ensure_format(tiny_checkpoint, "nvfp4")
    assert open_checkpoint(nvfp4).format == "nvfp4" and made == ["fp8", "nvfp4"]
    assert folders(home) == sorted([fp8.name, nvfp4.name])  # nothing temporary is left


def test_manifest(tiny_checkpoint: Path) -> None:
    folder = ensure_format(tiny_checkpoint, "fp8")
    manifest = json.loads((folder / "moe-parity.json").read_text())
    assert manifest["made_from"]["source_sha256"] == open_checkpoint(tiny_checkpoint).sha256()
    assert manifest["made_from"]["format"] == "fp8" and manifest["made_from"]["tool_version"]
    assert manifest["files"]["model.safetensors"]["sha256"] == open_checkpoint(folder).sha256()


def test_another_source_is_another_folder(tiny_checkpoint: Path, tmp_path: Path, made: list[str]) -> None:
    source = rewrite(tiny_checkpoint, tmp_path / "src")
    first = ensure_format(source, "fp8")
    changed = rewrite(tiny_checkpoint, tmp_path / "new", lambda t: t["model.norm.weight"].mul_(2))
    shutil.copy(changed / "model.safetensors", source / "model.safetensors")
    second = ensure_format(source, "fp8")
    assert first != second and made == ["fp8", "fp8"]
    other_config = json.loads((source / "config.json").read_text())
    other_config["routed_scaling_factor"] = 1.5
    (source / "config.json").write_text(json.dumps(other_config))
    assert open_checkpoint(ensure_format(source, "fp8")).routing.routed_scaling_factor == 1.5


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no manifest", "bad manifest", "other manifest"])
def test_a_damaged_copy_is_made_again(
    tiny_checkpoint: Path, made: list[str], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    folder = ensure_format(tiny_checkpoint, "fp8")
    file, manifest = folder / "model.safetensors", folder / "moe-parity.json"
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncate":
        file.write_bytes(good[:-1])
    elif damage == "delete":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text('{"made_from"')
    else:
        manifest.write_text(manifest.read_text().replace('"quantizer": ', '"quantizer": 9'))
    with caplog.at_level(logging.WARNING):
        assert ensure_format(tiny_checkpoint, "fp8") == folder
    assert made == ["fp8", "fp8"] and "is made again" in caplog.text
    assert file.read_bytes() == good
    assert ensure_format(tiny_checkpoint, "fp8") == folder and len(made) == 2


def test_a_new_tool_version_makes_a_new_copy(
    tiny_checkpoint: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure_format(tiny_checkpoint, "fp8")
    monkeypatch.setattr(cache, "QUANTIZER_VERSION", 99)
    assert ensure_format(tiny_checkpoint, "fp8") != first and len(made) == 2


def test_a_failure_leaves_nothing(tiny_checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(src, dst, format) -> None:
        dst.mkdir()
        (dst / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "quantize", fail)
    with pytest.raises(KeyboardInterrupt):
        ensure_format(tiny_checkpoint, "fp8")
    assert folders(home) == []


def test_leftovers_of_a_killed_process_go(tiny_checkpoint: Path, home: Path) -> None:
    folder = ensure_format(tiny_checkpoint, "fp8")
    shutil.move(folder, f"{folder}.tmp-1")
    assert ensure_format(tiny_checkpoint, "fp8") == folder and folders(home) == [folder.name]


def test_a_cache_that_cannot_be_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set MOE_PARITY_CACHE to a folder"):
        ensure_format(tiny_checkpoint, "fp8")


def test_two_processes_make_one_copy(tiny_checkpoint: Path, home: Path) -> None:
    script = (
        "import sys, logging; logging.basicConfig(level=logging.INFO, format='%(message)s');"
        "from moe_kernels.cache import ensure_format; print(ensure_format(sys.argv[1], 'nvfp4'))"
    )
    command, pipe = [sys.executable, "-c", script, str(tiny_checkpoint)], subprocess.PIPE
    running = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    results = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0, 0], results
    assert results[0][0] == results[1][0] and folders(home) == [Path(results[0][0].strip()).name]
    assert sum("converted" in err for _, err in results) == 1
