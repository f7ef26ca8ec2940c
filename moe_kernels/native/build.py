"""Compiles the C sources into a shared library, once per machine, compiler and torch, and keeps it in the cache."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from filelock import FileLock

from moe_kernels.paths import cache_dir

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wno-psabi")
# rows.c and fp8.c must round where torch rounds; attention.c has no torch operation to agree with to the bit.
CONTRACTION = {"rows.c": "off", "fp8.c": "off", "attention.c": "fast"}
TIMEOUT = 120  # seconds for one file


class Unavailable(Exception):
    """Why there is no library, in words."""


def compiler() -> list[str]:
    """The command of a C compiler: $CC, then cc, gcc, clang; `Unavailable` where none is found."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise Unavailable("no C compiler found: install gcc or clang, or set CC")


def openmp_runtime() -> Path:
    """The OpenMP library this process runs torch's threads with: a second one would be a second team of threads."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        raise Unavailable("/proc/self/maps cannot be read, so torch's OpenMP library is unknown") from None
    files = sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line})
    for stem in ("libgomp", "libiomp5", "libomp"):
        for file in files:
            if Path(file).name.startswith(stem):
                return Path(file)
    raise Unavailable("torch has loaded no OpenMP library that is known here (libgomp, libiomp5, libomp)")


def build() -> Path:
    """Path of the library for this machine, compiled now (about a second) if it is not in the cache."""
    command, openmp = compiler(), openmp_runtime()
    target = cache_dir() / "native" / f"kernels-{_key(command, openmp)}{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    _compile(command, openmp, Path(folder) / target.name).replace(target)
                log.info("compiled the CPU kernels: %s", target)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept in {target.parent} ({error}); set "
                          "MOE_PARITY_CACHE to a folder that can be written") from error
    return target


def _compile(command: list[str], openmp: Path, target: Path) -> Path:
    objects = []
    for name, contraction in CONTRACTION.items():
        objects.append(str(target.with_name(f"{name}.o")))
        _run([*command, *FLAGS, f"-ffp-contract={contraction}", "-c", str(SOURCES / name), "-o", objects[-1]])
    _run([*command, "-shared", "-o", str(target), *objects, str(openmp), "-lm"])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler did not run: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise Unavailable(f"'{shlex.join(command)}' failed with code {done.returncode}: {first}")


def _key(command: list[str], openmp: Path) -> str:
    """What decides the library's bytes and whether it runs: sources, flags, compiler, OpenMP, and the processor."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler did not run: {error}") from error
    parts = [shlex.join(command), version.stdout, str(openmp), platform.machine(), _processor(), *FLAGS,
             *(f"{name} {value}" for name, value in CONTRACTION.items()),
             *(file.read_text() for file in sorted(SOURCES.iterdir()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """Model and instruction sets, so that a cache on a shared disk serves machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
