"""Starts a service: check what is cheap, bind the port, load the model behind it, answer until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_kernels import embedded
from service.api.app import create_app
from service.api.prompts import PromptEncoder
from service.api.server import Server, bind, config
from service.api.state import ApiSettings, Loaded, Service
from service.config import EngineConfig
from service.errors import StartupError
from service.tokenizer import Tokenizer

log = logging.getLogger("service.launch")
LOCAL = frozenset(("127.0.0.1", "localhost", "::1"))


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: str
    variant: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "bfloat16"
    device: str = "cpu"
    served_model_name: str | None = None
    api_key: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_sequences: int = 1024
    log_prompts: bool = False
    drain_seconds: float = 30.0
    selftest: bool = False
    load_format: str = "auto"
    seed: int = 0
    attention_dtype: str = "bf16"
    num_layers: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


def checkpoint_path(model: str, load_format: str = "auto") -> Path:
    """The checkpoint folder ('mini': the embedded one, hashes checked), or a MoeParityError saying what is wrong.

    With `load_format` "random" also a config.json alone.
    """
    path = embedded.resolve(model)
    if load_format == "random" and path.is_file():
        return path
    if not path.exists():
        raise StartupError(f"--model {model}: no such folder; give the folder of a Hugging Face checkpoint")
    if not (path / "config.json").is_file():
        raise StartupError(
            f"--model {model}: there is no config.json in it; give the folder of a Hugging Face checkpoint"
        )
    return path


def load(options: Options, path: Path, name: str) -> Loaded:
    """Load weights and tokenizer, start the engine, take the fingerprint. Minutes for a large model."""
    import torch

    from service import fingerprint
    from service.engine.engine import Engine

    # libgomp keeps a team of threads for every thread that ever ran a parallel region, and with more than there are
    # cores its workers no longer spin but sleep: decoding took twice as long. So only the engine's thread gets a team.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    marks = [time.monotonic()]
    model, tokenizer, settings = load_weights(options, path)
    marks.append(time.monotonic())
    engine = Engine(model, tokenizer, settings)
    engine.start(threads)
    marks.append(time.monotonic())
    said = fingerprint.build(model, tokenizer, engine, name)
    settle()
    marks.append(time.monotonic())
    parts = ("weights_seconds", "engine_seconds", "fingerprint_seconds")
    log.info("loaded", extra={"fields": {name: round(b - a, 2) for name, a, b in
                                         zip(parts, marks, marks[1:], strict=False)}})
    if options.selftest:  # says so even while no fault is on
        said["faults"] = []
        said["id"] = fingerprint.identify(said)
    return Loaded(
        engine,
        tokenizer,
        PromptEncoder(tokenizer),
        engine.max_model_len,
        int(model.config.vocab_size),
        said,
    )


def settle() -> None:
    """Keep what is loaded out of Python's garbage collections, and make them rarer: tokens are many small objects.

    A full collection over torch's and transformers' modules took 0.3 s (425,000 objects, our two-core machine), during
    which no step starts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def load_weights(options: Options, path: Path) -> tuple[Any, Tokenizer, EngineConfig]:
    """The model (a checkpoint's, or a random one), its tokenizer, and the engine settings that suit the device."""
    import torch

    dtype = getattr(torch, options.dtype)
    settings = options.engine
    if options.selftest:  # its faults are put into transformers' modules
        settings = replace(settings, forward="transformers")
    if options.load_format == "random":
        from service.gpu import random_model
        from service.gpu.id_tokenizer import IdTokenizer

        random = random_model.build(path, options.variant, seed=options.seed, device=options.device, dtype=dtype,
                                    attention_dtype=options.attention_dtype, num_layers=options.num_layers)
        folder = path if path.is_dir() else path.parent
        tokenizer = (Tokenizer.load(folder) if path.is_dir() and (folder / "tokenizer.json").is_file()
                     else IdTokenizer(int(random.config.vocab_size)))
        return random, tokenizer, settings
    from moe_kernels.hf import load_model
    from service import attention

    attention.register()
    tokenizer = Tokenizer.load(path)
    model = load_model(path, options.variant, dtype=dtype, device=options.device, attn_implementation=attention.NAME)
    return model, tokenizer, settings


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises MoeParityError for what a user can cause."""
    path = checkpoint_path(options.model, options.load_format)
    sock = bind(options.host, options.port)
    try:
        _check_variant(options)
        name = options.served_model_name or ("mini" if options.model == "mini" else path.stem
                                             if path.is_file() else path.name)
        settings = ApiSettings(
            name,
            str(path),
            options.variant,
            api_key=options.api_key,
            max_body_bytes=options.max_body_bytes,
            max_sequences=options.max_sequences,
            max_logprobs=options.engine.max_logprobs,
            log_prompts=options.log_prompts,
            selftest=options.selftest,
        )
        if options.host not in LOCAL and not options.api_key:
            log.warning(
                "listening on %s without an API key: anyone who reaches the port can use the model", options.host
            )
        return _serve(Service(settings), options, path, sock)
    finally:
        sock.close()


def _check_variant(options: Options) -> None:
    from moe_kernels import registry

    registry.parse(options.variant)


def _serve(service: Service, options: Options, path: Path, sock: socket.socket) -> int:
    server = Server(config(create_app(service), options.drain_seconds))
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    failure: list[BaseException] = []
    drains: list[threading.Thread] = []

    def load_in_background() -> None:
        try:
            loaded = load(options, path, service.settings.model_name)
        except BaseException as error:
            failure.append(error)
            service.phase, service.failure = "failed", f"loading failed: {error}"
            server.should_exit = True
            return
        if server.should_exit:  # told to stop while loading
            loaded.engine.stop()
            return
        service.ready(loaded)
        print(f"listening on {url}", flush=True)

    def drain() -> None:
        service.phase = "draining"
        if service.loaded is not None:
            log.info("draining", extra={"fields": {"live": len(service.live), "seconds": options.drain_seconds}})
            drains.append(
                threading.Thread(target=service.loaded.engine.stop, args=(options.drain_seconds,), daemon=True)
            )
            drains[-1].start()

    server.on_signal = drain
    loader = threading.Thread(target=load_in_background, name="loader", daemon=True)
    loader.start()
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where installed
        runner.run(server.serve([sock]))
    for thread in drains:
        thread.join(options.drain_seconds + 5)
    if failure:
        raise failure[0]
    if loader.is_alive() or any(thread.is_alive() for thread in drains):
        # A thread inside torch cannot be interrupted, and ending the interpreter under it can crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
