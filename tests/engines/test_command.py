"""Command lines of the engines, in containers and over several nodes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.engines.command import plan
from evals.engines.load import EngineVariant, load
from evals.errors import UsageError


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(engine: str = "sglang", **more: Any) -> EngineVariant:
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump({"name": "x", "engine": engine, "model": "/w/M", "kernel": "triton"} | more))
        return load(path)

    return make


def test_sglang_here(made: Any) -> None:
    got = plan(made(parallel={"tensor": 8, "expert": 8}, gpus="0-7", args=["--x"], env={"A": "b c"}), 3000)
    assert shlex.join(got.command) == (
        "python3 -m sglang.launch_server --model-path /w/M --host 127.0.0.1 --port 3000 --tp-size 8 --ep-size 8 "
        "--moe-runner-backend triton --x"
    )
    assert got.env == {"A": "b c", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} and got.url == "http://127.0.0.1:3000"


def test_vllm_never_samples_by_the_checkpoints_defaults(made: Any) -> None:
    got = plan(made("vllm", parallel={"tensor": 4, "expert": 8, "data": 2, "pipeline": 2}), 8000)
    assert shlex.join(got.command) == (
        "vllm serve /w/M --host 127.0.0.1 --port 8000 --generation-config vllm --tensor-parallel-size 4 "
        "--enable-expert-parallel --pipeline-parallel-size 2 --data-parallel-size 2 --moe-backend triton"
    )


def test_a_container_mounts_weights_read_only_and_has_a_name(made: Any) -> None:
    variant = made(image="sgl:1", gpus=[4, 5], env={"K": "v"}, mounts=["/h:/c:ro"], docker_args=["--shm-size=8g"])
    got = plan(variant, 3000, "n")
    text = shlex.join(got.command)
    assert text.startswith("docker run --rm --name n --network host --ipc host --gpus '\"device=4,5\"' ")
    assert "--volume /w/M:/w/M:ro --volume /h:/c:ro --env K=v --shm-size=8g " in text
    assert "--entrypoint python3 sgl:1 -m sglang" in text
    assert got.container == "n" and got.env == {}  # the GPUs are docker's business then


def test_own_command(made: Any) -> None:
    got = plan(made("other", kernel=None, command=["srv", "{model}", "--p={port}"]), 5)
    assert got.command == ("srv", "/w/M", "--p=5")
    with pytest.raises(UsageError, match=r"cannot fill in 'prot'; known: model, host, port, python"):
        plan(made("other", kernel=None, command=["srv", "{prot}"]), 5)


def test_srun_runs_every_node_and_only_the_first_is_reached(made: Any) -> None:
    nodes = {"count": 2, "launcher": "srun", "address": "n0:20000"}
    got = plan(made(parallel={"tensor": 16}, gpus="0-7", nodes=nodes), 30000)
    assert got.command[:5] == ("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
    assert "--nnodes 2 --node-rank $SLURM_NODEID --dist-init-addr n0:20000" in got.command[-1]
    assert "--host 0.0.0.0" in got.command[-1] and got.url == "http://n0:30000"
    ray = plan(made("vllm", parallel={"tensor": 8, "pipeline": 2}, nodes=nodes), 30000).command[-1]
    assert ray.startswith('if [ "$SLURM_NODEID" = 0 ]; then ray start --head') and "ray start --address n0:6379" in ray


def test_srun_really_runs_such_a_line(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for srun that runs the command once per node shows that quoting and ranks survive the shell."""
    import subprocess

    fake = tmp_path / "srun"
    fake.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
                    'for n in 0 1; do SLURM_NODEID=$n "$@"; done\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nodes = {"count": 2, "launcher": "srun", "address": "n0:20000"}
    variant = made(parallel={"tensor": 2}, nodes=nodes, model="/w/a b")
    words = [w.replace("python3 -m sglang.launch_server", "printf '%s\\n'") for w in plan(variant, 30000).command]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")
    ranks = [lines[i + 1] for i, word in enumerate(lines) if word == "--node-rank"]
    assert ranks == ["0", "1"] and lines.count("/w/a b") == 2


def test_ray_and_manual_say_what_to_start_elsewhere(made: Any) -> None:
    nodes = {"count": 2, "launcher": "ray", "address": "n0:6379"}
    got = plan(made("vllm", parallel={"tensor": 16}, nodes=nodes), 8000)
    assert "--distributed-executor-backend ray" in shlex.join(got.command)
    assert [e.splitlines()[1] for e in got.elsewhere] == [
        "ray start --head --port 6379", "ray start --address n0:6379 --block"]
    with pytest.raises(UsageError, match="launcher ray is vLLM's"):
        plan(made(parallel={"tensor": 16}, nodes=nodes), 8000)
    got = plan(made(parallel={"tensor": 16}, nodes=nodes | {"launcher": "manual"}), 8000)
    assert "--node-rank 0" in shlex.join(got.command) and "--node-rank 1" in got.elsewhere[0]
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        plan(made(parallel={"tensor": 16}, nodes=nodes | {"address": "n0"}), 8000)


def test_lws_uses_the_pods_variables(made: Any) -> None:
    nodes = {"count": 2, "launcher": "lws", "address": "leader:20000"}
    got = plan(made(parallel={"tensor": 16}, nodes=nodes, url="http://leader:30000"), 30000)
    assert got.command == () and got.url == "http://leader:30000"
    assert "--node-rank $LWS_WORKER_INDEX --dist-init-addr $LWS_LEADER_ADDRESS:20000" in got.elsewhere[0]
