"""Triton kernels around a decode step, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_step_kernels_in_the_interpreter() -> None:
    """Greedy tokens, ties, log-probabilities, NaN and infinity, and step inputs, against torch."""
    done = subprocess.run([sys.executable, "-m", "tests.service.gpu_steps_cases"], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("greedy") == 3 and "inputs" in done.stdout
