"""Runs a file of interpreter cases in a process of its own: Triton's interpreter is switched on at import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_cases(name: str) -> dict[str, dict[str, Any]]:
    """What the script beside this file printed on its last line."""
    script = Path(__file__).with_name(name)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found
