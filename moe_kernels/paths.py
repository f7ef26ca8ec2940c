"""Where files that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Converted checkpoints, file hashes, compiled kernels: MOE_PARITY_CACHE or ~/.cache/moe-parity."""
    return Path(os.environ.get("MOE_PARITY_CACHE") or Path.home() / ".cache" / "moe-parity")
