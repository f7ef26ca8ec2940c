"""Command lines: an engine's own flags, a container around them, and the launcher of several nodes around that."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from evals.engines.load import EngineVariant
from evals.errors import UsageError

RANK = "__RANK__"  # stands for the node's number until the launcher is known
ADDRESS = "__ADDRESS__"
RAY_PORT = 6379


@dataclass(frozen=True)
class Plan:
    """What is started from here, what must be started elsewhere first, and where the server then answers."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    url: str
    elsewhere: tuple[str, ...] = ()
    container: str | None = None


def _address(variant: EngineVariant) -> tuple[str, str]:
    """Host and port of the first node."""
    nodes = variant.spec.nodes
    if nodes is None:
        return "127.0.0.1", ""
    host, _, port = nodes.address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{variant.path}: nodes.address '{nodes.address}' is not HOST:PORT")
    return host, port


def sglang(variant: EngineVariant, host: str, port: int) -> list[str]:
    """`python3 -m sglang.launch_server …`."""
    p, spec = variant.parallel, variant.spec
    words = ["python3", "-m", "sglang.launch_server", "--model-path", variant.model, "--host", host, "--port",
             str(port), "--tp-size", str(p.tensor)]
    for flag, size in (("--ep-size", p.expert), ("--pp-size", p.pipeline), ("--dp-size", p.data)):
        words += [flag, str(size)] if size > 1 else []
    words += ["--moe-runner-backend", spec.kernel] if spec.kernel else []
    words += ["--served-model-name", variant.served_name] if variant.served_name else []
    words += ["--context-length", str(variant.max_model_len)] if variant.max_model_len else []
    if spec.nodes:
        words += ["--nnodes", str(spec.nodes.count), "--node-rank", RANK, "--dist-init-addr", spec.nodes.address]
    return words + spec.args


def vllm(variant: EngineVariant, host: str, port: int) -> list[str]:
    """`vllm serve …`; the checkpoint's own sampling defaults are switched off, since GLM's would sample."""
    p, spec = variant.parallel, variant.spec
    words = ["vllm", "serve", variant.model, "--host", host, "--port", str(port), "--generation-config", "vllm",
             "--tensor-parallel-size", str(p.tensor)]
    words += ["--enable-expert-parallel"] if p.expert > 1 else []
    for flag, size in (("--pipeline-parallel-size", p.pipeline), ("--data-parallel-size", p.data)):
        words += [flag, str(size)] if size > 1 else []
    words += ["--moe-backend", spec.kernel] if spec.kernel else []
    words += ["--served-model-name", variant.served_name] if variant.served_name else []
    words += ["--max-model-len", str(variant.max_model_len)] if variant.max_model_len else []
    words += ["--distributed-executor-backend", "ray"] if spec.nodes else []
    return words + spec.args


def service(variant: EngineVariant, host: str, port: int) -> list[str]:
    """This project's service."""
    python = "python" if variant.spec.image else sys.executable
    words = [python, "-m", "service", "--model", variant.model, "--variant", variant.spec.kernel or "", "--host", host,
             "--port", str(port)]
    words += ["--max-model-len", str(variant.max_model_len)] if variant.max_model_len else []
    return words + variant.spec.args


def inner(variant: EngineVariant, host: str, port: int) -> list[str]:
    """The engine's command on one node."""
    spec = variant.spec
    if spec.command is not None:
        known = {"model": variant.model, "host": host, "port": port, "python": sys.executable}
        try:
            words = [word.format(**known) for word in spec.command]
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"{variant.path}: command: cannot fill in {error}; known: {', '.join(known)}") from None
        return words + spec.args
    return {"sglang": sglang, "vllm": vllm, "service": service}[spec.engine](variant, host, port)


def contained(variant: EngineVariant, words: list[str], name: str) -> list[str]:
    """`docker run` around a command; weights are mounted read-only, the container ends with its client."""
    spec = variant.spec
    if spec.image is None:
        return words
    out = ["docker", "run", "--rm", "--name", name, "--network", "host", "--ipc", "host"]
    if variant.gpus:
        out += ["--gpus", f'"device={",".join(map(str, variant.gpus))}"']
    elif spec.engine in ("sglang", "vllm"):
        out += ["--gpus", "all"]
    if variant.model.startswith("/"):
        out += ["--volume", f"{variant.model}:{variant.model}:ro"]
    for mount in spec.mounts:
        out += ["--volume", mount]
    for key, value in spec.env.items():
        out += ["--env", f"{key}={value}"]
    return [*out, *spec.docker_args, "--entrypoint", words[0], spec.image, *words[1:]]


def _shell(words: list[str], rank: str) -> str:
    """A shell line in which the node's number is a variable or a number."""
    return shlex.join(words).replace(RANK, rank)


def plan(variant: EngineVariant, port: int, container: str = "moe-parity-engine") -> Plan:
    """Everything needed to start this variant; nothing is run."""
    spec = variant.spec
    env = dict(spec.env) if spec.image is None else {}
    if variant.gpus and spec.image is None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, variant.gpus))
    head, rendezvous = _address(variant)
    if spec.url and not spec.nodes:
        return Plan((), env, spec.url)
    bind = "0.0.0.0" if spec.nodes else "127.0.0.1"
    words = contained(variant, inner(variant, bind, port), container)
    url = spec.url or f"http://{head}:{port}"
    if spec.nodes is None:
        return Plan(tuple(words), env, url, container=container if spec.image else None)
    n = spec.nodes.count
    ray_head = f"ray start --head --port {RAY_PORT}"
    ray_worker = f"ray start --address {head}:{RAY_PORT} --block"
    uses_ray = spec.engine == "vllm"
    if spec.nodes.launcher == "srun":
        if uses_ray:
            body = (f'if [ "$SLURM_NODEID" = 0 ]; then {ray_head} && exec {_shell(words, "0")}; '
                    f"else sleep 5; exec {ray_worker}; fi")
        else:
            body = f"exec {_shell(words, '$SLURM_NODEID')}"
        srun = ("srun", f"--nodes={n}", f"--ntasks={n}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
                "bash", "-c", body)
        return Plan(srun, env, url)
    if spec.nodes.launcher == "lws":
        words = [ADDRESS if w == spec.nodes.address else w for w in words]
        line = _shell(words, "$LWS_WORKER_INDEX").replace(ADDRESS, f"$LWS_LEADER_ADDRESS:{rendezvous}")
        return Plan((), env, url, (f"# in every pod of the LeaderWorkerSet:\n{line}",))
    if uses_ray:  # `ray` and `manual`: the cluster stands, or is made with these lines
        elsewhere = [f"# on {head}, once:\n{ray_head}"]
        elsewhere += [f"# on every other node ({n - 1}), once:\n{ray_worker}"]
        return Plan(tuple(words), env, url, tuple(elsewhere))
    if spec.nodes.launcher == "ray":
        raise UsageError(f"{variant.path}: launcher ray is vLLM's; SGLang uses srun, lws or manual")
    elsewhere = [f"# on node {rank}:\n{_shell(words, str(rank))}" for rank in range(1, n)]
    return Plan(tuple(w.replace(RANK, "0") for w in words), env, url, tuple(elsewhere))
